"""Reads the sections of a YAML file; values stay text, as they are written, so that 010 does not become 8.

The sections are mappings at the top, with the names and keys of the ini file. A list becomes words with
spaces between them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from levserve.errors import ConfigError

NULLS = ("null", "Null", "NULL", "~")
QUOTE = "aliases, anchors and tags are not supported; put a value that begins with *, & or ! in quotes"
"""Says nothing of the value, which may be a key. YAML would take one with an anchor or a tag for empty."""
MARKS = ("alias", "anchor", "tag")


def read_yaml(name: str, text: str) -> dict[str, dict[str, str]]:
    """`name` is the file's name, for error messages."""
    try:
        for event in yaml.parse(text, Loader=yaml.BaseLoader):
            _refuse_marks(name, event)
        document = yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.MarkedYAMLError as error:
        is_mark = str(error.context).endswith(MARKS) or "tag handle" in str(error.problem)
        problem = QUOTE if is_mark else error.problem
        raise ConfigError(f"{name}, line {_line(error.problem_mark)}: {problem}") from None
    except yaml.YAMLError as error:  # a character that YAML does not allow
        raise ConfigError(f"{name}: {' '.join(str(error).split())}") from None
    if document is None or _is_null(document):
        return {}
    sections: dict[str, dict[str, str]] = {}
    for section, node in _entries(name, document, "sections such as server: or model:"):
        if section in sections:
            raise ConfigError(f"{_place(name, node)}: section {section} appears twice")
        sections[section] = {}
        if _is_null(node):
            continue
        for key, value in _entries(name, node, f"keys of section {section}, such as port: 8000"):
            if key in sections[section]:
                raise ConfigError(f"{_place(name, value)}: {key} is given twice in section {section}")
            sections[section][key] = _text(f"{name}, [{section}] {key}", value)
    return sections


def _refuse_marks(name: str, event: yaml.Event) -> None:
    has_mark = isinstance(event, yaml.NodeEvent) and event.anchor is not None
    if has_mark or getattr(event, "tag", None) is not None:
        raise ConfigError(f"{name}, line {_line(event.start_mark)}: {QUOTE}")


def _line(mark: Any) -> int:
    return mark.line + 1 if mark is not None else 1


def _entries(name: str, node: yaml.Node, expected: str) -> Iterator[tuple[str, yaml.Node]]:
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{_place(name, node)}: expected {expected}")
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(f"{_place(name, key)}: expected {expected}")
        yield key.value, value


def _text(place: str, node: yaml.Node) -> str:
    if _is_null(node):
        return ""
    if isinstance(node, yaml.ScalarNode):
        return str(node.value)
    if isinstance(node, yaml.SequenceNode) and all(isinstance(one, yaml.ScalarNode) for one in node.value):
        return " ".join(str(one.value) for one in node.value)
    raise ConfigError(f"{place}: expected a value or a list of values")


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.style is None and node.value in ("", *NULLS)


def _place(name: str, node: yaml.Node) -> str:
    return f"{name}, line {node.start_mark.line + 1}"
