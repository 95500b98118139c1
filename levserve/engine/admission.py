"""Which requests are accepted: the sequences and the tokens of all requests together are bounded.

A request takes its place before its body is read and gives it back when the last byte of its answer is
written. HTTP threads call this; the device thread only sets the expected seconds. A lock keeps the counts
consistent with each other, and nothing waits while it is held.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from levserve.errors import BadRequest, Overloaded
from levserve.observe.metrics import Metrics

BYTES_PER_TOKEN = 8
"""For guessing the tokens of a body that is not tokenized yet: more than text has, so that guesses are low
and alone refuse little."""
MAX_GUESS_SHARE = 4
"""A guess is at most a quarter of all tokens: a body may be long for other reasons."""
UNKNOWN_RETRY_SECONDS = 1.0
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.05, 60.0
"""OpenAI's SDK waits as long as Retry-After says, up to a minute; some releases ignore a longer wait."""


class Room(NamedTuple):
    """The bounds, and how much of each is free."""

    max_requests: int
    free_requests: int
    max_tokens: int
    free_tokens: int
    drain_seconds: float | None
    """Until all accepted work is done."""


class Admission:
    """Counts accepted work. `max_tokens` is 0 until a model is ready, unless the operator set it."""

    def __init__(self, max_requests: int, max_tokens: int, metrics: Metrics) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.drain_seconds: float | None = None
        """How long the device needs for all accepted work; None before its rates are measured."""
        self.first_end_seconds = 0.0
        """When the first of the running sequences is expected to end; 0 if none is running."""
        self._metrics = metrics
        self._lock = threading.Lock()
        self._num_requests = 0
        self._num_tokens = 0
        self._num_guessed = 0
        self._num_refused = 0
        """Refused requests that may come back: each is told to wait until a place is free for it too."""

    def room(self) -> Room:
        with self._lock:
            free_requests = self.max_requests - self._num_requests
            free_tokens = self.max_tokens - self._num_tokens
        return Room(self.max_requests, free_requests, self.max_tokens, free_tokens, self.drain_seconds)

    def reserve(self, body_bytes: int, max_guess: int) -> Reservation:
        """A place for one sequence whose body has this size; raises `Overloaded` if there is none."""
        guess = min(body_bytes // BYTES_PER_TOKEN, max_guess, self.max_tokens // MAX_GUESS_SHARE)
        return Reservation(self, guess)

    def check(self, num_requests: int, num_tokens: int, param: str | None) -> None:
        """Raises `BadRequest` for a request that would not fit if it were alone."""
        if num_requests > self.max_requests:
            raise BadRequest(
                f"The request asks for {num_requests} choices in all; this server admits {self.max_requests} "
                "at a time.",
                param=param,
            )
        if num_tokens > self.max_tokens:
            raise BadRequest(
                f"The request may take {num_tokens} tokens, prompts and answers of all its choices together; "
                f"this server admits {self.max_tokens} at a time.",
                param=param,
            )

    def enter(self, guess: int) -> None:
        """Takes a place for one sequence. Its guess counts against other guesses until it is replaced."""
        with self._lock:
            num_requests = self._num_requests + 1
            num_expected = self._num_tokens + self._num_guessed + guess
            if num_requests <= self.max_requests and num_expected <= self.max_tokens:
                self._num_requests = num_requests
                self._num_guessed += guess
                self._num_refused = max(self._num_refused - 1, 0)
                return
        self._refuse(num_requests, num_expected)

    def change(self, requests: int, tokens: int, guess: int = 0) -> None:
        """Adds to the counts or subtracts; beyond a bound, raises `Overloaded` and changes nothing."""
        with self._lock:
            num_requests = self._num_requests + requests
            num_tokens = self._num_tokens + tokens
            fits = num_requests <= self.max_requests and num_tokens <= self.max_tokens
            if fits or (requests <= 0 and tokens <= 0):
                self._num_requests, self._num_tokens = num_requests, num_tokens
                self._num_guessed += guess
                return
        self._refuse(num_requests, num_tokens)

    def _refuse(self, num_requests: int, num_tokens: int) -> None:
        """Raises `Overloaded`; its retry time is what the device needs for the excess work.

        Requests that are refused one after another are told different times, or all would come back at once
        and find one free place.
        """
        if num_requests > self.max_requests:
            self._metrics.refused.labels("queue_full").inc()
            with self._lock:
                excess = num_requests - self.max_requests + self._num_refused
                self._num_refused = min(self._num_refused + 1, self.max_requests - 1)
            share = min(excess / self.max_requests, 1.0)
            raise Overloaded(
                f"The server is at its limit of {self.max_requests} requests; please try again.",
                retry_after_seconds=self._wait(share),
            )
        self._metrics.refused.labels("tokens_full").inc()
        share = (num_tokens - self.max_tokens) / self.max_tokens
        error = Overloaded(
            f"The server is at its limit of {self.max_tokens} tokens in all requests together; "
            "please try again.",
            retry_after_seconds=self._wait(share),
        )
        error.type = "tokens"
        raise error

    def _wait(self, share: float) -> float:
        drain = self.drain_seconds
        if not drain:  # not measured yet, or measured before this work came
            return UNKNOWN_RETRY_SECONDS
        wait = max(drain * share, self.first_end_seconds, MIN_RETRY_SECONDS)
        return min(wait, MAX_RETRY_SECONDS)


class Reservation:
    """Places for the sequences of one HTTP request, until its last byte is written.

    It begins with one place and a guess at the tokens. Releasing twice is harmless. Belongs to one HTTP
    thread.
    """

    def __init__(self, admission: Admission, guess: int) -> None:
        admission.enter(guess)
        self._admission = admission
        self._num_requests = 1
        self._num_tokens = 0
        self._guess = guess

    def grow_to(self, num_requests: int, num_tokens: int, param: str | None = None) -> None:
        """Grows to this much in all; raises `BadRequest` for what can never fit, or `Overloaded`.

        If it raises, it keeps what it held. 0 tokens means that they are not counted yet.
        """
        admission = self._admission
        admission.check(num_requests, num_tokens, param)
        num_requests = max(num_requests, self._num_requests)
        num_tokens = max(num_tokens, self._num_tokens)
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

    def __exit__(self, *error: object) -> None:
        self.release()
