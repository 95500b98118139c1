"""Products of FP8 activations with an FP8 matrix, as a Pallas kernel for NVIDIA GPUs.

Tensor cores multiply FP8 as it is, so nothing is unpacked: a program reads a tile of the matrix and one
of activations, multiplies them, and adds the result times both scales to its sum in float32. For few rows
a program may round the activations itself, which saves a kernel and costs little; for more they are
rounded beforehand.

The matrix is the left factor, because Hopper's instructions take at least 64 rows of that one and as few as
eight columns of the other. As in `packed_product`, programs may share a sum.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from levserve.model.cache import FP8, LARGEST_FP8
from levserve.model.fp8_rows import SMALLEST, Fp8Rows, round_rows
from levserve.model.gpu.fp8_dot import dot_fp8
from levserve.model.gpu.fp8_plan import Fp8Tiling
from levserve.model.gpu.packed_plan import PackedTiling, piece_width
from levserve.model.gpu.split_product import add_splits, sum_pieces
from levserve.model.packed import PackedMatrix, Scheme

Scales = tuple[jax.Array, ...]
"""Of a piece: the matrix's, and each row's unless the program finds these itself; none for whole rows."""


@functools.partial(jax.jit, static_argnames=("cut", "interpret"))
def multiply_fp8(
    matrix: PackedMatrix, x: jax.Array | Fp8Rows, *, cut: Fp8Tiling, interpret: bool = False
) -> jax.Array:
    """x [row, in], rounded to bfloat16 and then to FP8, times the matrix: float32 [row, out]."""
    tiling, rounds_inside = cut
    if not (rounds_inside or isinstance(x, Fp8Rows)):
        x = round_rows(x.astype(jnp.bfloat16), matrix.scheme.columns)
    if isinstance(x, Fp8Rows):
        arrays = [x.codes, matrix.codes, matrix.scale, x.largest]
    else:
        arrays = [x.astype(jnp.bfloat16), matrix.codes, matrix.scale]
    num_rows, num_columns = len(arrays[0]), matrix.axes[0].size
    # Programs that read the same part of the matrix run one after another, so that it is in the cache.
    grid = (-(-num_rows // tiling.rows), num_columns // tiling.columns)
    kernel = functools.partial(_kernel, scheme=matrix.scheme, tiling=tiling, interpret=interpret)
    shape = (num_rows, num_columns)
    return add_splits(kernel, arrays, shape, grid, tiling, interpret=interpret, name="fp8_product")


def _kernel(
    x_ref: jax.Ref,
    code_ref: jax.Ref,
    scale_ref: jax.Ref,
    *refs: jax.Ref,
    scheme: Scheme,
    tiling: PackedTiling,
    interpret: bool,
) -> None:
    *largest_refs, out_ref = refs
    dot = plgpu.dot if interpret else dot_fp8
    num_rows, num_inputs = x_ref.shape
    piece = piece_width(tiling.depth, scheme, num_inputs)
    first_column = pl.program_id(1) * tiling.columns
    columns = first_column + jnp.arange(tiling.columns, dtype=jnp.int32)
    rows = pl.program_id(0) * tiling.rows + jnp.arange(tiling.rows, dtype=jnp.int32)
    is_row = rows < num_rows
    split = pl.program_id(2)

    def scales_of_columns(group: jax.Array | int) -> jax.Array:
        """One scale per column [column, 1]; a single scale if all columns share a block."""
        if scheme.rows % tiling.columns == 0:
            found = plgpu.load(scale_ref.at[group, first_column // scheme.rows])
            return found.astype(jnp.float32)
        at = columns // scheme.rows if scheme.rows > 1 else columns
        return plgpu.load(scale_ref.at[group, at]).astype(jnp.float32)[:, None]

    def scales_of_rows(group: jax.Array | int) -> Scales:
        found = (plgpu.load(ref.at[group, rows], mask=is_row, other=0.0) for ref in largest_refs)
        return tuple(largest * (1 / LARGEST_FP8) for largest in found)

    def load_scales(first: jax.Array) -> Scales:
        if scheme.columns is None:
            return ()
        group = first // scheme.columns
        return scales_of_columns(group), *scales_of_rows(group)

    def add_piece(first: jax.Array, scales: Scales, total: jax.Array) -> jax.Array:
        tile = code_ref[pl.ds(first_column, tiling.columns), pl.ds(first, piece)]
        inputs = first + jnp.arange(piece, dtype=jnp.int32)
        mask = jnp.broadcast_to(is_row[:, None], (tiling.rows, piece))
        x = plgpu.load(x_ref.at[rows[:, None], inputs[None, :]], mask=mask, other=0.0)
        if not largest_refs:
            wide = x.astype(jnp.float32)
            largest = jnp.maximum(jnp.abs(wide).max(1), SMALLEST)
            x = (wide * (LARGEST_FP8 / largest)[:, None]).astype(FP8)
            scales = (*scales, largest * (1 / LARGEST_FP8))
        product = dot(tile, x.T)
        if not scales:
            return total + product
        of_columns, of_rows = scales
        return total + product * (of_columns * of_rows[None, :])

    nothing = jnp.zeros((tiling.columns, tiling.rows), jnp.float32)
    total = sum_pieces(
        load_scales,
        add_piece,
        nothing,
        width=num_inputs,
        piece=piece,
        depth=tiling.depth,
        split=split,
        splits=tiling.splits,
    )
    if scheme.columns is None:
        (of_rows,) = scales_of_rows(0)
        total = total * (scales_of_columns(0) * of_rows[None, :])
    mask = jnp.broadcast_to(is_row[None, :], total.shape)
    plgpu.store(out_ref.at[split, rows[None, :], columns[:, None]], total, mask=mask)
