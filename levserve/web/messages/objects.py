"""The objects that clients of /v1/messages get: a message with its blocks, and the events of its stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import UNSET, Raw, Struct, UnsetType

SIGNATURE = "levserve"
"""Appears in every thinking block: clients send back only thoughts that are signed. It proves nothing."""
EMPTY_OBJECT = Raw(b"{}")

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class Text(Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class Thinking(Struct, frozen=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = SIGNATURE


class ToolUse(Struct, frozen=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: Raw
    """The JSON, character for character as the model wrote it."""


AnswerBlock = Text | Thinking | ToolUse


class OutputDetails(Struct, frozen=True):
    thinking_tokens: int


class MessageUsage(Struct, frozen=True):
    """The prompt's tokens are `input_tokens` and `cache_read_input_tokens` together."""

    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputDetails
    cache_creation_input_tokens: int = 0
    """Caching is not charged, so nothing is counted as written to the cache."""


class MessageObject(Struct, frozen=True, tag_field="type", tag="message"):
    id: str
    model: str
    content: Sequence[AnswerBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    role: str = "assistant"
    warnings: Sequence[str] | UnsetType = UNSET
    """Where the server did not do what the client asked."""


class TokenCount(Struct, frozen=True):
    input_tokens: int


class TextDelta(Struct, frozen=True, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(Struct, frozen=True, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(Struct, frozen=True, tag_field="type", tag="signature_delta"):
    signature: str = SIGNATURE


class InputDelta(Struct, frozen=True, tag_field="type", tag="input_json_delta"):
    partial_json: str


BlockDelta = TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class MessageStart(Struct, frozen=True, tag_field="type", tag="message_start"):
    message: MessageObject


class Ping(Struct, frozen=True, tag_field="type", tag="ping"):
    pass


class BlockStart(Struct, frozen=True, tag_field="type", tag="content_block_start"):
    index: int
    content_block: AnswerBlock


class BlockChange(Struct, frozen=True, tag_field="type", tag="content_block_delta"):
    index: int
    delta: BlockDelta


class BlockStop(Struct, frozen=True, tag_field="type", tag="content_block_stop"):
    index: int


class MessageEnd(Struct, frozen=True):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageChange(Struct, frozen=True, tag_field="type", tag="message_delta"):
    delta: MessageEnd
    usage: MessageUsage
    warnings: Sequence[str] | UnsetType = UNSET


class MessageStop(Struct, frozen=True, tag_field="type", tag="message_stop"):
    pass


class ErrorText(Struct, frozen=True):
    type: str
    message: str


class MessageError(Struct, frozen=True, tag_field="type", tag="error"):
    """The body of every error of these paths, and an event of a stream that fails."""

    error: ErrorText
    request_id: str


MessageEvent = (
    MessageStart | Ping | BlockStart | BlockChange | BlockStop | MessageChange | MessageStop | MessageError
)
