"""Matrices of a checkpoint whose rows are read while they are quantized."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from levserve.weights.fill import Source, read_checked
from levserve.weights.stored_tensor import ALL


@dataclass(frozen=True, slots=True)
class StoredRows:
    """An array of which some tensors fill the rows."""

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
