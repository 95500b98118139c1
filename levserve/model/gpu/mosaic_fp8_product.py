"""Products of many FP8 rows with an FP8 matrix that has a scale for each block, as a Mosaic GPU kernel.

For Hopper. Every 128 inputs of a row share a scale, and so do 128 x 128 values of the matrix. One warp group
copies by TMA, several steps ahead and on into the next tile. Two multiply, each half of the tile's rows:
tensor cores accumulate the products of 128 inputs, which are then scaled and added to the sums in float32.
While one of the two adds, the other one keeps the tensor cores busy.

The rows of a mixture's tokens lie in blocks of 64 with the same expert, as for `mosaic_product`: a tile is
two blocks of an expert, or one.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from levserve.model.cache import LARGEST_FP8
from levserve.model.fp8_rows import Fp8Rows
from levserve.model.gpu.expert_blocks import BLOCK, Blocks
from levserve.model.gpu.gate import Gate
from levserve.model.gpu.hopper import num_processors
from levserve.model.gpu.mosaic_product import Share
from levserve.model.packed import PackedMatrix, decode_scale

DEPTH = 128
"""Inputs of one step, which share a scale."""
NUM_MULTIPLIERS = 2
COPIER = NUM_MULTIPLIERS
ROWS = 64
"""Rows of a tile that a warp group multiplies."""
COLUMNS = 128
"""Columns that share scales."""
TILE_ROWS = NUM_MULTIPLIERS * ROWS
COPIER_REGISTERS, MULTIPLIER_REGISTERS = 40, 208
"""With 232 the assembler keeps some values in memory all the same, and products take half as long again."""
NUM_SLOTS = {1: 5, 2: 4}
"""Steps that are copied ahead, by the pieces of a tile. With results, 226 KiB of 227 are used at most."""
STORED_BYTES = 128
"""Of each row of a result, stored together."""
NUM_STORED = 2
"""Parts of a warp group's result that may be on their way to memory."""


@functools.partial(jax.jit, static_argnames=("dtype", "pieces", "num_programs", "interpret"))
def multiply_in_blocks(
    matrix: PackedMatrix,
    x: Fp8Rows,
    *,
    dtype: jnp.dtype,
    pieces: int,
    num_programs: int | None = None,
    interpret: object = None,
) -> jax.Array:
    """x [row, in] times the matrix: [row, out] in this type. A tile has so many pieces of 128 columns."""
    arrays = matrix.codes[None], decode_scale(matrix.scale)[None]
    return _call(arrays, x, (), None, pieces, dtype, num_programs, interpret)


def multiply_experts(
    matrix: PackedMatrix,
    x: Fp8Rows,
    blocks: Blocks,
    gate: Gate | None,
    *,
    num_programs: int | None = None,
    interpret: object = None,
) -> jax.Array:
    """x [slot, in] times the matrix [expert, out, in] of their block's expert, in bfloat16; with a gate,
    which must have two parts (gate and up), the hidden values that it gives. The results of blocks without
    an expert are undefined."""
    listed = blocks.firsts, blocks.experts, blocks.counts
    arrays = matrix.codes, decode_scale(matrix.scale)
    return _call(arrays, x, listed, gate, 2, jnp.dtype(jnp.bfloat16), num_programs, interpret)


