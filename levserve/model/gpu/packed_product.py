"""Products with a matrix in the bits of its checkpoint, as a Pallas kernel for NVIDIA GPUs.

Codes are read as they lie, widened to bfloat16 in registers and multiplied by tensor cores there, so that no
widened matrix is ever in memory. Codes of up to eight bits are exact in bfloat16; the sum over a group of
inputs is multiplied by its scale in float32, so nothing is rounded but `x`.

The matrix is the left factor of every product, because tensor cores take that one from registers. Where one
column of programs would leave a GPU idle, several share a sum, each adding up some of the inputs; their parts
are added in the order of their numbers, so results do not depend on which is faster.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from levserve.model.gpu.packed_plan import PackedTiling, piece_width
from levserve.model.gpu.unpack import UINT4_OFFSET, unpack, unpack_plainly
from levserve.model.packed import Code, PackedMatrix, Scheme, decode_scale


@functools.partial(jax.jit, static_argnames=("tiling", "interpret"))
def multiply_in_registers(
    matrix: PackedMatrix, x: jax.Array, *, tiling: PackedTiling, interpret: bool = False
) -> jax.Array:
    """x [row, in], rounded to bfloat16, times the matrix: float32 [row, out]."""
    num_rows, num_columns = len(x), matrix.axes[0].size
    arrays = [x.astype(jnp.bfloat16), matrix.codes, matrix.scale]
    if matrix.zero is not None:
        arrays.append(matrix.zero)
    out = jax.ShapeDtypeStruct((tiling.splits, num_rows, num_columns), jnp.float32)
    parts = pl.pallas_call(
        functools.partial(_kernel, scheme=matrix.scheme, tiling=tiling, interpret=interpret),
        grid=(num_columns // tiling.columns, -(-num_rows // tiling.rows), tiling.splits),
        in_specs=[pl.BlockSpec(array.shape, functools.partial(_whole, array.ndim)) for array in arrays],
        out_specs=pl.BlockSpec(out.shape, functools.partial(_whole, 3)),
        out_shape=out,
        compiler_params=plgpu.CompilerParams(num_warps=tiling.num_warps, num_stages=tiling.num_stages),
        interpret=interpret,
        name="packed_product",
    )(*arrays)
    # One by one: XLA would compile a sum over an axis to a kernel of its own.
    return functools.reduce(jnp.add, (parts[number] for number in range(tiling.splits)))


def _whole(num_dims: int, *program: jax.Array) -> tuple[int, ...]:
    return (0,) * num_dims


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
    first_column = pl.program_id(0) * tiling.columns
    columns = first_column + jnp.arange(tiling.columns, dtype=jnp.int32)
    rows = pl.program_id(1) * tiling.rows + jnp.arange(tiling.rows, dtype=jnp.int32)
    known = jnp.minimum(rows, num_rows - 1)
    split = pl.program_id(2)
    piece = piece_width(tiling.depth, scheme, width)
    starts = (0, width) if scheme.code.is_nibble else (0,)

    def of_blocks(ref: jax.Ref, first: jax.Array) -> jax.Array:
        """A number for each column, of the group in which this input is."""
        group = 0 if scheme.columns is None else first // scheme.columns
        return plgpu.load(ref.at[group, columns // scheme.rows if scheme.rows > 1 else columns])

    def zeros_at(first: jax.Array) -> tuple[jax.Array, ...]:
        if scheme.code is not Code.UINT4:
            return ()
        if not zero_refs:
            return (jnp.full(tiling.columns, UINT4_OFFSET + scheme.zero, jnp.bfloat16),) * 2
        found = (of_blocks(zero_refs[0], first + start) for start in starts)
        return tuple(zero.astype(jnp.bfloat16) + jnp.bfloat16(UINT4_OFFSET) for zero in found)

    def add_piece(first: jax.Array, total: jax.Array) -> jax.Array:
        codes = code_ref[pl.ds(first_column, tiling.columns), pl.ds(first, piece)]
        zeros = zeros_at(first)
        if interpret:
            tiles = unpack_plainly(codes, scheme.code, zeros)
        else:
            tiles = unpack(codes, scheme.code, zeros, tiling.pack)
        for start, tile in zip(starts, tiles, strict=True):
            inputs = first + start + jnp.arange(piece, dtype=jnp.int32)
            x = plgpu.load(x_ref.at[known[:, None], inputs[None, :]])
            product = plgpu.dot(tile, x.T)
            if scheme.columns is not None:
                product = product * decode_scale(of_blocks(scale_ref, first + start))[:, None]
            total = total + product
        return total

    num_steps = width // tiling.depth // tiling.splits

    def step(index: jax.Array, total: jax.Array) -> jax.Array:
        first = (split * num_steps + index) * tiling.depth
        for number in range(tiling.depth // piece):
            total = add_piece(first + number * piece, total)
        return total

    total = lax.fori_loop(0, num_steps, step, jnp.zeros((tiling.columns, tiling.rows), jnp.float32))
    if scheme.columns is None:
        total = total * decode_scale(of_blocks(scale_ref, jnp.int32(0)))[:, None]
    mask = jnp.broadcast_to((rows < num_rows)[None, :], total.shape)
    plgpu.store(out_ref.at[split, rows[None, :], columns[:, None]], total, mask=mask)
