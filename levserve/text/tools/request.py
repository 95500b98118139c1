"""What a request says about tools, in one form for all the APIs that have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str | None
    parameters: Mapping[str, Any] | None
    """The JSON schema of its arguments, an object; None for a function without arguments."""
    param: str
    """The field that the tool came in, such as `tools[0]`, for errors."""

    def describe(self) -> dict[str, Any]:
        """Its name, what it does, and its arguments."""
        parameters = self.parameters or {"type": "object", "properties": {}}
        return {"name": self.name, "description": self.description or "", "parameters": dict(parameters)}

    def to_template(self) -> dict[str, Any]:
        """The tool as templates take it."""
        return {"type": "function", "function": self.describe()}


class CallMode(StrEnum):
    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """The tools of a request, and which of them its answer may or must call."""

    tools: tuple[Tool, ...]
    mode: CallMode = CallMode.AUTO
    allowed: frozenset[str] | None = None
    """The names that may be called; None for all of them. The template lists all tools nevertheless."""
    is_parallel: bool | None = None
    """Whether one answer may have several calls; None leaves it to what the model was trained for."""

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        if self.mode is CallMode.NONE:
            return ()
        return tuple(tool for tool in self.tools if self.allowed is None or tool.name in self.allowed)
