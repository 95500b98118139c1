"""Runs one prompt's sequences: they wait for admission, run, and their text goes to a listener.

No thread waits for them: the delivery thread turns their tokens into text and calls the listener, as it does
for the server's streams.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from levserve.api.admission_queue import AdmissionQueue, WaitingWork
from levserve.engine.admission import Reservation
from levserve.engine.engine import Engine
from levserve.engine.served_model import ServedModel
from levserve.engine.stream import PushStream
from levserve.errors import Unavailable
from levserve.generation import Choice, Delta, add_batch
from levserve.observe.health import Phase
from levserve.schedule.request import GenerationRequest, TokenBatch

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Job(Generic[T]):
    """What to run, and how the outcome is made from what the choices gained."""

    requests: Sequence[GenerationRequest]
    choices: Sequence[Choice]
    num_tokens: int
    finish: Callable[[Sequence[Sequence[Delta]]], T]
    warnings: Sequence[str] = ()

    @property
    def priority(self) -> int:
        return self.requests[0].priority


class Runtime:
    """Where work runs: an engine, one of its models, and the queue before it.

    `is_closed` is set by the thread that closes the model, before the engine ends the work.
    """

    def __init__(self, engine: Engine, model: ServedModel, queue: AdmissionQueue | None = None) -> None:
        self.engine = engine
        self.model = model
        self.queue = queue or AdmissionQueue(engine)
        self.is_closed = False
        self._find_process = os.getpid  # kept, because streams may be dropped after the module is gone
        self._process = os.getpid()

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked from the model's, whose threads do not exist here."""
        return self._find_process() != self._process

    def require_open(self) -> None:
        """Raises `Unavailable` if the model is closed, or belongs to another process."""
        if self.is_forked:
            raise Unavailable(
                f"The model {self.model.name} was opened in the process that this one was forked from; "
                "its threads are not here. Start processes with multiprocessing's 'spawn' and open it there.",
                retry_after_seconds=0.0,
            )
        if self.is_closed:
            raise Unavailable(
                f"The model {self.model.name} is closed; open it again to use it.", retry_after_seconds=0.0
            )

    def explain(self, error: Exception) -> Exception:
        """The error that ended work; what the engine says of a server would mislead if the model is closed,
        or if the device has failed, which nobody restarts."""
        try:
            self.require_open()
        except Unavailable as cause:
            return cause
        if isinstance(error, Unavailable) and self.engine.phase is Phase.FAILED:
            return Unavailable(
                f"The device has failed; close the model {self.model.name} and open it again.",
                retry_after_seconds=0.0,
            )
        return error


class Work:
    """One job that runs. `on_delta` and `on_end` are called on the delivery thread and must not block.

    `on_end` is called exactly once, with the error that ended the work early, if any; not after `cancel`.
    Work that is refused ends on the thread that tried to admit it.
    """

    def __init__(
        self,
        runtime: Runtime,
        job: Job[T],
        on_delta: Callable[[int, Delta], None],
        on_end: Callable[[Exception | None], None],
    ) -> None:
        self._runtime = runtime
        self._job = job
        self._on_delta = on_delta
        self._on_end = on_end
        self._lock = threading.Lock()
        self._num_open = len(job.choices)
        self._is_over = False
        self._reservation: Reservation | None = None
        self._stream: PushStream | None = None
        self._waiting: WaitingWork | None = None

    @property
    def placed_at(self) -> float | None:
        """When the first of its sequences got a row, on `time.monotonic`'s clock."""
        return None if self._stream is None else self._stream.placed_at

    def start(self) -> None:
        job = self._job
        waiting = self._runtime.queue.ask(len(job.requests), job.num_tokens, job.priority, self._enter)
        self._waiting = waiting
        if self._is_over:
            waiting.is_cancelled = True

    def cancel(self) -> None:
        """Ends the work; its rows and pages are free within one round. Any thread may call this."""
        if self._end():
            if self._waiting is not None:
                self._waiting.is_cancelled = True
            if self._stream is not None:
                self._stream.close()

    def _enter(self, granted: Reservation | Exception) -> None:
        if isinstance(granted, Exception):
            self._fail(granted)
            return
        with self._lock:
            is_over = self._is_over
            if not is_over:
                self._reservation = granted
        if is_over:
            self._runtime.queue.release(granted)
            return
        try:
            self._stream = self._runtime.engine.push(self._job.requests, self._runtime.model, self._take)
        except Exception as error:
            self._fail(error)
            return
        if self._is_over:  # cancelled meanwhile
            self._stream.close()

    def _take(self, index: int, batch: TokenBatch) -> None:
        if self._is_over:
            return
        try:
            self._add(index, batch)
        except Exception as error:
            self._fail(error)

    def _add(self, index: int, batch: TokenBatch) -> None:
        delta = add_batch(self._job.choices, index, batch, self._stream)
        if delta is None:
            return
        self._on_delta(index, delta)
        if delta.finish is None:
            return
        self._num_open -= 1
        if not self._num_open and self._end():
            self._on_end(None)

    def _fail(self, error: Exception) -> None:
        if self._end():
            if self._stream is not None:
                self._stream.close()
            self._on_end(self._runtime.explain(error))

    def _end(self) -> bool:
        """Gives the places back; False if the work was over already."""
        with self._lock:
            if self._is_over:
                return False
            self._is_over = True
            reservation, self._reservation = self._reservation, None
        if reservation is not None:
            self._runtime.queue.release(reservation)
        return True
