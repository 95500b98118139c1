"""Background work, such as batches: it runs in the rounds that no other work needs.

Rows that decode together make every step of all of them slower, so being last in the queue is not enough: as
long as live work is there, background sequences rest, with their slots and their pages, until live work needs
these. So that they end even on a device that is never idle, they take part in one round of many.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from levserve.schedule.request import BACKGROUND
from levserve.schedule.seats import Seats
from levserve.schedule.sequence import Sequence

REST_ROUNDS = 256
"""One of so many rounds beside live work: fewer than one gap between tokens in a hundred is longer for it."""


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


def is_resting(seats: Seats) -> bool:
    """Whether there is live work, so that background work makes room for it."""
    return seats.has_live_work and seats.has_background_work


def live_only(sequences: Iterable[Sequence]) -> Iterator[Sequence]:
    return (sequence for sequence in sequences if sequence.priority < BACKGROUND)
