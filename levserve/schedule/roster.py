"""The sequences that were accepted and have not ended, and the slots and pages that each of them holds.

Belongs to the scheduler, on the device thread. A sequence waits, without slot or pages, or it runs.
"""

from __future__ import annotations

from levserve.schedule.line import Line
from levserve.schedule.pages import PagePool
from levserve.schedule.sequence import Sequence

RAISE_EVERY = 16
"""After so many admissions the longest wait counts and not priority: at most this part of them goes to work
of low priority while more important work waits."""


class Roster:
    """Every sequence is in exactly one of `waiting` and `running` until it is dropped."""

    def __init__(self, pool: PagePool, num_slots: int) -> None:
        self.pool = pool
        self.waiting = Line()
        self.running = Line()
        self._num_arrived = 0
        self._until_raise = RAISE_EVERY
        self._num_slots = num_slots
        self._free_slots = list(range(num_slots - 1, -1, -1))

    def add(self, sequence: Sequence) -> None:
        """Lets a new sequence wait, behind all of its priority."""
        self._num_arrived += 1
        sequence.number = self._num_arrived
        self.waiting.add(sequence)

    def make_way(self) -> list[tuple[Sequence, int]]:
        """Preempts less important sequences if the head of the queue needs their slot or their pages.

        Gives those that were preempted, each with the computed tokens that it lost.
        """
        head = self.waiting.first()
        if head is None or head.num_pending > 0:
            return []
        missing = self.pages_for(min(len(head.tokens) + 1, head.max_length)) - self.pool.num_available
        outranked = [sequence for sequence in self.running if sequence.priority > head.priority]
        if missing > sum(len(sequence.pages) for sequence in outranked):
            return []  # all of them together do not have enough
        preempted = []
        while outranked and (missing > 0 or not self._free_slots):
            victim = outranked.pop()
            num_available = self.pool.num_available
            preempted.append((victim, victim.num_computed))
            self.preempt(victim)
            missing -= self.pool.num_available - num_available
        return preempted

    def admit(self) -> Sequence | None:
        """Moves the head of the queue into a free slot if there are pages for all its tokens and the next."""
        sequence = self.waiting.first()
        if sequence is None or not self._free_slots or sequence.num_pending > 0:
            return None  # tokens in flight when it was preempted are read first: it must recompute them too
        match = self.pool.match(sequence.tokens, sequence.num_reusable)
        length = min(len(sequence.tokens) + 1, sequence.max_length)
        rest = self.pool.take(self.pages_for(length) - len(match.pages))
        if rest is None:
            self.pool.release(match.pages)
            return None
        self.waiting.remove(sequence)
        self.running.add(sequence)
        self._raise_oldest()
        sequence.slot = self._free_slots.pop()
        sequence.pages = match.pages + rest
        sequence.num_remembered, sequence.serial = len(match.pages), match.serial
        sequence.num_computed = len(match.pages) * self.pool.page_size
        sequence.is_stale = False
        if sequence.num_cached is None:
            sequence.num_cached = sequence.num_computed
        return sequence

    def preempt(self, sequence: Sequence) -> None:
        """Takes slot and pages away; the sequence waits ahead of all later ones, and is computed again."""
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

    def remember(self, sequence: Sequence) -> None:
        """Makes pages findable whose tokens are known and whose KV has been dispatched."""
        if sequence.is_stale:
            return
        size = self.pool.page_size
        num_known = min(sequence.num_computed, len(sequence.tokens))
        while (end := (sequence.num_remembered + 1) * size) <= num_known:
            page = sequence.pages[sequence.num_remembered]
            tokens = tuple(sequence.tokens[end - size : end])
            sequence.serial = self.pool.remember(page, sequence.serial, tokens)
            sequence.num_remembered += 1

    def pages_for(self, length: int) -> int:
        return -(-length // self.pool.page_size)

    def check(self) -> None:
        """Recomputes slots and pages from the sequences; raises AssertionError on the first difference."""
        self.running.check()
        self.waiting.check()
        self.pool.check(sequence.pages for sequence in self.running)
        slots = [sequence.slot for sequence in self.running]
        assert sorted([*self._free_slots, *(slot for slot in slots if slot is not None)]) == list(
            range(self._num_slots)
        )
        for sequence in self.running:
            assert not sequence.is_ended and sequence.slot is not None
            assert self.pages_for(sequence.num_computed) <= len(sequence.pages)
            assert sequence.length <= max(sequence.max_length, len(sequence.request.prompt) + 1)
            assert sequence.num_computed <= sequence.length
        for sequence in self.waiting:
            assert not sequence.is_ended and sequence.slot is None and not sequence.pages

    def _raise_oldest(self) -> None:
        """Called at every admission; now and then the longest wait is ended, whatever its priority."""
        self._until_raise -= 1
        if self._until_raise > 0:
            return
        self._until_raise = RAISE_EVERY
        oldest, first, top = self.waiting.oldest(), self.waiting.first(), self.running.first()
        if oldest is None or first is None or top is None:
            return
        self.waiting.remove(oldest)
        oldest.priority = min(first.priority, top.priority)
        self.waiting.add(oldest)

    def _give_back(self, sequence: Sequence) -> None:
        self.pool.release(sequence.pages)
        sequence.pages = []
        if sequence.slot is not None:
            self._free_slots.append(sequence.slot)
            sequence.slot = None
