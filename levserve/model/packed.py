"""Matrices that stay in the bits of their checkpoint, quantized as it stores them.

`Scheme` describes such a matrix, whatever format it comes from: every value is `scale * (code - zero) +
offset`, and a block of `rows` x `columns` values shares a scale, a zero point and an offset. Readers in
`weights/quantized/` bring each format to this form, and `--quantize fp8` rounds other matrices to it.
`PackedMatrix` is the matrix on the device; the plain product here widens it inside the compiled program, and
a backend may have a kernel that widens in registers instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from jax import lax
from numpy.typing import NDArray

from levserve.model.cache import FP8
from levserve.model.fp8_rows import Fp8Rows, round_rows
from levserve.model.lanes import from_lanes

SCALE, ZERO, OFFSET = "_scale", "_zero", "_offset"
"""Suffixes of the names of a matrix's scales, zero points and offsets."""


class Code(StrEnum):
    """How one value is encoded, before its scale."""

    UINT4 = "uint4"
    E2M1 = "e2m1"
    """A sign, two bits of exponent and one of mantissa, as MXFP4 has them."""
    INT8 = "int8"
    FP8 = "fp8"

    @property
    def is_nibble(self) -> bool:
        """Whether two codes share a byte."""
        return self in (Code.UINT4, Code.E2M1)

    @property
    def dtype(self) -> jnp.dtype:
        """The type of the array that holds them."""
        return {Code.INT8: jnp.dtype(jnp.int8), Code.FP8: FP8}.get(self, jnp.dtype(jnp.uint8))


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the values of a matrix [out, in] are stored."""

    code: Code
    columns: int | None = None
    """Inputs that share a scale; None: all."""
    rows: int = 1
    """Outputs that share a scale."""
    zero: int = 0
    """What is subtracted from every code, if the blocks have no zero points of their own."""
    has_zeros: bool = False
    has_offsets: bool = False
    """Whether each block has an offset, added to `scale * (code - zero)`."""
    scale: jnp.dtype = jnp.dtype(jnp.float32)
    """The type of scales and offsets; uint8 is the exponent of a power of two, biased by 127."""
    in_lanes: bool = False
    """Whether codes are in the order of `lanes`, not in that of the inputs."""
    rounds_rows: bool = False
    """Whether activations are rounded to FP8 too, each token with a scale for every `columns` inputs;
    only with `Code.FP8`."""

    def __str__(self) -> str:
        across = "whole rows" if self.columns is None else f"{self.columns} inputs"
        down = "" if self.rows == 1 else f" x {self.rows} outputs"
        parts = ["a scale"] + ["a zero point"] * self.has_zeros + ["an offset"] * self.has_offsets
        rounded = ", activations too" if self.rounds_rows else ""
        return f"{self.code} with {' and '.join(parts)} for {across}{down}{rounded}"

    def as_stored(self) -> Scheme:
        """The scheme in the checkpoint, whatever the order of the codes on the device."""
        return replace(self, in_lanes=False)

    def num_groups(self, num_inputs: int) -> int:
        """Scales in one row."""
        return 1 if self.columns is None else -(-num_inputs // self.columns)

    def array_shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], jnp.dtype]]:
        """Shape and type of each array of a matrix of this shape, by the suffix of its name."""
        *stacked, num_rows, num_inputs = shape
        width = num_inputs // 2 if self.code.is_nibble else num_inputs
        blocks = (*stacked, self.num_groups(num_inputs), -(-num_rows // self.rows))
        arrays = {"": ((*stacked, num_rows, width), self.code.dtype), SCALE: (blocks, self.scale)}
        if self.has_zeros:
            arrays[ZERO] = (blocks, jnp.dtype(jnp.uint8))
        if self.has_offsets:
            arrays[OFFSET] = (blocks, self.scale)
        return arrays

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.array_shapes(shape).values())


@dataclass(frozen=True, slots=True)
class Kept:
    """The matrices of a model that have the form of a quantized checkpoint's, and the type of the others."""

    schemes: tuple[tuple[str, Scheme], ...]
    """By the names of `parameter_shapes`."""
    widened: jnp.dtype
    """The type that matrices are widened to for a product."""
    is_rounded: bool = False
    """Whether they are rounded to their schemes when they are loaded, whatever the checkpoint has."""

    def __str__(self) -> str:
        kinds = dict.fromkeys(str(scheme) for _, scheme in self.schemes)
        how = "rounded" if self.is_rounded else "as they are stored"
        return f"{how} ({'; '.join(kinds)}), multiplied in {self.widened}"

    @property
    def rounds_rows(self) -> bool:
        """Whether activations are rounded for the product with each of them."""
        return all(scheme.rounds_rows for _, scheme in self.schemes)

    def by_name(self) -> dict[str, Scheme]:
        return dict(self.schemes)


def pack_nibbles(codes: NDArray[np.uint8], into: NDArray[np.uint8]) -> None:
    """Codes of four bits [..., in] as bytes [..., in / 2]: byte j has code j, and above it code j + in / 2.

    So a tile of bytes is two tiles of neighbouring inputs, which a kernel multiplies without reordering them.
    """
    half = codes.shape[-1] // 2
    np.left_shift(codes[..., half:], 4, out=into)
    np.bitwise_or(into, codes[..., :half], out=into)


