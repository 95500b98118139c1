"""One loaded model on the device thread: its scheduler, its runner and the round it has in in_flight.

A `turn` plans and dispatches a round and then reads the one before, so that the device never waits for Python; where it
speculates it reads first, because drafts are made of what was read, and the device waits for the millisecond that takes.
Every accepted sequence ends with exactly one finishing batch, also on failure.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass

from levserve.device.delivery import Delivered, Delivery
from levserve.device.runner import InFlightRound, Runner
from levserve.device.tasks import SwapWeights
from levserve.engine.messages import Submit
from levserve.engine.stream import TokenStream
from levserve.observe.metrics import Metrics
from levserve.schedule.pace import Pace
from levserve.schedule.request import FinishReason
from levserve.schedule.scheduler import Sampled, Scheduler
from levserve.schedule.sequence import RoundPlan, SequenceUpdate

log = logging.getLogger(__name__)

EARLY_SECONDS = 2e-4
"""Who waits longer than this for a round's chunks has seen when they came, and decoding began; who does not came too late for that."""


@dataclass(slots=True)
class Recipient:
    """Where a sequence's updates go, and the times its latencies are counted from."""

    stream: TokenStream
    index: int
    arrival: float
    admitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None

    @property
    def phase(self) -> str:
        return "queued" if self.admitted is None else "prefill" if self.first_token is None else "decode"


