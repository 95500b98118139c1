"""The events of a streamed message. Used by one thread at a time: the HTTP thread or the relay.

Each event has a line with its name, which Anthropic's clients rely on. Only one block is open at a time.
"""

from __future__ import annotations

from json.encoder import encode_basestring_ascii

from levserve.errors import ServeError
from levserve.generation import Delta
from levserve.text.parts import CallArguments, CallStart, Content, Part, Thought
from levserve.web.events import named_event
from levserve.web.messages.answer import MessageAnswer
from levserve.web.messages.chat import MESSAGE_NAMES
from levserve.web.messages.errors import make_error
from levserve.web.messages.objects import (
    EMPTY_OBJECT,
    AnswerBlock,
    BlockChange,
    BlockStart,
    BlockStop,
    MessageChange,
    MessageStart,
    MessageStop,
    Ping,
    SignatureDelta,
    Text,
    Thinking,
    ToolUse,
)
from levserve.web.run import Run


class MessageStream:
    """What /v1/messages streams for one request."""

    def __init__(self, request_id: str, *, hides_thoughts: bool) -> None:
        self._request_id = request_id
        self._hides_thoughts = hides_thoughts

    def begin(self, run: Run) -> MessageEvents:
        return MessageEvents(MessageAnswer(run, hides_thoughts=self._hides_thoughts), self._request_id)

    def refusal(self, error: ServeError) -> bytes:
        MESSAGE_NAMES.rename(error)
        return named_event(make_error(error, error.status, self._request_id))


class MessageEvents:
    """The events of one stream."""

    def __init__(self, answer: MessageAnswer, request_id: str) -> None:
        self._answer = answer
        self._request_id = request_id
        self._open: type[AnswerBlock] | None = None
        self._num_blocks = 0
        self._has_calls = False

    def opening(self) -> bytes:
        return named_event(MessageStart(self._answer.start())) + named_event(Ping())

    def delta(self, index: int, delta: Delta) -> bytes:
        events = b"".join(self._part(part) for part in delta.shown)
        return events if delta.finish is None else events + self._close()

    def closing(self) -> bytes:
        end = self._answer.end(has_calls=self._has_calls)
        change = MessageChange(end, self._answer.usage(), self._answer.warnings)
        return named_event(change) + named_event(MessageStop())

    def failure(self, error: ServeError) -> bytes:
        MESSAGE_NAMES.rename(error)
        return named_event(make_error(error, error.status, self._request_id))

    def _part(self, part: Part) -> bytes:
        match part:
            case Content(text):
                return self._need(Text("")) + self._change("text_delta", "text", text)
            case Thought(text):
                opened = self._need(Thinking("", ""))
                if self._answer.hides_thoughts:
                    return opened
                return opened + self._change("thinking_delta", "thinking", text)
            case CallStart(_, call_id, name):
                self._has_calls = True
                return self._close() + self._need(ToolUse(call_id, name, EMPTY_OBJECT))
            case CallArguments(_, text):
                return self._change("input_json_delta", "partial_json", text)

    def _need(self, block: AnswerBlock) -> bytes:
        """Opens a block like this one, unless one of its kind is open."""
        if self._open is type(block):
            return b""
        closed = self._close()
        self._open = type(block)
        self._num_blocks += 1
        return closed + named_event(BlockStart(self._num_blocks - 1, block))

    def _close(self) -> bytes:
        """Ends the open block, if there is one."""
        closing, self._open = self._open, None
        if closing is None:
            return b""
        index = self._num_blocks - 1
        signed = named_event(BlockChange(index, SignatureDelta())) if closing is Thinking else b""
        return signed + named_event(BlockStop(index))

    def _change(self, kind: str, field: str, text: str) -> bytes:
        """The next piece of the open block; not encoded as an object, because almost all events are these."""
        return (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
            b'"delta":{"type":"%b","%b":%b}}\n\n'
            % (self._num_blocks - 1, kind.encode(), field.encode(), encode_basestring_ascii(text).encode())
        )
