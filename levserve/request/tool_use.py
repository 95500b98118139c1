"""What the tools of one chat mean for its prompt, for the constraint on its answer, and for how that is read.

Called on HTTP threads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from levserve.engine.served_model import ServedModel
from levserve.errors import BadRequest
from levserve.request.chat_message import Message
from levserve.request.schema import ChatBody, GenerationBody
from levserve.schedule.constraint import Constraint
from levserve.text.chat import LAST_USER_MESSAGE
from levserve.text.grammar import Grammars
from levserve.text.parts import PartReader
from levserve.text.tools.model_tools import ModelTools
from levserve.text.tools.request import ToolRequest


class Conversation(NamedTuple):
    """What the chat template gets."""

    messages: list[dict[str, Any]]
    template_kwargs: dict[str, Any]
    num_chars: int
    """How many characters of it the client wrote."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request; empty for one that is not a chat."""

    asked: ToolRequest | None = None
    tools: ModelTools | None = None

    def hold(
        self,
        content: Constraint | None,
        grammars: Grammars,
        add_thoughts: Callable[[Constraint | None], Constraint | None],
    ) -> Constraint | None:
        """The constraint on the answer, given the one on its content; raises `BadRequest`."""
        if self.tools is None or self.asked is None:
            return add_thoughts(content)
        if self.tools.form.has_channels:  # a call is a separate message and does not follow the thoughts
            return self.tools.constrain(self.asked, add_thoughts(content), grammars)
        return add_thoughts(self.tools.constrain(self.asked, content, grammars))

    def make_reader(self) -> PartReader | None:
        return None if self.tools is None else self.tools.make_reader(self.asked)

    @property
    def visible(self) -> frozenset[int]:
        """The special tokens that a reader has to see."""
        if self.tools is None:
            return frozenset()
        is_read = self.tools.form.has_channels or (self.asked is not None and self.asked.callable_tools)
        return self.tools.visible if is_read else frozenset()


def find_tool_use(body: GenerationBody, model: ServedModel) -> ToolUse:
    return ToolUse(body.find_tools(), model.tools) if isinstance(body, ChatBody) else ToolUse()


def make_conversation(
    messages: Sequence[Message],
    asked: ToolRequest | None,
    template_kwargs: Mapping[str, Any] | None,
    model: ServedModel,
) -> Conversation:
    """The messages and tools as the model's template takes them."""
    history = model.tools.history
    tools = () if asked is None else asked.tools
    if tools and model.tokenizer.chat_template == LAST_USER_MESSAGE:
        raise BadRequest(
            "This model has no chat template and reads the last user message alone, so it cannot be given "
            "tools.",
            param="tools",
        )
    kwargs = dict(template_kwargs or {})
    named = history.template_tools(tools)
    if named is not None:
        kwargs["tools"] = named
    plain = [message.to_template() for message in messages]
    num_chars = sum(len(message["content"]) for message in plain)
    num_chars += sum(len(call.function.arguments) for message in messages for call in message.calls)
    num_chars += sum(len(json.dumps(tool.to_template())) for tool in tools)
    return Conversation(history.adapt(plain, tools), kwargs, num_chars)
