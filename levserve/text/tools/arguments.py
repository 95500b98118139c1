"""The arguments of a call: the schema that they must fit, and JSON for values in other notations.

Some families write each argument between its own tags, where a string is bare text, or as Python does.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from levserve.errors import BadRequest
from levserve.text.json_schema import check_schema, resolve
from levserve.text.tools.request import Tool

COMBINING = ("anyOf", "oneOf", "allOf", "$ref", "patternProperties")
RULES = ("pattern", "format", "minLength", "maxLength", "enum", "const", "not", "allOf")
SCALARS = {type(None): "null", bool: "boolean", int: "integer", float: "number"}
MAX_REFERENCES = 20


class Argument(NamedTuple):
    """One argument of a tool."""

    name: str
    schema: Mapping[str, Any]
    """Includes the definitions that it refers to."""
    is_required: bool


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments, which is always that of an object; raises `BadRequest`.

    An object that does not say whether it has additional properties has none: a model that may add some often
    does not stop.
    """
    param = f"{tool.param}.parameters"
    try:
        schema: dict[str, Any] = check_schema(dict(tool.parameters or {}))
    except (ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, ValueError) else "it is nested too deeply"
        raise BadRequest(f"'{param}' cannot be used: {reason}.", param=param) from None
    if schema.get("type", "object") != "object":
        raise BadRequest(f"'{param}' must describe an object.", param=param)
    if "$ref" not in schema:
        schema["type"] = "object"
    if not any(key in schema for key in COMBINING):
        schema.setdefault("additionalProperties", False)
    return schema


def split_arguments(tool: Tool) -> list[Argument]:
    """The arguments one by one, for families that do not write them as JSON; raises `BadRequest`."""
    root = arguments_schema(tool)
    schema = resolve(root["$ref"], root) if "$ref" in root else root
    properties = schema.get("properties", {}) if isinstance(schema, dict) else None
    if not isinstance(properties, dict) or any(key in schema for key in COMBINING[:3]):
        raise BadRequest(
            f"'{tool.param}.parameters' must list its properties: this model writes them one by one.",
            param=f"{tool.param}.parameters",
        )
    required = schema.get("required")
    names = required if isinstance(required, list) else []
    shared: dict[str, Any] = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return [
        Argument(name, {**(value if isinstance(value, dict) else {}), **shared}, name in names)
        for name, value in properties.items()
    ]


def listed_texts(schema: Mapping[str, Any]) -> list[str] | None:
    """The texts that a string may be, if the schema lists them."""
    plain = _follow(schema, schema)
    values = [plain["const"]] if "const" in plain else plain.get("enum")
    if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
        return values
    return None


def is_bare(schema: Mapping[str, Any]) -> bool:
    """Whether a value is written as bare text. Strings that have to fit a rule are written as JSON."""
    if listed_texts(schema) is not None:
        return True
    kinds = [*_alternatives(schema, schema)]
    strings = [kind for kind in kinds if "string" in _types(kind)]
    return bool(strings) and not any(key in kind for kind in strings for key in RULES)


def bare_to_json(text: str, schema: Mapping[str, Any]) -> str:
    """JSON for a value as it stands between tags."""
    if listed_texts(schema) is not None:
        return json.dumps(text, ensure_ascii=False)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    if not is_bare(schema):
        return text.strip()
    types = {name for kind in _alternatives(schema, schema) for name in _types(kind)}
    name = SCALARS.get(type(value))
    is_other = name in types or (name == "integer" and "number" in types)
    return text.strip() if is_other else json.dumps(text, ensure_ascii=False)


def python_to_json(text: str) -> str:
    """JSON for a Python literal; JSON is passed on as it is, and anything else is a string."""
    try:
        json.loads(text)
        return text.strip()
    except (ValueError, RecursionError):
        pass
    try:
        return json.dumps(ast.literal_eval(text.strip()), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return json.dumps(text.strip(), ensure_ascii=False)


def _alternatives(schema: Mapping[str, Any], root: Mapping[str, Any], depth: int = 0) -> Iterator[Any]:
    plain = _follow(schema, root)
    lists = [plain[key] for key in ("anyOf", "oneOf") if isinstance(plain.get(key), list)]
    options = [option for each in lists for option in each if depth < 3]
    if not options:
        yield plain
    for option in options:
        if isinstance(option, dict):
            yield from _alternatives(option, root, depth + 1)


def _follow(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    for _ in range(MAX_REFERENCES):
        if "$ref" not in schema:
            break
        found = resolve(schema["$ref"], dict(root))
        schema = found if isinstance(found, dict) else {}
    return schema


def _types(schema: Mapping[str, Any]) -> set[str]:
    """The types that a schema without alternatives allows; all of them if it names none."""
    types = schema.get("type")
    if isinstance(types, str):
        return {types}
    if isinstance(types, list):
        return {name for name in types if isinstance(name, str)}
    if "properties" in schema:
        return {"object"}
    return {"string", "number", "integer", "boolean", "null", "array", "object"}
