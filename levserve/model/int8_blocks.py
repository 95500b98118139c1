"""Int8 matrices with a scale for every 32 inputs, which hold most four-bit files exactly.

Four-bit formats have one step size for 32 values or a multiple of 32, and each value is a whole number of
steps above the smallest. The sums and differences of 32 such values that a Hadamard rotation forms are
multiples of the same step and fit int8, except for the sum of all 32, which is rounded. So a rotated block
keeps the file's step as its scale. A block without such a step is rounded to 127 steps of its own.
Activations are rounded to int8 with a scale for each token and block.

The head is not rotated, which keeps blocks of Q8_0 exact, and its activations have two int8 terms, because no
later layer averages out the rounding errors there.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from levserve.model.hadamard import BLOCKS_PER_PRODUCT, rotation
from levserve.model.int8_packing import SMALLEST, STEPS

BLOCK = 32
"""Inputs that share a scale."""
SCALE_FACTOR = 256.0
"""Scales are stored multiplied by this, which keeps small ones in float16's full precision."""
SMALLEST_SCALE = 2.0**-14
"""The smallest float16 of full precision; smaller scales are raised to it."""
LARGEST_SCALE = float(np.finfo(np.float16).max)
SECOND_TERM = 254.0
"""Steps of the second term in one step of the first, whose error is half a step at most."""
LEVELS = range(15, 7, -1)
"""How many steps there may be from the smallest value of a block to the largest, the likeliest first."""
SAMPLE = 64
"""Blocks that are sampled to see whether a matrix has steps."""
TOLERANCE = 1e-3
"""How far a value may be from a whole number of steps: float32 errors are much smaller, chance is not."""
MIN_PRODUCT_ROWS = 2
"""XLA's integer product of one row is slower than that of two."""


def has_blocks(size: int) -> bool:
    """Whether rows of this size consist of whole blocks."""
    return size % BLOCK == 0


def round_rows(
    rows: NDArray[np.float32], *, is_rotated: bool
) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """Rows [out, in] as int8, and their scales [out, in / 32], multiplied by `SCALE_FACTOR`.

    A rotated block is not divided by the square root of its size, so products with it are 32 times too large.
    """
    blocks = rows.reshape(-1, BLOCK)
    numbers = _rotate(blocks) if is_rotated else blocks
    largest = np.maximum(np.maximum(numbers.max(1), -numbers.min(1)), SMALLEST)
    scale = largest / np.float32(STEPS)
    if is_rotated:
        step = _find_steps(blocks)
        times = np.floor(np.float32(STEPS + 0.5) * step / largest)  # finer, for the rounded sum of all
        scale = np.where(times >= 1, step / np.maximum(times, 1), scale)
    scale = np.maximum(scale * np.float32(SCALE_FACTOR), np.float32(SMALLEST_SCALE))
    if not scale.max() <= LARGEST_SCALE:  # or NaN
        raise ValueError(
            f"a matrix has a block with a value of {largest.max():.0f}, too large for int8 with block scales"
        )
    stored = scale.astype(np.float16)
    integers = np.rint(numbers * (np.float32(SCALE_FACTOR) / stored.astype(np.float32))[:, None])
    np.clip(integers, -STEPS, STEPS, out=integers)
    return integers.astype(np.int8).reshape(rows.shape), stored.reshape(len(rows), -1)


def multiply_blocks(
    weight: jax.Array, scale: jax.Array, x: jax.Array, *, in_two_terms: bool = False
) -> jax.Array:
    """x [row, in] times a matrix that `round_rows` made [out, in]: float32 [row, out].

    With two terms of activations nothing is rotated. Blocks are added one after another, as in the kernels.
    """
    num_rows, (out, size) = len(x), weight.shape
    num_blocks = size // BLOCK
    numbers = x.reshape(num_rows, num_blocks, BLOCK)
    numbers = numbers if in_two_terms else numbers @ unscaled_rotation()
    x_scale = jnp.maximum(jnp.abs(numbers).max(2, keepdims=True), SMALLEST) / STEPS
    steps = numbers / x_scale
    first = jnp.round(steps)
    terms = [(first, x_scale * product_factor(is_rotated=not in_two_terms))]
    if in_two_terms:
        terms.append((jnp.round((steps - first) * SECOND_TERM), terms[0][1] / SECOND_TERM))
    padding = ((0, max(0, MIN_PRODUCT_ROWS - num_rows)), (0, 0), (0, 0))
    integers = jnp.concatenate([jnp.pad(term, padding) for term, _ in terms]).astype(jnp.int8)
    x_scales = jnp.concatenate([jnp.pad(each, padding) for _, each in terms])
    blocks = weight.reshape(out, num_blocks, BLOCK)

    def add_block(index: jax.Array, total: jax.Array) -> jax.Array:
        rows, columns, across, down = (
            lax.dynamic_index_in_dim(array, index, 1, keepdims=False)
            for array in (integers, blocks, x_scales, scale)
        )
        sums = jnp.einsum("rk,ok->ro", rows, columns, preferred_element_type=jnp.int32)
        return total + sums.astype(jnp.float32) * down.astype(jnp.float32)[None] * across

    zeros = jnp.zeros((len(integers), out), jnp.float32)
    products = lax.fori_loop(jnp.int32(0), jnp.int32(num_blocks), add_block, zeros)
    return products.reshape(len(terms), -1, out).sum(0)[:num_rows]


def product_factor(*, is_rotated: bool) -> float:
    """The factor that undoes `SCALE_FACTOR` and the size of unscaled rotations."""
    return 1 / (SCALE_FACTOR * (BLOCK if is_rotated else 1))


def unscaled_rotation() -> NDArray[np.float32]:
    """The rotation of a block with entries 1 and -1."""
    return np.sign(rotation(BLOCK))


def _rotate(blocks: NDArray[np.float32]) -> NDArray[np.float32]:
    together = math.gcd(len(blocks), BLOCKS_PER_PRODUCT)
    return (blocks.reshape(-1, together, BLOCK) @ unscaled_rotation()).reshape(blocks.shape)


def _find_steps(blocks: NDArray[np.float32]) -> NDArray[np.float32]:
    """The step of which each block's values are multiples, apart from a constant; 0: there is none."""
    steps = np.zeros(len(blocks), np.float32)
    sample = blocks[:: max(1, len(blocks) // SAMPLE)]
    if not any(_has_levels(sample, levels).mean() > 1 / 4 for levels in LEVELS):
        return steps
    missing = np.arange(len(blocks))
    for levels in LEVELS:
        found = _has_levels(blocks[missing], levels)
        steps[missing[found]] = np.ptp(blocks[missing[found]], axis=1) / levels
        missing = missing[~found]
        if not len(missing):
            break
    return steps


def _has_levels(blocks: NDArray[np.float32], levels: int) -> NDArray[np.bool_]:
    """Whether each block's values lie on whole steps, with `levels` of them between its ends."""
    smallest = blocks.min(1, keepdims=True)
    spread = np.maximum(blocks.max(1, keepdims=True) - smallest, SMALLEST)
    positions = (blocks - smallest) * (levels / spread)
    return np.asarray((np.abs(positions - np.rint(positions)) < TOLERANCE).all(1))
