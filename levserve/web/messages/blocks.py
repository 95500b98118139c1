"""The blocks that a message of Anthropic's API consists of, as a client sends them.

`cache_control` and citations are accepted and not read: the prefix cache needs no marks. Blocks of other
types, such as images and documents, are refused by the name of their type.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from levserve.errors import BadRequest
from levserve.request.decode import require_choice
from levserve.request.tool_fields import check_name

ROLES = ("user", "assistant", "system")


class TextBlock(Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(Struct, frozen=True, tag_field="type", tag="thinking"):
    """Thoughts of an earlier answer. The signature is not checked: it proves nothing here."""

    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Struct, frozen=True, tag_field="type", tag="redacted_thinking"):
    """Encrypted thoughts, which only the service that wrote them can read; they are left out."""

    data: str


class ToolUseBlock(Struct, frozen=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Struct, frozen=True, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None


Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock

ALLOWED: dict[str, tuple[type[Struct], ...]] = {
    "user": (TextBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock),
    "system": (TextBlock,),
}
"""Which blocks may stand in a message of each role."""


class InputMessage(Struct, frozen=True):
    role: str
    content: str | list[Block]

    @property
    def blocks(self) -> list[Block]:
        return [TextBlock(self.content)] if isinstance(self.content, str) else self.content

    def check(self, path: str) -> None:
        require_choice(self.role, ROLES, f"{path}.role")
        if not self.blocks and self.role != "assistant":
            raise BadRequest(f"'{path}.content' has no blocks.", param=f"{path}.content")
        for number, block in enumerate(self.blocks):
            param = f"{path}.content[{number}]"
            if not isinstance(block, ALLOWED[self.role]):
                kind = block.__struct_config__.tag
                raise BadRequest(
                    f"'{param}' is a block of type '{kind}', which the role '{self.role}' cannot have.",
                    param=param,
                )
            if isinstance(block, ToolUseBlock):
                check_name(block.name, f"{param}.name")


def check_results(messages: Sequence[InputMessage]) -> None:
    """Refuses a result whose call is not in an earlier message, and a conversation that ends with a call."""
    called: set[str] = set()
    for number, message in enumerate(messages):
        for place, block in enumerate(message.blocks):
            if isinstance(block, ToolResultBlock) and block.tool_use_id not in called:
                param = f"messages[{number}].content[{place}].tool_use_id"
                raise BadRequest(
                    f"'{param}' is '{block.tool_use_id[:64]}', but no earlier 'tool_use' block has that id.",
                    param=param,
                )
        called |= {block.id for block in message.blocks if isinstance(block, ToolUseBlock)}
    if any(isinstance(block, ToolUseBlock) for block in messages[-1].blocks):
        raise BadRequest(
            "The last message calls a tool; a user message with the 'tool_result' must follow.",
            param="messages",
        )


def join_texts(content: str | Sequence[TextBlock] | None) -> str:
    """The text of blocks that a client wrote, each on a line of its own."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(block.text for block in content)
