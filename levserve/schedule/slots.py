"""The sequences that were accepted and have not ended: those that wait, and those that run, each with a slot.

Belongs to a scheduler, on the device thread. A slot is a place for a sequence's sampling state on the device.
What else a running sequence holds depends on the kind of model: `PagedSlots` adds the pages of a KV cache.
"""

from __future__ import annotations

from levserve.schedule.ranked import RankedSequences
from levserve.schedule.request import BACKGROUND, FinishReason, TokenBatch
from levserve.schedule.sequence import Sequence, SequenceUpdate

RAISE_EVERY = 16
"""After this many slots are given out, the longest wait decides instead of priority: at most one in this many
goes to low-priority work while more important work waits."""


class Slots:
    """Every sequence is in exactly one of `waiting` and `running` until it is dropped."""

    def __init__(self, num_slots: int) -> None:
        self.waiting = RankedSequences()
        self.running = RankedSequences()
        self._num_arrived = 0
        self._until_raise = RAISE_EVERY
        self._num_slots = num_slots
        self._free_slots = list(range(num_slots - 1, -1, -1))

    @property
    def has_live_work(self) -> bool:
        """Whether any sequence is not background work."""
        firsts = (self.running.first(), self.waiting.first())
        return any(first is not None and first.priority < BACKGROUND for first in firsts)

    @property
    def has_background_work(self) -> bool:
        lasts = (self.running.last(), self.waiting.last())
        return any(last is not None and last.priority >= BACKGROUND for last in lasts)

    def add(self, sequence: Sequence) -> None:
        """Puts a new sequence in the queue, behind all others of its priority."""
        self._num_arrived += 1
        sequence.number = self._num_arrived
        self.waiting.add(sequence)

    def make_way(self) -> list[tuple[Sequence, int]]:
        """Preempts less important sequences if the head of the queue needs what they hold.

        Gives those that were preempted, each with the number of computed tokens that it lost.
        """
        head = self.waiting.first()
        last = self.running.last()
        if head is None or last is None or self._free_slots or last.priority <= head.priority:
            return []
        preempted = (last, last.num_computed)
        self.preempt(last)
        return [preempted]

    def place_next(self) -> Sequence | None:
        """Moves the head of the queue into a free slot, if there is one and it has all that it needs."""
        sequence = self.waiting.first()
        if sequence is None or not self._free_slots:
            return None
        self._take_slot(sequence)
        return sequence

    def preempt(self, sequence: Sequence) -> None:
        """Takes everything from a sequence, which waits ahead of all later ones and is computed again."""
        self.running.remove(sequence)
        self._give_back(sequence)
        sequence.num_computed = 0
        sequence.is_primed = False
        self.waiting.add(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Ends a sequence, wherever it is."""
        self.running.remove(sequence)
        self.waiting.remove(sequence)
        self._give_back(sequence)
        sequence.is_ended = True

    def find(self, request_id: str) -> Sequence | None:
        """The sequence of a request; None when it has ended."""
        return self.running.get(request_id) or self.waiting.get(request_id)

    def end(self, request_id: str, finish: FinishReason) -> SequenceUpdate | None:
        """Ends a sequence from outside; None when it has ended already."""
        sequence = self.find(request_id)
        if sequence is None:
            return None
        self.drop(sequence)
        return SequenceUpdate(sequence, TokenBatch(tokens=(), finish=finish))

    def end_all(self, finish: FinishReason) -> list[SequenceUpdate]:
        ends = [self.end(request_id, finish) for request_id in (*self.running.ids, *self.waiting.ids)]
        return [end for end in ends if end is not None]

    def expire(self, now: float) -> list[SequenceUpdate]:
        """Ends every sequence whose deadline has passed, waiting ones before they cost anything."""
        late = [
            sequence.request.request_id
            for sequences in (self.running, self.waiting)
            for sequence in sequences
            if sequence.request.deadline is not None and sequence.request.deadline <= now
        ]
        ends = [self.end(request_id, FinishReason.DEADLINE) for request_id in late]
        return [end for end in ends if end is not None]

    def remember(self, sequence: Sequence) -> None:
        """Called when a sequence's tokens have been read: a cache may make them findable."""

    def extend(self, sequence: Sequence, length: int) -> bool:
        """Gives a running sequence what it needs to grow to this length; False if not enough is free."""
        return True

    def discard(self, sequence: Sequence) -> list[int]:
        """Takes away what may hold values that are not finite; gives the free pages that must be cleared."""
        return []

    def check(self) -> None:
        """Recomputes slots from the sequences; raises AssertionError on the first difference."""
        self.running.check()
        self.waiting.check()
        slots = [sequence.slot for sequence in self.running]
        assert sorted([*self._free_slots, *(slot for slot in slots if slot is not None)]) == list(
            range(self._num_slots)
        )
        for sequence in self.running:
            assert not sequence.is_ended and sequence.slot is not None
        for sequence in self.waiting:
            assert not sequence.is_ended and sequence.slot is None

    def _take_slot(self, sequence: Sequence) -> None:
        """Moves a waiting sequence into a free slot, which there must be."""
        self.waiting.remove(sequence)
        self.running.add(sequence)
        sequence.slot = self._free_slots.pop()
        self._raise_oldest()

    def _raise_oldest(self) -> None:
        """Each time `RAISE_EVERY` slots were given out, raises the longest-waiting sequence to the front."""
        self._until_raise -= 1
        if self._until_raise > 0:
            return
        self._until_raise = RAISE_EVERY
        # Background work that rests although there are slots is not raised: it has rounds of its own.
        oldest = self.waiting.oldest(below=BACKGROUND if self._free_slots else None)
        first, top = self.waiting.first(), self.running.first()
        if oldest is None or first is None or top is None:
            return
        self.waiting.remove(oldest)
        oldest.priority = min(first.priority, top.priority)
        self.waiting.add(oldest)

    def _give_back(self, sequence: Sequence) -> None:
        if sequence.slot is not None:
            self._free_slots.append(sequence.slot)
            sequence.slot = None
