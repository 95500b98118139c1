"""What the warps of a program share in `tests/ptx.py`: memory, the barriers in it, and their scheduling.

A bulk copy (one instruction for all threads) completes as late as possible: only when a warp has to wait for
it. Until then its destination holds garbage.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator

import numpy as np


class Pause(enum.Enum):
    """Where a warp waits: at a barrier of all warps, or at one in shared memory."""

    FOR_ALL = enum.auto()
    IN_MEMORY = enum.auto()


class Barrier:
    """A barrier in shared memory: a phase ends when `count` have arrived and what they expect is copied."""

    def __init__(self, count: int) -> None:
        self.count, self.arrived, self.phase = count, 0, 0
        self.expected = 0
        """Bytes for which no copy has begun yet."""
        self.copies: list[Callable[[], None]] = []

    def arrive(self, expected: int = 0) -> None:
        assert self.arrived < self.count, "no one arrives twice in a phase"
        self.arrived += 1
        self.expected += expected
        self.end_phase()

    def finish_copies(self) -> None:
        for copy in self.copies:
            copy()
        self.copies = []
        self.end_phase()

    def end_phase(self) -> None:
        if self.arrived == self.count and not self.expected and not self.copies:
            self.arrived = 0
            self.phase += 1


class Shared:
    """Memory that the warps of a program share."""

    def __init__(self, size: int) -> None:
        self.bytes = np.full(size, 0xAA, np.uint8)
        self.is_fenced = np.zeros(size, bool)
        """Which bytes tensor cores may read: those written by a warp that has made a fence since, and those
        written by bulk copies."""
        self.barriers: dict[int, Barrier] = {}

    @property
    def num_phases(self) -> int:
        """The number of barrier phases that have ended."""
        return sum(barrier.phase for barrier in self.barriers.values())


def run_together(warps: list[Iterator[Pause]], shared: Shared) -> None:
    """Runs warps to their end; one passes a barrier of all warps when all others have ended or reached it."""
    running: list[Iterator[Pause]] = warps
    stopped: list[Iterator[Pause]] = []
    while running or stopped:
        if not running:
            running, stopped = stopped, []
        phases = shared.num_phases
        pauses = [next(warp, None) for warp in running]
        is_waiting = all(pause is Pause.IN_MEMORY for pause in pauses)
        assert not is_waiting or shared.num_phases > phases, "warps wait for one another"
        stopped += [warp for warp, pause in zip(running, pauses, strict=True) if pause is Pause.FOR_ALL]
        running = [warp for warp, pause in zip(running, pauses, strict=True) if pause is Pause.IN_MEMORY]
    assert not any(barrier.copies for barrier in shared.barriers.values()), "a copy outlives the program"
