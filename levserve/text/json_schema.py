"""Checks a JSON schema before it is compiled: its size, what it combines, and that a finite text can fit it.

Compiling a hostile schema could take minutes: combined alternatives multiply, and patterns are costly. The
limits keep it within a tenth of a second; they are far above what applications send.
"""

from __future__ import annotations

import math
from typing import Any

MAX_SCHEMAS = 500
MAX_PATTERNS = 100
MAX_ENUM = 1000
MAX_DEPTH = 60
MAX_COMBINATIONS = 64
"""Combinations of the alternatives in one `allOf`."""
MAX_PASSES = 20
FORMATS = frozenset("date date-time time duration email hostname ipv4 ipv6 uuid uri".split())
"""The formats that are enforced; any other is an annotation, as the standard says."""

ANNOTATIONS = ("$comment", "$schema", "default", "description", "examples", "title")
"""These do not constrain the text, and they make schemas long."""

LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
NAMED = ("properties", "patternProperties", "$defs", "definitions")
SINGLE = ("items", "additionalProperties", "additionalItems", "not", "contains")


def check_schema(schema: Any) -> Any:
    """The schema without annotations; raises ValueError, with the reason, if it cannot be served."""
    if not isinstance(schema, dict | bool):
        raise ValueError("a schema is an object or a boolean")
    if schema is False:
        raise ValueError("it allows no text at all")
    if schema is True:
        return {}
    cleaned = _Survey().visit(schema, 0)
    _require_finite(cleaned)
    return cleaned


class _Survey:
    """Counts what a schema is made of, and copies it without annotations and unknown formats."""

    def __init__(self) -> None:
        self._num_schemas = 0
        self._num_patterns = 0
        self._num_enum = 0

    def visit(self, schema: Any, depth: int) -> Any:
        if not isinstance(schema, dict):
            return schema
        self._count(schema, depth)
        copy = {key: value for key, value in schema.items() if key not in ANNOTATIONS}
        if not (isinstance(copy.get("format"), str) and copy["format"] in FORMATS):
            copy.pop("format", None)
        if copy.get("uniqueItems") is False:
            del copy["uniqueItems"]  # the default, which constrains nothing
        for key, value in schema.items():
            if key in LISTS and isinstance(value, list):
                copy[key] = [self.visit(item, depth + 1) for item in value]
            elif key in NAMED and isinstance(value, dict):
                copy[key] = {name: self.visit(item, depth + 1) for name, item in value.items()}
            elif key in SINGLE:
                copy[key] = self.visit(value, depth + 1)
        return copy

    def _count(self, schema: dict[str, Any], depth: int) -> None:
        self._num_schemas += 1
        self._num_patterns += ("pattern" in schema) + len(_mapping(schema, "patternProperties"))
        self._num_enum += len(_items(schema, "enum"))
        self._require_at_most(MAX_SCHEMAS, self._num_schemas, "schemas")
        self._require_at_most(MAX_PATTERNS, self._num_patterns, "patterns")
        self._require_at_most(MAX_ENUM, self._num_enum, "values of enum")
        self._require_at_most(MAX_DEPTH, depth, "levels")
        combined = [part for part in _items(schema, "allOf") if isinstance(part, dict)]
        if combined:
            combinations = math.prod(max(len(_alternatives(part)), 1) for part in (schema, *combined))
            self._require_at_most(MAX_COMBINATIONS, combinations, "combinations of alternatives in allOf")

    @staticmethod
    def _require_at_most(limit: int, count: int, what: str) -> None:
        if count > limit:
            raise ValueError(f"it has more than {limit} {what}")


def _items(schema: dict[str, Any], key: str) -> list[Any]:
    """The list under a key. Anything else counts as empty: the compiler refuses it, with a better message."""
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _mapping(schema: dict[str, Any], key: str) -> dict[str, Any]:
    value = schema.get(key)
    return value if isinstance(value, dict) else {}


def _alternatives(schema: dict[str, Any]) -> list[Any]:
    return [*_items(schema, "anyOf"), *_items(schema, "oneOf")]


def _require_finite(root: dict[str, Any]) -> None:
    """Refuses a schema in which an object requires itself: its text would never end.

    A schema is finite if it allows a value built only from schemas that are known to be finite. When no more
    schemas can be added, the remaining ones are infinite. Going forwards and backwards in turn takes few
    passes, because references mostly point one way.
    """
    schemas = _subschemas(root)
    finite: set[int] = set()
    for _ in range(MAX_PASSES):
        num_known = len(finite)
        schemas.reverse()
        for schema in schemas:
            if id(schema) not in finite and _is_finite(schema, root, finite):
                finite.add(id(schema))
        if len(finite) == len(schemas):
            return
        if len(finite) == num_known:
            raise ValueError("a part of it requires itself, so that its text would never end")
    raise ValueError("its references are too complex")


def _subschemas(schema: Any) -> list[dict[str, Any]]:
    """The schema and all schemas in it, outer before inner ones."""
    if not isinstance(schema, dict):
        return []
    found = [schema]
    children = [child for key in LISTS for child in _items(schema, key)]
    children += [child for key in NAMED for child in _mapping(schema, key).values()]
    children += [schema[key] for key in SINGLE if key in schema]
    for child in children:
        found += _subschemas(child)
    return found


def _is_finite(schema: dict[str, Any], root: dict[str, Any], finite: set[int]) -> bool:
    def holds(part: Any) -> bool:
        return not isinstance(part, dict) or id(part) in finite

    if "$ref" in schema and not holds(resolve(schema["$ref"], root)):
        return False
    alternatives = _alternatives(schema)
    if alternatives and not any(map(holds, alternatives)):
        return False
    properties = _mapping(schema, "properties")
    needed = [*_items(schema, "allOf"), *(properties.get(name) for name in _names(schema, "required"))]
    num_items = schema.get("minItems")
    if isinstance(num_items, int) and num_items > 0:
        first = _items(schema, "prefixItems")[:num_items]
        needed += first
        if num_items > len(first):
            needed.append(schema.get("items"))
    return all(map(holds, needed))


def _names(schema: dict[str, Any], key: str) -> list[str]:
    return [name for name in _items(schema, key) if isinstance(name, str)]


def resolve(reference: Any, root: dict[str, Any]) -> Any:
    """What a reference within the schema points to; None for other references, which the compiler refuses."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    target: Any = root
    for part in reference[1:].split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        target = target.get(name) if isinstance(target, dict) else None
    return target
