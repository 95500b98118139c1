"""A file of named arrays that is mapped into memory and used in place.

The arrays come first, each at a multiple of `ALIGNMENT`, then an index of them, then the index's size and
digest, so a file that was truncated, or that grew, is detected at once. The index has a checksum of each
array, which readers verify: adding up the bytes takes no longer than reading them from memory.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import struct
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from levserve.model.aligned import ALIGNMENT

TRAILER = struct.Struct("<Q32s24s")
"""The size of the index, its digest, and `MAGIC`."""
MAGIC = b"levserve arrays 1".ljust(24, b"\0")
WORD = 8


class DamagedFile(Exception):
    """The file is not as it was written."""


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    total: int
    """See `add_up`."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _find_dtype(self.dtype).itemsize


def write_arrays(path: Path, arrays: Iterable[tuple[str, NDArray[np.generic]]]) -> int:
    """Writes the arrays as they come and returns the size of the file.

    Each array is written while the next one is made, so two of them are in memory at a time.
    """
    entries: list[dict[str, Any]] = []
    written: Future[dict[str, Any]] | None = None
    with path.open("wb") as file, ThreadPoolExecutor(1, thread_name_prefix="levserve-weights") as writer:
        for name, array in arrays:
            if written is not None:
                entries.append(written.result())
            written = writer.submit(_write_array, file, name, array)
        if written is not None:
            entries.append(written.result())
        index = json.dumps(entries).encode()
        file.write(index)
        file.write(TRAILER.pack(len(index), hashlib.sha256(index).digest(), MAGIC))
        return file.tell()


def _write_array(file: BinaryIO, name: str, array: NDArray[np.generic]) -> dict[str, Any]:
    """Appends the array to the file; returns its entry in the index."""
    file.write(bytes(-file.tell() % ALIGNMENT))
    offset = file.tell()
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    file.write(data.data)
    return {
        "name": name,
        "dtype": array.dtype.name,
        "shape": array.shape,
        "offset": offset,
        "total": add_up(data),
    }


def is_whole(path: Path) -> bool:
    """Whether the file exists and is complete. Reads the index, not the arrays."""
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        _read_index(mapped)
    except (OSError, ValueError, DamagedFile):
        return False
    return True


def map_arrays(
    path: Path, num_threads: int, *, on_unmap: Callable[[], object] | None = None
) -> dict[str, NDArray[np.generic]]:
    """The arrays, read-only and backed by the file's pages, which all processes that map the file share.

    Verifies every checksum, which also brings the pages into memory. Raises `OSError` or `DamagedFile`.
    `on_unmap` is called when none of the arrays is in use any more.
    """
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    entries = _read_index(mapped)
    with ThreadPoolExecutor(num_threads, thread_name_prefix="levserve-weights") as pool:
        arrays = dict(pool.map(lambda entry: (entry.name, _check(mapped, entry)), entries))
    if on_unmap is not None:
        weakref.finalize(mapped, on_unmap)
    return arrays


def add_up(data: NDArray[np.uint8]) -> int:
    """The sum of the data as little-endian 64-bit integers, modulo 2**64."""
    whole = len(data) // WORD * WORD
    words = int(np.add.reduce(data[:whole].view("<u8"), dtype=np.uint64))
    return (words + int.from_bytes(data[whole:].tobytes(), "little")) % 2**64


def _check(mapped: mmap.mmap, entry: _Entry) -> NDArray[np.generic]:
    data = np.frombuffer(mapped, np.uint8, entry.num_bytes, entry.offset)
    if add_up(data) != entry.total:
        raise DamagedFile(f"checksum mismatch in {entry.name}")
    return data.view(_find_dtype(entry.dtype)).reshape(entry.shape)


def _read_index(mapped: mmap.mmap) -> list[_Entry]:
    end = len(mapped) - TRAILER.size
    if end < 0:
        raise DamagedFile("it is truncated")
    size, digest, magic = TRAILER.unpack_from(mapped, end)
    if magic != MAGIC or size > end:
        raise DamagedFile("its trailer is missing or damaged")
    index = mapped[end - size : end]
    if hashlib.sha256(index).digest() != digest:
        raise DamagedFile("checksum mismatch in its index")
    return [_Entry(**{**entry, "shape": tuple(entry["shape"])}) for entry in json.loads(index)]


def _find_dtype(name: str) -> np.dtype[np.generic]:
    """The dtype of this name, which may be one that only `ml_dtypes` has."""
    return np.dtype(getattr(ml_dtypes, name, name))
