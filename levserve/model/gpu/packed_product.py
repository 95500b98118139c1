"""Products with a matrix that is packed as in its checkpoint, as a Pallas kernel for NVIDIA GPUs.

Codes are read as they are stored, widened to bfloat16 in registers and multiplied by tensor cores from there
(see `packed_columns`), so no widened matrix is ever in memory. Where too few programs would leave a GPU idle,
several share a sum, each over some of the inputs; their partial sums are added in a fixed order, so results
do not depend on which program is faster.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from levserve.model.gpu.packed_columns import Blocks, PackedColumns, arrays_of
from levserve.model.gpu.packed_plan import PackedTiling, piece_width
from levserve.model.gpu.split_product import add_splits, sum_pieces
from levserve.model.packed import PackedMatrix, Scheme


@functools.partial(jax.jit, static_argnames=("tiling", "interpret"))
def multiply_in_registers(
    matrix: PackedMatrix, x: jax.Array, *, tiling: PackedTiling, interpret: bool = False
) -> jax.Array:
    """x [row, in], rounded to bfloat16, times the matrix: float32 [row, out]."""
    num_rows, num_columns = len(x), matrix.axes[0].size
    arrays = [x.astype(jnp.bfloat16), *arrays_of(matrix)]
    grid = (num_columns // tiling.columns, -(-num_rows // tiling.rows))
    kernel = functools.partial(_kernel, scheme=matrix.scheme, tiling=tiling, interpret=interpret)
    shape = (num_rows, num_columns)
    return add_splits(kernel, arrays, shape, grid, tiling, interpret=interpret, name="packed_product")


def _kernel(
    x_ref: jax.Ref,
    *refs: jax.Ref,
    scheme: Scheme,
    tiling: PackedTiling,
    interpret: bool,
) -> None:
    *matrix_refs, out_ref = refs
    num_rows = x_ref.shape[0]
    first_column = pl.program_id(0) * tiling.columns
    columns = first_column + jnp.arange(tiling.columns, dtype=jnp.int32)
    rows = pl.program_id(1) * tiling.rows + jnp.arange(tiling.rows, dtype=jnp.int32)
    split = pl.program_id(2)
    piece = piece_width(tiling.depth, scheme, matrix_refs[0].shape[1])
    matrix = PackedColumns(
        tuple(matrix_refs),
        scheme,
        first_column,
        tiling.columns,
        piece,
        tiling.num_warps,
        interpret=interpret,
    )
    # Rows past the end are masked: if an existing row were read instead, all programs would read it at once.
    is_row = jnp.broadcast_to((rows < num_rows)[:, None], (tiling.rows, piece))

    def load_rows(inputs: jax.Array) -> jax.Array:
        return plgpu.load(x_ref.at[rows[:, None], inputs[None, :]], mask=is_row, other=0.0)

    def add_piece(first: jax.Array, blocks: Blocks, total: jax.Array) -> jax.Array:
        return matrix.add_piece(first, blocks, [*map(load_rows, matrix.inputs_of(first))], total)

    nothing = jnp.zeros((tiling.columns, tiling.rows), jnp.float32)
    total = sum_pieces(
        matrix.load_blocks,
        add_piece,
        nothing,
        width=matrix.width,
        piece=piece,
        depth=tiling.depth,
        split=split,
        splits=tiling.splits,
    )
    total = matrix.finish(total)
    mask = jnp.broadcast_to((rows < num_rows)[None, :], total.shape)
    plgpu.store(out_ref.at[split, rows[None, :], columns[:, None]], total, mask=mask)
