"""The device thread's work: take messages, plan, dispatch, read the round before, hand out tokens; until told to stop.

One round is always in flight while the host plans the next: the device never waits for Python. The thread blocks in two
places only, on the inbox when there is nothing to do and on the device when there is, and never on a reader.
"""

from __future__ import annotations

import logging
import queue
import time
from contextlib import suppress
from dataclasses import dataclass

from levserve.engine.engine import Cancel, Drain, Engine, Message, Reload, Stop, Submit
from levserve.engine.runner import Flight, Runner
from levserve.engine.stream import TokenStream
from levserve.errors import Unavailable
from levserve.schedule.pace import Pace
from levserve.schedule.request import FinishReason, TokenBatch
from levserve.schedule.scheduler import Scheduler
from levserve.schedule.sequence import Progress, RoundPlan

log = logging.getLogger(__name__)

WARM_WAIT_SECONDS = 0.05
"""How long it must be quiet before a program gets its first run: requests that come together are not kept waiting by one."""
IDLE_BEAT_SECONDS = 1.0
"""How often an idle device thread shows that it is alive."""
PACE_SECONDS = 0.25
"""How often HTTP threads are told how long the work will take; to count it, every sequence is looked at."""


@dataclass(slots=True)
class Ticket:
    """Where a sequence's news go, and the times its latencies are counted from."""

    stream: TokenStream
    index: int
    arrival: float
    admitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None

    @property
    def phase(self) -> str:
        return "queued" if self.admitted is None else "prefill" if self.first_token is None else "decode"


