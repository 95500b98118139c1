"""Converts a conversation with tools into what the model's chat template takes.

Templates differ: most take the arguments of calls as an object, some as text; some show calls only if the
content beside them is null. For templates that show no calls, or know no tools at all, calls are written into
the content, as the model would have written them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from levserve.text.chat import Written, hide
from levserve.text.tools.format import SpeltCall, ToolFormat
from levserve.text.tools.ids import shorten_id
from levserve.text.tools.request import Tool

Message = dict[str, Any]
SYSTEM_PROMPT = """You can call these functions:
{functions}

To call a function, answer with its name and its arguments in this form:
{example}
The result then comes between <tool_response> and </tool_response>."""
"""What the system message says about tools where the template cannot."""


@dataclass(frozen=True, slots=True)
class TemplateUse:
    """What a chat template does with tools."""

    lists_tools: bool = False
    shows_calls: bool = False
    takes_text: bool = False
    """Whether it wants the arguments of calls as JSON text."""
    wants_null: bool = False
    """Whether it shows calls only if the content beside them is null."""
    has_system: bool = True


class History:
    """Renders the tools and calls of conversations for one template."""

    def __init__(self, form: ToolFormat, use: TemplateUse, specials: Sequence[str]) -> None:
        self.form = form
        self.use = use
        self._specials = specials

    def adapt(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]) -> list[Message]:
        """The messages as the template takes them; with the tools if it does not list them itself."""
        adapted = _name_results([dict(message) for message in messages])
        if self.form.has_short_ids:
            _shorten_ids(adapted)
        if self.use.shows_calls:
            adapted = [self._show_calls(message) for message in adapted]
        else:
            adapted = [self._write_calls(message) for message in adapted]
        if self.use.lists_tools or self.use.shows_calls:
            return adapted
        adapted = _results_from_users(adapted)
        return self._describe(adapted, tools) if tools else adapted

    def template_tools(self, tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
        """The template's variable `tools`; None if there are none, or if the template does not use it."""
        if not tools or not (self.use.lists_tools or self.use.shows_calls):
            return None
        return [tool.to_template() for tool in tools]

    def _show_calls(self, message: Message) -> Message:
        if not message.get("tool_calls"):
            return message
        calls = [
            {**call, "function": {**call["function"], "arguments": self._arguments(call)}}
            for call in message["tool_calls"]
        ]
        content = None if self.use.wants_null and not message.get("content") else message.get("content", "")
        return {**message, "tool_calls": calls, "content": content}

    def _arguments(self, call: Mapping[str, Any]) -> Any:
        arguments = call["function"]["arguments"]
        return json.dumps(arguments, ensure_ascii=False) if self.use.takes_text else arguments

    def _write_calls(self, message: Message) -> Message:
        calls = message.pop("tool_calls", None)
        if not calls:
            return message
        hidden = hide(calls, self._specials)
        written = self.form.spell(
            [
                SpeltCall(call["function"]["name"], call["function"]["arguments"], call.get("id", ""))
                for call in hidden
            ]
        )
        content = hide(message.get("content") or "", self._specials)
        return {**message, "content": Written("\n".join(filter(None, (content, written))))}

    def _describe(self, messages: list[Message], tools: Sequence[Tool]) -> list[Message]:
        text = describe_tools(tools, self.form)
        first = messages[0]
        if not self.use.has_system:
            for number, message in enumerate(messages):
                if message["role"] == "user":
                    messages[number] = {**message, "content": f"{text}\n\n{message['content']}"}
                    break
            return messages
        if first["role"] in ("system", "developer"):
            joined = "\n\n".join(filter(None, (first.get("content"), text)))
            return [{**first, "content": joined}, *messages[1:]]
        return [{"role": "system", "content": text}, *messages]


def _name_results(messages: list[Message]) -> list[Message]:
    """Gives an id to calls without one, and to results the id and name of their call."""
    names: dict[str, str] = {}
    last_id = ""
    for message in messages:
        for call in message.get("tool_calls") or ():
            last_id = call.setdefault("id", f"call{len(names):05d}")
            names[last_id] = call["function"]["name"]
        if message["role"] == "function":
            message["role"] = "tool"
            message.setdefault("tool_call_id", last_id)
        if message["role"] == "tool" and message.get("tool_call_id") in names:
            message.setdefault("name", names[message["tool_call_id"]])
    return messages


def _shorten_ids(messages: list[Message]) -> None:
    for message in messages:
        if "tool_call_id" in message:
            message["tool_call_id"] = shorten_id(message["tool_call_id"])
        if message.get("tool_calls"):
            message["tool_calls"] = [{**call, "id": shorten_id(call["id"])} for call in message["tool_calls"]]


def _results_from_users(messages: list[Message]) -> list[Message]:
    """The results of tools as messages of the user; consecutive results make one message."""
    adapted: list[Message] = []
    was_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result:
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if was_result:
                adapted[-1]["content"] += f"\n{text}"
            else:
                adapted.append({"role": "user", "content": text})
        else:
            adapted.append(message)
        was_result = is_result
    return adapted


def describe_tools(tools: Sequence[Tool], form: ToolFormat) -> str:
    functions = [json.dumps(tool.describe(), ensure_ascii=False) for tool in tools]
    example = form.spell([SpeltCall("function_name", {"argument": "value"}, "")])
    return SYSTEM_PROMPT.format(functions="\n".join(functions), example=example)
