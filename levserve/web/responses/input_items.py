"""The items of a response's `input`: messages, calls of functions, their results, and thoughts.

Items that the store keeps have the same form, so that a later request can continue from them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from msgspec import Struct, structs

from levserve.errors import BadRequest
from levserve.request.decode import missing, require_choice
from levserve.request.tool_fields import check_name, parse_arguments

ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning")
ROLES = ("user", "assistant", "system", "developer")
TEXT_TYPES = ("input_text", "output_text")
THOUGHT_TYPES = ("reasoning_text", "summary_text")
ID_PREFIXES = {"message": "msg_", "function_call": "fc_", "function_call_output": "fco_", "reasoning": "rs_"}


class InputPart(Struct, frozen=True, omit_defaults=True):
    type: str
    text: str | None = None


class OutputPart(InputPart, frozen=True, omit_defaults=False):
    """A part of an assistant's message, as OpenAI shows it; clients expect the list to be there."""

    annotations: Sequence[object] = ()


class InputItem(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One item; which fields it has depends on its type. One with a role and no type is a message."""

    type: str | None = None
    id: str | None = None
    status: str | None = None
    role: str | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None

    @property
    def text(self) -> str:
        """The text of a message or of the result of a call; the thoughts of a reasoning item."""
        if self.type == "function_call_output":
            return _join(self.output)
        if self.type == "reasoning":
            return _join(self.content) or _join(self.summary)
        return _join(self.content)

    def check(self, path: str) -> None:
        """Raises `BadRequest` with the path of what is wrong."""
        if self.type is None and self.role is None:
            raise missing(f"{path}.type")
        kind = self.type or "message"
        require_choice(kind, ITEM_TYPES, f"{path}.type")
        if kind == "message":
            self._check_message(path)
        elif kind == "function_call":
            self._check_call(path)
        elif kind == "function_call_output":
            if self.call_id is None:
                raise missing(f"{path}.call_id")
            _check_text(self.output, TEXT_TYPES, f"{path}.output")
        else:
            if self.content is not None:
                _check_text(self.content, THOUGHT_TYPES, f"{path}.content")
            if self.summary is not None:
                _check_text(self.summary, THOUGHT_TYPES, f"{path}.summary")

    def _check_message(self, path: str) -> None:
        if self.role is None:
            raise missing(f"{path}.role")
        require_choice(self.role, ROLES, f"{path}.role")
        _check_text(self.content, TEXT_TYPES, f"{path}.content")

    def _check_call(self, path: str) -> None:
        if self.call_id is None:
            raise missing(f"{path}.call_id")
        if self.name is None:
            raise missing(f"{path}.name")
        check_name(self.name, f"{path}.name")
        if self.arguments is None:
            raise missing(f"{path}.arguments")
        parse_arguments(self.arguments, f"{path}.arguments")

    def complete(self) -> InputItem:
        """The same item with its type, an id, and its text as parts, as lists of items show it."""
        kind = self.type or "message"
        item = structs.replace(self, type=kind, id=self.id or make_id(ID_PREFIXES[kind]))
        if kind == "message" and isinstance(self.content, str):
            part_type = "output_text" if self.role == "assistant" else "input_text"
            return structs.replace(item, content=[InputPart(part_type, self.content)])
        return item

    def listed(self) -> InputItem:
        """A complete item with the fields that OpenAI's lists have."""
        item = structs.replace(self, status=self.status or "completed")
        if self.type != "message" or not isinstance(self.content, list):
            return item
        parts = [_show(part) for part in self.content]
        return structs.replace(item, content=parts)


def read_input(given: str | Sequence[InputItem] | None, history: Iterable[InputItem]) -> list[InputItem]:
    """The items of a request's `input`, checked; a text is a user's message. Raises `BadRequest`."""
    if given is None:
        return []
    if isinstance(given, str):
        return [InputItem(role="user", content=given)]
    calls = {item.call_id for item in history if item.type == "function_call"}
    for number, item in enumerate(given):
        path = f"input[{number}]"
        item.check(path)
        if item.type == "function_call":
            calls.add(item.call_id)
        if item.type == "function_call_output" and item.call_id not in calls:
            raise BadRequest(
                f"'{path}.call_id' is '{str(item.call_id)[:64]}', and no call before it has this id.",
                param=f"{path}.call_id",
            )
    return list(given)


def make_id(prefix: str) -> str:
    return f"{prefix}{random.getrandbits(96):024x}"  # os.urandom would release the GIL


def _show(part: InputPart) -> InputPart:
    return OutputPart(part.type, part.text) if part.type == "output_text" else part


def _join(text: str | list[InputPart] | None) -> str:
    if isinstance(text, list):
        return "".join(part.text or "" for part in text)
    return text or ""


def _check_text(text: str | list[InputPart] | None, types: tuple[str, ...], path: str) -> None:
    if text is None:
        raise missing(path)
    if isinstance(text, str):
        return
    for number, part in enumerate(text):
        require_choice(part.type, types, f"{path}[{number}].type")
        if part.text is None:
            raise missing(f"{path}[{number}].text")
