"""Turns a stream of tokens into pieces of text, on the HTTP thread that waits for them.

One `Choice` per sequence detokenizes, holds back text that may still become a stop string or a whole
character, counts tokens and knows how it ended. `Deltas` runs the choices of one HTTP request over its
stream.

Waking a thread for every token of every stream costs more than handling the tokens. So while a stream's HTTP
thread waits in `Deltas.wait`, the delivery thread runs the choices itself and passes each delta to the
`on_delta` function that the HTTP thread left behind: for a stream, one that writes the event to the client's
socket (`web/relay.py`). The HTTP thread wakes for the first delta, the last one, an error, and any delta that
`on_delta` could not handle. `TokenStream` holds a lock while the delivery thread does this, so the two
threads never use the choices at the same time.
"""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from levserve.engine.stream import OnBatch, TokenStream
from levserve.errors import BadRequest, DeadlineExceeded, Poisoned, ServeError, Unavailable
from levserve.schedule.request import FinishReason, PooledHidden, TokenBatch, TokenLogprob
from levserve.text.detokenizer import Detokenizer
from levserve.text.parts import (
    CallArguments,
    CallStart,
    Content,
    Part,
    PartReader,
    Thought,
    is_json_object,
)
from levserve.text.stops import StopStrings

GRACE_SECONDS = 5.0
"""The device thread ends a request at its deadline; this much later its HTTP thread stops waiting."""

WAKE_UP = TokenBatch(())
"""Wakes the reader without adding anything: the delta that it is woken for is already in `Deltas`."""

OnDelta = Callable[[int, "Delta"], bool]
"""Handles a delta on the delivery thread, without blocking; False wakes the reader for it."""


class ClientGone(ServeError):
    """The client hung up; nobody will read the answer."""

    status = 499


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt to show before its continuation; `offsets` gives each token's first character."""

    text: str
    tokens: tuple[int, ...]
    offsets: tuple[int, ...]


class Delta(NamedTuple):
    """What one choice gained: text to show, the tokens behind it, and on the last delta why it ended.

    `offsets` gives each token's first character in the choice's text. Text that is held back lags behind its
    tokens. The first token of an echoed prompt has no log-probability.
    """

    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob | None, ...] = ()
    finish: FinishReason | None = None
    offsets: tuple[int, ...] = ()
    parts: tuple[Part, ...] | None = None
    """The parts that a reader splits the text into, if there is a reader; they may lag behind the text."""
    num_echoed: int = 0
    """How many tokens at the beginning belong to an echoed prompt."""
    cuts_call: bool = False
    """Whether a stop string ended the choice within the arguments of a call; on the last delta."""

    @property
    def shown(self) -> tuple[Part, ...]:
        """The parts to show; without a reader, all of the text is content."""
        if self.parts is not None:
            return self.parts
        return (Content(self.text),) if self.text else ()


