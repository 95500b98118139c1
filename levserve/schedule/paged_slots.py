"""The sequences of a model with a KV cache, and the slots and pages that each of them holds.

Belongs to the scheduler, on the device thread. A sequence waits, without slot or pages, or it runs.
"""

from __future__ import annotations

from itertools import takewhile

from levserve.schedule.pages import PagePool
from levserve.schedule.sequence import Sequence
from levserve.schedule.slots import Slots


class PagedSlots(Slots):
    """Slots whose sequences hold pages of the pool too."""

    def __init__(self, pool: PagePool, num_slots: int) -> None:
        super().__init__(num_slots)
        self.pool = pool
        self._drafted: set[int] = set()  # findable pages whose tokens a draft model has seen too

    def make_way(self) -> list[tuple[Sequence, int]]:
        """Preempts less important sequences if the head of the queue needs their slot or their pages.

        Gives those that were preempted, each with the number of computed tokens that it lost.
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

    def place_next(self) -> Sequence | None:
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
        self._take_slot(sequence)
        sequence.pages = match.pages + rest
        sequence.num_remembered, sequence.serial = len(match.pages), match.serial
        sequence.num_computed = len(match.pages) * self.pool.page_size
        num_drafted = sum(1 for _ in takewhile(self._drafted.__contains__, match.pages))
        sequence.num_drafted = num_drafted * self.pool.page_size
        sequence.is_stale = False
        if sequence.num_cached is None:
            sequence.num_cached = sequence.num_computed
        return sequence

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
            if sequence.num_drafted >= end:
                self._drafted.add(page)
            else:
                self._drafted.discard(page)
            sequence.num_remembered += 1

    def extend(self, sequence: Sequence, length: int) -> bool:
        pages = self.pool.take(max(self.pages_for(length) - len(sequence.pages), 0))
        if pages is None:
            return False
        sequence.pages += pages
        return True

    def discard(self, sequence: Sequence) -> list[int]:
        tainted = self.pool.discard(sequence.pages)
        sequence.pages = []
        return tainted

    def pages_for(self, length: int) -> int:
        return -(-length // self.pool.page_size)

    def check(self) -> None:
        """Recomputes slots and pages from the sequences; raises AssertionError on the first difference."""
        super().check()
        self.pool.check(sequence.pages for sequence in self.running)
        for sequence in self.running:
            assert self.pages_for(sequence.num_computed) <= len(sequence.pages)
            assert sequence.length <= max(sequence.max_length, len(sequence.request.prompt) + 1)
            assert sequence.num_computed <= sequence.length
        for sequence in self.waiting:
            assert not sequence.pages

    def _give_back(self, sequence: Sequence) -> None:
        self.pool.release(sequence.pages)
        sequence.pages = []
        super()._give_back(sequence)
