"""Reads a JSON body into a checked record, or refuses it with a `BadRequest` that names the mistake.

msgspec finds the first mistake and where it is; `_explain` reports it as OpenAI does: a dotted path in
`param`, the expected and the given type in the message, and OpenAI's error codes. The server and the Python
API read their requests with this.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from levserve.errors import BadRequest

Body = TypeVar("Body", bound=msgspec.Struct)

_decoders: dict[type[Any], msgspec.json.Decoder[Any]] = {}
_making = threading.Lock()

# msgspec's messages end with "... - at `$.messages[0].role`" or "... - at `key` in `$.logit_bias`".
PLACE = re.compile(r"(?P<what>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>[^`]*?)(?:\[\.\.\.\])*`)?", re.DOTALL)
MISSING = re.compile(r"Object missing required field `(.+)`")
WRONG_TYPE = re.compile(r"Expected `(.+)`, got `(.+)`")
WRONG_TAG = re.compile(r"Invalid value '(.*)'", re.DOTALL)
OUT_OF_RANGE = re.compile(r"Expected `(\w+)` ((.+) \S+)")

# msgspec calls it truncated data. JavaScript makes it of a text that is cut in the middle of an emoji.
HALF_CHARACTER = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")
HALF_PAIR = "a text has one half of a surrogate pair, such as '\\ud83d' without the escape that follows it"

# OpenAI's error code for a value out of range, by its type and the bound that msgspec reports.
RANGE_CODES = {
    ("int", ">="): "integer_below_min_value",
    ("int", "<="): "integer_above_max_value",
    ("float", ">"): "decimal_below_min_value",
    ("float", ">="): "decimal_below_min_value",
    ("float", "<="): "decimal_above_max_value",
    ("str", "of length >="): "empty_string",  # every minimum length in the bodies is 1
    ("str", "of length <="): "string_above_max_length",
    ("array", "of length >="): "empty_array",
    ("array", "of length <="): "array_above_max_length",
}
INVALID_VALUE = "invalid_value"
MAX_DIGITS = 18
"""Digits of a number in a query or a form that are read: more are out of any range."""

# Fields of other servers, and what this server calls them.
INSTEAD = {
    "ebnf": "grammar",
    "n_predict": "max_tokens",
    "regex": "guided_regex",
    "repeat_penalty": "repetition_penalty",
}
JSON_WORDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "a boolean",
    "array": "an array",
    "object": "an object",
    "null": "null",
}


def decode(data: bytes, kind: type[Body]) -> Body:
    """The body as a record of this kind; raises `BadRequest` for the first mistake in it."""
    if not data.strip():
        raise BadRequest("The body is empty; send a JSON object.")
    try:
        if not data.isascii():
            data.decode()  # msgspec does not check the text of undeclared fields
        return _decoder(kind).decode(data)
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        problem = HALF_PAIR if HALF_CHARACTER.search(data) else error
        raise BadRequest(f"The body is not valid JSON: {problem}.") from None
    except RecursionError:
        raise BadRequest("The body is nested too deeply.") from None


def unsupported(param: str, where: str = "by this server") -> BadRequest:
    """The refusal of a known field that asks for something this server cannot do."""
    hint = f"; send '{INSTEAD[param]}'" if param in INSTEAD else ""
    return BadRequest(f"'{param}' is not supported {where}{hint}.", param=param, code="unsupported_parameter")


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
        given = "a decimal number" if found[2] == "float" else JSON_WORDS[found[2]]
        message = f"Invalid type for {name}: expected {wanted}, but got {given} instead."
        return BadRequest(message, param=path, code="invalid_type")
    if found := WRONG_TAG.fullmatch(what):
        message = f"{name} is '{found[1][:64]}', which this server does not support."
        return BadRequest(message, param=path, code=INVALID_VALUE)
    if found := OUT_OF_RANGE.fullmatch(what):
        message = f"Invalid value for {name}: expected {JSON_WORDS[found[1]]} {found[2]}."
        return BadRequest(message, param=path, code=RANGE_CODES.get((found[1], found[3]), INVALID_VALUE))
    message = f"Invalid value for {name}: {what[:1].lower()}{what[1:]}."
    return BadRequest(message, param=path, code=INVALID_VALUE)


def require_choice(value: str, choices: tuple[str, ...], param: str) -> None:
    if value not in choices:
        wanted = ", ".join(f"'{choice}'" for choice in choices)
        raise BadRequest(
            f"Invalid value for '{param}': '{value[:64]}'. Supported values are: {wanted}.",
            param=param,
            code=INVALID_VALUE,
        )


def read_integer(text: str, param: str, least: int, most: int) -> int:
    """A whole number in a query or a form, refused as one in a body is."""
    sign, digits = (-1, text[1:]) if text.startswith("-") else (1, text)
    if not (digits.isascii() and digits.isdecimal()):
        message = f"Invalid type for '{param}': expected an integer, but got '{text[:64]}' instead."
        raise BadRequest(message, param=param, code="invalid_type")
    value = sign * int(digits.lstrip("0")[:MAX_DIGITS] or "0")
    if least <= value <= most:
        return value
    relation, bound = (">=", least) if value < least else ("<=", most)
    message = f"Invalid value for '{param}': expected an integer {relation} {bound}."
    raise BadRequest(message, param=param, code=RANGE_CODES["int", relation])


def refuse_unsupported(
    record: msgspec.Struct,
    table: Mapping[str, tuple[object, ...]],
    path: str = "",
    where: str = "by this server",
) -> None:
    """Refuses the fields of the table, except null and the harmless values that the table lists."""
    for name, harmless in table.items():
        value = getattr(record, name)
        if value is not None and value not in harmless:
            raise unsupported(f"{path}{name}", where)
