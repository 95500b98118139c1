"""Finds where a request ends in the bytes of a connection, so that only whole requests take an HTTP thread.

Pure: bytes in, requests out; the worker's main loop feeds it. It looks at no more than what tells the length. Whether a
request is well-formed is decided by gunicorn's parser, which gets exactly the bytes found here: what this file cannot make
sense of is handed over at once for the parser to refuse, and ends the connection.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gunicorn.http.errors import LimitRequestHeaders
from gunicorn.http.unreader import Unreader

from levserve.errors import BodyTooLarge

MAX_HEAD_BYTES = 2**16  # gunicorn takes 100 fields of 8 KiB; nobody needs that
MAX_LINE_BYTES = 8190  # of a chunk's size and its extensions, as gunicorn has it
FRAMING_BYTES = 2**16  # sizes and trailers of a chunked body, beyond as many bytes as a body may have
CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:[ \t]*;[^\r\n]*)?")


@dataclass(frozen=True, slots=True)
class RawRequest:
    """The bytes of one request. `shortfall` is the answer to a reader that wants more of them than there are.

    If `is_whole`, the next request begins right after it; if not, nobody knows where.
    """

    head: bytes
    body: bytes
    is_whole: bool = True
    shortfall: Exception | None = None

    @property
    def path(self) -> bytes:
        """What is asked for, without the query; nothing if the first line has no such thing."""
        words = self.head.partition(b"\r\n")[0].split(b" ")
        return words[1].partition(b"?")[0] if len(words) == 3 else b""


class RawReader(Unreader):  # type: ignore[misc]
    """What gunicorn's parser reads a request from: memory, so that no HTTP thread ever waits for a client to send."""

    def __init__(self, request: RawRequest) -> None:
        super().__init__()
        self._pieces = [request.body, request.head]  # the last comes first
        self._shortfall = request.shortfall

    def chunk(self, size_hint: int | None = None) -> bytes:
        while self._pieces:
            if piece := self._pieces.pop():
                return piece
        if self._shortfall is not None:
            raise self._shortfall
        return b""


class RequestBuffer:
    """The bytes a client has sent that belong to no request yet. Owned by the main loop."""

    def __init__(self, max_body_bytes: int) -> None:
        self._max_body_bytes = max_body_bytes
        self._data = bytearray()
        self._forget()

    def _forget(self) -> None:
        self._num_searched = 0
        self._head_len = 0
        self._body_len = 0  # counted, or of the chunks that are here
        self._chunk_start = 0
        self._is_chunked = False
        self._is_waiting = False

    def __len__(self) -> int:
        return len(self._data)

    @property
    def has_head(self) -> bool:
        """Whether the head is here, so that `take` waits for the rest of a body."""
        return self._head_len > 0

    def pop_invitation(self) -> bool:
        """Whether the client waits to be told to send the body; asked once, and not of one that has begun."""
        is_waiting, self._is_waiting = self._is_waiting, False
        return is_waiting and len(self._data) == self._head_len

    def feed(self, data: bytes) -> None:
        self._data += data

    def clear(self) -> None:
        self._data.clear()
        self._forget()

    def take(self) -> RawRequest | None:
        """The next request, if what must be known of it is here; to be asked again after every `feed`."""
        if not self._head_len:
            if self._data.startswith(b"\r\n"):  # some clients end a body with a line of its own
                del self._data[:2]
                self._num_searched = 0
            if (request := self._find_head()) is not None:
                return request
        if not self._head_len:
            return None
        return self._take_chunked() if self._is_chunked else self._take_counted()

    def _find_head(self) -> RawRequest | None:
        end = self._data.find(b"\r\n\r\n", max(self._num_searched - 3, 0))
        has_bare_newline = self._data.count(b"\n", self._num_searched) != self._data.count(
            b"\r\n", max(self._num_searched - 1, 0)
        )
        self._num_searched = len(self._data)
        if end >= 0 and end + 4 <= MAX_HEAD_BYTES:
            return self._read_head(end + 4)
        if end >= 0 or len(self._data) > MAX_HEAD_BYTES:
            return self._give_up(LimitRequestHeaders(f"the head is larger than {MAX_HEAD_BYTES} bytes"))
        is_garbage = self._data != b"\r" and not self._data[:1].isalpha()  # TLS, most likely
        return self._give_up(None) if self._data and (has_bare_newline or is_garbage) else None

    def _read_head(self, head_len: int) -> RawRequest | None:
        first, *lines = self._data[:head_len].split(b"\r\n")
        fields = [
            (name.lower(), value.strip(b" \t")) for name, _, value in (line.partition(b":") for line in lines)
        ]
        lengths = [value for name, value in fields if name == b"content-length"]
        codings = [
            coding.strip(b" \t").lower()
            for name, value in fields
            if name == b"transfer-encoding"
            for coding in value.split(b",")
        ]
        expects = [value.lower() for name, value in fields if name == b"expect"]
        length = lengths[0] if lengths else b"0"
        is_number = length.isdigit() and len(length) < 19
        self._head_len = self._chunk_start = head_len
        self._body_len = int(length) if is_number else 0
        self._is_chunked = codings[-1:] == [b"chunked"]
        is_asking = expects == [b"100-continue"]
        self._is_waiting = is_asking and not first.endswith(b"/1.0")  # to which one must not answer that
        is_unclear = (
            not is_number or len(lengths) > 1 or (lengths and codings) or (codings and not self._is_chunked)
        )
        return self._give_up(None) if is_unclear or (expects and not is_asking) else None

    def _take_counted(self) -> RawRequest | None:
        if self._body_len > self._max_body_bytes:
            return self._give_up(self._too_large())
        end = self._head_len + self._body_len
        return self._cut(end) if len(self._data) >= end else None

    def _take_chunked(self) -> RawRequest | None:
        while (
            line_end := self._data.find(b"\r\n", self._chunk_start, self._chunk_start + MAX_LINE_BYTES)
        ) >= 0:
            match = CHUNK_SIZE.fullmatch(self._data, self._chunk_start, line_end)
            if match is None:
                return self._give_up(None)
            size = int(match[1], 16)
            if size == 0:
                end = self._data.find(
                    b"\r\n\r\n", line_end
                )  # after the trailers, of which there are seldom any
                if end >= 0:
                    return self._cut(end + 4)
                break
            chunk_end = line_end + 2 + size
            if self._body_len + size > self._max_body_bytes:
                return self._give_up(self._too_large())
            if len(self._data) < chunk_end + 2:
                break
            if self._data[chunk_end : chunk_end + 2] != b"\r\n":
                return self._give_up(None)
            self._body_len += size
            self._chunk_start = chunk_end + 2
        if line_end < 0 and len(self._data) - self._chunk_start >= MAX_LINE_BYTES:
            return self._give_up(None)
        if len(self._data) > self._head_len + 2 * self._max_body_bytes + FRAMING_BYTES:
            return self._give_up(self._too_large())
        return None

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"The body is larger than this server's limit of {self._max_body_bytes} bytes.")

    def _cut(self, end: int) -> RawRequest:
        request = RawRequest(bytes(self._data[: self._head_len]), bytes(self._data[self._head_len : end]))
        del self._data[:end]
        self._forget()
        return request

    def _give_up(self, shortfall: Exception | None) -> RawRequest:
        """What is here as a request that is to be refused."""
        head_len = self._head_len or len(self._data)
        request = RawRequest(bytes(self._data[:head_len]), bytes(self._data[head_len:]), False, shortfall)
        self.clear()
        return request
