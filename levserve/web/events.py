"""Makes the events of a stream from deltas. Used by one thread at a time: the HTTP thread or the relay.

An endpoint that streams has a `StreamKind`, which makes the `StreamEvents` of each of its streams.
`ChunkStream` is the one of OpenAI's chat and completions, whose events are chunks of an `Answer`. Almost
every chunk differs from the one before only in its text, so each choice keeps the bytes before and after the
text: an event takes 0.4 us, while encoding the whole object takes 1.1 us. Only chunks with log-probabilities,
thoughts, calls or counts are encoded whole. An event is one `data:` line: `event:`, `id:` or `retry:` lines
would break OpenAI's SDK here.
"""

from __future__ import annotations

from collections.abc import Callable
from json.encoder import encode_basestring_ascii
from typing import Protocol

import msgspec
from msgspec import UNSET, Struct, UnsetType

from levserve.answers.answer import Answer, ChatChunkChoice, TextChoice, Usage
from levserve.answers.message import has_call
from levserve.errors import ServeError
from levserve.generation import Delta
from levserve.text.parts import Content
from levserve.web.run import Run, Totals

DONE = b"data: [DONE]\n\n"

# Stands for the text while a template is made; no name or id can contain its encoded form.
MARK = Delta("\0")
ENCODED_MARK = b'"\\u0000"'


class StreamEvents(Protocol):
    """The events of one stream, each framed as bytes."""

    def opening(self) -> bytes:
        """What comes before the first delta."""

    def delta(self, index: int, delta: Delta) -> bytes:
        """The events of a choice's next delta; none if it shows nothing yet."""

    def closing(self) -> bytes:
        """What comes after the last delta."""

    def failure(self, error: ServeError) -> bytes:
        """What comes instead of the rest, after a failure."""


class StreamKind(Protocol):
    """What an endpoint streams."""

    def begin(self, run: Run) -> StreamEvents: ...

    def refusal(self, error: ServeError) -> bytes:
        """The whole stream of a request that failed before its run began."""


class ChunkStream:
    """Streams chunks of one kind of answer."""

    def __init__(self, answer_kind: type[Answer]) -> None:
        self._answer_kind = answer_kind

    def begin(self, run: Run) -> ChunkEvents:
        answer = run.make_answer(self._answer_kind)
        return ChunkEvents(
            answer,
            len(run.choices),
            with_usage=run.body.wants_usage,
            totals=run.totals,
            running_usage=run.usage if run.body.wants_running_usage else None,
        )

    def refusal(self, error: ServeError) -> bytes:
        return error_event(error) + DONE


class ChunkEvents:
    """The chunks of one stream."""

    def __init__(
        self,
        answer: Answer,
        num_choices: int,
        *,
        with_usage: bool,
        totals: Callable[[], Totals | None] = lambda: None,
        running_usage: Callable[[], Usage] | None = None,
    ) -> None:
        self._answer = answer
        self._num_choices = num_choices
        # A client that asks for usage at the end gets `usage: null` in every earlier chunk.
        self._no_usage = None if with_usage else UNSET
        self._running_usage = running_usage
        self._totals = totals
        self._templates = [self._template(index) for index in range(num_choices)]
        self._has_call = [False] * num_choices

    def opening(self) -> bytes:
        """One event per choice that names the role; nothing where the endpoint has no such event."""
        openings = (self._answer.opening(index) for index in range(self._num_choices))
        return b"".join(
            _frame(self._answer.chunk((opening,), self._usage_so_far(), is_opening=True))
            for opening in openings
            if opening is not None
        )

    def delta(self, index: int, delta: Delta) -> bytes:
        """The events of a delta: its text or parts, and its end if it is the last. May be empty."""
        has_ids = self._answer.shows_token_ids and len(delta.tokens) > 0
        text = None if has_ids else _plain_text(delta)
        if text is None or (text and self._running_usage is not None):
            events = b"".join(map(self._event, self._answer.delta(index, delta)))
            self._has_call[index] |= has_call(delta.parts)
        elif text:
            before, after = self._templates[index]
            events = b"%b%b%b" % (before, encode_basestring_ascii(text).encode(), after)
        else:
            events = b""
        if delta.finish is None:
            return events
        calls = self._has_call[index] and not delta.cuts_call
        ending = self._answer.ending(index, delta.finish, has_call=calls)
        return events + self._event(ending)

    def closing(self) -> bytes:
        """Totals of all choices, if the client wants them, and the end marker."""
        totals = self._totals()
        return DONE if totals is None else _frame(self._answer.chunk((), *totals)) + DONE

    def failure(self, error: ServeError) -> bytes:
        return error_event(error) + DONE

    def _event(self, choice: TextChoice | ChatChunkChoice) -> bytes:
        return _frame(self._answer.chunk((choice,), self._usage_so_far()))

    def _usage_so_far(self) -> Usage | UnsetType | None:
        return self._no_usage if self._running_usage is None else self._running_usage()

    def _template(self, index: int) -> tuple[bytes, bytes]:
        (marked,) = self._answer.delta(index, MARK)
        before, mark, after = self._event(marked).partition(ENCODED_MARK)
        assert mark
        return before, after


def _plain_text(delta: Delta) -> str | None:
    """The text of a delta that shows nothing else, so that a template fits; None for any other delta."""
    if delta.logprobs:
        return None
    match delta.parts:
        case None:
            return delta.text
        case ():
            return ""
        case (Content(text),):
            return text
    return None


def named_event(event: Struct) -> bytes:
    """An event with an `event:` line that names its type, for APIs whose clients look for that line."""
    name = event.__struct_config__.tag
    assert isinstance(name, str)
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(event))


def error_event(error: ServeError) -> bytes:
    """A failure after the 200 was sent."""
    return _frame(error.body())


def _frame(chunk: bytes) -> bytes:
    return b"data: %b\n\n" % chunk
