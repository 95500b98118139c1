"""Releases the pages of mapped checkpoint files that have been read.

Pages read from a mapped file count as the process's memory until they are unmapped; while weights load, that
would be the whole file on top of the weights. The system's cache keeps the pages, so reading them again is
cheap.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from pathlib import Path

MAPPED_BYTES = 128 << 20
"""Bytes of weights that are read before the pages of their files are released."""


class PageRelease:
    """Releases the pages of some files repeatedly while weights are read from them."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._files = files
        self._num_read = 0

    def advance(self, num_bytes: int) -> None:
        """Counts weights that were read, and releases the pages after every `MAPPED_BYTES`."""
        self._num_read += num_bytes
        if self._num_read > MAPPED_BYTES:
            release_pages(self._files)
            self._num_read = 0


def release_pages(files: Iterable[Path]) -> None:
    """Safe while other threads read the files: their pages come back from the system's cache."""
    names = {str(file.resolve()) for file in files}
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, *_, name = line.split(maxsplit=5)
        if name in names:
            start, end = (int(address, 16) for address in addresses.split("-"))
            madvise(start, end - start, mmap.MADV_DONTNEED)
