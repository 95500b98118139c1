"""Reads the body of a request, whole and no larger than the limit. Called in views, on HTTP threads."""

from __future__ import annotations

from flask import request
from gunicorn.http.errors import NoMoreData, ParseException
from werkzeug.exceptions import UnsupportedMediaType

from levserve.errors import BadRequest, BodyTooLarge


def read_body(max_bytes: int) -> bytes:
    if request.mimetype not in (
        "",
        "application/json",
    ):  # a browser asks before it sends this type to another site
        raise UnsupportedMediaType("Send the body as application/json.")
    too_large = BodyTooLarge(f"The body is larger than this server's limit of {max_bytes} bytes.")
    if (request.content_length or 0) > max_bytes:
        raise too_large
    try:
        data = request.stream.read(
            max_bytes + 1
        )  # without a Content-Length, one byte more tells that it is too large
    except (ParseException, NoMoreData) as error:
        raise BadRequest(f"The chunked body is malformed: {error}.") from None
    if len(data) > max_bytes:
        raise too_large
    return data
