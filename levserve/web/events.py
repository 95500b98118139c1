"""Makes the events of a stream from deltas. Used by one thread at a time: the HTTP thread or the relay.

Almost every event differs from the one before only in its text, so each choice keeps the bytes before and
after the text: 0.4 us an event, where encoding the whole object takes 1.1. Only chunks with log-probabilities
are encoded whole. An event is one `data:` line: `event:`, `id:` or `retry:` lines would break OpenAI's SDK.
"""

from __future__ import annotations

from json.encoder import encode_basestring_ascii

from msgspec import UNSET, UnsetType

from levserve.errors import ServeError
from levserve.generation import Delta
from levserve.web.answer import Answer, ChatChunkChoice, TextChoice, Timings, Usage

DONE = b"data: [DONE]\n\n"

# Stands for the text while a template is made; no name or id can hold its encoded form.
MARK = Delta("\0")
ENCODED_MARK = b'"\\u0000"'


class Events:
    """The events of one stream."""

    def __init__(self, answer: Answer, num_choices: int, *, with_usage: bool) -> None:
        self._answer = answer
        self._num_choices = num_choices
        # A client that asks for usage gets a null in every chunk but the last.
        self._usage_so_far = None if with_usage else UNSET
        self._templates = [self._template(index) for index in range(num_choices)]

    def opening(self) -> bytes:
        """One event per choice that names the role; nothing where the endpoint has no such event."""
        openings = (self._answer.opening(index) for index in range(self._num_choices))
        return b"".join(self._event(opening) for opening in openings if opening is not None)

    def delta(self, index: int, delta: Delta) -> bytes:
        """The events of a delta: its text if there is any, its end if it is the last. May be empty."""
        if delta.logprobs:
            event = self._event(self._answer.delta(index, delta))
        elif delta.text:
            before, after = self._templates[index]
            event = b"%b%b%b" % (before, encode_basestring_ascii(delta.text).encode(), after)
        else:
            event = b""
        if delta.finish is None:
            return event
        return event + self._event(self._answer.ending(index, delta.finish))

    def closing(self, usage: Usage, timings: Timings | UnsetType = UNSET) -> bytes:
        """The event after the last choice has ended: totals of all choices."""
        return _frame(self._answer.chunk((), usage, timings))

    def _event(self, choice: TextChoice | ChatChunkChoice) -> bytes:
        return _frame(self._answer.chunk((choice,), self._usage_so_far))

    def _template(self, index: int) -> tuple[bytes, bytes]:
        before, mark, after = self._event(self._answer.delta(index, MARK)).partition(ENCODED_MARK)
        assert mark
        return before, after


def error_event(error: ServeError) -> bytes:
    """A failure after the 200 was sent."""
    return _frame(error.body())


def _frame(chunk: bytes) -> bytes:
    return b"data: %b\n\n" % chunk
