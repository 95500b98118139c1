"""Makes a chat from the body of a message, so that the same code runs both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import structs

from levserve.request.chat_message import Message
from levserve.request.constraint import NamedSchema, ResponseFormat
from levserve.request.schema import ChatBody
from levserve.request.tool_fields import CalledFunction, Function, FunctionTool, ToolCall
from levserve.web.field_names import FieldNames
from levserve.web.messages.blocks import (
    InputMessage,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    join_texts,
)
from levserve.web.messages.body import InputTool, MessageBody, PromptBody, ToolChoice

DEFAULT_EFFORT = "medium"
# Templates that know efforts know these three.
EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
MODES = {"auto": "auto", "any": "required", "none": "none"}
MESSAGE_NAMES = FieldNames(
    (r"messages\[\d+\].*", "messages"),
    (r"response_format(\.json_schema)?(?P<rest>.*)", r"output_config.format\g<rest>"),
    (r"(?P<tool>tools\[\d+\])\.function\.parameters(?P<rest>.*)", r"\g<tool>.input_schema\g<rest>"),
    (r"(?P<tool>tools\[\d+\])\.function(?P<rest>.*)", r"\g<tool>\g<rest>"),
    (r"stop", "stop_sequences"),
    (r"thinking_token_budget", "thinking.budget_tokens"),
)
ERROR_PREFIX = "Error: "
"""A chat has no field for a failed tool, so the text of the tool's result says it."""


class MessageChat(ChatBody, frozen=True, kw_only=True):
    """The chat of a message. Coding tools ask every model for 32,000 tokens and for thoughts."""

    cuts_limit = True
    may_lack_thoughts = True


def make_prompt(body: PromptBody) -> MessageChat:
    """The part of the chat that decides the prompt; raises `BadRequest`."""
    continues = body.messages[-1].role == "assistant"
    asked = body.wanted_format
    choice = body.tool_choice
    return MessageChat(
        model=body.model,
        messages=make_messages(body.system, body.messages),
        continue_final_message=continues or None,
        tools=[_make_tool(tool) for tool in body.tools or ()] or None,
        tool_choice=None if choice is None else _make_choice(choice),
        parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
        response_format=None if asked is None else ResponseFormat("json_schema", NamedSchema(asked.schema)),
        thinking_token_budget=None if body.thinking is None else body.thinking.budget_tokens,
        **_ask_for_thoughts(body),
    )


def make_chat(body: MessageBody) -> MessageChat:
    """The chat that the engine runs; raises `BadRequest`."""
    return structs.replace(
        make_prompt(body),
        max_tokens=body.max_tokens,
        stop=body.stop_sequences or None,
        stream=body.stream,
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
    )


def make_messages(system: str | list[TextBlock] | None, given: Sequence[InputMessage]) -> list[Message]:
    """The conversation, in which each result of a tool is a message of its own."""
    messages = [Message(role="system", content=join_texts(system))] if system else []
    names: dict[str, str] = {}
    for message in given:
        if message.role == "assistant":
            messages.append(_make_assistant(message))
            names |= {block.id: block.name for block in message.blocks if isinstance(block, ToolUseBlock)}
        else:
            messages += _make_turn(message, names)
    return messages


def _make_assistant(message: InputMessage) -> Message:
    """Thoughts, text and calls as one message. Texts are pieces of one answer, so no separator joins them."""
    text, thoughts = "", ""
    calls: list[ToolCall] = []
    for block in message.blocks:
        match block:
            case TextBlock():
                text += block.text
            case ThinkingBlock():
                thoughts += block.thinking
            case ToolUseBlock():
                arguments = msgspec.json.encode(block.input).decode()
                calls.append(ToolCall(CalledFunction(block.name, arguments), block.id))
            case RedactedThinkingBlock():
                pass
    return Message(
        role="assistant",
        content=text if text or not calls else None,
        reasoning_content=thoughts or None,
        tool_calls=calls or None,
    )


def _make_turn(message: InputMessage, names: dict[str, str]) -> list[Message]:
    """The messages of a user, or of an operator in between: adjacent texts joined, each tool result alone."""
    messages: list[Message] = []
    texts: list[TextBlock] = []

    def say_texts() -> None:
        if texts:
            messages.append(Message(role=message.role, content=join_texts(texts)))
            texts.clear()

    for block in message.blocks:
        match block:
            case TextBlock():
                texts.append(block)
            case ToolResultBlock():
                say_texts()
                prefix = ERROR_PREFIX if block.is_error else ""
                messages.append(
                    Message(
                        role="tool",
                        content=prefix + join_texts(block.content),
                        tool_call_id=block.tool_use_id,
                        name=names[block.tool_use_id],
                    )
                )
    say_texts()
    return messages


def _make_tool(tool: InputTool) -> FunctionTool:
    return FunctionTool("function", Function(tool.name, tool.description, tool.input_schema))


def _make_choice(choice: ToolChoice) -> str | dict[str, Any]:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return MODES[choice.type]


def _ask_for_thoughts(body: PromptBody) -> dict[str, Any]:
    """The fields of the chat for `thinking` and `output_config.effort`."""
    asked = None if body.output_config is None else body.output_config.effort
    effort = None if asked is None else EFFORTS[asked]
    if body.thinking is not None:
        is_on = body.thinking.type != "disabled"
        return {"reasoning_effort": (effort or DEFAULT_EFFORT) if is_on else "none"}
    # Passed as a variable, which does not switch on thinking that the template leaves off.
    return {} if effort is None else {"chat_template_kwargs": {"reasoning_effort": effort}}
