"""What the warps of a program share in `tests/ptx.py`: memory, barriers there, and the turns that they take.

What is copied by one instruction for all threads comes as late as it may: when a warp waits for it in vain.
Until then, what it is copied over is spoilt.
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
    """One in shared memory: a phase of it ends when so many have arrived and what they expect is copied."""

    def __init__(self, count: int) -> None:
        self.count, self.arrived, self.phase = count, 0, 0
        self.expected = 0
        """Bytes that no copy has been begun for yet."""
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
        """What tensor cores may read: bytes for which the warp that wrote them has made a fence since, and
        those that were copied by one instruction for all threads."""
        self.barriers: dict[int, Barrier] = {}

    @property
    def num_phases(self) -> int:
        """Phases of barriers that have ended."""
        return sum(barrier.phase for barrier in self.barriers.values())


def run_together(warps: list[Iterator[Pause]], shared: Shared) -> None:
    """A warp goes on from a barrier of all when the others that have not ended are there."""
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