def _call(
    matrix: tuple[jax.Array, jax.Array],
    x: Fp8Rows,
    listed: tuple[jax.Array, ...],
    gate: Gate | None,
    pieces: int,
    dtype: jnp.dtype,
    num_programs: int | None,
    interpret: object,
) -> jax.Array:
    """`matrix` are codes [expert, out, in] and scales; `listed` are the tiles of experts, or nothing if there
    is one matrix for all rows. There is a program for each processor, unless `num_programs` is given."""
    codes, scale = matrix
    num_programs = num_programs or num_processors()
    num_slots, stored = NUM_SLOTS[pieces], STORED_BYTES // dtype.itemsize
    in_tiling = (plgpu.TilingTransform((8, DEPTH)), plgpu.SwizzleTransform(128))
    out_tiling = (plgpu.TilingTransform((8, stored)), plgpu.SwizzleTransform(128))
    width = codes.shape[1] // (1 if gate is None else 2)
    kernel = plgpu.kernel(
        functools.partial(_kernel, gate=gate, num_programs=num_programs),
        out_type=jax.ShapeDtypeStruct((len(x.codes), width), dtype),
        grid=(num_programs,),
        grid_names=("program",),
        num_threads=NUM_MULTIPLIERS + 1,
        thread_name="group",
        scratch_types=[
            plgpu.SMEM((num_slots, TILE_ROWS, DEPTH), codes.dtype, transforms=in_tiling),
            plgpu.SMEM((num_slots, pieces * COLUMNS, DEPTH), codes.dtype, transforms=in_tiling),
            plgpu.SMEM((num_slots, TILE_ROWS), jnp.float32),
            plgpu.SMEM((NUM_MULTIPLIERS * NUM_STORED, ROWS, stored), dtype, transforms=out_tiling),
            plgpu.Barrier(num_arrivals=2 + pieces, num_barriers=num_slots),
            plgpu.Barrier(num_arrivals=NUM_MULTIPLIERS, num_barriers=num_slots),
        ],
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        interpret=interpret,
    )
    return kernel(x.codes, x.largest, codes, scale, *listed)


class _Tile(NamedTuple):
    row: jax.Array
    expert: jax.Array
    column: jax.Array
    """The first of the result."""
    is_half: jax.Array
    """Whether only the first warp group has rows."""


