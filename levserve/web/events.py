"""The events of a stream, made from deltas; and when a silent stream owes its client a sign of life.

Used on the HTTP thread of one stream. Almost every event differs from the one before in its text only, so each choice has
the bytes before and after it ready: 0.4 us an event where encoding the whole object takes 1.1. Only chunks with
log-probabilities are encoded whole. An event is one `data:` line; `event:`, `id:` or `retry:` would break OpenAI's SDK, which
passes over a comment.
"""

from __future__ import annotations

import math
import time
from json.encoder import encode_basestring_ascii
from typing import Protocol

from msgspec import UNSET, UnsetType

from levserve.errors import ServeError
from levserve.generation import Delta, Deltas, OnDelta
from levserve.web.answer import Answer, ChatPiece, TextChoice, Timings, Usage

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"

MARK = Delta(
    "\0"
)  # stands for the text when a template is made; encoded, it is a string that no name or id can be
ENCODED_MARK = b'"\\u0000"'


class Awaited(Protocol):
    """A stream's deltas, or a model."""

    def wait(self, timeout_seconds: float | None) -> bool: ...


class Heartbeat:
    """Knows when a silent stream owes its client a sign of life, which keeps proxies from cutting it; 0 seconds for never.

    The clock starts with the request and starts again with everything that is sent. Belongs to one HTTP thread.
    """

    def __init__(self, seconds: float, started: float) -> None:
        self._seconds = seconds
        self._due = started + seconds

    def wait_for(self, awaited: Awaited, deadline: float | None = None) -> bool:
        """Whether the next delta, the end or what else is awaited has come, or the deadline, before a sign of life is due."""
        until = min(self._due if self._seconds else math.inf, math.inf if deadline is None else deadline)
        is_here = awaited.wait(None if until == math.inf else max(until - time.monotonic(), 0))
        return is_here or (deadline is not None and deadline <= time.monotonic())

    def wait_beside(self, deltas: Deltas, relay: OnDelta | None) -> bool:
        """The same for deltas of which a relay may send some meanwhile: then the clock starts again behind our back."""
        while not deltas.wait(max(self._due - time.monotonic(), 0) if self._seconds else None, relay):
            if self.is_due():
                return False
        return True

    def is_due(self) -> bool:
        return self._seconds > 0 and time.monotonic() >= self._due

    def restart(self) -> None:
        self._due = time.monotonic() + self._seconds


class Events:
    """Makes the events of one stream; belongs to one HTTP thread."""

    def __init__(self, answer: Answer, num_choices: int, *, with_usage: bool) -> None:
        self._answer = answer
        self._num_choices = num_choices
        self._usage_so_far = (
            None if with_usage else UNSET
        )  # null in every chunk but the last, for clients that ask for usage
        self._templates = [self._template(index) for index in range(num_choices)]

    def opening(self) -> bytes:
        """One event per choice that says whose turn it is; nothing where the endpoint has no such event."""
        openings = (self._answer.opening(index) for index in range(self._num_choices))
        return b"".join(self._event(opening) for opening in openings if opening is not None)

    def delta(self, index: int, delta: Delta) -> bytes:
        """The events of a delta: its text if there is any, its end if it is the last. May be empty."""
        if delta.logprobs:
            event = self._event(self._answer.piece(index, delta))
        elif delta.text:
            before, after = self._templates[index]
            event = b"%b%b%b" % (before, encode_basestring_ascii(delta.text).encode(), after)
        else:
            event = b""
        if delta.finish is None:
            return event
        return event + self._event(self._answer.ending(index, delta.finish))

    def closing(self, usage: Usage, timings: Timings | UnsetType = UNSET) -> bytes:
        """What concerns all choices, after the last of them has ended."""
        return _frame(self._answer.chunk((), usage, timings))

    def _event(self, choice: TextChoice | ChatPiece) -> bytes:
        return _frame(self._answer.chunk((choice,), self._usage_so_far))

    def _template(self, index: int) -> tuple[bytes, bytes]:
        before, mark, after = self._event(self._answer.piece(index, MARK)).partition(ENCODED_MARK)
        assert mark
        return before, after


def error_event(error: ServeError) -> bytes:
    """What a stream says when it fails after its 200 was sent."""
    return _frame(error.body())


def _frame(chunk: bytes) -> bytes:
    return b"data: %b\n\n" % chunk
