"""What the schedulers of all kinds of models have in common: committing tokens and ending sequences.

Called by the device loop only. A subclass plans which sequences run in a round.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Generic, TypeVar

from levserve.schedule.background import Rest, Share, live_only
from levserve.schedule.commit import Committer, Jumps, Sampled
from levserve.schedule.request import FinishReason
from levserve.schedule.sequence import RoundPlan, SequenceUpdate
from levserve.schedule.slots import Slots

SlotsT = TypeVar("SlotsT", bound=Slots)


class SlotScheduler(Generic[SlotsT]):
    """Every sequence that has been accepted and has not ended is either waiting or running.

    `check` recomputes what they hold from scratch and is cheap enough to call after each step of a test.
    """

    def __init__(self, slots: SlotsT, jumps: Jumps) -> None:
        self._slots = slots
        self._committer = Committer(slots, jumps)
        self._rest = Rest()
        self._share = Share()

    @property
    def num_waiting(self) -> int:
        return len(self._slots.waiting)

    @property
    def num_running(self) -> int:
        return len(self._slots.running)

    @property
    def has_work(self) -> bool:
        return self.num_waiting + self.num_running > 0

    @property
    def has_live_work(self) -> bool:
        """Whether any sequence is not background work."""
        return self._slots.has_live_work

    def end(self, request_id: str, finish: FinishReason) -> SequenceUpdate | None:
        """Ends a sequence from outside; None when it has ended already."""
        return self._slots.end(request_id, finish)

    def end_all(self, finish: FinishReason) -> list[SequenceUpdate]:
        return self._slots.end_all(finish)

    def expire(self, now: float) -> list[SequenceUpdate]:
        """Ends every sequence whose deadline has passed, waiting ones before they cost anything."""
        return self._slots.expire(now)

    def commit(self, plan: RoundPlan, chunks: Seq[Sampled], rows: Seq[Sampled]) -> list[SequenceUpdate]:
        """Takes what a planned round sampled, in the plan's order, and gives what each stream gained."""
        return self.commit_chunks(plan, chunks) + self.commit_rows(plan, rows)

    def commit_chunks(self, plan: RoundPlan, chunks: Seq[Sampled]) -> list[SequenceUpdate]:
        """Commits the prompts alone; nothing else in the round depends on them."""
        pairs = zip(plan.chunks, chunks, strict=True)
        return self._gained([self._committer.take_chunk(chunk, sampled) for chunk, sampled in pairs])

    def commit_rows(self, plan: RoundPlan, rows: Seq[Sampled]) -> list[SequenceUpdate]:
        pairs = zip(plan.rows, rows, strict=True)
        return self._gained([self._committer.take_row(row, sampled) for row, sampled in pairs])

    def note_round(self, plan: RoundPlan, seconds: float) -> None:
        """Records the time of a round, which shows how many background rows may run beside its live rows."""
        if not plan.rows or plan.chunks or plan.forks or plan.is_verify:
            return
        num_live = sum(1 for _ in live_only(row.sequence for row in plan.rows))
        steps = max(row.steps for row in plan.rows)
        self._share.note(num_live, len(plan.rows) - num_live, seconds / steps)

    def take_constraint_counts(self) -> tuple[int, int]:
        """Since the last call: tokens that did not fit their constraint, and forced tokens not drawn."""
        return self._committer.take_constraint_counts()

    def check(self) -> None:
        """Recomputes slots and pages from the sequences; raises AssertionError on the first difference."""
        self._slots.check()

    def _gained(self, updates: Seq[SequenceUpdate | None]) -> list[SequenceUpdate]:
        """The updates that are not None."""
        return [update for update in updates if update is not None]