class Choice:
    """Turns one sequence into text. Used by one thread at a time.

    - With an `echo`, the first delta begins with the prompt; it waits until the prompt's scores are complete.
    - Tokens in `stop_ids` end the choice here and not on the device; such a token is listed, but its text is
      not shown and it is not counted.
    - Deltas carry `num_logprobs` alternatives, or no log-probabilities for None, however many the device
      computed.
    - A `reader` splits the text into content, thoughts and calls of tools.
    - A prompt with several choices is scored only for the first. The others show the scores of `scored_by`,
      which are complete before any of them has a token. There are `num_scores` of them.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: StopStrings,
        *,
        stop_ids: frozenset[int] = frozenset(),
        num_logprobs: int | None = None,
        echo: Echo | None = None,
        scored_by: Choice | None = None,
        num_scores: int = 0,
        reader: PartReader | None = None,
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._stop_ids = stop_ids
        self._num_logprobs = num_logprobs
        self._echo = echo
        self._scored_by = scored_by or self
        self._num_scores = num_scores
        self._reader = reader
        self.num_tokens = 0
        self.num_thought_tokens = 0
        """How many of `num_tokens` belong to thoughts, including the marks around them."""
        self.num_cached = 0
        self.finish: FinishReason | None = None
        self.prompt_logprobs: tuple[TokenLogprob, ...] = ()
        self.hidden: PooledHidden | None = None
        self._sum_logprobs = 0.0
        self._num_chars = 0 if echo is None else len(echo.text)
        self._last_call: list[str] | None = None
        """The arguments of the last call so far, in pieces."""
        self._is_plain = num_logprobs is None and not stop_ids and not stops and reader is None

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended it, if one did."""
        return self._stops.matched

    @property
    def mean_logprob(self) -> float:
        """The mean log-probability of its tokens; minus infinity without tokens."""
        return self._sum_logprobs / self.num_tokens if self.num_tokens else float("-inf")

    def add(self, batch: TokenBatch) -> Delta | None:
        """Adds a batch and returns its delta; None if it has only prompt scores or the choice has ended."""
        if self.finish is not None:
            return None
        self.num_cached = max(self.num_cached, batch.num_cached)
        self.prompt_logprobs += batch.prompt_logprobs
        self.hidden = batch.hidden or self.hidden
        if not batch.tokens and batch.finish is None:
            return None
        delta = self._continue(batch)
        if self._echo is None:
            return delta
        echo, self._echo = self._echo, None
        scores = () if self._num_logprobs is None else (None, *self._show(self._scored_by.prompt_logprobs))
        return Delta(
            echo.text + delta.text,
            echo.tokens + delta.tokens,
            scores + delta.logprobs,
            delta.finish,
            echo.offsets + delta.offsets,
            num_echoed=len(echo.tokens),
        )

    def _continue(self, batch: TokenBatch) -> Delta:
        if not self._is_plain or batch.logprobs:
            return self._continue_by_token(batch)
        # The path of almost every batch: detokenizing all tokens of a round costs little more than one token.
        self.num_tokens += len(batch.tokens)
        text = self._detokenizer.add(batch.tokens)
        if batch.finish is not None:
            text += self._detokenizer.flush()
            self.finish = self._end(batch.finish)
        return Delta(text, batch.tokens, finish=self.finish)

    def _continue_by_token(self, batch: TokenBatch) -> Delta:
        """Adds one token at a time: the token that completes a stop string is the last one counted."""
        text = ""
        offsets = []
        num_before = self.num_tokens
        end = batch.finish
        parts: list[Part] = []
        for token in batch.tokens:
            offsets.append(self._num_chars)
            if token in self._stop_ids:
                end = FinishReason.STOP
                break
            self.num_tokens += 1
            piece = self._detokenizer.add((token,))
            self._num_chars += len(piece)
            shown = self._stops.add(piece)
            text += shown
            if self._reader is not None:
                was_thinking = self._reader.is_thinking
                parts += self._reader.add(shown)
                self.num_thought_tokens += was_thinking or self._reader.is_thinking  # with both marks
            if self._stops.is_matched:
                self.finish = FinishReason.STOP
                break
        counted = batch.logprobs[: self.num_tokens - num_before]
        self._sum_logprobs += sum(logprob.logprob for logprob in counted)
        if self.finish is None and end is not None:
            rest = self._stops.add(self._detokenizer.flush()) + self._stops.flush()
            text += rest
            if self._reader is not None:
                parts += self._reader.add(rest)
            self.finish = FinishReason.STOP if self._stops.is_matched else self._end(end)
        if self._reader is not None and self.finish is not None:
            parts += self._reader.flush()
        num_used = len(offsets)
        logprobs = self._show(batch.logprobs[:num_used])
        for part in parts:
            self._note_call(part)
        return Delta(
            text,
            batch.tokens[:num_used],
            logprobs,
            self.finish,
            tuple(offsets),
            None if self._reader is None else join_parts(parts),
            cuts_call=self._stops.is_matched and self._has_open_call(),
        )

    def _lacks_scores(self) -> bool:
        return self._echo is not None or len(self._scored_by.prompt_logprobs) < self._num_scores

    def _note_call(self, part: Part) -> None:
        match part:
            case CallStart():
                self._last_call = []
            case CallArguments(_, text):
                assert self._last_call is not None  # a call's arguments follow its start
                self._last_call.append(text)

    def _has_open_call(self) -> bool:
        return self._last_call is not None and not is_json_object("".join(self._last_call))

    def _show(self, logprobs: tuple[TokenLogprob, ...]) -> tuple[TokenLogprob, ...]:
        """Cuts the alternatives to the number asked for; other fields, such as `best_of`, may need more."""
        count = self._num_logprobs
        if count is None:
            return ()
        return tuple(
            one if len(one.top) <= count else TokenLogprob(one.logprob, one.top[:count]) for one in logprobs
        )

    def _end(self, finish: FinishReason) -> FinishReason:
        """Raises an error for an end that is not an answer."""
        match finish:
            case FinishReason.CANCELLED:
                raise ClientGone("The client closed the connection.")
            case FinishReason.SHUTDOWN:
                raise Unavailable(
                    "The server shut down before the request was done.", retry_after_seconds=10.0
                )
            case FinishReason.FAILED:
                raise ServeError("The device failed while the request was running.")
            case FinishReason.POISONED:
                raise Poisoned(
                    "The model computed non-finite numbers for this request; other requests are not affected."
                )
            case FinishReason.STUCK:
                raise BadRequest(
                    "The constraints on the text leave no token to go on with, or are too costly to follow."
                )
            case FinishReason.DEADLINE if self._lacks_scores():
                raise DeadlineExceeded("The request's time ran out before its prompt was scored.")
        return finish