class PackedMatrix(eqx.Module):
    """A matrix [out, in], or one for each expert, in the bits of its checkpoint.

    Scales, zero points and offsets are [group of inputs, block of outputs], so that those of neighbouring
    outputs, which a kernel needs together, are adjacent.
    """

    codes: jax.Array
    scale: jax.Array
    zero: jax.Array | None
    scheme: Scheme = eqx.field(static=True)
    axes: tuple[Axis, ...] = eqx.field(static=True)
    offset: jax.Array | None = None

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, jax.Array], scheme: Scheme, axes: tuple[Axis, ...], name: str = ""
    ) -> PackedMatrix:
        """The matrix of this name; `arrays` has all those of `Scheme.array_shapes`."""
        zero, offset = arrays.get(name + ZERO), arrays.get(name + OFFSET)
        return cls(arrays[name], arrays[name + SCALE], zero, scheme, axes, offset)

    @property
    def ndim(self) -> int:
        return len(self.axes)

    def of_expert(self, number: jax.Array) -> PackedMatrix:
        """One of the matrices [expert, out, in]."""
        return self._with_each(
            lambda array: lax.dynamic_index_in_dim(array, number, keepdims=False), self.axes[1:]
        )

    def of_each(self, numbers: NamedArray) -> PackedMatrix:
        """A copy of an expert's matrix for each number."""
        return self._with_each(lambda array: array[numbers.array], (*numbers.axes, *self.axes[1:]))

    def _with_each(self, change: Callable[[jax.Array], jax.Array], axes: tuple[Axis, ...]) -> PackedMatrix:
        zero, offset = (None if array is None else change(array) for array in (self.zero, self.offset))
        return PackedMatrix(change(self.codes), change(self.scale), zero, self.scheme, axes, offset)

    def widen(self, dtype: jnp.dtype) -> NamedArray:
        """The values themselves, computed in float32 and rounded once."""
        code = self.scheme.code
        if self.scheme.in_lanes:
            numbers = from_lanes(self.codes, code.is_nibble).astype(jnp.float32)
        else:
            numbers = decode(self.codes, code)
        if self.zero is not None:
            numbers = numbers - self._spread(self.zero.astype(jnp.float32))
        elif self.scheme.zero:
            numbers = numbers - float(self.scheme.zero)
        numbers = numbers * self._spread(decode_scale(self.scale))
        if self.offset is not None:
            numbers = numbers + self._spread(self.offset.astype(jnp.float32))
        return hax.named(numbers.astype(dtype), self.axes)

    def row_scales(self) -> jax.Array:
        """float32 [out] of a matrix [out, in] that has one scale for all inputs of a row."""
        assert self.scheme.columns is None and self.ndim == 2
        return jnp.broadcast_to(self._spread(decode_scale(self.scale))[:, 0], self.axes[0].size)

    def _spread(self, blocks: jax.Array) -> jax.Array:
        """Repeats the values of blocks for each row and column, as far as they do not broadcast."""
        num_rows, num_inputs = (axis.size for axis in self.axes[-2:])
        blocks = blocks.swapaxes(-1, -2)
        if self.scheme.columns is not None:
            blocks = jnp.repeat(blocks, self.scheme.columns, axis=-1)[..., :num_inputs]
        if self.scheme.rows > 1:
            blocks = jnp.repeat(blocks, self.scheme.rows, axis=-2)[..., :num_rows, :]
        return blocks


def multiply_packed(
    matrix: PackedMatrix,
    x: jax.Array | Fp8Rows,
    widened: jnp.dtype,
    summed: jnp.dtype = jnp.dtype(jnp.float32),
) -> jax.Array:
    """x [row, in] times a matrix that is widened for this product alone: `summed` [row, out]."""
    # XLA moves invariants out of loops, and would keep all widened matrices of a model in memory.
    matrix, x = lax.optimization_barrier((matrix, x))
    weight = matrix.widen(widened).array
    if isinstance(x, Fp8Rows):
        x = x.widen().astype(widened)
    else:
        x = round_as_asked(x.astype(widened), matrix.scheme)
    return jnp.einsum("ri,oi->ro", x, weight, preferred_element_type=summed)


def round_as_asked(x: jax.Array, scheme: Scheme) -> jax.Array:
    """x [..., in] rounded as the scheme asks for, in the type of x."""
    if not scheme.rounds_rows:
        return x
    rows = x.reshape(-1, x.shape[-1])
    return round_rows(rows, scheme.columns).widen().astype(x.dtype).reshape(x.shape)


def decode(codes: jax.Array, code: Code) -> jax.Array:
    """The values of codes, before their scales, as float32."""
    if code.is_nibble:
        codes = jnp.concatenate([codes & 15, codes >> 4], axis=-1)
    if code is not Code.E2M1:
        return codes.astype(jnp.float32)
    size = codes & 7
    exponent, half = size >> 1, size & 1
    # Below 1 there are only 0 and 0.5.
    large = (2 + half).astype(jnp.float32) * jnp.exp2(exponent.astype(jnp.float32) - 2)
    number = jnp.where(exponent == 0, half.astype(jnp.float32) * 0.5, large)
    return jnp.where(codes > 7, -number, number)


def decode_scale(scale: jax.Array) -> jax.Array:
    """Scales as float32."""
    if scale.dtype != jnp.uint8:
        return scale.astype(jnp.float32)
    return jnp.exp2(scale.astype(jnp.float32) - 127)
