"""How a call spells its name and arguments, in three ways: JSON, tags around each argument, and Python.

Each way reads a call from a model's text, writes the grammar of a call, and spells a call of the history.
Only JSON arguments are passed on as the model wrote them; the others become JSON value by value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from levserve.text.lark import EMPTY, Lark, quote_regex
from levserve.text.parts import CallArguments, CallStart, Part
from levserve.text.tools.arguments import (
    Argument,
    arguments_schema,
    bare_to_json,
    is_bare,
    listed_texts,
    python_to_json,
    split_arguments,
)
from levserve.text.tools.ids import make_id
from levserve.text.tools.request import Tool
from levserve.text.tools.scanner import Scanner, Steps


class Calls:
    """Collects the calls of one answer as parts."""

    def __init__(self, tools: Sequence[Tool], *, has_short_ids: bool) -> None:
        self.tools: Mapping[str, Tool] = {tool.name: tool for tool in tools}
        self.parts: list[Part] = []
        self.count = 0
        self._has_short_ids = has_short_ids
        self._separator = ""

    def start(self, name: str, call_id: str = "") -> None:
        self.parts.append(CallStart(self.count, call_id or make_id(is_short=self._has_short_ids), name))
        self.count += 1
        self._separator = "{"

    def add(self, text: str) -> None:
        """More of the arguments of the last call, as JSON text."""
        self.parts.append(CallArguments(self.count - 1, text))

    def add_argument(self, name: str, value: str) -> None:
        """One more argument of the last call; the value is JSON."""
        self.add(f"{self._separator}{json.dumps(name, ensure_ascii=False)}: {value}")
        self._separator = ", "

    def end_arguments(self) -> None:
        self.add("{}" if self._separator == "{" else "}")


class Body(Protocol):
    def read(self, scanner: Scanner, calls: Calls) -> Steps[bool]:
        """Reads a call from its name on. False if there is none; then no part was made."""

    def write_grammar(self, lark: Lark, number: int, tool: Tool) -> str:
        """An expression for a call of this tool; raises `BadRequest`."""

    def spell(self, name: str, arguments: Mapping[str, Any], call_id: str) -> str: ...

    @property
    def after_name(self) -> str:
        """What stands between the name and the arguments."""


@dataclass(frozen=True, slots=True)
class JsonBody:
    """The arguments are a JSON object; there may be an id before them."""

    after_name: str
    after_id: str = ""
    """If this is not empty, an id stands before it."""
    has_more: bool = False
    """Whether the name and the arguments stand in a JSON object, where further keys may follow."""

    def read(self, scanner: Scanner, calls: Calls) -> Steps[bool]:
        name = yield from scanner.take_name()
        if name not in calls.tools or not (yield from scanner.take(self.after_name)):
            return False
        call_id = ""
        if self.after_id:
            call_id = yield from scanner.take_name()
            if not (yield from scanner.take(self.after_id)):
                return False
        if (yield from scanner.skip_space()) != "{":
            return False
        calls.start(name, call_id)
        is_complete = yield from scanner.copy_object(calls.add)
        if is_complete and self.has_more:
            yield from _skip_members(scanner)
        return True

    def write_grammar(self, lark: Lark, number: int, tool: Tool) -> str:
        arguments = lark.json(f"args_{number}", arguments_schema(tool))
        parts = [lark.literal(tool.name + self.after_name), arguments]
        if self.after_id:
            parts[1:1] = [lark.rule("ID", "/[a-zA-Z0-9]{9}/"), lark.literal(self.after_id)]
        return " ".join(parts)

    def spell(self, name: str, arguments: Mapping[str, Any], call_id: str) -> str:
        between = self.after_name + (call_id + self.after_id if self.after_id else "")
        return name + between + json.dumps(arguments, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class TaggedBody:
    """Each argument stands between tags: strings as bare text, other values as JSON."""

    after_name: str
    before_key: str
    after_key: str
    before_value: str
    after_value: str
    end: str
    pad: str = ""
    """Stands on both sides of a value."""
    break_after: str = "\n"
    """Stands after each argument."""

    def read(self, scanner: Scanner, calls: Calls) -> Steps[bool]:
        name = yield from scanner.take_name()
        if name not in calls.tools or not (yield from scanner.take(self.after_name)):
            return False
        schemas = {argument.name: argument.schema for argument in split_arguments(calls.tools[name])}
        calls.start(name)
        while (yield from scanner.take(self.before_key)):
            key = yield from scanner.take_until(self.after_key)
            if key is None or not (yield from scanner.take(self.before_value)):
                return True
            text = yield from scanner.take_until(self.after_value)
            if text is None:
                return True
            text = text.removeprefix(self.pad).removesuffix(self.pad)
            calls.add_argument(key.strip(), bare_to_json(text, schemas.get(key.strip(), {})))
        has_end = bool(self.end) and (yield from scanner.take(self.end))
        if has_end or (yield from scanner.skip_space()):
            calls.end_arguments()  # else the text ended, and more arguments might have come
        return True

    def write_grammar(self, lark: Lark, number: int, tool: Tool) -> str:
        parts = [lark.literal(tool.name + self.after_name)]
        for place, argument in enumerate(split_arguments(tool)):
            rule = lark.rule(f"arg_{number}_{place}", self._argument(lark, f"{number}_{place}", argument))
            parts.append(rule if argument.is_required else f"{rule}?")
        return " ".join([*parts, lark.literal(self.end)])

    def _argument(self, lark: Lark, number: str, argument: Argument) -> str:
        start = lark.literal(f"{self.before_key}{argument.name}{self.after_key}{self.before_value}{self.pad}")
        end = self.pad + self.after_value + self.break_after
        if (texts := listed_texts(argument.schema)) is not None:
            return f"{start} ({' | '.join(map(lark.literal, texts))}) {lark.literal(end)}"
        if is_bare(argument.schema):
            # The text ends at the first occurrence of its end mark.
            text = lark.rule("text_value[lazy]", f"/(?s:.*){quote_regex(end)}/").removesuffix("[lazy]")
            return f"{start} {text}"
        return f"{start} {lark.json(f'value_{number}', argument.schema)} {lark.literal(end)}"

    def spell(self, name: str, arguments: Mapping[str, Any], call_id: str) -> str:
        written = name + self.after_name
        for key, value in arguments.items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            written += f"{self.before_key}{key}{self.after_key}{self.before_value}{self.pad}{text}{self.pad}"
            written += self.after_value + self.break_after
        return written + self.end


@dataclass(frozen=True, slots=True)
class PythonBody:
    """A call in Python's syntax, with keyword arguments."""

    after_name: str = "("

    def read(self, scanner: Scanner, calls: Calls) -> Steps[bool]:
        name = yield from scanner.take_name()
        if name not in calls.tools or not (yield from scanner.take("(")):
            return False
        calls.start(name)
        while (found := (yield from scanner.skip_space())) not in ("", ")"):
            if found == ",":
                scanner.at += 1
                continue
            key = yield from scanner.take_until("=")
            value = None if key is None else (yield from _take_literal(scanner))
            if key is None or value is None:
                return True
            calls.add_argument(key.strip(), python_to_json(value))
        if found:
            scanner.at += 1
            calls.end_arguments()
        return True

    def write_grammar(self, lark: Lark, number: int, tool: Tool) -> str:
        arguments = split_arguments(tool)
        written = []
        for place, argument in enumerate(arguments):
            value = lark.json(f"value_{number}_{place}", argument.schema)
            written.append(lark.rule(f"arg_{number}_{place}", f"{lark.literal(argument.name + '=')} {value}"))
        start = lark.literal(f"{tool.name}(")
        return f"{start} {_in_order(lark, number, arguments, written)} {lark.literal(')')}"

    def spell(self, name: str, arguments: Mapping[str, Any], call_id: str) -> str:
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def _in_order(lark: Lark, number: int, arguments: Sequence[Argument], written: Sequence[str]) -> str:
    """Arguments with commas between them, where some may be left out."""
    rest = EMPTY
    starts = []
    for place in reversed(range(len(arguments))):
        follows = lark.rule(f"rest_{number}_{place}", rest)
        starts.append(f"{written[place]} {follows}")
        if arguments[place].is_required:
            starts = starts[-1:]
            rest = f'", " {written[place]} {follows}'
        else:
            rest = f'(", " {written[place]})? {follows}'
    if not any(argument.is_required for argument in arguments):
        starts.append(EMPTY)
    return f"({' | '.join(starts)})"


