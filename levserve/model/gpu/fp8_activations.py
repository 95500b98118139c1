"""Which way a product with activations in FP8 is computed on an NVIDIA GPU.

Triton's kernel multiplies few rows. For many, XLA has a library for matrices with one scale for a whole row,
and Hopper a kernel for those with one scale for 128 x 128 values. What is left is widened in memory by XLA.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from levserve.model.fp8_rows import Fp8Rows
from levserve.model.gpu.fp8_dot import has_dot_fp8
from levserve.model.gpu.fp8_plan import MAX_WHOLE_ROWS, choose_fp8_tiling
from levserve.model.gpu.fp8_product import multiply_fp8
from levserve.model.gpu.fp8_whole_rows import multiply_whole_rows
from levserve.model.gpu.mosaic_fp8_plan import choose_pieces
from levserve.model.gpu.mosaic_fp8_product import multiply_in_blocks
from levserve.model.gpu.packed_plan import choose_tiling
from levserve.model.gpu.packed_product import multiply_in_registers
from levserve.model.gpu.round_fp8 import find_group, round_in_groups
from levserve.model.packed import PackedMatrix, round_as_asked


def multiply_rounded(
    matrix: PackedMatrix, x: jax.Array | Fp8Rows, summed: jnp.dtype, *, interpret: bool
) -> jax.Array | None:
    """x [row, in], rounded to FP8, times the matrix; None if the matrix has to be widened in memory. Sums may
    be rounded to `summed`."""
    num_rows, scheme = len(x.codes if isinstance(x, Fp8Rows) else x), matrix.scheme
    given = num_rows, _shape_of(matrix), scheme

    def rounded() -> Fp8Rows:
        return x if isinstance(x, Fp8Rows) else round_in_groups(x, scheme.columns, interpret=interpret)

    if scheme.columns is None and num_rows > MAX_WHOLE_ROWS:
        return multiply_whole_rows(matrix, rounded(), summed)
    pieces = None if interpret else choose_pieces(*given)
    if pieces is not None:
        return multiply_in_blocks(matrix, rounded(), dtype=summed, pieces=pieces)
    if not has_dot_fp8():
        return _multiply_widened(matrix, x, num_rows, interpret=interpret)
    cut = choose_fp8_tiling(*given)
    if cut is None:
        return None
    return multiply_fp8(matrix, x if cut.rounds_inside else rounded(), cut=cut, interpret=interpret)


def group_to_round(num_rows: int, matrix: PackedMatrix) -> int | None:
    """How many inputs share a scale, if a kernel should round them before the product."""
    shape = _shape_of(matrix)
    cut = choose_fp8_tiling(num_rows, shape, matrix.scheme) if has_dot_fp8() else None
    return None if cut is not None and cut.rounds_inside else find_group(shape[1], matrix.scheme.columns)


def _shape_of(matrix: PackedMatrix) -> tuple[int, int]:
    num_columns, num_inputs = (axis.size for axis in matrix.axes)
    return num_columns, num_inputs


def _multiply_widened(
    matrix: PackedMatrix, x: jax.Array | Fp8Rows, num_rows: int, *, interpret: bool
) -> jax.Array | None:
    """The same where jax has no product of FP8 for kernels: both factors are widened in registers."""
    tiling = choose_tiling(num_rows, _shape_of(matrix), matrix.scheme)
    if tiling is None:
        return None
    if isinstance(x, Fp8Rows):
        x = x.widen().astype(jnp.bfloat16)
    else:
        x = round_as_asked(x.astype(jnp.bfloat16), matrix.scheme)
    return multiply_in_registers(matrix, x, tiling=tiling, interpret=interpret)
