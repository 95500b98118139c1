"""Finds where a request ends in the bytes of a connection, so that only whole requests take an HTTP thread.

Bytes in, requests out; the worker's main loop feeds it. It reads only what determines the length.
gunicorn's parser, which gets exactly the bytes found here, decides whether a request is well-formed: bytes
that this file cannot make sense of go to the parser at once, to be refused, and end the connection.
"""

from __future__ import annotations

import errno
import os
import re
import tempfile
from dataclasses import dataclass
from typing import BinaryIO

from gunicorn.http.errors import LimitRequestHeaders
from gunicorn.http.unreader import Unreader

from levserve.errors import BadRequest, BodyTooLarge, Unavailable

MAX_HEAD_BYTES = 2**16  # gunicorn allows 100 fields of 8 KiB, more than any client needs
MAX_LINE_BYTES = 8190  # for a chunk's size and its extensions, as in gunicorn
FRAMING_BYTES, FRAMING_SHARE = 2**16, 8
"""What surrounds a body's chunks may take so many bytes, and one for so many of the largest body."""
UPLOAD_START = b"POST /v1/files "  # the one path whose bodies may be as large as files
UPLOAD_BLOCK_BYTES = 2**16
UPLOAD_RETRY_SECONDS = 60.0
CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:[ \t]*;[^\r\n]*)?")


@dataclass(frozen=True, slots=True)
class RawRequest:
    """The bytes of one request. Reading beyond them raises `shortfall`, if it is set.

    If `is_whole`, the next request begins right after it; otherwise its beginning is unknown.
    """

    head: bytes
    body: bytes
    is_whole: bool = True
    shortfall: Exception | None = None
    upload: BinaryIO | None = None
    """The body of an upload, as a file positioned at its beginning."""

    def close(self) -> None:
        if self.upload is not None:
            self.upload.close()

    @property
    def path(self) -> bytes:
        """The path without the query; empty if the first line is malformed."""
        words = self.head.partition(b"\r\n")[0].split(b" ")
        return words[1].partition(b"?")[0] if len(words) == 3 else b""


class RawReader(Unreader):  # type: ignore[misc]
    """Lets gunicorn's parser read what has arrived, so that no HTTP thread waits for a client to send."""

    def __init__(self, request: RawRequest) -> None:
        super().__init__()
        self._unread = [request.body, request.head]  # read from the end
        self._upload = request.upload
        self._shortfall = request.shortfall

    def chunk(self, size_hint: int | None = None) -> bytes:
        while self._unread:
            if data := self._unread.pop():
                return data
        if self._upload is not None and (data := self._upload.read(UPLOAD_BLOCK_BYTES)):
            return data
        if self._shortfall is not None:
            raise self._shortfall
        return b""


