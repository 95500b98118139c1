"""The device thread's loop: takes messages, steps each loaded model and sets gauges, until it is stopped.

Each model has one round in flight while the host plans its next one, so the device never waits for Python;
several models share it round by round. The thread waits for messages when it is idle and for the device when
it is not; it never waits for a reader.
"""

from __future__ import annotations

import logging
import queue
import time
from contextlib import suppress

import jax

from levserve.device.delivery import Delivery
from levserve.device.model_loop import ModelLoop
from levserve.device.platform import read_status
from levserve.device.tasks import Attach, Detach, SwapWeights
from levserve.engine.engine import IDLE_BEAT_SECONDS, Engine
from levserve.engine.messages import Cancel, DeviceTask, Drain, Message, Stop, Submit
from levserve.errors import Unavailable
from levserve.schedule.background import Rest
from levserve.schedule.pages import PagePool
from levserve.schedule.request import FinishReason, TokenBatch

log = logging.getLogger(__name__)

WARM_WAIT_SECONDS = 0.05
"""How long the inbox must be empty before a new program gets its first run, which would delay requests."""
PACE_SECONDS = 0.25
"""How often other threads are told how much memory is free, and how long the work will take, which counts
every sequence."""


class DeviceLoop:
    """Owns the model loops, by model name. It ends every stream before it ends, also on failure.

    If given a `device`, it publishes the device's state in the engine.
    """

    def __init__(self, engine: Engine, device: jax.Device | None = None) -> None:
        self._engine = engine
        self._device = device
        self._metrics = engine.metrics
        self._delivery = Delivery()
        self._model_loops: dict[str, ModelLoop] = {}
        self._pace_told = 0.0
        self._rest = Rest()
        self._drain_deadline: float | None = None
        self._is_stopped = False
        self._note_device()

    def attach(self, attach: Attach) -> None:
        """Serves one more model from here on."""
        model_loop = ModelLoop(attach.scheduler, attach.runner, attach.pace, self._delivery, self._metrics)
        self._model_loops[attach.model] = model_loop
        self._note_models()

    def run(self) -> None:
        """Serves until `Stop`."""
        with self._delivery:
            self._run()

    def _run(self) -> None:
        try:
            while not self._is_stopped:
                self._take_messages(wait=not self._has_work)
                self._engine.beat(is_busy=self._has_work)
                for model_loop in self._active():
                    model_loop.step()
                self._set_gauges()
        except BaseException:
            self._engine.fail()  # first: a client told of the failure must find it in the health checks too
            self._end_all(FinishReason.FAILED)
            self._stop_programs(waits=False)  # the process is about to end, and a compile may take minutes
            raise
        self._stop_programs(waits=True)
        self._end_all(FinishReason.SHUTDOWN)

    def _stop_programs(self, *, waits: bool) -> None:
        for model_loop in self._model_loops.values():
            model_loop.runner.programs.stop(waits=waits)

    def _active(self) -> list[ModelLoop]:
        """The model loops that take a step; those with only background work rest beside live work."""
        model_loops = list(self._model_loops.values())
        live = [model_loop for model_loop in model_loops if model_loop.has_live_work]
        has_background = any(
            model_loop.has_work and not model_loop.has_live_work for model_loop in model_loops
        )
        rests = bool(live) and has_background and not self._rest.takes_turn()
        return live if rests else model_loops

    @property
    def _has_work(self) -> bool:
        return any(model_loop.has_work for model_loop in self._model_loops.values())

    def _take_messages(self, *, wait: bool) -> None:
        """Empties the inbox; with `wait`, waits for a first message, and runs a new program if none comes."""
        if self._drain_deadline is not None and time.monotonic() >= self._drain_deadline:
            for model_loop in self._model_loops.values():
                model_loop.end_all(FinishReason.SHUTDOWN)
        try:
            has_cold = any(model_loop.runner.programs.has_cold for model_loop in self._model_loops.values())
            patience = WARM_WAIT_SECONDS if has_cold else IDLE_BEAT_SECONDS
            message = self._engine.inbox.get(block=wait, timeout=patience)
        except queue.Empty:
            if wait:
                for model_loop in self._model_loops.values():
                    model_loop.runner.warm_one()
            return
        with suppress(queue.Empty):
            while True:
                self._handle(message)
                message = self._engine.inbox.get_nowait()

    def _handle(self, message: Message) -> None:
        match message:
            case Submit():
                self._accept(message)
            case Cancel(request_id, finish):
                for model_loop in self._model_loops.values():
                    model_loop.end(request_id, finish)
            case Drain(deadline):
                self._drain_deadline = (
                    deadline if self._drain_deadline is None else min(deadline, self._drain_deadline)
                )
            case SwapWeights():
                self._model_loops[message.model].swap(message)
            case Attach():
                self.attach(message)
            case Detach():
                self._detach(message)
            case Stop():
                self._is_stopped = True

    def _accept(self, submit: Submit) -> None:
        model_loop = self._model_loops.get(submit.model)
        if self._drain_deadline is not None:
            submit.stream.put(submit.index, TokenBatch(tokens=(), finish=FinishReason.SHUTDOWN))
        elif model_loop is not None:
            model_loop.accept(submit)
        else:  # a bug, because the request holds the model; but one that must not end the work of others
            log.error("%s: the model %s is not loaded", submit.request.request_id, submit.model)
            submit.stream.put(submit.index, TokenBatch(tokens=(), finish=FinishReason.FAILED))

    def _detach(self, detach: Detach) -> None:
        model_loop = self._model_loops.pop(detach.model)
        model_loop.retire()
        self._note_models()
        detach.done.set_result(model_loop.runner)

    def _note_device(self) -> None:
        if self._device is not None:
            self._engine.device = read_status(self._device)

    def _note_models(self) -> None:
        """Sets the metrics that only change when a model is added or removed."""
        self._metrics.kv_pages_total.set(sum(pool.num_pages for pool in self._pools))
        has_texts = len(self._pools) < len(self._model_loops)
        self._metrics.note_kinds(has_pages=bool(self._pools) or not has_texts, has_texts=has_texts)
        self._metrics.model_info.clear()
        for name, model_loop in self._model_loops.items():
            pool = model_loop.scheduler.pool
            # To Prometheus, an empty label is the same as no label.
            pages = ("", "") if pool is None else (pool.page_size, pool.num_pages)
            self._metrics.model_info.labels(name, *pages).set(1)

    @property
    def _pools(self) -> list[PagePool]:
        pools = [model_loop.scheduler.pool for model_loop in self._model_loops.values()]
        return [pool for pool in pools if pool is not None]

    def _set_gauges(self) -> None:
        """Sets the gauges, which cover all models together."""
        schedulers = [model_loop.scheduler for model_loop in self._model_loops.values()]
        self._metrics.running.set(sum(scheduler.num_running for scheduler in schedulers))
        self._metrics.waiting.set(sum(scheduler.num_waiting for scheduler in schedulers))
        self._metrics.kv_pages_used.set(sum(pool.num_held for pool in self._pools))
        self._metrics.kv_pages_cached.set(sum(pool.num_idle for pool in self._pools))
        now = time.monotonic()
        if now - self._pace_told >= PACE_SECONDS:
            self._pace_told = now
            self._note_device()
            expected = [model_loop.expect() for model_loop in self._model_loops.values()]
            first_ends = [each.first_end_seconds for each in expected if each.first_end_seconds > 0]
            self._engine.admission.first_end_seconds = min(first_ends, default=0.0)
            self._engine.admission.drain_seconds = sum(each.drain_seconds for each in expected)

    def _end_all(self, finish: FinishReason) -> None:
        """Ends all sequences, and answers what is still in the inbox."""
        for model_loop in self._model_loops.values():
            model_loop.end_all(finish)
        while True:
            try:
                message = self._engine.inbox.get_nowait()
            except queue.Empty:
                return
            if isinstance(message, DeviceTask):
                message.refuse(Unavailable("The server is shutting down.", retry_after_seconds=10.0))
            if isinstance(message, Submit):
                message.stream.put(message.index, TokenBatch(tokens=(), finish=finish))
