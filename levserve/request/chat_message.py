"""One message of a chat, as OpenAI's bodies have it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct, defstruct

from levserve.errors import BadRequest
from levserve.request.decode import missing, refuse_unsupported, require_choice
from levserve.request.tool_fields import CalledFunction, ToolCall, check_calls

ROLES = ("developer", "system", "user", "assistant", "tool", "function")
UNSUPPORTED_IN_MESSAGE: Mapping[str, tuple[object, ...]] = {
    "audio": (),
    "refusal": ("",),
}

if TYPE_CHECKING:
    RefusedInMessage = Struct
else:  # the table declares the fields, so that each is named once
    RefusedInMessage = defstruct(
        "RefusedInMessage", [(name, Any, None) for name in UNSUPPORTED_IN_MESSAGE], frozen=True, kw_only=True
    )


class ContentPart(Struct, frozen=True):
    type: str
    text: str | None = None


class Message(RefusedInMessage, frozen=True, kw_only=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: CalledFunction | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @property
    def calls(self) -> list[ToolCall]:
        """The calls of tools that it made."""
        return [ToolCall(self.function_call)] if self.function_call else self.tool_calls or []

    def check(self, path: str) -> None:
        require_choice(self.role, ROLES, f"{path}.role")
        refuse_unsupported(self, UNSUPPORTED_IN_MESSAGE, f"{path}.")
        if self.role == "tool" and self.tool_call_id is None:
            raise missing(f"{path}.tool_call_id")
        if self.role == "function" and self.name is None:
            raise missing(f"{path}.name")
        if self.calls and self.role != "assistant":
            raise BadRequest(
                f"'{path}.tool_calls' is only allowed in an assistant's message.",
                param=f"{path}.tool_calls",
            )
        check_calls(self.calls, f"{path}.tool_calls")
        if self.content is None and self.role != "assistant":
            raise missing(f"{path}.content")
        if isinstance(self.content, list):
            for number, part in enumerate(self.content):
                require_choice(part.type, ("text",), f"{path}.content[{number}].type")
                if part.text is None:
                    raise missing(f"{path}.content[{number}].text")

    def to_template(self) -> dict[str, Any]:
        """The message as chat templates expect it: content parts joined, arguments of calls parsed."""
        if isinstance(self.content, list):
            text = "".join(part.text or "" for part in self.content)
        else:
            text = self.content or ""
        fields = {
            "role": self.role,
            "content": text,
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning if self.reasoning_content is None else self.reasoning_content,
            "tool_calls": [call.to_template() for call in self.calls] or None,
        }
        return {name: value for name, value in fields.items() if value is not None}
