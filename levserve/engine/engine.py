"""The device thread as other threads see it: they admit and submit requests, drain it, and check its health.

Importing this imports no jax. What crosses to the device thread is a frozen message through one queue. What
comes back are the batches of a `TokenStream`, and the attributes that the device thread sets here.
"""

from __future__ import annotations

import functools
import math
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence

from levserve.engine.admission import Admission, Reservation
from levserve.engine.messages import Cancel, DeviceTask, Drain, Message, Stop, Submit
from levserve.engine.served_model import ServedModel
from levserve.engine.stream import PushStream, TokenStream
from levserve.errors import Unavailable
from levserve.observe.health import DeviceStatus, Phase
from levserve.observe.metrics import Metrics
from levserve.schedule.request import FinishReason, GenerationRequest, TokenBatch

IDLE_BEAT_SECONDS = 1.0
"""How often an idle device thread shows that it is alive."""
OVERDUE_SECONDS = 1.0
"""The device thread ends what runs at the end of a drain; this much later, others do."""


class Engine:
    """What the rest of the server sees of the device thread.

    `inbox`, `beat`, `mark_ready`, `mark_following` and `fail` are for the device thread; any thread may call
    the rest.
    """

    def __init__(
        self, *, max_inflight: int, metrics: Metrics, max_tokens: int = 0, stall_seconds: float = 30.0
    ) -> None:
        # SimpleQueue is written in C. With Queue, a thread may wait for the GIL while it holds its lock.
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.metrics = metrics
        self.max_inflight = max_inflight
        self.admission = Admission(max_inflight, max_tokens, metrics)
        self.background = Admission(max_inflight, max_tokens, metrics)
        """Counts background work, which yields to all other work and so takes none of its places."""
        self.progress = "starting"
        self.device: DeviceStatus | None = None
        """What the server runs on; the device thread sets it, from the first model on."""
        self._has_own_limit = max_tokens > 0
        self._max_guess = 0
        self._stall_seconds = stall_seconds
        self._is_busy = False
        self._phase = Phase.LOADING
        self._has_model = False
        self._is_settled = threading.Event()
        self._last_beat = time.monotonic()
        self._on_drain: list[Callable[[], None]] = []
        self._on_close: list[Callable[[], None]] = []
        self._streams: weakref.WeakSet[TokenStream] = weakref.WeakSet()
        self._streams_lock = threading.Lock()
        self.drain_deadline = math.inf
        """When running work must have ended, on the monotonic clock."""
        metrics.heartbeat_age.set_function(self.heartbeat_age)
        for phase in Phase:
            metrics.phase.labels(phase.value).set_function(functools.partial(self._is_in, phase))

    @property
    def phase(self) -> Phase:
        return self._phase

    def heartbeat_age(self) -> float:
        return time.monotonic() - self._last_beat

    @property
    def is_stalled(self) -> bool:
        """Whether the device thread serves and has work, but has not called `beat` for too long."""
        is_serving = self._phase in (Phase.READY, Phase.FOLLOWING, Phase.DRAINING)
        has_work = self._is_busy or not self.inbox.empty()
        return is_serving and has_work and 0 < self._stall_seconds < self.heartbeat_age()

    def require_loaded(self) -> None:
        """Raises `Unavailable` until the first model is ready."""
        if self._has_model:
            return
        raise self._not_the_leader() if self._phase is Phase.FOLLOWING else self._still_loading()

    def require_ready(self) -> None:
        """Raises `Unavailable` unless the server accepts new work."""
        if self.is_stalled:
            self.metrics.refused.labels("stalled").inc()
            raise Unavailable(
                f"The device has not moved for {self.heartbeat_age():.0f} seconds.", retry_after_seconds=10.0
            )
        if self._phase is Phase.READY:
            return
        self.metrics.refused.labels(self._phase.value).inc()
        if self._phase is Phase.LOADING:
            raise self._still_loading()
        if self._phase is Phase.FOLLOWING:
            raise self._not_the_leader()
        if self._phase is Phase.DRAINING:
            raise Unavailable(
                "The server is shutting down; please try another one.", retry_after_seconds=10.0
            )
        raise Unavailable("The device has failed and the server is restarting.", retry_after_seconds=10.0)

    def reserve(self, body_bytes: int = 0) -> Reservation:
        """A place for one request whose body has this size; raises `Overloaded` or `Unavailable`."""
        self.require_ready()
        return self.admission.reserve(body_bytes, self._max_guess)

    def submit(self, requests: Sequence[GenerationRequest], model: ServedModel) -> TokenStream:
        """Hands the sequences of one HTTP request to the device thread.

        The caller holds a place for each and a handle on the model. It reads the stream to its end or closes
        the stream.
        """
        self.require_ready()
        stream = TokenStream([request.request_id for request in requests], self._cancel)
        with self._streams_lock:
            self._streams.add(stream)
        self._send_requests(requests, model, stream)
        return stream

    def push(
        self,
        requests: Sequence[GenerationRequest],
        model: ServedModel,
        on_batch: Callable[[int, TokenBatch], None],
    ) -> PushStream:
        """`submit` without a reader: each batch goes to `on_batch`, on the thread that delivers it."""
        self.require_ready()
        stream = PushStream([request.request_id for request in requests], self._cancel, on_batch)
        self._send_requests(requests, model, stream)
        return stream

    def send(self, task: DeviceTask) -> None:
        """Queues a task that the device thread runs between two rounds."""
        self.inbox.put(task)

    def on_drain(self, call: Callable[[], None]) -> None:
        """Registers a function that `begin_drain` calls."""
        self._on_drain.append(call)

    def begin_drain(self, deadline: float) -> None:
        """Refuses new work and lets running work finish until `deadline` on the monotonic clock."""
        if self._phase is not Phase.FAILED:
            self._phase = Phase.DRAINING
        self.drain_deadline = min(self.drain_deadline, deadline)
        self.inbox.put(Drain(deadline))
        for call in self._on_drain:
            call()

    def end_overdue(self) -> None:
        """Ends the streams that the device thread should have ended with the drain, but did not.

        It hangs, or it compiles. The readers get to tell their clients so before the process ends.
        """
        if time.monotonic() < self.drain_deadline + OVERDUE_SECONDS:
            return
        with self._streams_lock:
            streams = list(self._streams)
            self._streams.clear()
        for stream in streams:
            stream.end_rest(FinishReason.SHUTDOWN)

    def on_close(self, call: Callable[[], None]) -> None:
        """Registers a function that `close` calls."""
        self._on_close.append(call)

    def close(self) -> None:
        """The last step of an orderly shutdown; the device thread has ended, or is still loading."""
        for call in self._on_close:
            call()

    def stop(self) -> None:
        """Ends the device thread; called when no HTTP thread can submit any more."""
        self.inbox.put(Stop())

    def wait_ready(self, timeout_seconds: float) -> bool:
        """Waits until the first model is ready or its loading failed; whether it is ready."""
        return self._is_settled.wait(timeout_seconds) and self._phase is Phase.READY

    def beat(self, *, is_busy: bool = False) -> None:
        """Notes a sign of life. A busy device thread that gives none for too long counts as stalled."""
        self._last_beat = time.monotonic()
        self._is_busy = is_busy

    def mark_ready(self) -> None:
        """The first model is loaded: requests are accepted from here on."""
        self.beat()
        if self._phase is Phase.LOADING:
            self._phase = Phase.READY
        self._has_model = True
        self._is_settled.set()

    def mark_following(self) -> None:
        """This host computes for another one, which accepts the requests."""
        self.beat()
        if self._phase is Phase.LOADING:
            self._phase = Phase.FOLLOWING

    def fail(self) -> None:
        self._phase = Phase.FAILED
        self._is_settled.set()

    def note_models(self, models: Sequence[ServedModel]) -> None:
        """Bounds the tokens of accepted work by what the models can hold, unless the operator set a bound."""
        if not models:
            return  # the bound stays: the next model is loaded by a request, which must be admitted
        self._max_guess = max(model.max_seq_len for model in models)
        if not self._has_own_limit:
            limits = (model.max_inflight_tokens or self.max_inflight * model.max_seq_len for model in models)
            self.admission.max_tokens = self.background.max_tokens = sum(limits)

    def _send_requests(
        self, requests: Sequence[GenerationRequest], model: ServedModel, stream: TokenStream
    ) -> None:
        arrival = time.monotonic()
        for index, request in enumerate(requests):
            self.inbox.put(Submit(request, stream, index, arrival, model.name))

    def _still_loading(self) -> Unavailable:
        return Unavailable(f"The model is still loading ({self.progress}).", retry_after_seconds=5.0)

    def _not_the_leader(self) -> Unavailable:
        return Unavailable("This host follows host 0; send requests to host 0.", retry_after_seconds=10.0)

    def _is_in(self, phase: Phase) -> float:
        return float(self._phase is phase)

    def _cancel(self, request_id: str, finish: FinishReason) -> None:
        self.inbox.put(Cancel(request_id, finish))