class DeviceLoop:
    """Owns the scheduler and the runner. Every accepted sequence ends with exactly one finishing batch, also on failure."""

    def __init__(self, engine: Engine, scheduler: Scheduler, runner: Runner, pace: Pace) -> None:
        self._engine = engine
        self._metrics = engine.metrics
        self._scheduler = scheduler
        self._runner = runner
        self._pace = pace
        self._pace_told = 0.0
        self._tickets: dict[str, Ticket] = {}
        self._drain_deadline: float | None = None
        self._is_stopped = False
        self._round_began = 0.0
        self._metrics.kv_pages_total.set(scheduler.pool.num_pages)
        self._metrics.model_info.labels(engine.model.name, scheduler.pool.page_size, scheduler.pool.num_pages).set(1)

    def run(self) -> None:
        """Serves until `Stop`; an exception leaves no stream open behind it."""
        flight: Flight | None = None
        try:
            while not self._is_stopped:
                self._take_messages(wait=flight is None and not self._scheduler.has_work)
                self._engine.beat(is_busy=flight is not None or self._scheduler.has_work)
                self._deliver(self._scheduler.expire(time.monotonic()))
                plan = self._scheduler.plan()
                self._note_plan(plan)
                if flight is None:
                    self._round_began = time.monotonic()
                before, flight = flight, None if plan.is_empty else self._runner.dispatch(plan)
                if before is not None:
                    self._read(before)
                self._set_gauges()
        except BaseException:
            self._end_all(FinishReason.FAILED)
            raise
        finally:
            self._runner.programs.stop()
        self._end_all(FinishReason.SHUTDOWN)

    def _take_messages(self, *, wait: bool) -> None:
        """Empties the inbox; with nothing else to do, waits for the first message."""
        if self._drain_deadline is not None and time.monotonic() >= self._drain_deadline:
            self._deliver(self._scheduler.end_all(FinishReason.SHUTDOWN))
        try:
            patience = WARM_WAIT_SECONDS if self._runner.programs.has_cold else IDLE_BEAT_SECONDS
            message = self._engine.inbox.get(block=wait, timeout=patience)
        except queue.Empty:
            if wait:
                self._runner.warm_one()
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
                ended = self._scheduler.end(request_id, finish)
                self._deliver([ended] if ended is not None else [])
            case Drain(deadline):
                self._drain_deadline = deadline if self._drain_deadline is None else min(deadline, self._drain_deadline)
            case Reload():
                self._swap(message)
            case Stop():
                self._is_stopped = True

    def _swap(self, reload: Reload) -> None:
        """Between two rounds: the one in flight ends with the weights it was dispatched with."""
        start = time.monotonic()
        self._runner.swap(reload.leaves)
        self._scheduler.forget_prefixes()
        reload.done.set_result(time.monotonic() - start)

    def _accept(self, submit: Submit) -> None:
        request = submit.request
        if self._drain_deadline is not None:
            submit.stream.put(submit.index, TokenBatch(tokens=(), finish=FinishReason.SHUTDOWN))
            return
        self._tickets[request.request_id] = Ticket(submit.stream, submit.index, submit.arrival)
        self._metrics.prompt_tokens.inc(len(request.prompt))
        self._scheduler.add(request)

    def _read(self, flight: Flight) -> None:
        chunks, rows = self._runner.read(flight)
        seconds = time.monotonic() - self._round_began
        self._round_began += seconds
        self._metrics.round_time.observe(seconds)
        plan = flight.plan
        self._pace.note_round(sum(chunk.count for chunk in plan.chunks), sum(row.steps for row in plan.rows), seconds)
        self._deliver(self._scheduler.commit(flight.plan, chunks, rows))

    def _deliver(self, news: list[Progress]) -> None:
        now = time.monotonic()
        for progress in news:
            request_id = progress.sequence.request.request_id
            ticket = self._tickets[request_id]
            ticket.stream.put(ticket.index, progress.batch)
            self._note_tokens(ticket, len(progress.batch.tokens), now)
            if progress.finish is not None:
                del self._tickets[request_id]
                self._note_end(ticket, progress, now)

    def _note_tokens(self, ticket: Ticket, count: int, now: float) -> None:
        if count == 0:
            return
        self._metrics.generated_tokens.inc(count)
        if ticket.last_token is None:
            ticket.first_token = now
            self._metrics.ttft.observe(now - ticket.arrival)
            self._metrics.prefill_time.observe(now - (ticket.admitted or now))
        else:
            self._metrics.inter_token.observe((now - ticket.last_token) / count)
        ticket.last_token = now

    def _note_end(self, ticket: Ticket, progress: Progress, now: float) -> None:
        metrics, request = self._metrics, progress.sequence.request
        num_generated = len(progress.sequence.tokens) - len(request.prompt)
        if progress.finish is FinishReason.POISONED:
            log.error("%s: the model's numbers are not finite; the request has failed, others go on", request.request_id)
        if progress.finish in (FinishReason.STOP, FinishReason.LENGTH):
            self._pace.note_end(num_generated, request.max_tokens)
        metrics.request_time.observe(now - ticket.arrival)
        if ticket.first_token is not None:
            metrics.decode_time.observe(now - ticket.first_token)
        metrics.request_prompt.observe(len(request.prompt))
        metrics.request_generated.observe(num_generated)
        metrics.request_max.observe(request.max_tokens)
        assert progress.finish is not None
        metrics.finished.labels(progress.finish.value).inc()
        if progress.finish is FinishReason.DEADLINE:
            metrics.deadlines.labels(ticket.phase).inc()

    def _note_plan(self, plan: RoundPlan) -> None:
        metrics, now = self._metrics, time.monotonic()
        for sequence in plan.admitted:
            ticket = self._tickets[sequence.request.request_id]
            if ticket.admitted is None:  # else it was preempted
                ticket.admitted = now
                ticket.stream.note_admitted(now)
                metrics.queue_time.observe(now - ticket.arrival)
                metrics.prefix_hit_tokens.inc(sequence.num_cached or 0)
        for sequence, lost in plan.preempted:
            pool = self._scheduler.pool
            log.warning("%s: preempted, %d tokens to recompute; %d of %d KV pages in use",
                        sequence.request.request_id, lost, pool.num_held, pool.num_pages)
            metrics.preemptions.inc()
            metrics.preempted_tokens.inc(lost)
        if not plan.is_empty:
            metrics.round_tokens.observe(sum(chunk.count for chunk in plan.chunks) + sum(row.steps for row in plan.rows))
        if plan.chunks:
            metrics.rounds.labels("prefill").inc()
            metrics.prefill_tokens.inc(sum(chunk.count for chunk in plan.chunks))
        if plan.rows:
            metrics.rounds.labels("decode").inc()
            metrics.batch_rows.observe(len(plan.rows))

    def _set_gauges(self) -> None:
        self._metrics.running.set(self._scheduler.num_running)
        self._metrics.waiting.set(self._scheduler.num_waiting)
        self._metrics.kv_pages_used.set(self._scheduler.pool.num_held)
        self._metrics.kv_pages_cached.set(self._scheduler.pool.num_idle)
        now = time.monotonic()
        if now - self._pace_told >= PACE_SECONDS:
            self._pace_told = now
            self._engine.admission.drain_seconds = self._pace.seconds_for(self._scheduler.backlog())

    def _end_all(self, finish: FinishReason) -> None:
        """Ends what runs, and what still lies in the inbox."""
        self._deliver(self._scheduler.end_all(finish))
        while True:
            try:
                message = self._engine.inbox.get_nowait()
            except queue.Empty:
                return
            if isinstance(message, Reload):
                message.done.set_exception(Unavailable("The server is shutting down.", retry_after_seconds=10.0))
            if isinstance(message, Submit):
                message.stream.put(message.index, TokenBatch(tokens=(), finish=finish))
