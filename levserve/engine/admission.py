"""Who is let in: two counts, of sequences and of their tokens, each with a bound, and what a refusal tells.

A place is taken before a body is read and given back when its last byte is written. Used by HTTP threads; the device thread
only replaces `drain_seconds` now and then. This is the one place of the engine with a lock: the counts must move together,
and nothing waits while it is held.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import NamedTuple

from levserve.errors import BadRequest, Overloaded
from levserve.observe.metrics import Metrics

BYTES_PER_TOKEN = 8
"""Of a body whose tokens are not counted yet: more than text has, so that hardly anyone is refused by the guess alone."""
MAX_GUESS_SHARE = 4
"""No guess takes more than this part of all tokens: a body may be long for other reasons."""
UNKNOWN_RETRY_SECONDS = 1.0
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.05, 60.0
"""OpenAI's SDK waits as long as it is told, up to a minute; what says more is not obeyed by all of its releases."""


class Room(NamedTuple):
    """The bounds and what is left under them."""

    max_requests: int
    free_requests: int
    max_tokens: int
    free_tokens: int
    drain_seconds: float | None
    """Until all that was let in is done."""


class Admission:
    """Counts what has been let in. `max_tokens` is 0 until the model is ready and nobody has set it."""

    def __init__(self, max_requests: int, max_tokens: int, metrics: Metrics) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.drain_seconds: float | None = None
        """How long the device needs for all it has, by its measured rates; None before it has measured any."""
        self._metrics = metrics
        self._lock = threading.Lock()
        self._num_requests = 0
        self._num_tokens = 0
        self._num_guessed = 0

    def room(self) -> Room:
        with self._lock:
            free_requests, free_tokens = (
                self.max_requests - self._num_requests,
                self.max_tokens - self._num_tokens,
            )
        return Room(self.max_requests, free_requests, self.max_tokens, free_tokens, self.drain_seconds)

    def reserve(self, body_bytes: int, max_guess: int) -> Reservation:
        """One place for a body of this size, or `Overloaded` at once."""
        return Reservation(
            self, min(body_bytes // BYTES_PER_TOKEN, max_guess, self.max_tokens // MAX_GUESS_SHARE)
        )

    def enter(self, guess: int) -> None:
        """Takes one place and notes how many tokens to expect, which keeps others out only until they are counted."""
        with self._lock:
            num_requests, num_expected = self._num_requests + 1, self._num_tokens + self._num_guessed + guess
            if num_requests <= self.max_requests and num_expected <= self.max_tokens:
                self._num_requests = num_requests
                self._num_guessed += guess
                return
        self._refuse(num_requests, num_expected)

    def change(self, requests: int, tokens: int, guess: int = 0) -> None:
        """Adds to the counts, or takes away; raises `Overloaded` and changes nothing if that is too much."""
        with self._lock:
            num_requests, num_tokens = self._num_requests + requests, self._num_tokens + tokens
            fits = num_requests <= self.max_requests and num_tokens <= self.max_tokens
            if fits or (requests <= 0 and tokens <= 0):
                self._num_requests, self._num_tokens = num_requests, num_tokens
                self._num_guessed += guess
                return
        self._refuse(num_requests, num_tokens)

    def _refuse(self, num_requests: int, num_tokens: int) -> None:
        """The wait is the part of all work that must be done until there is room."""
        if num_requests > self.max_requests:
            self._metrics.refused.labels("queue_full").inc()
            share = (num_requests - self.max_requests) / self.max_requests
            raise Overloaded(
                f"The server is at its limit of {self.max_requests} requests; please try again.",
                retry_after_seconds=self._wait(share),
            )
        self._metrics.refused.labels("tokens_full").inc()
        message = f"The server is at its limit of {self.max_tokens} tokens in all requests together; please try again."
        error = Overloaded(
            message, retry_after_seconds=self._wait((num_tokens - self.max_tokens) / self.max_tokens)
        )
        error.type = "tokens"
        raise error

    def _wait(self, share: float) -> float:
        drain = self.drain_seconds
        if drain is None:
            return UNKNOWN_RETRY_SECONDS
        return min(max(drain * share, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)


class Reservation:
    """Places in the queue, held from before a body is parsed until its last byte is written.

    One place is one sequence. It begins as one, with a guess at the tokens. Releasing twice is harmless. Belongs to one HTTP
    thread.
    """

    def __init__(self, admission: Admission, guess: int) -> None:
        admission.enter(guess)
        self._admission = admission
        self._num_requests = 1
        self._num_tokens = 0
        self._guess = guess

    def grow_to(self, num_requests: int, num_tokens: int, param: str | None = None) -> None:
        """Holds so much in all; raises `Overloaded`, or `BadRequest` for what never fits, and keeps what it held.

        0 tokens: they are not counted yet.
        """
        admission = self._admission
        if num_requests > admission.max_requests:
            most = admission.max_requests
            raise BadRequest(
                f"The request asks for {num_requests} choices in all; this server runs {most}.", param=param
            )
        if num_tokens > admission.max_tokens:
            raise BadRequest(
                f"The request may take {num_tokens} tokens, prompts and answers of all its choices together; "
                f"this server admits {admission.max_tokens} at a time.",
                param=param,
            )
        num_requests, num_tokens = max(num_requests, self._num_requests), max(num_tokens, self._num_tokens)
        guess = 0 if num_tokens else self._guess
        admission.change(
            num_requests - self._num_requests, num_tokens - self._num_tokens, guess - self._guess
        )
        self._num_requests, self._num_tokens, self._guess = num_requests, num_tokens, guess

    def release(self) -> None:
        self._admission.change(-self._num_requests, -self._num_tokens, -self._guess)
        self._num_requests = self._num_tokens = self._guess = 0

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
