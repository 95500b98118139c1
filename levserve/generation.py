"""From a stream of tokens to pieces of text, on the HTTP thread that waits for them.

One `Choice` per sequence detokenizes, holds back what may still become a stop string or a whole character, counts tokens
and says how it ended. `Deltas` runs the choices of one HTTP request over its stream.
"""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from levserve.engine.stream import Carrier, TokenStream
from levserve.errors import DeadlineExceeded, Poisoned, ServeError, Unavailable
from levserve.schedule.request import FinishReason, PooledHidden, TokenBatch, TokenLogprob
from levserve.text.detokenizer import Detokenizer
from levserve.text.stops import StopStrings

GRACE_SECONDS = 5.0
"""How much later than its deadline a request is given up that the device thread, which should end it, does not end."""


NO_NEWS = TokenBatch(())
"""Wakes a reader and changes nothing."""

Carry = Callable[[int, "Delta"], bool]


class ClientGone(ServeError):
    """The client hung up; nobody will read the answer."""

    status = 499


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt to show before what follows it; `offsets` says for each token how many characters come before it."""

    text: str
    tokens: tuple[int, ...]
    offsets: tuple[int, ...]


class Delta(NamedTuple):
    """What one choice gained: text that may be shown, the tokens behind it, and on the last delta why it ended.

    `offsets` says for each token how many characters of the choice's text come before it. Text that is held back lags behind
    its tokens. The first token of an echoed prompt has no log-probability.
    """

    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob | None, ...] = ()
    finish: FinishReason | None = None
    offsets: tuple[int, ...] = ()


class Choice:
    """One sequence's way into text. Belongs to one HTTP thread.

    With an `echo` its first delta begins with the prompt, for which it waits until the prompt's scores are complete. Tokens in
    `stop_ids` end it here and not on the device; such a token is listed but neither shown nor counted. Its deltas carry
    `num_logprobs` alternatives, or with None no log-probabilities, however many the device was asked for. Of several choices
    of one prompt only the first is scored: the others show its scores, which are complete before they have a token.
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
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._stop_ids = stop_ids
        self._num_logprobs = num_logprobs
        self._echo = echo
        self._scored_by = scored_by or self
        self.num_tokens = 0
        self.num_cached = 0
        self.finish: FinishReason | None = None
        self.prompt_logprobs: tuple[TokenLogprob, ...] = ()
        self.hidden: PooledHidden | None = None
        self._sum_logprobs = 0.0
        self._num_chars = 0 if echo is None else len(echo.text)
        self._is_plain = num_logprobs is None and not stop_ids and not stops

    @property
    def mean_logprob(self) -> float:
        """How likely its tokens were, one with another; one that has none is the least likely of all."""
        return self._sum_logprobs / self.num_tokens if self.num_tokens else float("-inf")

    def add(self, batch: TokenBatch) -> Delta | None:
        """Takes a batch; None for scores of a part of the prompt, and for what comes after a stop string was found."""
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
        )

    def _continue(self, batch: TokenBatch) -> Delta:
        if (
            self._is_plain and not batch.logprobs
        ):  # almost always: then a round's tokens cost little more than one
            self.num_tokens += len(batch.tokens)
            text = self._detokenizer.add(batch.tokens)
            if batch.finish is not None:
                text += self._detokenizer.flush()
                self.finish = self._end(batch.finish)
            return Delta(text, batch.tokens, finish=self.finish)
        text = ""
        offsets = []
        num_before = self.num_tokens
        end = batch.finish
        for (
            token
        ) in batch.tokens:  # one at a time: the token that completes a stop string is the last one counted
            offsets.append(self._num_chars)
            if token in self._stop_ids:
                end = FinishReason.STOP
                break
            self.num_tokens += 1
            piece = self._detokenizer.add((token,))
            self._num_chars += len(piece)
            text += self._stops.add(piece)
            if self._stops.is_matched:
                self.finish = FinishReason.STOP
                break
        self._sum_logprobs += sum(
            logprob.logprob for logprob in batch.logprobs[: self.num_tokens - num_before]
        )
        if self.finish is None and end is not None:
            text += self._stops.add(self._detokenizer.flush()) + self._stops.flush()
            self.finish = FinishReason.STOP if self._stops.is_matched else self._end(end)
        used = len(offsets)
        return Delta(
            text, batch.tokens[:used], self._show(batch.logprobs[:used]), self.finish, tuple(offsets)
        )

    def _show(self, logprobs: tuple[TokenLogprob, ...]) -> tuple[TokenLogprob, ...]:
        """What was asked to be shown of them: the device may have been asked for more, for another field or for `best_of`."""
        count = self._num_logprobs
        if count is None:
            return ()
        return tuple(
            one if len(one.top) <= count else TokenLogprob(one.logprob, one.top[:count]) for one in logprobs
        )

    def _end(self, finish: FinishReason) -> FinishReason:
        """Turns an end that is nobody's answer into an error."""
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
                    "The model gave numbers that are not finite for this request; no other request was touched."
                )
            case FinishReason.DEADLINE if self._echo is not None:
                raise DeadlineExceeded("The request's time ran out before its prompt was scored.")
        return finish


class Deltas(Iterator[tuple[int, Delta]]):
    """Each choice's deltas as they come, with the choice's number, until all have ended. Belongs to one HTTP thread.

    `wait` is for readers that have something to do when nothing comes. A sequence whose choice ends before the device knows
    is closed here; who leaves before the end closes the stream.

    A reader that gives `wait` a function need not be woken for what comes between the first delta and the last: that is
    given to the function, on the thread that brings the tokens, and the reader is woken when it returns False, to find the
    delta still there. It must not block.
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
    def admitted_at(self) -> float | None:
        return self._stream.admitted_at

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

    def wait(self, timeout_seconds: float | None, carry: Carry | None = None) -> bool:
        """Whether the next delta, or the end, has come within this time. What `next` would raise is raised here."""
        carrier = None if carry is None or self.first_token_at is None else self._carrier(carry)
        until = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
        while self._next is None and self._num_open:
            seconds = max(min(until, self._give_up_at) - time.monotonic(), 0)
            try:
                index, batch = self._stream.get(None if seconds == math.inf else seconds, carrier)
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

    def _carrier(self, carry: Carry) -> Carrier:
        def deal(index: int, batch: TokenBatch) -> TokenBatch | None:
            if batch.finish is not None:
                return batch
            try:
                self._take(index, batch)
                if self._next is None:
                    return None
                if self._next[1].finish is None and carry(*self._next):
                    self._next = None
                    return None
            except (
                Exception
            ) as error:  # the reader's to tell: it must not end the thread that brings everyone's tokens
                self._failure = error
            return NO_NEWS

        return deal

    def _take(self, index: int, batch: TokenBatch) -> None:
        if batch.finish is FinishReason.DEADLINE and not any(choice.num_tokens for choice in self._choices):
            raise DeadlineExceeded("The request's time ran out before its first token.")
        delta = self._choices[index].add(batch)
        if delta is None:
            return
        self._next = index, delta
        if batch.tokens and self.first_token_at is None:
            self.first_token_at = time.monotonic()
        if delta.finish is None:
            return
        if batch.finish is None:
            self._stream.close(index, FinishReason.STOP)  # one that the device does not know of
        self._num_open -= 1
