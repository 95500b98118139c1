"""Matrices whose rows are read when they are needed, so that no whole matrix is in memory in float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


class MatrixRows(Protocol):
    """A matrix [out, in] that is read on demand. Several threads may read it, and more than once."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, start: int, stop: int) -> Array:
        """Rows `start` to `stop`, contiguous in memory; they must not be changed."""
        ...


@dataclass(frozen=True, slots=True)
class ArrayRows:
    """A matrix in memory."""

    array: NDArray[np.generic]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def read(self, start: int, stop: int) -> Array:
        return np.ascontiguousarray(self.array[start:stop], np.float32)


def as_rows(matrix: NDArray[np.generic] | MatrixRows) -> MatrixRows:
    return ArrayRows(matrix) if isinstance(matrix, np.ndarray) else matrix