def join_parts(parts: Iterable[Part]) -> tuple[Part, ...]:
    """The same parts, with neighbours of one kind joined."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        match part:
            case Content(text) if isinstance(last, Content):
                joined[-1] = Content(last.text + text)
            case Thought(text) if isinstance(last, Thought):
                joined[-1] = Thought(last.text + text)
            case CallArguments(number, text) if isinstance(last, CallArguments):
                joined[-1] = CallArguments(number, last.text + text)
            case _:
                joined.append(part)
    return tuple(joined)


def join_deltas(deltas: Sequence[Delta]) -> Delta:
    """All that one choice gained, from its first delta to its last."""
    has_parts = deltas[-1].parts is not None
    return Delta(
        "".join(delta.text for delta in deltas),
        tuple(token for delta in deltas for token in delta.tokens),
        tuple(logprob for delta in deltas for logprob in delta.logprobs),
        deltas[-1].finish,
        tuple(offset for delta in deltas for offset in delta.offsets),
        join_parts(part for delta in deltas for part in delta.parts or ()) if has_parts else None,
        deltas[0].num_echoed,
        deltas[-1].cuts_call,
    )


def add_batch(
    choices: Sequence[Choice], index: int, batch: TokenBatch, stream: TokenStream | None
) -> Delta | None:
    """Adds a batch to the choice at `index`; returns None if there is nothing to show.

    If the choice ends before the device knows, its sequence is closed. Raises `DeadlineExceeded` if the
    request's time ran out before any choice had a token.
    """
    if batch.finish is FinishReason.DEADLINE and not any(choice.num_tokens for choice in choices):
        raise DeadlineExceeded("The request's time ran out before its first token.")
    delta = choices[index].add(batch)
    if delta is not None and delta.finish is not None and batch.finish is None and stream is not None:
        stream.close(index, FinishReason.STOP)
    return delta


class Deltas(Iterator[tuple[int, Delta]]):
    """The deltas of one HTTP request, each with the number of its choice, until all choices have ended.

    Belongs to one HTTP thread, which may wait with a timeout (`wait`) before it takes the next delta. A
    reader that leaves early closes the stream itself.
    """

    def __init__(self, stream: TokenStream, choices: Sequence[Choice], deadline: float | None = None) -> None:
        self._stream = stream
        self._choices = choices
        self._give_up_at = math.inf if deadline is None else deadline + GRACE_SECONDS
        self._num_open = len(choices)
        self._next: tuple[int, Delta] | None = None
        self._failure: Exception | None = None
        self.first_token_at: float | None = None
        """On `time.monotonic`'s clock."""

    @property
    def placed_at(self) -> float | None:
        return self._stream.placed_at

    @property
    def is_ended(self) -> bool:
        """Whether the last delta was taken."""
        return not self._num_open and self._next is None

    def __next__(self) -> tuple[int, Delta]:
        self.wait(None)
        if self._next is None:
            raise StopIteration
        found, self._next = self._next, None
        return found

    def wait(self, timeout_seconds: float | None, on_delta: OnDelta | None = None) -> bool:
        """Waits for the next delta or the end; False if neither came in time. Raises what `next` would raise.

        Deltas between the first and the last go to `on_delta` while this waits; see the module's docstring.
        """
        on_batch = None if on_delta is None or self.first_token_at is None else self._inline(on_delta)
        until = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
        while self._next is None and self._num_open:
            seconds = max(min(until, self._give_up_at) - time.monotonic(), 0)
            try:
                index, batch = self._stream.get(None if seconds == math.inf else seconds, on_batch)
            except queue.Empty:
                index, batch = 0, None
            if self._failure is not None:
                raise self._failure
            if batch is not None:
                self._take(index, batch)
            elif self._next is None and self._num_open:
                if until <= self._give_up_at:
                    return False
                raise DeadlineExceeded(
                    "The request's time ran out, and the device does not answer."
                ) from None
        return True

    def _inline(self, on_delta: OnDelta) -> OnBatch:
        """The function that the delivery thread calls with each batch while the reader waits."""

        def on_batch(index: int, batch: TokenBatch) -> TokenBatch | None:
            if batch.finish is not None:
                return batch
            try:
                self._take(index, batch)
                if self._next is None:
                    return None
                if self._next[1].finish is None and on_delta(*self._next):
                    self._next = None
                    return None
            except Exception as error:
                self._failure = error  # the reader raises it: here it would end delivery to all streams
            return WAKE_UP

        return on_batch

    def _take(self, index: int, batch: TokenBatch) -> None:
        delta = add_batch(self._choices, index, batch, self._stream)
        if delta is None:
            return
        self._next = index, delta
        if batch.tokens and self.first_token_at is None:
            self.first_token_at = time.monotonic()
        self._num_open -= delta.finish is not None
