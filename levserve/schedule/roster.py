"""The sequences that were accepted and have not ended, and the slots and pages that each of them holds.

Belongs to the scheduler, on the device thread. A sequence waits, without slot or pages, or it runs.
"""

from __future__ import annotations

from collections import OrderedDict

from levserve.schedule.pages import PagePool
from levserve.schedule.sequence import Sequence


class Roster:
    """Every sequence is in exactly one of `waiting` and `running`, both in order of arrival, until it is
    dropped."""

    def __init__(self, pool: PagePool, num_slots: int) -> None:
        self.pool = pool
        self.waiting: OrderedDict[str, Sequence] = OrderedDict()
        self.running: dict[str, Sequence] = {}
        self._num_slots = num_slots
        self._free_slots = list(range(num_slots - 1, -1, -1))

    def admit(self) -> Sequence | None:
        """Moves the head of the queue into a free slot if there are pages for all its tokens and the next."""
        sequence = next(iter(self.waiting.values()), None)
        if sequence is None or not self._free_slots or sequence.num_pending > 0:
            return None  # tokens in flight when it was preempted are read first: it must recompute them too
        match = self.pool.match(sequence.tokens, sequence.num_reusable)
        length = min(len(sequence.tokens) + 1, sequence.max_length)
        rest = self.pool.take(self.pages_for(length) - len(match.pages))
        if rest is None:
            self.pool.release(match.pages)
            return None
        del self.waiting[sequence.request.request_id]
        self.running[sequence.request.request_id] = sequence
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
        del self.running[sequence.request.request_id]
        self._give_back(sequence)
        sequence.num_computed = 0
        sequence.is_primed = False
        self.waiting[sequence.request.request_id] = sequence
        self.waiting.move_to_end(sequence.request.request_id, last=False)

    def drop(self, sequence: Sequence) -> None:
        """Ends a sequence, wherever it is."""
        self.running.pop(sequence.request.request_id, None)
        self.waiting.pop(sequence.request.request_id, None)
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
        self.pool.check(sequence.pages for sequence in self.running.values())
        slots = [sequence.slot for sequence in self.running.values()]
        assert sorted([*self._free_slots, *(slot for slot in slots if slot is not None)]) == list(
            range(self._num_slots)
        )
        for sequence in self.running.values():
            assert not sequence.is_ended and sequence.slot is not None
            assert self.pages_for(sequence.num_computed) <= len(sequence.pages)
            assert sequence.length <= max(sequence.max_length, len(sequence.request.prompt) + 1)
            assert sequence.num_computed <= sequence.length
        for sequence in self.waiting.values():
            assert not sequence.is_ended and sequence.slot is None and not sequence.pages

    def _give_back(self, sequence: Sequence) -> None:
        self.pool.release(sequence.pages)
        sequence.pages = []
        if sequence.slot is not None:
            self._free_slots.append(sequence.slot)
            sequence.slot = None
