"""Background work, such as batches: it runs in rounds that no other work needs, and beside live work as far
as that is hardly slowed down.

Rows that decode together make every step slower for all of them, so being last in the queue is not enough.
While there is live work, background sequences rest; they keep their slots and pages until live work needs
these. There are two exceptions: beside live rows as many of them decode as make a step at most `MAX_SLOWDOWN`
times as long, by measurement, or a prompt gets a small chunk; and in one of `REST_ROUNDS` rounds all of them
run, so that they end even on a device that is never idle.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from levserve.schedule.request import BACKGROUND
from levserve.schedule.sequence import Sequence
from levserve.schedule.slots import Slots

REST_ROUNDS = 256
"""In one of this many rounds no work rests: it lengthens fewer than one in a hundred gaps between tokens."""
MAX_SLOWDOWN = 1.15
"""How many times as long background rows may make a step: gaps of live streams stay within 1.2 times."""
PREFILL_PART = 15
"""A background prompt gets 1/15 of what a round may prefill. That limit is at most 1.5 times the round's
decode time (`pace.PREFILL_SHARE`), so this is a tenth of it or less."""
CYCLE = 8
"""Of this many rounds beside live work, the first is measured without background work, and the fifth takes a
background prompt instead of background rows."""
WEIGHT = 1 / 4
"""Weight of a measured step in the smoothed step time."""
NUM_SAMPLES = 2
"""Steps measured before a number of rows is judged, by the quicker one: a machine's hiccups do not count."""
RETRY_ROUNDS = 512
"""Rounds until one row more is tried again: so fewer than one round in two hundred is too slow."""


class Allowance(NamedTuple):
    """What background work may do in a round beside live work: decode rows, or prefill tokens."""

    rows: int = 0
    tokens: int = 0


NOTHING = Allowance()


class Share:
    """Finds how many background rows may decode beside live rows.

    Belongs to a scheduler, which has no clock: round times are passed in. It adds a row as long as steps are
    quick enough. When they are not, it halves the rows, and for a while tries no more than were quick enough.
    """

    def __init__(self) -> None:
        self._alone: dict[int, float] = {}
        """Smoothed seconds of a step by the number of live rows, without background rows."""
        self._num_rows = 1
        self._samples: list[float] = []
        """Slowdown of each measured step with `_num_rows` background rows."""
        self._max_rows: int | None = None
        """More rows than this were too slow."""
        self._num_rounds = 0
        self._until_retry = RETRY_ROUNDS

    def next(self, num_live: int, max_prefill: int | None) -> Allowance:
        """The allowance of the next round, which has `num_live` live rows."""
        place = self._num_rounds % CYCLE
        self._num_rounds += 1
        self._count_down()
        if place == 0 or num_live not in self._alone:
            return NOTHING
        if place == CYCLE // 2:
            return Allowance(tokens=(max_prefill or 0) // PREFILL_PART)
        return Allowance(rows=self._num_rows)

    def note(self, num_live: int, num_background: int, step_seconds: float) -> None:
        """Records the time of a step in a round without prompts."""
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
        """Counts a round in which background work would rest; gives whether it runs all the same."""
        self._until_turn -= 1
        if self._until_turn > 0:
            return False
        self._until_turn = REST_ROUNDS
        return True


def is_resting(slots: Slots) -> bool:
    """Whether there is live work that background work makes room for."""
    return slots.has_live_work and slots.has_background_work


def live_only(sequences: Iterable[Sequence]) -> Iterator[Sequence]:
    return (sequence for sequence in sequences if sequence.priority < BACKGROUND)
