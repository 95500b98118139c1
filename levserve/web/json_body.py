"""JSON in and out: reads a body into a checked record, or refuses it with a 400 that names the mistake.

Called in views, on HTTP threads. msgspec finds the first mistake and where it is; `_explain` says so as
OpenAI does: a dotted path in `param`, the expected and the given type in the message, a code if a field is
missing or of the wrong type.
"""

from __future__ import annotations

import re
import threading
from typing import Any, TypeVar

import msgspec
from flask import Response, request
from gunicorn.http.errors import NoMoreData, ParseException
from werkzeug.exceptions import UnsupportedMediaType

from levserve.errors import BadRequest, BodyTooLarge

Body = TypeVar("Body", bound=msgspec.Struct)

_decoders: dict[type[Any], msgspec.json.Decoder[Any]] = {}
_making = threading.Lock()

# msgspec's messages end with "... - at `$.messages[0].role`" or "... - at `key` in `$.logit_bias`".
PLACE = re.compile(r"(?P<what>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>[^`]*?)(?:\[\.\.\.\])*`)?", re.DOTALL)
MISSING = re.compile(r"Object missing required field `(.+)`")
WRONG_TYPE = re.compile(r"Expected `(.+)`, got `(.+)`")
OUT_OF_RANGE = re.compile(r"Expected `(\w+)` (.+)")

JSON_WORDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "a boolean",
    "array": "an array",
    "object": "an object",
    "null": "null",
}


def read_body(max_bytes: int) -> bytes:
    """The whole body of the request that this thread handles; raises `BodyTooLarge` above the limit."""
    # A browser asks permission before a page sends this type to another site; other types it just sends.
    if request.mimetype not in ("", "application/json"):
        raise UnsupportedMediaType("Send the body as application/json.")
    too_large = BodyTooLarge(f"The body is larger than this server's limit of {max_bytes} bytes.")
    if (request.content_length or 0) > max_bytes:
        raise too_large
    try:
        data = request.stream.read(max_bytes + 1)  # one more byte shows that a chunked body is too large
    except (ParseException, NoMoreData) as error:
        raise BadRequest(f"The chunked body is malformed: {error}.") from None
    if len(data) > max_bytes:
        raise too_large
    return data


def decode(data: bytes, kind: type[Body]) -> Body:
    """The body as a record of this kind; raises `BadRequest` for the first mistake in it."""
    try:
        return _decoder(kind).decode(data)
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"The body is not valid JSON: {error}.") from None
    except RecursionError:
        raise BadRequest("The body is nested too deeply.") from None


def json_response(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, content_type="application/json")


def unsupported(param: str) -> BadRequest:
    """The refusal of a known field that asks for something this server cannot do."""
    return BadRequest(f"'{param}' is not supported by this server.", param=param)


def missing(param: str) -> BadRequest:
    return BadRequest(
        f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter"
    )


def _decoder(kind: type[Body]) -> msgspec.json.Decoder[Body]:
    """Locked: two threads that make the first decoder of a type at the same time crash msgspec 0.22."""
    found = _decoders.get(kind)
    if found is None:
        with _making:
            found = _decoders.setdefault(kind, msgspec.json.Decoder(kind))
    return found


def _explain(text: str) -> BadRequest:
    place = PLACE.fullmatch(text)
    assert place is not None  # every part of the pattern is optional
    what, path = place["what"], place["path"] or None
    if found := MISSING.fullmatch(what):
        return missing(f"{path}.{found[1]}" if path else found[1])
    name = f"'{path}'" if path else "the body"
    if found := WRONG_TYPE.fullmatch(what):
        wanted = " or ".join(JSON_WORDS[word] for word in found[1].split(" | ") if word != "null")
        message = f"Invalid type for {name}: expected {wanted}, but got {JSON_WORDS[found[2]]} instead."
        return BadRequest(message, param=path, code="invalid_type")
    if found := OUT_OF_RANGE.fullmatch(what):
        return BadRequest(
            f"Invalid value for {name}: expected {JSON_WORDS[found[1]]} {found[2]}.", param=path
        )
    return BadRequest(f"Invalid value for {name}: {what[:1].lower()}{what[1:]}.", param=path)
