"""One loaded model on the device thread: its scheduler, its runner and its round in flight.

A `step` plans and dispatches a round and then reads the one before, so that the device never waits for
Python. It reads first if the next plan depends on those tokens: to make drafts from them, or masks when all
rows are constrained. The device then waits for about a millisecond.

Every accepted sequence ends with exactly one finishing batch, also on failure.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass

from levserve.device.delivery import AddressedBatch, Delivery
from levserve.device.kind import Planner, Round, RoundRunner
from levserve.device.tasks import SwapWeights
from levserve.engine.messages import Submit
from levserve.engine.stream import TokenStream
from levserve.observe.metrics import Metrics
from levserve.schedule.commit import Sampled
from levserve.schedule.pace import Expected, Pace
from levserve.schedule.request import FinishReason
from levserve.schedule.sequence import RoundPlan, Sequence, SequenceUpdate

log = logging.getLogger(__name__)

BLOCKED_SECONDS = 2e-4
"""If reading the chunks blocked longer, prefill ended just now and the rest of the round is decode time."""


@dataclass(slots=True)
class RequestState:
    """Where the batches of an accepted sequence go, and the times from which its latencies are counted."""

    stream: TokenStream
    index: int
    arrival: float
    placed: float | None = None
    first_token: float | None = None
    last_token: float | None = None

    @property
    def phase(self) -> str:
        if self.placed is None:
            return "queued"
        return "prefill" if self.first_token is None else "decode"


class ModelLoop:
    """Belongs to the device thread."""

    def __init__(
        self, scheduler: Planner, runner: RoundRunner, pace: Pace, delivery: Delivery, metrics: Metrics
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self._pace = pace
        self._delivery = delivery
        self._metrics = metrics
        self._in_flight: Round | None = None
        self._requests: dict[str, RequestState] = {}
        self._round_began = 0.0

    @property
    def has_work(self) -> bool:
        return self._in_flight is not None or self.scheduler.has_work

    @property
    def has_live_work(self) -> bool:
        """Whether it has work that is not background work."""
        return self.scheduler.has_live_work

    def expect(self) -> Expected:
        """When its accepted work will end, by the measured rates."""
        return self._pace.expect(self.scheduler.backlog())

    def step(self) -> None:
        """Dispatches the next round behind the one in flight, and delivers the tokens of that one."""
        self._deliver(self.scheduler.expire(time.monotonic()))
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is None:
            self._round_began = time.monotonic()
        elif in_flight.plan.is_verify or self.scheduler.reads_first or self._speculates():
            self._read(in_flight)
            in_flight = None
        max_prefill = self._pace.max_prefill(self.runner.prefill_token_seconds, self.scheduler.num_streams)
        plan = self.scheduler.plan(max_prefill)
        self._note_plan(plan)
        if not plan.is_empty:
            self._in_flight = self.runner.dispatch(plan, may_mix=self._pace.knows_decoding)
        if in_flight is not None:
            self._read(in_flight)

    def accept(self, submit: Submit) -> None:
        request = submit.request
        self._requests[request.request_id] = RequestState(submit.stream, submit.index, submit.arrival)
        self._metrics.prompt_tokens.inc(len(request.prompt))
        self._metrics.constrained.inc(request.constraint is not None)
        self.scheduler.add(request)

    def end(self, request_id: str, finish: FinishReason) -> None:
        """Ends a sequence, if it is one of this model's and has not ended."""
        update = self.scheduler.end(request_id, finish)
        if update is not None:
            self._deliver([update])

    def end_all(self, finish: FinishReason) -> None:
        self._deliver(self.scheduler.end_all(finish))

    def swap(self, task: SwapWeights) -> None:
        """Swaps weights between two rounds: the one in flight keeps those that it was dispatched with."""
        start = time.monotonic()
        self.runner.swap(task.leaves)
        self.scheduler.forget_prefixes()
        task.done.set_result(time.monotonic() - start)

    def retire(self) -> None:
        """Ends all sequences and waits for the round in flight: after this the runner is not in use."""
        self.end_all(FinishReason.CANCELLED)
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            in_flight.read()

    def _read(self, in_flight: Round) -> None:
        started = time.monotonic()
        chunks = in_flight.read_chunks()
        chunks_read = time.monotonic()
        # Delivered before the rows are read: first tokens do not wait for the decoding of others.
        self._deliver(self.scheduler.commit_chunks(in_flight.plan, chunks))
        rows = in_flight.read_rows()
        now = time.monotonic()
        seconds = now - self._round_began
        self._round_began = now
        self._metrics.round_time.observe(seconds)
        work = in_flight.plan.work_done(sum(len(sampled.tokens) for sampled in rows))
        self._pace.note_round(work.prefill, work.decode, seconds)
        if rows and not in_flight.is_mixed:
            decode_seconds = now - chunks_read
            if chunks_read - started <= BLOCKED_SECONDS:
                decode_seconds = seconds - work.prefill * self.runner.prefill_token_seconds
            self._pace.note_decoding(len(rows), decode_seconds)
        self.scheduler.note_round(in_flight.plan, seconds)
        self._note_drafts(in_flight.plan, rows, seconds)
        self._deliver(self.scheduler.commit_rows(in_flight.plan, rows))
        self._note_constraints()

    def _speculates(self) -> bool:
        if self.scheduler.speculation is None:
            return False
        self.scheduler.speculation.max_rows = self.runner.programs.max_verified
        return self.scheduler.is_speculating

    def _note_drafts(self, plan: RoundPlan, rows: list[Sampled], seconds: float) -> None:
        speculation = self.scheduler.speculation
        for row, sampled in zip(plan.rows, rows):
            if row.draft:
                self._note_draft(len(row.draft), max(len(sampled.tokens) - row.steps, 0))
            elif row.reach:
                num_gained, num_accepted = len(sampled.tokens), sampled.num_accepted
                self._note_draft(sampled.num_drafted, num_accepted, num_gained - num_accepted)
                if speculation is not None:
                    speculation.note_drafted(num_gained, num_accepted)
        has_missed = any(row.missed for row in plan.rows)  # not a cost of every round
        if speculation is not None and plan.rows and not plan.chunks and not has_missed:
            steps = max(row.steps for row in plan.rows)
            if plan.is_verify and speculation.has_model:
                steps = speculation.num_turns
            speculation.note_round(len(plan.rows), seconds / steps, is_verify=plan.is_verify, num_steps=steps)

    def _note_draft(self, num_drafted: int, num_accepted: int, num_drafts: int = 1) -> None:
        self._metrics.drafts.inc(num_drafts)
        self._metrics.draft_tokens.inc(num_drafted)
        self._metrics.accepted_tokens.inc(num_accepted)

    def _note_constraints(self) -> None:
        misfits, forced = self.scheduler.take_constraint_counts()
        self._metrics.misfits.inc(misfits)
        self._metrics.forced_tokens.inc(forced)

    def _deliver(self, updates: list[SequenceUpdate]) -> None:
        """Counts batches, then sends them: a client that has an answer must find it in the metrics."""
        if not updates:
            return
        now = time.monotonic()
        self._metrics.generated_tokens.inc(sum(len(update.batch.tokens) for update in updates))
        gaps: Counter[float] = Counter()  # most rows have equal gaps: they gain equally many tokens at once
        batches = []
        for update in updates:
            request_id, batch = update.sequence.request.request_id, update.batch
            state = self._requests[request_id]
            batches.append(AddressedBatch(state.stream, state.index, batch))
            if count := len(batch.tokens):
                if state.last_token is None:
                    self._note_first(state, now)
                else:
                    gaps[(now - state.last_token) / count] += 1
                state.last_token = now
            if batch.finish is not None:
                del self._requests[request_id]
                self._note_end(state, update, now)
        for gap, num_rows in gaps.items():
            self._metrics.inter_token.observe_rows(gap, num_rows)
        self._delivery.send(batches)

    def _note_first(self, state: RequestState, now: float) -> None:
        state.first_token = now
        self._metrics.ttft.observe(now - state.arrival)
        self._metrics.prefill_time.observe(now - (state.placed or now))

    def _note_end(self, state: RequestState, update: SequenceUpdate, now: float) -> None:
        metrics, request = self._metrics, update.sequence.request
        num_generated = len(update.sequence.tokens) - len(request.prompt)
        if update.finish is FinishReason.POISONED:
            log.error("%s: failed, the model computed values for it that are not finite", request.request_id)
        if update.finish in (FinishReason.STOP, FinishReason.LENGTH):
            self._pace.note_end(num_generated, request.max_tokens)
        metrics.request_time.observe(now - state.arrival)
        if state.first_token is not None:
            metrics.decode_time.observe(now - state.first_token)
        metrics.request_prompt.observe(len(request.prompt))
        metrics.request_generated.observe(num_generated)
        metrics.request_max.observe(request.max_tokens)
        assert update.finish is not None
        metrics.finished.labels(update.finish.value).inc()
        if update.finish is FinishReason.DEADLINE:
            metrics.deadlines.labels(state.phase).inc()

    def _note_plan(self, plan: RoundPlan) -> None:
        metrics, now = self._metrics, time.monotonic()
        for sequence in plan.placed:
            state = self._requests[sequence.request.request_id]
            if state.placed is None:  # else it was preempted
                state.placed = now
                state.stream.note_placed(now)
                metrics.queue_time.observe(now - state.arrival)
                metrics.prefix_hit_tokens.inc(sequence.num_cached or 0)
        for sequence, lost in plan.preempted:
            self._note_preempted(sequence, lost)
        if not plan.is_empty:
            metrics.round_tokens.observe(plan.num_tokens)
        if plan.chunks and self.scheduler.pool is None:
            metrics.rounds.labels("score").inc()
        elif plan.chunks:
            metrics.rounds.labels("prefill").inc()
            metrics.prefill_tokens.inc(plan.num_prefill)
        if plan.rows:
            metrics.rounds.labels("verify" if plan.is_verify else "decode").inc()
            metrics.batch_rows.observe(len(plan.rows))

    def _note_preempted(self, sequence: Sequence, lost: int) -> None:
        pool = self.scheduler.pool
        held = "" if pool is None else f"; {pool.num_held} of {pool.num_pages} KV pages in use"
        log.warning("%s: preempted, %d tokens to recompute%s", sequence.request.request_id, lost, held)
        self._metrics.preemptions.inc()
        self._metrics.preempted_tokens.inc(lost)
