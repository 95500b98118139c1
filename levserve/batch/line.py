"""The lines of batch files in OpenAI's format: a request on each input line, a result on each output line.

A result's id holds the number of the request's line and a checksum of it. So the results themselves tell
which requests are done, and a batch that was killed continues from what it has written.
"""

from __future__ import annotations

import random
import re
import zlib
from typing import NamedTuple

import msgspec
from msgspec import Raw, Struct

from levserve.errors import BadRequest, BodyTooLarge
from levserve.request.decode import decode

RESULT_ID = re.compile(r"batch_req_([0-9a-f]{1,12})_([0-9a-f]{8})")
MAX_ID_CHARS = 512


class InputLine(NamedTuple):
    """A line of the file and its number, from 1 on. If the line is too long, only its beginning is kept."""

    number: int
    data: bytes
    num_bytes: int
    is_too_long: bool = False
    is_repeated: bool = False
    """Whether an earlier line has the same custom_id."""

    @property
    def checksum(self) -> int:
        return zlib.crc32(self.data)


class RequestLine(Struct, frozen=True):
    """The request on a line. The body is read later, as its endpoint reads it."""

    custom_id: str
    method: str
    url: str
    body: Raw

    def __post_init__(self) -> None:
        if len(self.custom_id) > MAX_ID_CHARS:
            raise BadRequest(f"'custom_id' has more than {MAX_ID_CHARS} characters.", param="custom_id")


class LineResponse(Struct, frozen=True):
    """The answer that the request would have had over HTTP."""

    status_code: int
    request_id: str
    body: Raw


class LineError(Struct, frozen=True):
    """Why a request was not run."""

    code: str
    message: str


class ResultLine(Struct, frozen=True):
    id: str
    custom_id: str | None
    response: LineResponse | None
    error: LineError | None = None

    def encode(self) -> bytes:
        return msgspec.json.encode(self) + b"\n"


class CustomId(Struct, frozen=True):
    custom_id: str | None = None


def read_line(line: InputLine, max_bytes: int) -> RequestLine:
    """Raises `BadRequest`, or `BodyTooLarge` under the same limit as the server."""
    if line.is_too_long:
        raise BodyTooLarge(max_bytes)
    try:
        request = decode(line.data, RequestLine)
    except BadRequest as error:
        if error.param is None:
            raise BadRequest(error.message.replace("body", "line", 1), code=error.code) from None
        raise
    if line.is_repeated:
        shown = request.custom_id[:64]
        raise BadRequest(
            f"An earlier line has the custom_id '{shown}' too.", param="custom_id", code="duplicate_custom_id"
        )
    if len(request.body) > max_bytes:
        raise BodyTooLarge(max_bytes)
    return request


def find_custom_id(line: InputLine) -> str | None:
    """The custom_id of a line, if it has one; works for lines that are otherwise invalid too."""
    try:
        return msgspec.json.decode(line.data, type=CustomId).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def result_id(line: InputLine) -> str:
    return f"batch_req_{line.number:x}_{line.checksum:08x}"


def make_result(line: InputLine, custom_id: str | None, status: int, body: bytes) -> ResultLine:
    response = LineResponse(status, f"{random.getrandbits(64):016x}", Raw(body))
    return ResultLine(result_id(line), custom_id, response)
