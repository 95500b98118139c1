"""The body of an HTTP request in bytes, and JSON answers. Called in views, on HTTP threads."""

from __future__ import annotations

import msgspec
from flask import Response, request
from gunicorn.http.errors import NoMoreData, ParseException
from werkzeug.exceptions import UnsupportedMediaType

from levserve.errors import BadRequest, BodyTooLarge


def read_body(max_bytes: int) -> bytes:
    """The whole body of the request that this thread handles; raises `BodyTooLarge` above the limit."""
    # Before a page sends JSON to another site, the browser asks permission; other types it may just send.
    if request.mimetype not in ("", "application/json"):
        raise UnsupportedMediaType("Send the body as application/json.")
    if request.headers.get("Content-Encoding", "").lower() not in ("", "identity"):
        raise UnsupportedMediaType("Send the body without compression.")
    if (request.content_length or 0) > max_bytes:
        raise BodyTooLarge(max_bytes)
    try:
        data = request.stream.read(max_bytes + 1)  # one more byte shows that a chunked body is too large
    except (ParseException, NoMoreData) as error:
        raise BadRequest(f"The chunked body is malformed: {error}.") from None
    if len(data) > max_bytes:
        raise BodyTooLarge(max_bytes)
    return data


def json_response(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, content_type="application/json")
