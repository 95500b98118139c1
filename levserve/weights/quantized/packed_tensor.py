"""A stored quantized matrix, as every reader of a quantized format provides it.

It can be read in two ways: as decoded weights, like any other tensor, or as its parts (codes, scales, zero
points and offsets), from which `packed_arrays.py` makes the arrays that stay quantized on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from levserve.model.packed import Code, Scheme
from levserve.weights.stored_tensor import ALL, StoredTensor

Array = NDArray[np.generic]
E2M1_NUMBERS = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@dataclass(frozen=True, slots=True)
class Rows:
    """One part of a matrix; `read_rows` reads rows `start` to `stop` with all columns."""

    shape: tuple[int, ...]
    read_rows: Callable[[int, int], Array]

    def read(self, start: int, stop: int, columns: slice = ALL) -> Array:
        rows = self.read_rows(start, stop)
        return rows if columns == ALL else rows[..., columns]

    def finish(self) -> None:
        """Does nothing: the file stays mapped."""


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A matrix [out, in] whose weights are `scale * (code - zero) + offset`.

    `codes` is [out, in], a byte for each weight. The other parts are [out, group], with a row for every row
    of the matrix, even where aligned blocks of `scheme.rows` rows share the same values.
    """

    scheme: Scheme
    codes: StoredTensor
    scales: StoredTensor
    zeros: StoredTensor | None = None
    offsets: StoredTensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    def read(self, start: int, stop: int, columns: slice = ALL) -> Array:
        """The decoded weights, as float32."""
        numbers = decode_codes(self.codes.read(start, stop), self.scheme.code)
        if self.zeros is not None:
            numbers -= self._spread(self.zeros.read(start, stop))
        elif self.scheme.zero:
            numbers -= self.scheme.zero
        numbers *= self._spread(decode_scales(self.scales.read(start, stop)))
        if self.offsets is not None:
            numbers += self._spread(self.offsets.read(start, stop))
        return numbers if columns == ALL else numbers[..., columns]

    def finish(self) -> None:
        for part in (self.codes, self.scales, self.zeros, self.offsets):
            if part is not None:
                part.finish()

    def with_parts(self, change: Callable[[StoredTensor], StoredTensor]) -> PackedTensor:
        """The same matrix with `change`, which puts rows in another order, applied to each part."""
        zeros, offsets = (None if part is None else change(part) for part in (self.zeros, self.offsets))
        scheme = replace(self.scheme, rows=1)
        return PackedTensor(scheme, change(self.codes), change(self.scales), zeros, offsets)

    def _spread(self, groups: Array) -> NDArray[np.float32]:
        wide = groups.astype(np.float32)
        if self.scheme.columns is None:
            return wide
        return np.repeat(wide, self.scheme.columns, axis=-1)[..., : self.shape[-1]]


def decode_codes(codes: Array, code: Code) -> NDArray[np.float32]:
    return E2M1_NUMBERS[codes] if code is Code.E2M1 else codes.astype(np.float32)


def decode_scales(scales: Array) -> NDArray[np.float32]:
    if scales.dtype != np.uint8:
        return scales.astype(np.float32)
    return np.ldexp(np.float32(1), scales.astype(np.int32) - 127)


def unpack_nibbles(words: Array) -> NDArray[np.uint8]:
    """The eight codes of each int32, lowest bits first: [..., n] becomes [..., n, 8]."""
    packed = np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, 4)
    codes = np.empty((*words.shape, 4, 2), np.uint8)
    np.bitwise_and(packed, 15, out=codes[..., 0])
    np.right_shift(packed, 4, out=codes[..., 1])
    return codes.reshape(*words.shape, 8)
