"""Products with a matrix that is packed as in its checkpoint, as a Pallas kernel for NVIDIA GPUs.

Codes are read as they are stored, widened to bfloat16 in registers and multiplied by tensor cores from there,
so no widened matrix is ever in memory. Codes of up to eight bits are exact in bfloat16; the sum over a group
of inputs is multiplied by its scale in float32, so only `x` is rounded.

The matrix is the left factor of every product, because tensor cores take that one from registers. Where too
few programs would leave a GPU idle, several share a sum, each over some of the inputs; their partial sums are
added in a fixed order, so results do not depend on which program is faster.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from levserve.model.gpu.packed_plan import PackedTiling, piece_width
from levserve.model.gpu.split_product import add_splits, sum_pieces
from levserve.model.gpu.unpack import UINT4_OFFSET, unpack, unpack_plainly
from levserve.model.packed import Code, PackedMatrix, Scheme, decode_scale

Blocks = tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]
"""The scales of a piece and its zero points; of nibbles, those of the first values and of the second."""


@functools.partial(jax.jit, static_argnames=("tiling", "interpret"))
def multiply_in_registers(
    matrix: PackedMatrix, x: jax.Array, *, tiling: PackedTiling, interpret: bool = False
) -> jax.Array:
    """x [row, in], rounded to bfloat16, times the matrix: float32 [row, out]."""
    num_rows, num_columns = len(x), matrix.axes[0].size
    arrays = [x.astype(jnp.bfloat16), matrix.codes, matrix.scale]
    if matrix.zero is not None:
        arrays.append(matrix.zero)
    grid = (num_columns // tiling.columns, -(-num_rows // tiling.rows))
    kernel = functools.partial(_kernel, scheme=matrix.scheme, tiling=tiling, interpret=interpret)
    shape = (num_rows, num_columns)
    return add_splits(kernel, arrays, shape, grid, tiling, interpret=interpret, name="packed_product")


def _kernel(
    x_ref: jax.Ref,
    code_ref: jax.Ref,
    scale_ref: jax.Ref,
    *refs: jax.Ref,
    scheme: Scheme,
    tiling: PackedTiling,
    interpret: bool,
) -> None:
    *zero_refs, out_ref = refs
    num_rows = x_ref.shape[0]
    width = code_ref.shape[1]
    piece = piece_width(tiling.depth, scheme, width)
    first_column = pl.program_id(0) * tiling.columns
    columns = first_column + jnp.arange(tiling.columns, dtype=jnp.int32)
    rows = pl.program_id(1) * tiling.rows + jnp.arange(tiling.rows, dtype=jnp.int32)
    # Rows past the end are masked: if an existing row were read instead, all programs would read it at once.
    is_row = jnp.broadcast_to((rows < num_rows)[:, None], (tiling.rows, piece))
    split = pl.program_id(2)
    starts = (0, width) if scheme.code.is_nibble else (0,)

    def of_blocks(ref: jax.Ref, first: jax.Array) -> jax.Array:
        """One value per column, for the group of this input; a single value if all columns share a block."""
        group = 0 if scheme.columns is None else first // scheme.columns
        if scheme.rows % tiling.columns == 0:
            return plgpu.load(ref.at[group, first_column // scheme.rows])
        return plgpu.load(ref.at[group, columns // scheme.rows if scheme.rows > 1 else columns])

    def across(numbers: jax.Array) -> jax.Array:
        return numbers[:, None] if numbers.ndim else numbers

    def load_blocks(first: jax.Array) -> Blocks:
        inputs = [first + start for start in starts]
        scales = () if scheme.columns is None else tuple(of_blocks(scale_ref, each) for each in inputs)
        return scales, tuple(of_blocks(ref, each) for ref in zero_refs for each in inputs)

    def zeros_of(found: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        if scheme.code is not Code.UINT4:
            return ()
        if not zero_refs:
            return (jnp.full(tiling.columns, UINT4_OFFSET + scheme.zero, jnp.bfloat16),) * 2
        return tuple(zero.astype(jnp.bfloat16) + jnp.bfloat16(UINT4_OFFSET) for zero in found)

    def add_piece(first: jax.Array, blocks: Blocks, total: jax.Array) -> jax.Array:
        scales, found = blocks
        codes = code_ref[pl.ds(first_column, tiling.columns), pl.ds(first, piece)]
        zeros = zeros_of(found)
        if interpret:
            tiles = unpack_plainly(codes, scheme.code, zeros)
        else:
            tiles = unpack(codes, scheme.code, zeros, tiling.pack)
        for number, (start, tile) in enumerate(zip(starts, tiles, strict=True)):
            inputs = first + start + jnp.arange(piece, dtype=jnp.int32)
            x = plgpu.load(x_ref.at[rows[:, None], inputs[None, :]], mask=is_row, other=0.0)
            product = plgpu.dot(tile, x.T)
            total = total + (product * across(decode_scale(scales[number])) if scales else product)
        return total

    total = sum_pieces(load_blocks, add_piece, split=split, width=width, piece=piece, tiling=tiling)
    if scheme.columns is None:
        total = total * across(decode_scale(of_blocks(scale_ref, jnp.int32(0))))
    mask = jnp.broadcast_to((rows < num_rows)[None, :], total.shape)
    plgpu.store(out_ref.at[split, rows[None, :], columns[:, None]], total, mask=mask)
