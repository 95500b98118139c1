"""Settings of glibc's malloc that keep the server's memory small and level.

Compiling allocates and frees hundreds of megabytes in small blocks, and every step allocates and frees arrays of some megabytes
on several threads of XLA's. Where malloc is not glibc's, nothing is set.
"""

from __future__ import annotations

import ctypes

LARGE_BYTES = 16 << 20
"""More than the arrays that a step allocates and frees."""
MAX_ARENAS = 1
"""Free blocks of one arena are of no use to another. In four minutes of bench/soak.py on two cores resident memory grew by
174 MiB without a limit, by 83 with four arenas, by 19 with two and by 9 with one. No speed is lost: Python's small objects
do not come from malloc, and glibc keeps small blocks by thread."""
TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8
"""As malloc.h numbers its settings."""


def tune_malloc() -> None:
    """Has all threads share one arena, and returns large blocks to the system as soon as they are freed.

    To be called before threads start: arenas that exist stay in use. Left to itself, glibc puts blocks of up to 32 MB among
    others once it has seen one.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc has it
    if mallopt is not None:
        mallopt(ARENA_MAX, MAX_ARENAS)
        mallopt(MMAP_THRESHOLD, LARGE_BYTES)
        mallopt(TRIM_THRESHOLD, 4 * LARGE_BYTES)  # what a step frees stays for the next


def trim_malloc() -> None:
    """Gives back what was freed in the middle of malloc's heaps: after a compile a hundred megabytes and more."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
