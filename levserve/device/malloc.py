"""What malloc holds back: compiling takes and frees hundreds of megabytes in small parts, and a server is to stay small."""

from __future__ import annotations

import ctypes

LARGE_BYTES = 16 << 20
"""More than the arrays that a step takes and frees."""
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""As malloc.h numbers its settings."""


def tune_malloc() -> None:
    """What is large goes back when it is freed. Left to itself, glibc puts parts of up to 32 MB between others once it has seen one."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc has it
    if mallopt is not None:
        mallopt(MMAP_THRESHOLD, LARGE_BYTES)
        mallopt(TRIM_THRESHOLD, 4 * LARGE_BYTES)  # what a step frees stays for the next


def trim_malloc() -> None:
    """Gives back what was freed in the middle of malloc's heaps: after a compile a hundred megabytes and more."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
