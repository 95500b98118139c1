"""The answer of /v1/messages: turns a run into the blocks, stop reason and token counts of a message.

Used on HTTP threads and by the relay, by one thread at a time.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

import msgspec
from msgspec import UNSET, Raw

from levserve.answers.message import has_call
from levserve.generation import Delta
from levserve.schedule.request import FinishReason
from levserve.text.parts import CallArguments, CallStart, Content, Part, Thought
from levserve.web.messages.objects import (
    EMPTY_OBJECT,
    AnswerBlock,
    MessageEnd,
    MessageObject,
    MessageUsage,
    OutputDetails,
    StopReason,
    Text,
    Thinking,
    ToolUse,
)
from levserve.web.run import Run


class MessageAnswer:
    """The answer to one request. `hides_thoughts` leaves the thinking blocks empty."""

    def __init__(self, run: Run, *, hides_thoughts: bool = False) -> None:
        self.hides_thoughts = hides_thoughts
        self.warnings = run.warnings or UNSET
        self._id = f"msg_{random.getrandbits(96):024x}"
        self._model = run.model_name or run.model.name
        (self._choice,) = run.choices
        self._prompt_len = len(run.prompts[0])
        self._max_tokens = run.body.max_length

    def start(self) -> MessageObject:
        """The message before its first block."""
        return MessageObject(self._id, self._model, (), None, None, self.usage())

    def whole(self, delta: Delta) -> MessageObject:
        """The whole message; `delta` joins all deltas of the run."""
        end = self.end(has_calls=has_call(delta.parts))
        return MessageObject(
            self._id,
            self._model,
            make_blocks(delta.shown, hides_thoughts=self.hides_thoughts),
            end.stop_reason,
            end.stop_sequence,
            self.usage(),
            warnings=self.warnings,
        )

    def end(self, *, has_calls: bool) -> MessageEnd:
        """How the message ended, once its choice has."""
        return MessageEnd(self._stop_reason(has_calls), self._choice.stop_string)

    def usage(self) -> MessageUsage:
        """The counts so far."""
        num_cached = self._choice.num_cached
        return MessageUsage(
            self._prompt_len - num_cached,
            num_cached,
            self._choice.num_tokens,
            OutputDetails(self._choice.num_thought_tokens),
        )

    def _stop_reason(self, has_calls: bool) -> StopReason:
        if self._choice.stop_string is not None:
            return "stop_sequence"
        if self._choice.finish is FinishReason.STOP:
            return "tool_use" if has_calls else "end_turn"
        is_full = self._choice.finish is FinishReason.LENGTH and self._choice.num_tokens != self._max_tokens
        # Anthropic has no stop reason for a deadline; the answer is as incomplete as with too few tokens.
        return "model_context_window_exceeded" if is_full else "max_tokens"


def make_blocks(parts: Iterable[Part], *, hides_thoughts: bool = False) -> list[AnswerBlock]:
    """The blocks of joined parts, in the order in which the model wrote them."""
    blocks: list[AnswerBlock] = []
    for part in parts:
        match part:
            case Content(text):
                blocks.append(Text(text))
            case Thought(text):
                blocks.append(Thinking("" if hides_thoughts else text))
            case CallStart(_, call_id, name):
                blocks.append(ToolUse(call_id, name, EMPTY_OBJECT))
            case CallArguments(_, text):
                call = blocks[-1]
                assert isinstance(call, ToolUse)  # a call's arguments follow its start
                blocks[-1] = ToolUse(call.id, call.name, _read_input(text))
    return blocks


def _read_input(text: str) -> Raw:
    """The arguments of a call; an empty object if they are not JSON because the tokens ran out."""
    try:
        msgspec.json.decode(text, type=dict[str, Raw])
    except (msgspec.MsgspecError, RecursionError):
        return EMPTY_OBJECT
    return Raw(text.encode())
