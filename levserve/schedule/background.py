"""Background work, such as batches: it runs in the rounds that no other work needs, and beside live work as
far as that hardly notices.

Rows that decode together make every step of all of them slower, so being last in the queue is not enough. As
long as live work is there, background sequences keep their slots and pages until live work needs these, and
otherwise rest, but for two exceptions: as many of them decode beside live rows as make a step at most
`MAX_SLOWDOWN` times as long, by measurement; and in one round of many all of them take part, so that they end
even on a device that is never idle.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from levserve.schedule.request import BACKGROUND
from levserve.schedule.sequence import Sequence
from levserve.schedule.slots import Slots

REST_ROUNDS = 256
"""One of so many rounds beside live work: fewer than one gap between tokens in a hundred is longer for it."""


MAX_SLOWDOWN = 1.15
"""How much longer a step may take for background rows: gaps of live streams stay within 1.2 times."""
PREFILL_PART = 15
"""A background prompt gets at most this part of what a round may prefill, a tenth of its decode time."""
CYCLE = 8
"""Of so many rounds beside live work, the first is without background work, to be measured, and the fifth has
a prompt of it rather than rows."""
WEIGHT = 1 / 4
"""Of a measured step in the smoothed one."""
NUM_SAMPLES = 2
"""Steps with a number of rows until it is judged, by the quicker one: a machine's hiccups do not count."""
RETRY_ROUNDS = 512
"""Rounds until one row more is tried than was too slow: then fewer than one round in two hundred is."""


class Allowance(NamedTuple):
    """What background work may do in a round beside live work: decode rows, or prefill tokens."""

    rows: int = 0
    tokens: int = 0


NOTHING = Allowance()


class Share:
    """Finds how many background rows live rows can bear.

    Belongs to a scheduler, which has no clock: the times of rounds are noted. It adds a row as long as steps
    are quick enough. When they are not it takes half of them, and for a while tries no more than were right.
    """

    def __init__(self) -> None:
        self._alone: dict[int, float] = {}
        """Smoothed seconds of a step by the number of live rows, without background rows."""
        self._num_rows = 1
        self._samples: list[float] = []
        """How many times as long steps with `_num_rows` background rows took."""
        self._max_rows: int | None = None
        """More were too slow."""
        self._num_rounds = 0
        self._until_retry = RETRY_ROUNDS

    def next(self, num_live: int, max_prefill: int | None) -> Allowance:
        """The allowance of the next round, which has so many live rows."""
        place = self._num_rounds % CYCLE
        self._num_rounds += 1
        self._count_down()
        if place == 0 or num_live not in self._alone:
            return NOTHING
        if place == CYCLE // 2:
            return Allowance(tokens=(max_prefill or 0) // PREFILL_PART)
        return Allowance(rows=self._num_rows)

    def note(self, num_live: int, num_background: int, step_seconds: float) -> None:
        """Takes the time of a step in a round without prompts."""
        alone = self._alone.get(num_live)
        if num_live and num_background == 0:
            before = step_seconds if alone is None else alone
            self._alone[num_live] = before + WEIGHT * (step_seconds - before)
        elif alone is not None and num_background == self._num_rows:
            self._samples.append(step_seconds / alone)
            if len(self._samples) == NUM_SAMPLES:
                self._adapt(min(self._samples))
                self._samples.clear()

    def _adapt(self, slowdown: float) -> None:
        if slowdown > MAX_SLOWDOWN:
            self._max_rows = self._num_rows - 1
            self._num_rows //= 2
            self._until_retry = RETRY_ROUNDS
        elif self._max_rows is None or self._num_rows < self._max_rows:
            self._num_rows += 1

    def _count_down(self) -> None:
        if self._max_rows is None:
            return
        self._until_retry -= 1
        if self._until_retry == 0:
            self._until_retry = RETRY_ROUNDS
            self._max_rows = self._num_rows + 1
            self._num_rows += self._num_rows == 0
            self._samples.clear()


class Rest:
    """Decides which rounds background work sits out. Belongs to a scheduler or to the device loop."""

    def __init__(self) -> None:
        self._until_turn = REST_ROUNDS

    def takes_turn(self) -> bool:
        """Counts a round in which background work would rest; whether it takes part all the same."""
        self._until_turn -= 1
        if self._until_turn > 0:
            return False
        self._until_turn = REST_ROUNDS
        return True


def is_resting(slots: Slots) -> bool:
    """Whether there is live work, so that background work makes room for it."""
    return slots.has_live_work and slots.has_background_work


def live_only(sequences: Iterable[Sequence]) -> Iterator[Sequence]:
    return (sequence for sequence in sequences if sequence.priority < BACKGROUND)
