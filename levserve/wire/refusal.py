"""Answers that need no application: what gunicorn's parser refuses, and what the main loop says itself.

The same shape as every other error, ready to be sent, and the end of its connection.
"""

from __future__ import annotations

import os
from http import HTTPStatus

from gunicorn.http.errors import (
    ExpectationFailed,
    InvalidResponseHeader,
    InvalidResponseHeaderName,
    LimitRequestHeaders,
    LimitRequestLine,
    NoMoreData,
    ParseException,
)

from levserve.errors import BadRequest, ServeError

MAX_QUOTED = 200  # of what a client sent, in the answer that refuses it
PARSER_STATUS = {
    LimitRequestLine: HTTPStatus.REQUEST_URI_TOO_LONG,
    LimitRequestHeaders: HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    ExpectationFailed: HTTPStatus.EXPECTATION_FAILED,
}
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def explain_refusal(exc: Exception) -> ServeError:
    """What gunicorn's parser could not take, as an error of ours; anything else that comes here is a fault."""
    if isinstance(exc, NoMoreData):
        return BadRequest("The request cannot be read: it is not HTTP, or not all of it is here.")
    if not isinstance(exc, ParseException) or isinstance(
        exc, (InvalidResponseHeader, InvalidResponseHeaderName)
    ):
        return ServeError("The server failed to handle the request.")
    told = BadRequest(f"The request cannot be read: {str(exc)[:MAX_QUOTED]}.")
    told.status = next(
        (status for kind, status in PARSER_STATUS.items() if isinstance(exc, kind)), told.status
    )
    return told


def render(error: ServeError) -> bytes:
    """The whole answer, head and body."""
    body = error.body()
    fields = {
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "x-request-id": os.urandom(8).hex(),
        **error.headers,
        "Connection": "close",
    }
    head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
    return (head + "".join(f"{name}: {value}\r\n" for name, value in fields.items()) + "\r\n").encode() + body
