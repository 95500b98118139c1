"""Makes the messages of a chat from the items of a response's input."""

from __future__ import annotations

from collections.abc import Sequence

from levserve.request.chat_message import Message
from levserve.request.tool_fields import CalledFunction, ToolCall
from levserve.web.responses.input_items import InputItem

SYSTEM_ROLES = ("system", "developer")


def make_messages(instructions: str | None, items: Sequence[InputItem]) -> list[Message]:
    """The conversation; an assistant's adjacent thoughts, text and calls become one message."""
    messages: list[Message] = []
    turn = AssistantTurn()
    for item in items:
        if item.type == "reasoning" or item.type == "function_call" or item.role == "assistant":
            if not turn.add(item):
                messages += turn.take()
                turn.add(item)
            continue
        messages += turn.take()
        if item.type == "function_call_output":
            messages.append(Message(role="tool", content=item.text, tool_call_id=item.call_id))
        else:
            assert item.role is not None  # `InputItem.check` requires it
            messages.append(Message(role=item.role, content=item.text))
    messages += turn.take()
    return messages if instructions is None else _with_instructions(instructions, messages)


class AssistantTurn:
    """Collects adjacent items of an assistant that belong to one message: thoughts, text, calls."""

    def __init__(self) -> None:
        self._thoughts = ""
        self._text: str | None = None
        self._calls: list[ToolCall] = []

    def add(self, item: InputItem) -> bool:
        """Whether the item belongs to this message; if not, it begins the next one."""
        if item.type == "function_call":
            called = CalledFunction(item.name or "", item.arguments or "")
            self._calls.append(ToolCall(called, item.call_id))
            return True
        if self._text is not None or self._calls:
            return False
        if item.type == "reasoning":
            self._thoughts += item.text
        else:
            self._text = item.text
        return True

    def take(self) -> list[Message]:
        """Removes and returns the message, if there is one; thoughts that nothing followed are left out."""
        found = []
        if self._text is not None or self._calls:
            found.append(
                Message(
                    role="assistant",
                    content=self._text,
                    tool_calls=self._calls or None,
                    reasoning_content=self._thoughts or None,
                )
            )
        self._thoughts, self._text, self._calls = "", None, []
        return found


def _with_instructions(instructions: str, messages: list[Message]) -> list[Message]:
    """Joins the first system messages to the instructions: many templates take one, at the beginning."""
    num_joined = 0
    texts = [instructions]
    for message in messages:
        if message.role not in SYSTEM_ROLES:
            break
        texts.append(str(message.content))
        num_joined += 1
    return [Message(role="system", content="\n\n".join(texts)), *messages[num_joined:]]
