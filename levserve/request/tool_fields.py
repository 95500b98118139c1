"""The fields of a chat that have to do with tools: OpenAI's, and those of its older clients."""

from __future__ import annotations

import json
import re
from typing import Any

from msgspec import Struct

from levserve.errors import BadRequest
from levserve.request.decode import INVALID_VALUE, missing, require_choice, unsupported
from levserve.text.tools.request import CallMode, Tool, ToolRequest

MAX_TOOLS = 128
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


class Function(Struct, frozen=True):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(Struct, frozen=True):
    type: str
    function: Function | None = None


class CalledFunction(Struct, frozen=True):
    name: str
    arguments: str
    """JSON text, as the model wrote it."""


class ToolCall(Struct, frozen=True):
    """A call in a message of the history, and in an answer."""

    function: CalledFunction
    id: str | None = None
    type: str = "function"

    def to_template(self) -> dict[str, Any]:
        """The call as chat templates expect it, with its arguments parsed."""
        arguments = parse_arguments(self.function.arguments, "arguments")
        function = {"name": self.function.name, "arguments": arguments}
        named = {} if self.id is None else {"id": self.id}
        return {**named, "type": self.type, "function": function}


def find_tools(
    tools: list[FunctionTool] | None, choice: str | dict[str, Any] | None, is_parallel: bool | None
) -> ToolRequest | None:
    """What `tools`, `tool_choice` and `parallel_tool_calls` ask for; None without tools.

    `strict` changes nothing: arguments always fit their schema. Raises `BadRequest`.
    """
    if not tools:
        if choice not in (None, "none", "auto"):
            raise BadRequest("'tool_choice' is only allowed with 'tools'.", param="tool_choice")
        return None
    found = []
    for number, one in enumerate(tools):
        param = f"tools[{number}]"
        require_choice(one.type, ("function",), f"{param}.type")
        if one.function is None:
            raise missing(f"{param}.function")
        found.append(_tool(one.function, f"{param}.function"))
    mode, allowed = _read_choice(choice)
    is_named = isinstance(choice, dict) and choice.get("type") == "function"  # means one call
    return make_tool_request(found, mode, allowed, False if is_named else is_parallel, "tool_choice")


def find_functions(
    functions: list[Function] | None, choice: str | dict[str, Any] | None
) -> ToolRequest | None:
    """What the older `functions` and `function_call` ask for. Raises `BadRequest`."""
    if not functions:
        if choice not in (None, "none", "auto"):
            raise BadRequest("'function_call' is only allowed with 'functions'.", param="function_call")
        return None
    tools = [_tool(function, f"functions[{number}]") for number, function in enumerate(functions)]
    match choice:
        case None | "auto":
            return make_tool_request(tools, CallMode.AUTO, None, False, "function_call")
        case "none":
            return make_tool_request(tools, CallMode.NONE, None, False, "function_call")
        case {"name": str(name)}:
            return make_tool_request(tools, CallMode.REQUIRED, [name], False, "function_call")
    raise BadRequest(
        "'function_call' must be 'none', 'auto' or an object with the name of a function.",
        param="function_call",
    )


def make_tool_request(
    tools: list[Tool], mode: CallMode, allowed: list[str] | None, is_parallel: bool | None, choice_param: str
) -> ToolRequest:
    """Checks the tools against each other and against the choice; raises `BadRequest`."""
    if len(tools) > MAX_TOOLS:
        raise BadRequest(
            f"'tools' has {len(tools)} entries; at most {MAX_TOOLS} are allowed.",
            param="tools",
            code="array_above_max_length",
        )
    names: set[str] = set()
    for tool in tools:
        if tool.name in names:
            raise BadRequest(
                f"'{tool.param}.name' is '{tool.name}', which another tool has already.",
                param=f"{tool.param}.name",
            )
        names.add(tool.name)
    for name in allowed or ():
        if name not in names:
            raise BadRequest(
                f"'{choice_param}' names '{name[:64]}', which is not a tool.", param=choice_param
            )
    return ToolRequest(tuple(tools), mode, None if allowed is None else frozenset(allowed), is_parallel)


def check_name(name: str, param: str) -> None:
    if not NAME.fullmatch(name):
        raise BadRequest(
            f"'{param}' must be 1 to 64 letters, digits, underscores and dashes, not '{name[:80]}'.",
            param=param,
            code=INVALID_VALUE,
        )


def check_calls(calls: list[ToolCall], path: str) -> None:
    """Checks the calls in a message of the history."""
    for number, call in enumerate(calls):
        param = f"{path}[{number}]"
        if call.type != "function":
            raise unsupported(f"{param}.type")
        parse_arguments(call.function.arguments, f"{param}.function.arguments")


def parse_arguments(text: str, param: str) -> dict[str, Any]:
    """The arguments of a call in the history; an empty text is a call without arguments."""
    if not text.strip():
        return {}
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise BadRequest(f"'{param}' is not a JSON object.", param=param)
    return arguments


def _tool(function: Function, param: str) -> Tool:
    check_name(function.name, f"{param}.name")
    return Tool(function.name, function.description, function.parameters, param)


def _read_choice(choice: str | dict[str, Any] | None) -> tuple[CallMode, list[str] | None]:
    match choice:
        case None:
            return CallMode.AUTO, None
        case "none" | "auto" | "required":
            return CallMode(choice), None
        case {"type": "function", "function": {"name": str(name)}}:
            return CallMode.REQUIRED, [name]
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [*tools]},
        }:
            return CallMode(mode), [_allowed_name(tool) for tool in tools]
    raise BadRequest(
        "'tool_choice' must be 'none', 'auto', 'required', a function, or 'allowed_tools' with its mode.",
        param="tool_choice",
        code=INVALID_VALUE,
    )


def _allowed_name(tool: object) -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    raise BadRequest("'tool_choice' must list its tools as functions with a name.", param="tool_choice")
