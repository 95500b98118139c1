"""Settings of glibc's malloc that keep the server's memory small and stable.

Compiling allocates and frees hundreds of megabytes in small blocks, and every step allocates and frees arrays
of some megabytes on several of XLA's threads. With a malloc other than glibc's, nothing is set.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

from levserve.device.host import process_memory

LARGE_BYTES = 16 << 20
"""More than the arrays that a step allocates and frees."""
MAX_ARENAS = 1
"""Free blocks of one arena are of no use to another. In four minutes of bench/soak.py on two cores resident
memory grew by 174 MiB without a limit, by 83 with four arenas, by 19 with two and by 9 with one. CPU time per
token, relative to no limit, was 1.00 at 8 streams and 1.03 +- 0.03 at 32, on a busy machine: whether that is
a cost is open, and compiling on many cores was not measured."""
GROWTH = 1.02
"""Memory is trimmed whenever it has grown by this factor. Compiling leaves hundreds of megabytes of free
blocks, and under load malloc gradually uses more and more of them: without a trim, resident memory grew by
3.5 % from the fifth minute to the 65th."""
TRIM_SECONDS = 5.0
"""The least time between two trims: a trim takes 10 ms, in which other threads wait for memory."""
TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8
"""The numbers of these settings in malloc.h."""


def tune_malloc() -> None:
    """Has all threads share one arena, and returns large blocks to the system as soon as they are freed.

    Must be called before threads start: arenas that exist stay in use. By default glibc stops treating blocks
    of up to 32 MB as large once one of that size has been freed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc has it
    if mallopt is not None:
        mallopt(ARENA_MAX, MAX_ARENAS)
        mallopt(MMAP_THRESHOLD, LARGE_BYTES)
        mallopt(TRIM_THRESHOLD, 4 * LARGE_BYTES)  # what a step frees stays for the next


def trim_malloc() -> None:
    """Gives back memory freed in the middle of malloc's heaps: 100 MB and more after a compile."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class Trimmer:
    """Gives free memory back whenever the process has grown by 2 % since it was smallest or trimmed."""

    def __init__(
        self,
        memory: Callable[[], int] = process_memory,
        trim: Callable[[], None] = trim_malloc,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._memory = memory
        self._trim = trim
        self._clock = clock
        self._next = clock()
        self._level = memory()

    def tick(self) -> None:
        """Called a few times a second; takes 10 ms when it trims."""
        if self._clock() < self._next:
            return
        self._next = self._clock() + TRIM_SECONDS
        self._level = min(self._level, self._memory())
        if self._memory() > self._level * GROWTH:
            self._trim()
            self._level = self._memory()
