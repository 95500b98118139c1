"""Sorts the lines of a window so that those with a common beginning are next to each other.

The engine keeps what it computed for the beginning of a prompt only for a while: if lines with a common
beginning are far apart in the file, the beginning is computed again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec
from msgspec import Raw, Struct

from levserve.batch.line import InputLine, RequestLine, read_line
from levserve.errors import ServeError

MAX_LINES = 4096
MAX_BYTES = 64 << 20
"""The limits of a window; whichever is reached first ends it."""


class Prompt(Struct, frozen=True):
    """The fields that hold a prompt, as JSON. Two texts with a common beginning have one in JSON too."""

    model: str | None = None
    messages: Raw = Raw()
    prompt: Raw = Raw()
    prompts: Raw = Raw()
    input: Raw = Raw()
    tools: Raw = Raw()


class ReadyLine(NamedTuple):
    """A line, with its request or the reason why it cannot be read."""

    line: InputLine
    request: RequestLine | ServeError


def order_lines(
    lines: Iterable[InputLine], max_body_bytes: int, max_lines: int = MAX_LINES
) -> Iterator[ReadyLine]:
    """All lines, window after window."""
    window: list[ReadyLine] = []
    num_bytes = 0
    for line in lines:
        window.append(ReadyLine(line, _read(line, max_body_bytes)))
        num_bytes += len(line.data)
        if len(window) >= max_lines or num_bytes >= MAX_BYTES:
            yield from sorted(window, key=_key)
            window.clear()
            num_bytes = 0
    yield from sorted(window, key=_key)


def _read(line: InputLine, max_body_bytes: int) -> RequestLine | ServeError:
    try:
        return read_line(line, max_body_bytes)
    except ServeError as error:
        return error


def _key(ready: ReadyLine) -> tuple[str, str, bytes, bytes]:
    request = ready.request
    if isinstance(request, ServeError):
        return "", "", b"", b""
    try:
        found = msgspec.json.decode(request.body, type=Prompt)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return request.url, "", b"", b""
    prompt = b"".join(map(bytes, (found.messages, found.prompt, found.prompts, found.input)))
    return request.url, found.model or "", bytes(found.tools), prompt
