"""Sequences in the order in which they are served: the more important first, then the earlier.

The scheduler has two of these, for running and for waiting sequences. Almost always a sequence joins
at the end or, after a preemption, at the beginning; both are cheap. Joining in the middle sorts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from levserve.schedule.sequence import Sequence


class RankedSequences:
    """Sequences by their ids, in the order of their ranks."""

    def __init__(self) -> None:
        self._by_id: OrderedDict[str, Sequence] = OrderedDict()
        self.num_free = 0
        """Sequences without a constraint."""

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._by_id.values())

    @property
    def ids(self) -> list[str]:
        return list(self._by_id)

    def get(self, request_id: str) -> Sequence | None:
        return self._by_id.get(request_id)

    def first(self) -> Sequence | None:
        return next(iter(self._by_id.values()), None)

    def last(self) -> Sequence | None:
        return next(reversed(self._by_id.values()), None)

    def oldest(self, *, below: int | None = None) -> Sequence | None:
        """The sequence that arrived first, whatever its priority; with `below`, among those below it."""
        sequences = (one for one in self._by_id.values() if below is None or one.priority < below)
        return min(sequences, key=lambda sequence: sequence.number, default=None)

    def add(self, sequence: Sequence) -> None:
        first, last = self.first(), self.last()
        self._by_id[sequence.request.request_id] = sequence
        self.num_free += sequence.matcher is None
        if first is None or last is None or last.rank < sequence.rank:
            return
        if sequence.rank < first.rank:
            self._by_id.move_to_end(sequence.request.request_id, last=False)
            return
        ordered = sorted(self._by_id.values(), key=lambda one: one.rank)
        self._by_id = OrderedDict((one.request.request_id, one) for one in ordered)

    def remove(self, sequence: Sequence) -> None:
        """Does nothing if the sequence is not there."""
        if self._by_id.pop(sequence.request.request_id, None) is not None:
            self.num_free -= sequence.matcher is None

    def check(self) -> None:
        ranks = [sequence.rank for sequence in self._by_id.values()]
        assert ranks == sorted(ranks)
        assert self.num_free == sum(sequence.matcher is None for sequence in self._by_id.values())
