"""Int8 matrices with a scale for every 32 inputs, which hold most four-bit files exactly.

Four-bit formats have one step size for 32 values or a multiple of 32, and each value is a whole number of
steps above the smallest. The sums and differences of 32 such values that a Hadamard rotation forms are
multiples of the same step and fit int8, except for the sum of all 32, which is rounded. So a rotated block
keeps the file's step as its scale. A block without such a step is rounded to 127 steps of its own.
Activations are rounded to int8 with a scale for each token and block.

On CPUs with matrix units, matrices other than the head have another form (`cpu/widened_matrices`): nothing is
rotated, and every block has a middle besides its scale.

The head is not rotated, which keeps blocks of Q8_0 exact, and its activations have two int8 terms, because no
later layer averages out the rounding errors there.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from levserve.model.hadamard import rotation
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
MIN_PRODUCT_ROWS = 2
"""XLA's integer product of one row is slower than that of two."""


class TooLarge(ValueError):
    """A matrix has a value that scales for blocks cannot hold."""


def has_blocks(size: int) -> bool:
    """Whether rows of this size consist of whole blocks."""
    return size % BLOCK == 0


def multiply_blocks(
    weight: jax.Array, scale: jax.Array, x: jax.Array, *, in_two_terms: bool = False
) -> jax.Array:
    """x [row, in] times a matrix that `round_blocks` made [out, in]: float32 [row, out].

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
