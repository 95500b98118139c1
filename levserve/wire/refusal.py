"""Answers that need no application: refusals by gunicorn's parser and by the main loop.

They have the same shape as every other error, and each ends its connection.
"""

from __future__ import annotations

import os
from email.utils import formatdate
from http import HTTPStatus
from typing import Any

from gunicorn.http.errors import (
    ExpectationFailed,
    InvalidHeader,
    InvalidResponseHeader,
    InvalidResponseHeaderName,
    LimitRequestHeaders,
    LimitRequestLine,
    NoMoreData,
    ParseException,
    UnsupportedTransferCoding,
)

from levserve.errors import BadRequest, ServeError

MAX_QUOTED = 200  # characters of a faulty request that the answer repeats
PARSER_STATUS = {
    LimitRequestLine: HTTPStatus.REQUEST_URI_TOO_LONG,
    LimitRequestHeaders: HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    ExpectationFailed: HTTPStatus.EXPECTATION_FAILED,
    UnsupportedTransferCoding: HTTPStatus.NOT_IMPLEMENTED,
}
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
HTTP_1_1 = (1, 1)


def check_head(req: Any) -> None:
    """Refuses what HTTP forbids but gunicorn's parser accepts; raises `ParseException`.

    The parser accepts gzip as a transfer coding, but nothing would decode it. A request of a later minor
    version is answered in HTTP/1.1, the latest version spoken here.
    """
    if req.version >= HTTP_1_1 and not any(name == "HOST" for name, _ in req.headers):
        raise InvalidHeader("HOST")
    for name, value in req.headers:
        if name == "TRANSFER-ENCODING" and value.strip().lower() != "chunked":
            raise UnsupportedTransferCoding(value)
    req.version = min(req.version, HTTP_1_1)


def explain_refusal(exc: Exception) -> ServeError:
    """The parser's refusal as an error of levserve; any other exception is a fault of the server."""
    if isinstance(exc, NoMoreData):
        return BadRequest("The request cannot be read: it is not HTTP, or it is incomplete.")
    is_fault = isinstance(exc, (InvalidResponseHeader, InvalidResponseHeaderName))
    if is_fault or not isinstance(exc, ParseException):
        return ServeError("The server failed to handle the request.")
    refusal = BadRequest(f"The request cannot be read: {str(exc)[:MAX_QUOTED]}.")
    for kind, status in PARSER_STATUS.items():
        if isinstance(exc, kind):
            refusal.status = status
    return refusal


def render(error: ServeError) -> bytes:
    """The whole HTTP response."""
    body = error.body()
    fields = {
        "Date": formatdate(usegmt=True),
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "x-request-id": os.urandom(8).hex(),
        "openai-processing-ms": "0",
        **error.headers,
        "Connection": "close",
    }
    head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
    return (head + "".join(f"{name}: {value}\r\n" for name, value in fields.items()) + "\r\n").encode() + body
