"""One loaded model on the device thread: its scheduler, its runner and the round it has in flight.

A `turn` plans and dispatches a round and then reads the one before, so that the device never waits for Python; where it
speculates it reads first, because drafts are made of what was read, and the device waits for the millisecond that takes.
Every accepted sequence ends with exactly one finishing batch, also on failure.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass

from levserve.engine.courier import Courier, News
from levserve.engine.engine import Reload, Submit
from levserve.engine.runner import Flight, Runner
from levserve.engine.stream import TokenStream
from levserve.metrics import Metrics
from levserve.schedule.pace import Pace
from levserve.schedule.request import FinishReason
from levserve.schedule.scheduler import Sampled, Scheduler
from levserve.schedule.sequence import Progress, RoundPlan

log = logging.getLogger(__name__)

EARLY_SECONDS = 2e-4
"""Who waits longer than this for a round's chunks has seen when they came, and decoding began; who does not came too late for that."""


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


class Lane:
    """Belongs to the device thread."""

    def __init__(self, scheduler: Scheduler, runner: Runner, pace: Pace, courier: Courier, metrics: Metrics) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self._pace = pace
        self._courier = courier
        self._metrics = metrics
        self._flight: Flight | None = None
        self._tickets: dict[str, Ticket] = {}
        self._round_began = 0.0

    @property
    def has_work(self) -> bool:
        return self._flight is not None or self.scheduler.has_work

    @property
    def drain_seconds(self) -> float:
        """How long all it has will take, by the measured rates."""
        return self._pace.seconds_for(self.scheduler.backlog())

    def turn(self) -> None:
        """Starts the next round behind the one in flight, and hands out the tokens of that one."""
        self._deliver(self.scheduler.expire(time.monotonic()))
        before, self._flight = self._flight, None
        if before is None:
            self._round_began = time.monotonic()
        elif before.plan.is_verify or self._speculates():
            self._read(before)
            before = None
        max_prefill = self._pace.max_prefill(self.runner.prefill_token_seconds, self.scheduler.num_streams)
        plan = self.scheduler.plan(max_prefill)
        self._note_plan(plan)
        self._flight = None if plan.is_empty else self.runner.dispatch(plan, may_mix=self._pace.knows_decoding)
        if before is not None:
            self._read(before)

    def accept(self, submit: Submit) -> None:
        request = submit.request
        self._tickets[request.request_id] = Ticket(submit.stream, submit.index, submit.arrival)
        self._metrics.prompt_tokens.inc(len(request.prompt))
        self.scheduler.add(request)

    def end(self, request_id: str, finish: FinishReason) -> None:
        """Ends a sequence, if it is one of this lane's that has not ended."""
        ended = self.scheduler.end(request_id, finish)
        self._deliver([ended] if ended is not None else [])

    def end_all(self, finish: FinishReason) -> None:
        self._deliver(self.scheduler.end_all(finish))

    def swap(self, reload: Reload) -> None:
        """Between two rounds: the one in flight ends with the weights it was dispatched with."""
        start = time.monotonic()
        self.runner.swap(reload.leaves)
        self.scheduler.forget_prefixes()
        reload.done.set_result(time.monotonic() - start)

    def retire(self) -> None:
        """Ends what there is and waits for the round in flight: after this nothing of the lane is in use."""
        self.end_all(FinishReason.CANCELLED)
        flight, self._flight = self._flight, None
        if flight is not None:
            self.runner.read(flight)

    def _read(self, flight: Flight) -> None:
        started = time.monotonic()
        chunks = self.runner.read_chunks(flight)
        chunks_read = time.monotonic()
        self._deliver(self.scheduler.commit_chunks(flight.plan, chunks))  # first tokens do not wait for others' next ones
        rows = self.runner.read_rows(flight)
        now = time.monotonic()
        seconds = now - self._round_began
        self._round_began = now
        self._metrics.round_time.observe(seconds)
        self._pace.note_round(flight.plan.num_prefill, sum(len(sampled.tokens) for sampled in rows), seconds)
        if rows and not flight.is_mixed:
            was_early = chunks_read - started > EARLY_SECONDS
            prefill_seconds = flight.plan.num_prefill * self.runner.prefill_token_seconds
            self._pace.note_decoding(len(rows), now - chunks_read if was_early else seconds - prefill_seconds)
        self._note_drafts(flight.plan, rows, seconds)
        self._deliver(self.scheduler.commit_rows(flight.plan, rows))

    def _speculates(self) -> bool:
        if self.scheduler.speculation is None:
            return False
        self.scheduler.speculation.max_rows = self.runner.programs.max_verified
        return self.scheduler.is_speculating

    def _note_drafts(self, plan: RoundPlan, rows: list[Sampled], seconds: float) -> None:
        for row, sampled in zip(plan.rows, rows) if plan.is_verify else ():
            if row.draft:
                self._metrics.drafts.inc()
                self._metrics.draft_tokens.inc(len(row.draft))
                self._metrics.accepted_tokens.inc(max(len(sampled.tokens) - row.steps, 0))
        if self.scheduler.speculation is not None and plan.rows and not plan.chunks:
            steps = max(row.steps for row in plan.rows)
            self.scheduler.speculation.note_round(len(plan.rows), seconds / steps, is_verify=plan.is_verify)

    def _deliver(self, news: list[Progress]) -> None:
        """Counts before it tells: who has an answer finds it in the metrics."""
        if not news:
            return
        now = time.monotonic()
        tickets = [self._tickets[progress.sequence.request.request_id] for progress in news]
        self._metrics.generated_tokens.inc(sum(len(progress.batch.tokens) for progress in news))
        gaps: Counter[float] = Counter()  # most rows had their last tokens at the same time, and as many
        for ticket, progress in zip(tickets, news):
            if count := len(progress.batch.tokens):
                if ticket.last_token is None:
                    self._note_first(ticket, now)
                else:
                    gaps[(now - ticket.last_token) / count] += 1
                ticket.last_token = now
            if progress.batch.finish is not None:
                del self._tickets[progress.sequence.request.request_id]
                self._note_end(ticket, progress, now)
        for gap, num_rows in gaps.items():
            self._metrics.inter_token.observe_rows(gap, num_rows)
        self._courier.send([News(ticket.stream, ticket.index, progress.batch) for ticket, progress in zip(tickets, news)])

    def _note_first(self, ticket: Ticket, now: float) -> None:
        ticket.first_token = now
        self._metrics.ttft.observe(now - ticket.arrival)
        self._metrics.prefill_time.observe(now - (ticket.admitted or now))

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
            pool = self.scheduler.pool
            log.warning("%s: preempted, %d tokens to recompute; %d of %d KV pages in use",
                        sequence.request.request_id, lost, pool.num_held, pool.num_pages)
            metrics.preemptions.inc()
            metrics.preempted_tokens.inc(lost)
        if not plan.is_empty:
            metrics.round_tokens.observe(plan.num_prefill + sum(row.steps + len(row.draft) for row in plan.rows))
        if plan.chunks:
            metrics.rounds.labels("prefill").inc()
            metrics.prefill_tokens.inc(plan.num_prefill)
        if plan.rows:
            metrics.rounds.labels("verify" if plan.is_verify else "decode").inc()
            metrics.batch_rows.observe(len(plan.rows))