def _kernel(
    row_ref: jax.Ref,
    largest_ref: jax.Ref,
    matrix_ref: jax.Ref,
    scale_ref: jax.Ref,
    *refs: jax.Ref,
    gate: Gate | None,
    num_programs: int,
) -> None:
    *listed_refs, out_ref, row_slots, matrix_slots, largest_slots, out_slots, is_copied, is_free = refs
    group, program = lax.axis_index("group"), lax.axis_index("program")
    (num_rows, num_inputs), width = row_ref.shape, out_ref.shape[1]
    num_steps = num_inputs // DEPTH
    num_slots, tile_columns, _ = matrix_slots.shape
    pieces = tile_columns // COLUMNS
    per_tile = pieces * COLUMNS if gate is None else COLUMNS
    across = width // per_tile

    def find_dense(number: jax.Array) -> _Tile:
        """Tiles of the same columns follow each other, so that the matrix is read from memory once."""
        tile = number * num_programs + program
        row, column = lax.rem(tile, down) * TILE_ROWS, lax.div(tile, down) * per_tile
        return _Tile(row, jnp.int32(0), column, jnp.bool_(False))

    def find_of_experts(number: jax.Array) -> _Tile:
        first_ref, expert_ref, _ = listed_refs
        is_half, unit = share.find(number)
        kind, tile = is_half.astype(jnp.int32), lax.div(unit, across)
        column = lax.rem(unit, across) * per_tile
        return _Tile(first_ref[kind, tile] * BLOCK, expert_ref[kind, tile], column, is_half)

    if listed_refs:
        share = Share.of(program, listed_refs[-1], across, num_programs)
        find, own_tiles = find_of_experts, share.total
    else:
        down = -(-num_rows // TILE_ROWS)
        find, own_tiles = find_dense, lax.div(down * across - program + num_programs - 1, num_programs)

    def first_of(tile: _Tile, piece: int) -> jax.Array:
        """The first of a piece's columns in the matrix; the second one of a gated tile is the up part's."""
        return tile.column + piece * (COLUMNS if gate is None else width)

    def slot_of(number: jax.Array, step: jax.Array) -> jax.Array:
        return lax.rem(number * num_steps + step, num_slots)

    def copy() -> None:
        plgpu.set_max_registers(COPIER_REGISTERS, action="decrease")

        def copy_tile(number: jax.Array, carry: None) -> None:
            tile = find(number)

            def copy_step(step: jax.Array, carry: None) -> None:
                slot = slot_of(number, step)
                inputs, barrier = pl.ds(step * DEPTH, DEPTH), is_copied.at[slot]
                rows = pl.ds(tile.row, TILE_ROWS)
                plgpu.barrier_wait(is_free.at[slot])
                plgpu.copy_gmem_to_smem(row_ref.at[rows, inputs], row_slots.at[slot], barrier)
                plgpu.copy_gmem_to_smem(largest_ref.at[step, rows], largest_slots.at[slot], barrier)
                for piece in range(pieces):
                    columns = pl.ds(first_of(tile, piece), COLUMNS)
                    plgpu.copy_gmem_to_smem(
                        matrix_ref.at[tile.expert, columns, inputs],
                        matrix_slots.at[slot, pl.ds(piece * COLUMNS, COLUMNS)],
                        barrier,
                    )

            lax.fori_loop(0, num_steps, copy_step, None)

        lax.fori_loop(0, own_tiles, copy_tile, None)
        for slot in range(num_slots):
            plgpu.barrier_wait(is_free.at[slot])

    def multiply() -> None:
        plgpu.set_max_registers(MULTIPLIER_REGISTERS, action="increase")
        for slot in range(num_slots):
            plgpu.barrier_arrive(is_free.at[slot])
        own_rows = pl.ds(group * ROWS, ROWS)

        def multiply_tile(number: jax.Array, carry: None) -> None:
            tile = find(number)

            def add_step(step: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                slot = slot_of(number, step)
                scales = [
                    scale_ref[tile.expert, step, lax.div(first_of(tile, piece), COLUMNS)] * (1 / LARGEST_FP8)
                    for piece in range(pieces)
                ]
                plgpu.barrier_wait(is_copied.at[slot])
                # An accumulator's layout, so that every thread has the scales of the rows that it adds to.
                largest = plgpu.layout_cast(largest_slots[slot, own_rows], plgpu.Layout.WGMMA.reduce(1))
                added = []
                for piece, (total, scale) in enumerate(zip(sums, scales, strict=True)):

                    def product(accumulator: Any, piece: int = piece) -> jax.Array:
                        columns = pl.ds(piece * COLUMNS, COLUMNS)
                        plgpu.wgmma(
                            accumulator,
                            row_slots.at[slot, own_rows],
                            matrix_slots.at[slot, columns].transpose((1, 0)),
                        )
                        plgpu.wgmma_wait(0)
                        return accumulator[...]

                    accumulator = plgpu.ACC((ROWS, COLUMNS), jnp.float32)  # type: ignore[attr-defined]
                    part = pl.run_scoped(product, accumulator)
                    factor = lax.broadcast_in_dim(largest * scale, (ROWS, COLUMNS), [0])
                    added.append(total + part * factor)
                plgpu.barrier_arrive(is_free.at[slot])
                return tuple(added)

            def compute() -> None:
                nothing = plgpu.layout_cast(jnp.zeros((ROWS, COLUMNS), jnp.float32), plgpu.Layout.WGMMA)
                sums = lax.fori_loop(0, num_steps, add_step, (nothing,) * pieces)
                store(tile, sums if gate is None else (gate.apply(sums),))

            def leave_out() -> None:
                def skip(step: jax.Array, carry: None) -> None:
                    slot = slot_of(number, step)
                    plgpu.barrier_wait(is_copied.at[slot])
                    plgpu.barrier_arrive(is_free.at[slot])

                lax.fori_loop(0, num_steps, skip, None)

            if listed_refs:
                lax.cond(tile.is_half & (group > 0), leave_out, compute)
            else:
                compute()

        def store(tile: _Tile, results: tuple[jax.Array, ...]) -> None:
            stored = out_slots.shape[2]
            starts = [(piece, start) for piece in range(len(results)) for start in range(0, COLUMNS, stored)]
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for index, (piece, start) in enumerate(starts):
                place = group * NUM_STORED + index % NUM_STORED
                plgpu.wait_smem_to_gmem(NUM_STORED - 1, wait_read_only=True)
                out_slots[place] = results[piece][:, start : start + stored].astype(out_ref.dtype)
                plgpu.commit_smem()
                at = (
                    pl.ds(tile.row + group * ROWS, ROWS),
                    pl.ds(tile.column + piece * COLUMNS + start, stored),
                )
                plgpu.copy_smem_to_gmem(out_slots.at[place], out_ref.at[at])

        lax.fori_loop(0, own_tiles, multiply_tile, None)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    lax.cond(group == COPIER, copy, multiply)
