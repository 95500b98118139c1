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
from typing import TYPE_CHECKING

from levserve.engine.admission import Admission, Reservation
from levserve.engine.entry import Resident
from levserve.engine.library import Library
from levserve.engine.stream import TokenStream
from levserve.errors import BadRequest, ServeError, StartupError, Unavailable
from levserve.metrics import Metrics
from levserve.schedule.request import FinishReason, GenerationRequest

if TYPE_CHECKING:
    import jax

    from levserve.engine.runner import Runner
    from levserve.engine.startup import Loaded
    from levserve.text.tokenizer import Tokenizer


log = logging.getLogger(__name__)


class Phase(StrEnum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What HTTP threads need to know of a model; published when it is ready."""

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
    model: str


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody wants the sequence any more; `finish` is STOP where its reader has seen a stop that the device cannot see."""

    request_id: str
    finish: FinishReason = FinishReason.CANCELLED


@dataclass(frozen=True, slots=True)
class Drain:
    """Finish what runs until `deadline`, then end the rest."""

    deadline: float


@dataclass(frozen=True, slots=True)
class Reload:
    """Serve with these weights, the model's leaves on the host, from the next round on; `done` gets the seconds it took."""

    model: str
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
class Attach:
    """Serve this model too, from the next round on."""

    loaded: Loaded


@dataclass(frozen=True, slots=True)
class Detach:
    """Serve this model no more; `done` gets what it had on the device, which nobody uses any longer."""

    model: str
    done: Future[Runner]


@dataclass(frozen=True, slots=True)
class Stop:
    """Leave: every HTTP thread has gone."""


Message = Submit | Cancel | Drain | Reload | Attach | Detach | Stop


class Engine:
    """What the rest of the server sees of the device thread.

    `inbox`, `beat` and `publish` are the device thread's side; everything else may be called from any thread. Phases go
    loading -> ready -> draining, or to failed from anywhere, and never back.
    """

    def __init__(self, *, max_inflight: int, metrics: Metrics, max_tokens: int = 0, stall_seconds: float = 30.0) -> None:
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()  # a lock in Python would be held by threads that wait for the GIL
        self.metrics = metrics
        self.max_inflight = max_inflight
        self.admission = Admission(max_inflight, max_tokens, metrics)
        self.library = Library(metrics, self._note_models)
        self.progress = "starting"
        self._has_own_limit = max_tokens > 0
        self._max_guess = 0
        self._stall_seconds = stall_seconds
        self._is_busy = False
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
        """The model that was loaded first; raises `Unavailable` until it is ready."""
        if self._model is None:
            raise Unavailable(f"The model is still loading ({self.progress}).", retry_after_seconds=5.0)
        return self._model

    def require_model(self) -> None:
        """Raises `Unavailable` until the first model is ready."""
        self.model

    def heartbeat_age(self) -> float:
        return time.monotonic() - self._last_beat

    @property
    def is_stalled(self) -> bool:
        """Whether the device thread has work and has shown no sign of life for too long; while it loads it never is."""
        is_serving = self._phase is Phase.READY or self._phase is Phase.DRAINING
        return is_serving and (self._is_busy or not self.inbox.empty()) and 0 < self._stall_seconds < self.heartbeat_age()

    def reserve(self, body_bytes: int = 0) -> Reservation:
        """Takes one place for a body of this size, or raises `Overloaded` or `Unavailable` at once."""
        self._require_ready()
        return self.admission.reserve(body_bytes, self._max_guess)

    def submit(self, requests: Sequence[GenerationRequest], model: ServedModel | None = None) -> TokenStream:
        """Hands the sequences of one HTTP request to the device thread, for the model that was loaded first or for another.

        The caller holds a place for each and a loan of the model, reads the stream to its end or closes it.
        """
        self._require_ready()
        arrival = time.monotonic()
        name = (model or self.model).name
        stream = TokenStream([request.request_id for request in requests], self._cancel)
        for index, request in enumerate(requests):
            self.inbox.put(Submit(request, stream, index, arrival, name))
        return stream

    def begin_drain(self, deadline: float) -> None:
        """Refuses new work and lets running work finish until `deadline` on the monotonic clock."""
        if self._phase is not Phase.FAILED:
            self._phase = Phase.DRAINING
        self.inbox.put(Drain(deadline))
        self.library.close()

    def reload(self, name: str = "", *, model: str = "", checkpoint_path: str = "", revision: str = "") -> Reloaded:
        """Reads weights on the calling thread and has them swapped in; raises and changes nothing if they do not fit.

        `name` says which of the loaded models gets them, where there are several.
        """
        self._require_ready()
        loaded = self.library.loaded_names()
        if not name and len(loaded) > 1:
            raise BadRequest(f"Several models are loaded; say in 'name' which one to reload: {', '.join(loaded)}.", param="name")
        with self.library.borrow(name or next(iter(loaded), None), loads=False) as loan:
            reloader = loan.resident.reloader
            if reloader is None:
                raise Unavailable("This server cannot reload.", retry_after_seconds=60.0)
            return reloader.reload(model=model, checkpoint_path=checkpoint_path, revision=revision)

    def begin_reload(self) -> threading.Thread:
        """Reloads what is loaded on a thread of its own, for a signal; the outcome is in the log."""

        def work() -> None:
            for name in self.library.loaded_names() or [""]:
                reload(name)

        def reload(name: str) -> None:
            try:
                self.reload(name)
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
        self.library.close()
        self.inbox.put(Stop())
        self.library.join()

    def wait_ready(self, timeout_seconds: float) -> bool:
        """Whether the model became ready, or loading ended otherwise, within the time."""
        return self._ready.wait(timeout_seconds) and self._phase is Phase.READY

    def beat(self, *, is_busy: bool = False) -> None:
        """A sign of life; one that is busy owes the next one soon."""
        self._last_beat = time.monotonic()
        self._is_busy = is_busy

    def publish(self, resident: Resident) -> None:
        """The first model is loaded: requests may come."""
        self._model = resident.model
        self.library.put(resident)
        self.beat()
        if self._phase is Phase.LOADING:
            self._phase = Phase.READY
        self._ready.set()

    def fail(self) -> None:
        self._phase = Phase.FAILED
        self._ready.set()

    def _note_models(self, residents: Sequence[Resident]) -> None:
        """Bounds the tokens of admitted work by what the loaded models may take, where the operator did not bound them."""
        if not residents:
            return  # whoever comes next has one loaded
        self._max_guess = max(resident.model.max_seq_len for resident in residents)
        if not self._has_own_limit:
            limits = (resident.max_tokens or self.max_inflight * resident.model.max_seq_len for resident in residents)
            self.admission.max_tokens = sum(limits)

    def _is_in(self, phase: Phase) -> float:
        return float(self._phase is phase)

    def _cancel(self, request_id: str, finish: FinishReason) -> None:
        self.inbox.put(Cancel(request_id, finish))

    def _require_ready(self) -> None:
        if self.is_stalled:
            self.metrics.refused.labels("stalled").inc()
            raise Unavailable(f"The device has not moved for {self.heartbeat_age():.0f} seconds.", retry_after_seconds=10.0)
        if self._phase is Phase.READY:
            return
        self.metrics.refused.labels(self._phase.value).inc()
        if self._phase is Phase.LOADING:
            raise Unavailable(f"The model is still loading ({self.progress}).", retry_after_seconds=5.0)
        if self._phase is Phase.DRAINING:
            raise Unavailable("The server is shutting down; please try another one.", retry_after_seconds=10.0)
        raise Unavailable("The device has failed and the server is restarting.", retry_after_seconds=10.0)
