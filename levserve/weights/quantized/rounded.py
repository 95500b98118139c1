"""Rounds matrices to FP8 while they are read, with a scale for each row, as FP8 checkpoints store them.

A scale maps the largest number of its row to the largest FP8 value. Rows are read once: reading their codes
leaves their scales behind.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from levserve.model.cache import FP8, LARGEST_FP8
from levserve.model.int8_packing import SMALLEST
from levserve.model.quantize import FP8_ROWS
from levserve.weights.fill import BLOCK_SIZE, Source
from levserve.weights.quantized.packed_tensor import Array, PackedTensor, Rows
from levserve.weights.stored_tensor import ALL, StoredTensor


def round_sources(sources: Iterable[Source]) -> list[Source]:
    """The tensors that fill an array, rounded."""
    return [replace(source, tensor=round_tensor(source.tensor)) for source in sources]


def round_tensor(tensor: StoredTensor) -> PackedTensor:
    codes = RoundedCodes(tensor)
    scales = Rows((*tensor.shape[:-1], 1), codes.read_scales)
    return PackedTensor(FP8_ROWS, codes, scales)


class RoundedCodes:
    """The codes of a matrix [out, in], or of one for each expert. Several threads may read different rows."""

    def __init__(self, tensor: StoredTensor) -> None:
        self._tensor = tensor
        self._scales = np.zeros((*tensor.shape[:-1], 1), np.float32)
        self.shape = tensor.shape

    def read(self, start: int, stop: int, columns: slice = ALL) -> Array:
        """Reads whole rows, whatever the columns, so that all devices have the same scale for a row."""
        rows = self._tensor.read(start, stop)
        codes, scales = np.empty(rows.shape, FP8), self._scales[start:stop]
        step = max(1, BLOCK_SIZE // rows.shape[-1])  # an expert may have many more rows
        for first in range(0, rows.shape[-2], step):
            part = (..., slice(first, first + step), ALL)
            codes[part], scales[part] = _round_rows(np.asarray(rows[part], np.float32))
        return codes[..., columns]

    def read_scales(self, start: int, stop: int) -> Array:
        if not self._scales[start:stop].all():  # not all of their codes were read
            self.read(start, stop)
        return self._scales[start:stop]

    def finish(self) -> None:
        self._tensor.finish()


def _round_rows(rows: NDArray[np.float32]) -> tuple[Array, Array]:
    """The codes of rows [..., in] and their scales [..., 1]."""
    with np.errstate(invalid="ignore"):  # a row that is not finite becomes NaN, which `fill` refuses
        largest = np.abs(rows).max(-1, keepdims=True)
        scales = np.maximum(largest, np.float32(SMALLEST)) / np.float32(LARGEST_FP8)
        return to_fp8(rows / scales), scales


def to_fp8(numbers: NDArray[np.float32]) -> Array:
    """Casts by a table of all bfloat16: 3 ns a value where numpy's cast takes 10, and without the GIL.

    The upper half of a float32, with its last bit set if the lower half is not zero, rounds to the same FP8
    as the whole float32.
    """
    bits = numbers.view(np.uint32)
    upper = bits >> 16
    upper |= (bits & 0xFFFF) != 0
    return np.take(_fp8_of_bfloat16(), upper).view(FP8)


@functools.cache
def _fp8_of_bfloat16() -> NDArray[np.uint8]:
    with np.errstate(all="ignore"):
        codes: Array = np.arange(1 << 16, dtype=np.uint16).view(jnp.bfloat16).astype(FP8)
    return codes.view(np.uint8)
