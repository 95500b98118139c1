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

from levserve.model.fp8_rows import Fp8Rows, round_rows
from levserve.model.gpu.fp8_plan import Fp8Tiling
from levserve.model.gpu.packed_columns import Blocks, PackedColumns
from levserve.model.gpu.packed_plan import PackedTiling, piece_width
from levserve.model.gpu.round_fp8 import round_group
from levserve.model.gpu.split_product import add_splits, sum_pieces
from levserve.model.packed import PackedMatrix, Scheme

Largest = tuple[jax.Array, ...]
"""Those of the rows of a piece; none if the program finds them itself or a row has only one."""


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
    num_rows, num_inputs = x_ref.shape
    piece = piece_width(tiling.depth, scheme, num_inputs)
    first_column = pl.program_id(1) * tiling.columns
    columns = first_column + jnp.arange(tiling.columns, dtype=jnp.int32)
    rows = pl.program_id(0) * tiling.rows + jnp.arange(tiling.rows, dtype=jnp.int32)
    is_row = rows < num_rows
    split = pl.program_id(2)
    matrix = PackedColumns(
        (code_ref, scale_ref),
        scheme,
        first_column,
        tiling.columns,
        piece,
        tiling.num_warps,
        multiplies_fp8=True,
        interpret=interpret,
    )

    def load_largest(group: jax.Array | int) -> Largest:
        return tuple(plgpu.load(ref.at[group, rows], mask=is_row, other=0.0) for ref in largest_refs)

    def load(first: jax.Array) -> tuple[Blocks, Largest]:
        blocks = matrix.load_blocks(first)
        return blocks, () if scheme.columns is None else load_largest(first // scheme.columns)

    def add_piece(first: jax.Array, loaded: tuple[Blocks, Largest], total: jax.Array) -> jax.Array:
        blocks, largest = loaded
        (inputs,) = matrix.inputs_of(first)
        mask = jnp.broadcast_to(is_row[:, None], (tiling.rows, piece))
        x = plgpu.load(x_ref.at[rows[:, None], inputs[None, :]], mask=mask, other=0.0)
        if not largest_refs:
            x, found = round_group(x, 1)
            largest = (found,)
        return matrix.add_piece(first, blocks, [x], total, largest=largest)

    nothing = jnp.zeros((tiling.columns, tiling.rows), jnp.float32)
    total = sum_pieces(
        load,
        add_piece,
        nothing,
        width=num_inputs,
        piece=piece,
        depth=tiling.depth,
        split=split,
        splits=tiling.splits,
    )
    total = matrix.finish(total, *(load_largest(0) if scheme.columns is None else ()))
    mask = jnp.broadcast_to(is_row[None, :], total.shape)
    plgpu.store(out_ref.at[split, rows[None, :], columns[:, None]], total, mask=mask)