def _skip_members(scanner: Scanner) -> Steps[None]:
    """Skips what else stands in the object around the arguments, such as an id."""
    start = scanner.at
    depth = 0
    while found := (yield from scanner.peek()):
        if found == '"':
            scanner.at += 1
            while (inner := (yield from scanner.peek())) not in ("", '"'):
                scanner.at += 2 if inner == "\\" else 1
        elif found in "{[":
            depth += 1
        elif found in "}]":
            if depth == 0:
                return
            depth -= 1
        elif depth == 0 and scanner.at == start and not found.isspace() and found != ",":
            return
        scanner.at += 1
    scanner.at = min(scanner.at, len(scanner.text))


def _take_literal(scanner: Scanner) -> Steps[str | None]:
    """A Python value up to the comma or bracket after it, which is not taken; None if the text ends first."""
    start = scanner.at
    depth = 0
    quote = ""
    while found := (yield from scanner.peek()):
        if quote:
            if found == "\\":
                scanner.at += 1
            elif found == quote:
                quote = ""
        elif found in "\"'":
            quote = found
        elif found in "([{":
            depth += 1
        elif depth == 0 and found in ",)":
            return scanner.text[start : scanner.at]
        elif found in ")]}":
            depth -= 1
        scanner.at += 1
    return None
