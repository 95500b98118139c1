"""Products of FP8 activations with an FP8 matrix where a whole row of each has one scale, by XLA.

XLA has cuBLASLt multiply such codes as they are, and scales its result. For many rows that is one and a half
times as fast as bfloat16. cuBLASLt is not asked for products with a scale for every group of inputs, because
XLA has no way to ask for them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from levserve.model.cache import LARGEST_FP8
from levserve.model.fp8_rows import Fp8Rows
from levserve.model.packed import PackedMatrix


def multiply_whole_rows(matrix: PackedMatrix, x: Fp8Rows, summed: jnp.dtype) -> jax.Array:
    """x [row, in] times the matrix, float32 [row, out]; the unscaled sums are rounded to `summed`."""
    assert matrix.scheme.columns is None
    # At any other precision tensor cores would accumulate with fewer bits than float32 has.
    sums = lax.dot_general(
        x.codes,
        matrix.codes,
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=summed,
    )
    return sums.astype(jnp.float32) * (x.largest.T / LARGEST_FP8) * matrix.row_scales()[None, :]
