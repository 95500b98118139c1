"""Fills a model's arrays from tensors that are still in their files.

A few threads decode blocks of rows and write them in the array's type straight to their place. Matrices that
are quantized while they are read stay `StoredRows`, whose rows are read as they are needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from levserve.errors import StartupError
from levserve.observe.control_group import num_cpus
from levserve.weights.stored_tensor import ALL, StoredTensor
from levserve.weights.tensor_names import Target

BLOCK_SIZE = 1 << 18  # weights decoded at a time: 1 MB of float32 stays in the CPU's cache
MAX_THREADS = 16
BFLOAT16_EXPONENT = 0x7F80  # all ones in a number that is not finite
FP8_NAN = 0x7F


@dataclass(frozen=True, slots=True)
class Source:
    """A stored tensor and the part of an array that it fills."""

    name: str
    tensor: StoredTensor
    target: Target


class Copy(NamedTuple):
    """Rows of a tensor that are copied into an array: `part` of each of them, or all of it if empty."""

    rows: range
    part: tuple[slice, ...]
    into: NDArray[np.generic]


def fill(copies: Iterable[Copy], source: Source, pool: Executor, origin: str | Path) -> None:
    """Makes the copies; rows that several of them have in common are read once. `origin` is for errors."""
    by_rows: dict[range, list[Copy]] = {}
    for copy in copies:
        by_rows.setdefault(copy.rows, []).append(copy)
    for rows, alike in by_rows.items():
        _fill_rows(rows, alike, source, pool, origin)
    source.tensor.finish()


def _fill_rows(rows: range, copies: list[Copy], source: Source, pool: Executor, origin: str | Path) -> None:
    step = max(1, BLOCK_SIZE // math.prod(source.tensor.shape[1:]))
    columns = _columns_of(copies, source)
    first = columns.start or 0

    def copy_block(start: int) -> None:
        stop = min(start + step, rows.stop)
        block = read_checked(source, start, stop, columns, origin)
        for copy in copies:
            part = copy.part
            if columns != ALL:
                (wanted,) = part
                part = (slice(wanted.start - first, wanted.stop - first),)
            copy.into[start - rows.start : stop - rows.start] = block[(ALL, *part)]

    starts = range(rows.start, rows.stop, step)
    for _ in pool.map(copy_block, starts):  # taking the results raises the errors of the threads
        pass


@dataclass(frozen=True, slots=True)
class StoredRows:
    """An array whose rows are still in one or more tensors."""

    shape: tuple[int, ...]
    sources: Sequence[Source]
    origin: str
    """For errors."""

    def read(self, start: int, stop: int) -> NDArray[np.float32]:
        parts = []
        for source in self.sources:
            (filled,) = source.target.index
            assert isinstance(filled, slice)
            first, last = max(start, filled.start), min(stop, filled.stop)
            if first < last:
                at = first - filled.start
                parts.append((first, read_checked(source, at, at + last - first, ALL, self.origin)))
        if len(parts) == 1:
            return np.ascontiguousarray(parts[0][1], np.float32)
        rows = np.empty((stop - start, *self.shape[1:]), np.float32)
        for first, numbers in parts:
            rows[first - start : first - start + len(numbers)] = numbers
        return rows


def read_checked(
    source: Source, start: int, stop: int, columns: slice, origin: str | Path
) -> NDArray[np.generic]:
    """Rows of a tensor. Raises `StartupError` if some of their values are not finite."""
    block = source.tensor.read(start, stop, columns)
    if not _is_finite(block):
        place = f"rows {start} to {stop}"
        raise StartupError(f"{origin}: {source.name} is corrupt: some values are not finite ({place})")
    return block


def _columns_of(copies: list[Copy], source: Source) -> slice:
    """The columns of a matrix that any of the copies needs."""
    if len(source.tensor.shape) != 2 or not all(copy.part for copy in copies):
        return ALL
    parts = [part for copy in copies for part in copy.part]
    first, last = min(part.start for part in parts), max(part.stop for part in parts)
    return ALL if last - first == source.tensor.shape[1] else slice(first, last)


def _is_finite(block: NDArray[np.generic]) -> bool:
    if block.dtype == ml_dtypes.float8_e4m3fn:  # it has no infinity
        return int((block.view(np.uint8) & FP8_NAN).max()) < FP8_NAN
    if block.dtype == ml_dtypes.bfloat16:  # by the bits: 0.4 ns per value, where numpy's isfinite takes 3.6
        return int((block.view(np.uint16) & BFLOAT16_EXPONENT).max()) < BFLOAT16_EXPONENT
    return bool(np.isfinite(block).all())


def num_threads() -> int:
    return min(MAX_THREADS, num_cpus())
