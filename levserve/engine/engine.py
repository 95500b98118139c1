"""The handle that HTTP threads hold on the device thread: admit, submit, drain, ask how it is.

Importing this touches no jax. What crosses to the device thread is a frozen message through one queue; what comes back
are `TokenStream` batches and the attributes published here before `phase` says so.
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import TYPE_CHECKING

from prometheus_client import Counter

from levserve.engine.stream import TokenStream
from levserve.errors import Overloaded, ServeError, StartupError, Unavailable
from levserve.metrics import Metrics
from levserve.schedule.request import GenerationRequest

if TYPE_CHECKING:
    import jax

    from levserve.engine.reload import Reloader
    from levserve.text.tokenizer import Tokenizer


log = logging.getLogger(__name__)


class Phase(StrEnum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What HTTP threads need to know of the model; published when it is ready."""

    name: str
    tokenizer: Tokenizer
    max_seq_len: int
    hidden_size: int
    created: int


@dataclass(frozen=True, slots=True)
class Submit:
    """One sequence: its batches go to `stream` under the number `index`."""

    request: GenerationRequest
    stream: TokenStream
    index: int
    arrival: float


@dataclass(frozen=True, slots=True)
class Cancel:
    request_id: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Finish what runs until `deadline`, then end the rest."""

    deadline: float


@dataclass(frozen=True, slots=True)
class Reload:
    """Serve with these weights, the model's leaves on the host, from the next round on; `done` gets the seconds it took."""

    leaves: Sequence[jax.Array]
    done: Future[float]


@dataclass(frozen=True, slots=True)
class Reloaded:
    """What a reload did, and how far the new weights are from the old ones on the probe text."""

    model: str
    path: str
    load_seconds: float
    swap_seconds: float
    probe_tokens: int
    max_logprob_difference: float
    mean_logprob: float
    mean_logprob_before: float


@dataclass(frozen=True, slots=True)
class Stop:
    """Leave: every HTTP thread has gone."""


Message = Submit | Cancel | Drain | Reload | Stop


class Reservation:
    """Places in the queue, held from before a body is parsed until its last byte is written.

    One place is one sequence. Releasing twice is harmless.
    """

    def __init__(self, places: threading.Semaphore, limit: int, refusals: Counter) -> None:
        self._places = places
        self._limit = limit
        self._refusals = refusals
        self._held = 0
        self.grow_to(1)

    def grow_to(self, count: int) -> None:
        """Holds `count` places in all, or raises `Overloaded` and keeps what it held."""
        before = self._held
        while self._held < count:
            if not self._places.acquire(blocking=False):
                self._release_down_to(before)
                self._refusals.inc()
                raise Overloaded(
                    f"The server is at its limit of {self._limit} requests; please try again.", retry_after_seconds=1.0
                )
            self._held += 1

    def release(self) -> None:
        self._release_down_to(0)

    def _release_down_to(self, count: int) -> None:
        while self._held > count:
            self._held -= 1
            self._places.release()

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


class Engine:
    """What the rest of the server sees of the device thread.

    `inbox`, `beat` and `publish` are the device thread's side; everything else may be called from any thread. Phases go
    loading -> ready -> draining, or to failed from anywhere, and never back.
    """

    def __init__(self, *, max_inflight: int, metrics: Metrics) -> None:
        self.inbox: queue.Queue[Message] = queue.Queue()
        self.metrics = metrics
        self.max_inflight = max_inflight
        self.progress = "starting"
        self._places = threading.BoundedSemaphore(max_inflight)
        self.reloader: Reloader | None = None
        self._model: ServedModel | None = None
        self._phase = Phase.LOADING
        self._ready = threading.Event()
        self._last_beat = time.monotonic()
        metrics.heartbeat_age.set_function(self.heartbeat_age)
        for phase in Phase:
            metrics.phase.labels(phase.value).set_function(functools.partial(self._is_in, phase))

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def model(self) -> ServedModel:
        """The served model; raises `Unavailable` until it is ready."""
        if self._model is None:
            raise Unavailable(f"The model is still loading ({self.progress}).", retry_after_seconds=5.0)
        return self._model

    def heartbeat_age(self) -> float:
        return time.monotonic() - self._last_beat

    def reserve(self) -> Reservation:
        """Takes one place, or raises `Overloaded` or `Unavailable` at once."""
        self._require_ready()
        return Reservation(self._places, self.max_inflight, self.metrics.refused.labels("queue_full"))

    def submit(self, requests: Sequence[GenerationRequest]) -> TokenStream:
        """Hands the sequences of one HTTP request to the device thread.

        The caller holds a place for each, reads the stream to its end or closes it.
        """
        self._require_ready()
        arrival = time.monotonic()
        stream = TokenStream([request.request_id for request in requests], self._cancel)
        for index, request in enumerate(requests):
            self.inbox.put(Submit(request, stream, index, arrival))
        return stream

    def begin_drain(self, deadline: float) -> None:
        """Refuses new work and lets running work finish until `deadline` on the monotonic clock."""
        if self._phase is not Phase.FAILED:
            self._phase = Phase.DRAINING
        self.inbox.put(Drain(deadline))

    def reload(self, *, model: str = "", checkpoint_path: str = "", revision: str = "") -> Reloaded:
        """Reads weights on the calling thread and has them swapped in; raises and changes nothing if they do not fit."""
        self._require_ready()
        if self.reloader is None:
            raise Unavailable("This server cannot reload.", retry_after_seconds=60.0)
        return self.reloader.reload(model=model, checkpoint_path=checkpoint_path, revision=revision)

    def begin_reload(self) -> threading.Thread:
        """Reloads on a thread of its own, for a signal; the outcome is in the log."""

        def work() -> None:
            try:
                self.reload()
            except StartupError:
                pass  # told already
            except ServeError as error:
                log.warning("reload: %s", error)
            except Exception:
                log.exception("the reload failed")

        thread = threading.Thread(target=work, name="levserve-reload", daemon=True)
        thread.start()
        return thread

    def stop(self) -> None:
        """Lets the device thread leave; call it when no HTTP thread can submit any more."""
        self.inbox.put(Stop())

    def wait_ready(self, timeout_seconds: float) -> bool:
        """Whether the model became ready, or loading ended otherwise, within the time."""
        return self._ready.wait(timeout_seconds) and self._phase is Phase.READY

    def beat(self) -> None:
        self._last_beat = time.monotonic()

    def publish(self, model: ServedModel) -> None:
        self._model = model
        if self._phase is Phase.LOADING:
            self._phase = Phase.READY
        self._ready.set()

    def fail(self) -> None:
        self._phase = Phase.FAILED
        self._ready.set()

    def _is_in(self, phase: Phase) -> float:
        return float(self._phase is phase)

    def _cancel(self, request_id: str) -> None:
        self.inbox.put(Cancel(request_id))

    def _require_ready(self) -> None:
        if self._phase is Phase.READY:
            return
        self.metrics.refused.labels(self._phase.value).inc()
        if self._phase is Phase.LOADING:
            raise Unavailable(f"The model is still loading ({self.progress}).", retry_after_seconds=5.0)
        if self._phase is Phase.DRAINING:
            raise Unavailable("The server is shutting down; please try another one.", retry_after_seconds=10.0)
        raise Unavailable("The device has failed and the server is restarting.", retry_after_seconds=10.0)