class ModelLoop:
    """Belongs to the device thread."""

    def __init__(
        self, scheduler: Scheduler, runner: Runner, pace: Pace, delivery: Delivery, metrics: Metrics
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self._pace = pace
        self._delivery = delivery
        self._metrics = metrics
        self._in_flight: InFlightRound | None = None
        self._recipients: dict[str, Recipient] = {}
        self._round_began = 0.0

    @property
    def has_work(self) -> bool:
        return self._in_flight is not None or self.scheduler.has_work

    @property
    def drain_seconds(self) -> float:
        """How long all it has will take, by the measured rates."""
        return self._pace.seconds_for(self.scheduler.backlog())

    def turn(self) -> None:
        """Starts the next round behind the one in in_flight, and hands out the tokens of that one."""
        self._deliver(self.scheduler.expire(time.monotonic()))
        before, self._in_flight = self._in_flight, None
        if before is None:
            self._round_began = time.monotonic()
        elif before.plan.is_verify or self._speculates():
            self._read(before)
            before = None
        max_prefill = self._pace.max_prefill(self.runner.prefill_token_seconds, self.scheduler.num_streams)
        plan = self.scheduler.plan(max_prefill)
        self._note_plan(plan)
        self._in_flight = (
            None if plan.is_empty else self.runner.dispatch(plan, may_mix=self._pace.knows_decoding)
        )
        if before is not None:
            self._read(before)

    def accept(self, submit: Submit) -> None:
        request = submit.request
        self._recipients[request.request_id] = Recipient(submit.stream, submit.index, submit.arrival)
        self._metrics.prompt_tokens.inc(len(request.prompt))
        self.scheduler.add(request)

    def end(self, request_id: str, finish: FinishReason) -> None:
        """Ends a sequence, if it is one of this model_loop's that has not ended."""
        ended = self.scheduler.end(request_id, finish)
        self._deliver([ended] if ended is not None else [])

    def end_all(self, finish: FinishReason) -> None:
        self._deliver(self.scheduler.end_all(finish))

    def swap(self, task: SwapWeights) -> None:
        """Between two rounds: the one in in_flight ends with the weights it was dispatched with."""
        start = time.monotonic()
        self.runner.swap(task.leaves)
        self.scheduler.forget_prefixes()
        task.done.set_result(time.monotonic() - start)

    def retire(self) -> None:
        """Ends what there is and waits for the round in in_flight: after this nothing of the model_loop is in use."""
        self.end_all(FinishReason.CANCELLED)
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            self.runner.read(in_flight)

    def _read(self, in_flight: InFlightRound) -> None:
        started = time.monotonic()
        chunks = self.runner.read_chunks(in_flight)
        chunks_read = time.monotonic()
        self._deliver(
            self.scheduler.commit_chunks(in_flight.plan, chunks)
        )  # first tokens do not wait for others' next ones
        rows = self.runner.read_rows(in_flight)
        now = time.monotonic()
        seconds = now - self._round_began
        self._round_began = now
        self._metrics.round_time.observe(seconds)
        self._pace.note_round(
            in_flight.plan.num_prefill, sum(len(sampled.tokens) for sampled in rows), seconds
        )
        if rows and not in_flight.is_mixed:
            was_early = chunks_read - started > EARLY_SECONDS
            prefill_seconds = in_flight.plan.num_prefill * self.runner.prefill_token_seconds
            self._pace.note_decoding(len(rows), now - chunks_read if was_early else seconds - prefill_seconds)
        self._note_drafts(in_flight.plan, rows, seconds)
        self._deliver(self.scheduler.commit_rows(in_flight.plan, rows))

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

    def _deliver(self, updates: list[SequenceUpdate]) -> None:
        """Counts before it tells: who has an answer finds it in the metrics."""
        if not updates:
            return
        now = time.monotonic()
        recipients = [self._recipients[update.sequence.request.request_id] for update in updates]
        self._metrics.generated_tokens.inc(sum(len(update.batch.tokens) for update in updates))
        gaps: Counter[float] = Counter()  # most rows had their last tokens at the same time, and as many
        for recipient, update in zip(recipients, updates):
            if count := len(update.batch.tokens):
                if recipient.last_token is None:
                    self._note_first(recipient, now)
                else:
                    gaps[(now - recipient.last_token) / count] += 1
                recipient.last_token = now
            if update.batch.finish is not None:
                del self._recipients[update.sequence.request.request_id]
                self._note_end(recipient, update, now)
        for gap, num_rows in gaps.items():
            self._metrics.inter_token.observe_rows(gap, num_rows)
        self._delivery.send(
            [
                Delivered(recipient.stream, recipient.index, update.batch)
                for recipient, update in zip(recipients, updates)
            ]
        )

    def _note_first(self, recipient: Recipient, now: float) -> None:
        recipient.first_token = now
        self._metrics.ttft.observe(now - recipient.arrival)
        self._metrics.prefill_time.observe(now - (recipient.admitted or now))

    def _note_end(self, recipient: Recipient, update: SequenceUpdate, now: float) -> None:
        metrics, request = self._metrics, update.sequence.request
        num_generated = len(update.sequence.tokens) - len(request.prompt)
        if update.finish is FinishReason.POISONED:
            log.error(
                "%s: the model's numbers are not finite; the request has failed, others go on",
                request.request_id,
            )
        if update.finish in (FinishReason.STOP, FinishReason.LENGTH):
            self._pace.note_end(num_generated, request.max_tokens)
        metrics.request_time.observe(now - recipient.arrival)
        if recipient.first_token is not None:
            metrics.decode_time.observe(now - recipient.first_token)
        metrics.request_prompt.observe(len(request.prompt))
        metrics.request_generated.observe(num_generated)
        metrics.request_max.observe(request.max_tokens)
        assert update.finish is not None
        metrics.finished.labels(update.finish.value).inc()
        if update.finish is FinishReason.DEADLINE:
            metrics.deadlines.labels(recipient.phase).inc()

    def _note_plan(self, plan: RoundPlan) -> None:
        metrics, now = self._metrics, time.monotonic()
        for sequence in plan.admitted:
            recipient = self._recipients[sequence.request.request_id]
            if recipient.admitted is None:  # else it was preempted
                recipient.admitted = now
                recipient.stream.note_admitted(now)
                metrics.queue_time.observe(now - recipient.arrival)
                metrics.prefix_hit_tokens.inc(sequence.num_cached or 0)
        for sequence, lost in plan.preempted:
            pool = self.scheduler.pool
            log.warning(
                "%s: preempted, %d tokens to recompute; %d of %d KV pages in use",
                sequence.request.request_id,
                lost,
                pool.num_held,
                pool.num_pages,
            )
            metrics.preemptions.inc()
            metrics.preempted_tokens.inc(lost)
        if not plan.is_empty:
            metrics.round_tokens.observe(
                plan.num_prefill + sum(row.steps + len(row.draft) for row in plan.rows)
            )
        if plan.chunks:
            metrics.rounds.labels("prefill").inc()
            metrics.prefill_tokens.inc(plan.num_prefill)
        if plan.rows:
            metrics.rounds.labels("verify" if plan.is_verify else "decode").inc()
            metrics.batch_rows.observe(len(plan.rows))