class RequestBuffer:
    """The bytes that a client has sent after its last whole request. Owned by the main loop.

    The body of an upload may be larger than other bodies, up to `max_upload_bytes`; it then goes to an
    unnamed temporary file in `upload_folder`, which disappears when it is closed.
    """

    def __init__(
        self, max_body_bytes: int, max_upload_bytes: int = 0, upload_folder: str | None = None
    ) -> None:
        self._max_body_bytes = max_body_bytes
        self._max_framing = FRAMING_BYTES + max_body_bytes // FRAMING_SHARE
        self._max_upload_bytes = max_upload_bytes
        self._upload_folder = upload_folder
        self._data = bytearray()
        self._upload: BinaryIO | None = None
        self._forget()

    def _forget(self) -> None:
        self._num_searched = 0
        self._head_len = 0
        self._body_len = 0  # from Content-Length, or of the chunks received so far
        self._limit = self._max_body_bytes
        self._num_uploaded = 0
        self._upload_error: OSError | None = None
        self._is_chunked = False
        self._chunks = bytearray()
        self._num_framing = 0
        self._expects_continue = False

    def __len__(self) -> int:
        return len(self._data) + len(self._chunks)

    @property
    def has_head(self) -> bool:
        """Whether the head is complete, so that `take` waits for the rest of the body."""
        return self._head_len > 0

    @property
    def upload_bytes(self) -> int:
        """The size of the upload that is on its way; 0 if there is none."""
        return 0 if self._upload is None else self._body_len

    def pop_expects_continue(self) -> bool:
        """Whether the client waits for "100 Continue" before it sends the body; True at most once."""
        expects, self._expects_continue = self._expects_continue, False
        return expects and len(self._data) == self._head_len

    def feed(self, data: bytes) -> None:
        if self._upload is None:
            self._data += data
            return
        count = min(len(data), self._body_len - self._num_uploaded)
        self._keep(data[:count])
        self._data += data[count:]

    def clear(self) -> None:
        self._data.clear()
        if self._upload is not None:
            self._upload.close()
            self._upload = None
        self._forget()

    def _keep(self, data: bytes) -> None:
        """Writes a part of an upload. `take` reports errors: raised here, one would end the main loop."""
        assert self._upload is not None
        self._num_uploaded += len(data)
        try:
            if self._upload_error is None and self._upload.write(data) != len(data):
                self._upload_error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._upload_error = error

    def take(self) -> RawRequest | None:
        """The next request, if it is whole or must be refused; call it again after every `feed`."""
        if not self._head_len:
            if self._data.startswith(b"\r\n"):  # some clients send an empty line after a body
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
        lengths, codings, expects = [], [], []
        for line in lines:
            name, _, value = line.partition(b":")
            value = value.strip(b" \t")
            match name.lower():
                case b"content-length":
                    lengths.append(value)
                case b"transfer-encoding":
                    codings += [coding.strip(b" \t").lower() for coding in value.split(b",")]
                case b"expect":
                    expects.append(value.lower())
        length = lengths[0] if lengths else b"0"
        is_number = length.isdigit() and len(length) < 19
        self._head_len = head_len
        self._body_len = int(length) if is_number else 0
        self._is_chunked = codings[-1:] == [b"chunked"]
        expects_continue = expects == [b"100-continue"]
        # HTTP/1.0 has no "100 Continue".
        self._expects_continue = expects_continue and not first.endswith(b"/1.0")
        has_bad_length = not is_number or len(lengths) > 1 or (lengths and codings)
        has_bad_coding = codings and not self._is_chunked
        if has_bad_length or has_bad_coding or (expects and not expects_continue):
            return self._give_up(None)
        if first.startswith(UPLOAD_START) and not self._is_chunked:
            self._limit = max(self._max_upload_bytes, self._max_body_bytes)
            if self._max_body_bytes < self._body_len <= self._limit:
                return self._begin_upload()
        return None

    def _begin_upload(self) -> RawRequest | None:
        try:
            self._upload = tempfile.TemporaryFile(buffering=0, dir=self._upload_folder)  # noqa: SIM115
        except OSError as error:
            return self._give_up(_cannot_keep(error))
        early = self._data[self._head_len :]
        del self._data[self._head_len :]
        self.feed(bytes(early))
        return None

    def _take_upload(self) -> RawRequest | None:
        assert self._upload is not None
        if self._upload_error is not None:
            return self._give_up(_cannot_keep(self._upload_error))
        if self._num_uploaded < self._body_len:
            return None
        self._upload.seek(0)
        request = RawRequest(bytes(self._data[: self._head_len]), b"", upload=self._upload)
        self._upload = None
        del self._data[: self._head_len]
        self._forget()
        return request

    def _take_counted(self) -> RawRequest | None:
        if self._upload is not None:
            return self._take_upload()
        if self._body_len > self._limit:
            return self._give_up(BodyTooLarge(self._limit))
        end = self._head_len + self._body_len
        return self._cut(end) if len(self._data) >= end else None

    def _take_chunked(self) -> RawRequest | None:
        self._join_chunks()
        if self._num_framing > self._max_framing:
            return self._give_up(BadRequest("The body has too many small chunks; send larger ones."))
        found = self._find_chunk(self._head_len)
        if found is None:
            is_long = len(self._data) - self._head_len >= MAX_LINE_BYTES
            return self._give_up(None) if is_long else None
        start, size = found
        if size < 0:
            return self._give_up(None)
        if size == 0:
            return self._take_trailers(start)
        if self._body_len + size > self._max_body_bytes:
            return self._give_up(BodyTooLarge(self._limit))
        has_arrived = len(self._data) >= start + size + 2
        return self._give_up(None) if has_arrived and not self._is_newline(start + size) else None

    def _take_trailers(self, start: int) -> RawRequest | None:
        """What follows the last chunk's line, which ends at `start`: an empty line, or fields and one."""
        end = self._data.find(b"\r\n\r\n", start - 2)
        if end >= 0:
            return self._cut(end + 4)
        is_large = len(self._data) - start > FRAMING_BYTES
        return self._give_up(LimitRequestHeaders("the trailers are too large")) if is_large else None

    def _join_chunks(self) -> None:
        """Takes whole chunks out of the data: for each of them, the parser would copy all that follows it."""
        start = self._head_len
        while self._num_framing <= self._max_framing and (found := self._find_chunk(start)) is not None:
            content, size = found
            end = content + size
            if size <= 0 or self._body_len + size > self._max_body_bytes or not self._is_newline(end):
                break
            self._chunks += self._data[content:end]
            self._body_len += size
            self._num_framing += content - start + 2
            start = end + 2
        del self._data[self._head_len : start]

    def _find_chunk(self, start: int) -> tuple[int, int] | None:
        """Where a chunk's content begins, and its size, which is -1 if it cannot be read; None if its first
        line has not arrived."""
        line_end = self._data.find(b"\r\n", start, start + MAX_LINE_BYTES)
        if line_end < 0:
            return None
        match = CHUNK_SIZE.fullmatch(self._data, start, line_end)
        return line_end + 2, -1 if match is None else int(match[1], 16)

    def _is_newline(self, at: int) -> bool:
        return self._data[at : at + 2] == b"\r\n"

    def _cut(self, end: int) -> RawRequest:
        body = self._joined() + bytes(self._data[self._head_len : end])
        request = RawRequest(bytes(self._data[: self._head_len]), body)
        del self._data[:end]
        self._forget()
        return request

    def _give_up(self, shortfall: Exception | None) -> RawRequest:
        """All bytes received so far, as a request for the parser to refuse."""
        head_len = self._head_len or len(self._data)
        body = self._joined() + bytes(self._data[head_len:])
        request = RawRequest(bytes(self._data[:head_len]), body, False, shortfall)
        self.clear()
        return request

    def _joined(self) -> bytes:
        """The chunks that have been taken out of the data, as one."""
        return b"%x\r\n%b\r\n" % (len(self._chunks), bytes(self._chunks)) if self._chunks else b""


def _cannot_keep(error: OSError) -> Unavailable:
    message = f"The server cannot keep the file: {error.strerror}."
    return Unavailable(message, retry_after_seconds=UPLOAD_RETRY_SECONDS)
