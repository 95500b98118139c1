"""The device thread's work: take messages, give each loaded model its turn, tell how it goes; until told to stop.

Each model has one round in flight while the host plans its next: the device never waits for Python, and several models share
it round by round. The thread blocks in two places only, on the inbox when there is nothing to do and on the device when there
is, and never on a reader.
"""

from __future__ import annotations

import logging
import queue
import time
from contextlib import suppress

from levserve.engine.courier import Courier
from levserve.engine.engine import Attach, Cancel, Detach, Drain, Engine, Message, Reload, Stop, Submit
from levserve.engine.lane import Lane
from levserve.errors import Unavailable
from levserve.schedule.request import FinishReason, TokenBatch

log = logging.getLogger(__name__)

WARM_WAIT_SECONDS = 0.05
"""How long it must be quiet before a program gets its first run: requests that come together are not kept waiting by one."""
IDLE_BEAT_SECONDS = 1.0
"""How often an idle device thread shows that it is alive."""
PACE_SECONDS = 0.25
"""How often HTTP threads are told how long the work will take; to count it, every sequence is looked at."""


class DeviceLoop:
    """Owns the lanes, one for each loaded model, by its name. An exception leaves no stream open behind it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._metrics = engine.metrics
        self._courier = Courier()
        self._lanes: dict[str, Lane] = {}
        self._pace_told = 0.0
        self._drain_deadline: float | None = None
        self._is_stopped = False

    def attach(self, attach: Attach) -> None:
        """Serves one model more from here on."""
        loaded = attach.loaded
        self._lanes[loaded.model.name] = Lane(loaded.scheduler, loaded.runner, loaded.pace, self._courier, self._metrics)
        self._note_lanes()

    def run(self) -> None:
        """Serves until `Stop`."""
        with self._courier:
            self._run()

    def _run(self) -> None:
        try:
            while not self._is_stopped:
                self._take_messages(wait=not self._has_work)
                self._engine.beat(is_busy=self._has_work)
                for lane in self._lanes.values():
                    lane.turn()
                self._set_gauges()
        except BaseException:
            self._engine.fail()  # before anyone is told: who asks then how the server is hears the same
            self._end_all(FinishReason.FAILED)
            raise
        finally:
            for lane in self._lanes.values():
                lane.runner.programs.stop()
        self._end_all(FinishReason.SHUTDOWN)

    @property
    def _has_work(self) -> bool:
        return any(lane.has_work for lane in self._lanes.values())

    def _take_messages(self, *, wait: bool) -> None:
        """Empties the inbox; with nothing else to do, waits for the first message."""
        if self._drain_deadline is not None and time.monotonic() >= self._drain_deadline:
            for lane in self._lanes.values():
                lane.end_all(FinishReason.SHUTDOWN)
        try:
            has_cold = any(lane.runner.programs.has_cold for lane in self._lanes.values())
            patience = WARM_WAIT_SECONDS if has_cold else IDLE_BEAT_SECONDS
            message = self._engine.inbox.get(block=wait, timeout=patience)
        except queue.Empty:
            if wait:
                for lane in self._lanes.values():
                    lane.runner.warm_one()
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
                for lane in self._lanes.values():
                    lane.end(request_id, finish)
            case Drain(deadline):
                self._drain_deadline = deadline if self._drain_deadline is None else min(deadline, self._drain_deadline)
            case Reload():
                self._lanes[message.model].swap(message)
            case Attach():
                self.attach(message)
            case Detach():
                self._detach(message)
            case Stop():
                self._is_stopped = True

    def _accept(self, submit: Submit) -> None:
        lane = self._lanes.get(submit.model)
        if self._drain_deadline is not None:
            submit.stream.put(submit.index, TokenBatch(tokens=(), finish=FinishReason.SHUTDOWN))
        elif lane is not None:
            lane.accept(submit)
        else:  # who submits holds the model, so this cannot be; but it must not end everyone else's work
            log.error("%s: the model %s is not loaded", submit.request.request_id, submit.model)
            submit.stream.put(submit.index, TokenBatch(tokens=(), finish=FinishReason.FAILED))

    def _detach(self, detach: Detach) -> None:
        lane = self._lanes.pop(detach.model)
        lane.retire()
        self._note_lanes()
        detach.done.set_result(lane.runner)

    def _note_lanes(self) -> None:
        """The names and sizes of what is loaded, for the metrics."""
        self._metrics.kv_pages_total.set(sum(lane.scheduler.pool.num_pages for lane in self._lanes.values()))
        self._metrics.model_info.clear()
        for name, lane in self._lanes.items():
            self._metrics.model_info.labels(name, lane.scheduler.pool.page_size, lane.scheduler.pool.num_pages).set(1)

    def _set_gauges(self) -> None:
        """Of all models together."""
        schedulers = [lane.scheduler for lane in self._lanes.values()]
        self._metrics.running.set(sum(scheduler.num_running for scheduler in schedulers))
        self._metrics.waiting.set(sum(scheduler.num_waiting for scheduler in schedulers))
        self._metrics.kv_pages_used.set(sum(scheduler.pool.num_held for scheduler in schedulers))
        self._metrics.kv_pages_cached.set(sum(scheduler.pool.num_idle for scheduler in schedulers))
        now = time.monotonic()
        if now - self._pace_told >= PACE_SECONDS:
            self._pace_told = now
            self._engine.admission.drain_seconds = sum(lane.drain_seconds for lane in self._lanes.values())

    def _end_all(self, finish: FinishReason) -> None:
        """Ends what runs, and what still lies in the inbox."""
        for lane in self._lanes.values():
            lane.end_all(finish)
        while True:
            try:
                message = self._engine.inbox.get_nowait()
            except queue.Empty:
                return
            if isinstance(message, (Reload, Detach)):
                message.done.set_exception(Unavailable("The server is shutting down.", retry_after_seconds=10.0))
            if isinstance(message, Submit):
                message.stream.put(message.index, TokenBatch(tokens=(), finish=finish))
