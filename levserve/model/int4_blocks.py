"""Matrices that stay in the four bits of their file, with a scale for every 32 inputs.

A value is `scale * (code - 8) + middle`, where codes are from 0 to 15. The middle is 0 in files whose blocks
have no offset (Q4_0). In others it is small, because codes are counted from 8, their own middle. Nothing is
rotated, so the codes stay those of the file.

Activations are rounded to two int8 terms, with a scale for each token and block. The sums of both terms are
combined as integers by a shift, so the number of steps of the second term is a power of two.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from levserve.model.int8_blocks import BLOCK, LARGEST_SCALE, SCALE_FACTOR, product_factor
from levserve.model.int8_packing import SMALLEST, STEPS, WIDENED_NIBBLES, BlockOrder
from levserve.model.packed import Code, Scheme

CENTER = 8
"""Subtracted from every code."""
SECOND_TERM_BITS = 4
SECOND_TERM = 2.0**SECOND_TERM_BITS
"""Steps of the second term in one step of the first. A centred code times this still fits int8, so that
matrix units can multiply both terms at once."""


@dataclass(frozen=True, slots=True)
class FourBits:
    """A matrix as it was read."""

    codes: NDArray[np.uint8]
    """[out, in]"""
    scales: NDArray[np.float16]
    """[out, in / 32], multiplied by `SCALE_FACTOR`."""
    middles: NDArray[np.float16] | None
    """The same shape and factor; None: all are 0."""

    def rows(self, part: slice) -> FourBits:
        middles = None if self.middles is None else self.middles[part]
        return FourBits(self.codes[part], self.scales[part], middles)

    def pack(self, order: BlockOrder | None) -> tuple[NDArray[np.uint8], NDArray[np.float16]]:
        """Bytes [out, in / 2] and scales [out, block], in this order; None: the order of the inputs.

        A byte has a code of the first half of its block in its low bits, and the one 16 inputs later above
        it; in `WIDENED_NIBBLES` it has one of a block and the one 32 inputs later, in the next block. The
        middle of each block follows its scale.
        """
        apart = BLOCK if order == WIDENED_NIBBLES else BLOCK // 2
        halves = self.codes.reshape(len(self.codes), -1, 2, apart)
        packed = (halves[:, :, 0] | halves[:, :, 1] << np.uint8(4)).reshape(len(self.codes), -1)
        scales = self.scales
        if self.middles is not None:
            scales = np.stack([scales, self.middles], -1).reshape(len(scales), -1)
        if order is None:
            return packed, scales
        return replace(order, offset=0).pack(packed), order.pack_scales(scales)


def takes(scheme: Scheme, num_inputs: int) -> bool:
    """Whether a matrix of this scheme can stay as it is."""
    is_whole = scheme.columns is not None and scheme.columns % BLOCK == 0 and num_inputs % BLOCK == 0
    return scheme.code is Code.UINT4 and scheme.rows == 1 and is_whole


def can_widen(num_inputs: int) -> bool:
    """Whether rows of a matrix consist of whole pairs of blocks, as `WIDENED_NIBBLES` needs them."""
    return num_inputs % (2 * BLOCK) == 0


def has_middles(scheme: Scheme) -> bool:
    return scheme.has_offsets or scheme.has_zeros or scheme.zero != CENTER


def from_parts(
    scheme: Scheme,
    codes: NDArray[np.generic],
    scales: NDArray[np.generic],
    zeros: NDArray[np.generic] | None,
    offsets: NDArray[np.generic] | None,
) -> FourBits:
    """Builds the matrix from codes [out, in] and what each group of inputs has, [out, group]."""
    assert scheme.columns is not None
    factor, times = np.float32(SCALE_FACTOR), scheme.columns // BLOCK
    wide = scales.astype(np.float32) * factor
    middles = None
    if has_middles(scheme):
        zero = np.float32(scheme.zero) if zeros is None else zeros.astype(np.float32)
        middles = wide * (CENTER - zero)
        if offsets is not None:
            middles = middles + offsets.astype(np.float32) * factor
    parts = [None if part is None else _to_blocks(part, times, codes.shape[1]) for part in (wide, middles)]
    assert parts[0] is not None
    return FourBits(codes.view(np.uint8), parts[0], parts[1])


def _to_blocks(groups: NDArray[np.float32], times: int, num_inputs: int) -> NDArray[np.float16]:
    if not np.abs(groups).max(initial=0) <= LARGEST_SCALE:  # or NaN
        raise ValueError("a matrix has a scale too large for four bits with block scales")
    return np.repeat(groups.astype(np.float16), times, axis=1)[:, : num_inputs // BLOCK]


def is_packed(weight: tuple[int, ...], scale: tuple[int, ...]) -> bool:
    """Whether arrays of these shapes are such a matrix and its scales, and not int8."""
    return len(scale) == 2 and weight[1] < BLOCK * scale[1]


def are_middles(weight: tuple[int, ...], scale: tuple[int, ...]) -> bool:
    """Whether every second value of the scales of such a matrix is a middle."""
    return 2 * weight[1] < BLOCK * scale[1]


def multiply_nibbles(weight: jax.Array, scale: jax.Array, x: jax.Array) -> jax.Array:
    """x [row, in] times a matrix that `FourBits.pack` gave in its plain order: float32 [row, out]."""
    (num_rows, size), out = x.shape, len(weight)
    num_blocks = size // BLOCK
    numbers = x.reshape(num_rows, num_blocks, BLOCK)
    x_scale = jnp.maximum(jnp.abs(numbers).max(2, keepdims=True), SMALLEST) / STEPS
    steps = numbers / x_scale
    first = jnp.round(steps)
    second = jnp.round((steps - first) * SECOND_TERM)
    x_scale = x_scale * (product_factor(is_rotated=False) / SECOND_TERM)
    x_sums = (first * SECOND_TERM + second).sum(2, keepdims=True) * x_scale
    integers = jnp.concatenate([first, second]).astype(jnp.int8)
    blocks = weight.reshape(out, num_blocks, BLOCK // 2)
    scales = scale.astype(jnp.float32).reshape(out, num_blocks, -1)

    def add_block(index: jax.Array, total: jax.Array) -> jax.Array:
        rows, packed, of_block, across, x_sum = (
            lax.dynamic_index_in_dim(array, index, 1, keepdims=False)
            for array in (integers, blocks, scales, x_scale, x_sums)
        )
        codes = jnp.concatenate([packed & 15, packed >> 4], 1).astype(jnp.int8) - jnp.int8(CENTER)
        sums = jnp.einsum("rk,ok->ro", rows, codes, preferred_element_type=jnp.int32)
        sums = (sums[:num_rows] << SECOND_TERM_BITS) + sums[num_rows:]
        total = total + sums.astype(jnp.float32) * of_block[None, :, 0] * across
        return total if scales.shape[2] == 1 else total + of_block[None, :, 1] * x_sum

    zeros = jnp.zeros((num_rows, out), jnp.float32)
    return lax.fori_loop(jnp.int32(0), jnp.int32(num_blocks), add_block, zeros)
