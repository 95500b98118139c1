"""Products of many FP8 rows with an FP8 matrix that has a scale for each block, as a Mosaic GPU kernel.

For Hopper. Every 128 inputs of a row share a scale, and so do 128 x 128 values of the matrix. One warp group
copies by TMA, several steps ahead and on into the next tile. Two multiply, each half of the tile's rows:
tensor cores accumulate the products of 128 inputs, which are then scaled and added to the sums in float32.
While one of the two adds, the other one keeps the tensor cores busy.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from levserve.model.cache import LARGEST_FP8
from levserve.model.fp8_rows import Fp8Rows
from levserve.model.gpu.fp8_plan import MAX_ROWS, WIDE
from levserve.model.gpu.hopper import is_hopper
from levserve.model.packed import Code, PackedMatrix, Scheme, decode_scale

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
NUM_SLOTS = {1: 6, 2: 4}
"""Steps that are copied ahead, by the pieces of a tile: about 194 KiB of the 227 that a processor has."""
TIMES = {2: 2.0, 1: 1.05}
"""How long a tile takes, by its pieces; for each product, a larger one reads less."""
ROWS_COPIED = 8
"""TMA copies so many rows together, and their scales if these are a multiple of 16 bytes."""
MAX_WIDE_ROWS = 64
"""The most rows that Triton's kernel multiplies faster with a matrix of `WIDE` outputs."""
STORED_BYTES = 128
"""Of each row of a result, stored together."""
NUM_PROGRAMS = 132
"""One for each processor of an H100 or H200."""


def choose_pieces(num_rows: int, shape: tuple[int, int], scheme: Scheme) -> int | None:
    """How many pieces the tiles of a product with a matrix [out, in] should have; None if the kernel does not
    serve it or Triton's is faster."""
    num_columns, num_inputs = shape
    if not is_hopper() or scheme.code is not Code.FP8 or (scheme.columns, scheme.rows) != (DEPTH, COLUMNS):
        return None
    if num_rows <= (MAX_WIDE_ROWS if num_columns >= WIDE else MAX_ROWS):
        return None
    if num_rows % ROWS_COPIED or num_inputs % DEPTH:
        return None
    down = -(-num_rows // TILE_ROWS)

    def time_of(pieces: int) -> float:
        turns = -(-down * (num_columns // (pieces * COLUMNS)) // NUM_PROGRAMS)
        return turns * TIMES[pieces]

    fitting = [pieces for pieces in TIMES if num_columns % (pieces * COLUMNS) == 0]
    return min(fitting, key=time_of, default=None)


@functools.partial(jax.jit, static_argnames=("dtype", "pieces", "num_programs", "interpret"))
def multiply_in_blocks(
    matrix: PackedMatrix,
    x: Fp8Rows,
    *,
    dtype: jnp.dtype,
    pieces: int,
    num_programs: int = NUM_PROGRAMS,
    interpret: object = None,
) -> jax.Array:
    """x [row, in] times the matrix: [row, out] in this type. A tile has so many pieces of 128 columns."""
    num_slots = NUM_SLOTS[pieces]
    stored = STORED_BYTES // dtype.itemsize
    in_tiling = (plgpu.TilingTransform((8, DEPTH)), plgpu.SwizzleTransform(128))
    out_tiling = (plgpu.TilingTransform((8, stored)), plgpu.SwizzleTransform(128))
    kernel = plgpu.kernel(
        functools.partial(_kernel, num_programs=num_programs),
        out_type=jax.ShapeDtypeStruct((len(x.codes), len(matrix.codes)), dtype),
        grid=(num_programs,),
        grid_names=("program",),
        num_threads=NUM_MULTIPLIERS + 1,
        thread_name="group",
        scratch_types=[
            plgpu.SMEM((num_slots, TILE_ROWS, DEPTH), x.codes.dtype, transforms=in_tiling),
            plgpu.SMEM((num_slots, pieces * COLUMNS, DEPTH), x.codes.dtype, transforms=in_tiling),
            plgpu.SMEM((num_slots, TILE_ROWS), jnp.float32),
            plgpu.SMEM((NUM_MULTIPLIERS, ROWS, stored), dtype, transforms=out_tiling),
            plgpu.Barrier(num_arrivals=3, num_barriers=num_slots),
            plgpu.Barrier(num_arrivals=NUM_MULTIPLIERS, num_barriers=num_slots),
        ],
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        interpret=interpret,
    )
    scale = decode_scale(matrix.scale) / LARGEST_FP8
    return kernel(x.codes, x.largest, matrix.codes, scale)


def _kernel(
    row_ref: jax.Ref,
    largest_ref: jax.Ref,
    matrix_ref: jax.Ref,
    scale_ref: jax.Ref,
    out_ref: jax.Ref,
    row_slots: jax.Ref,
    matrix_slots: jax.Ref,
    largest_slots: jax.Ref,
    out_slots: jax.Ref,
    is_copied: jax.Ref,
    is_free: jax.Ref,
    *,
    num_programs: int,
) -> None:
    group, program = lax.axis_index("group"), lax.axis_index("program")
    (num_rows, num_inputs), num_columns = row_ref.shape, matrix_ref.shape[0]
    num_steps = num_inputs // DEPTH
    num_slots, tile_columns, _ = matrix_slots.shape
    pieces = tile_columns // COLUMNS
    down = -(-num_rows // TILE_ROWS)
    num_tiles = down * (num_columns // tile_columns)
    own_tiles = lax.div(num_tiles - program + num_programs - 1, num_programs)

    def slot_of(number: jax.Array, step: jax.Array) -> jax.Array:
        return lax.rem(number * num_steps + step, num_slots)

    def find(number: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The first row and column of one of this program's tiles. Tiles of the same columns follow each
        other, so that the matrix is read from memory once."""
        tile = number * num_programs + program
        return lax.rem(tile, down) * TILE_ROWS, lax.div(tile, down) * tile_columns

    def copy() -> None:
        plgpu.set_max_registers(COPIER_REGISTERS, action="decrease")

        def copy_tile(number: jax.Array, carry: None) -> None:
            row, column = find(number)

            def copy_step(step: jax.Array, carry: None) -> None:
                slot = slot_of(number, step)
                inputs, barrier = pl.ds(step * DEPTH, DEPTH), is_copied.at[slot]
                rows = pl.ds(row, TILE_ROWS)
                plgpu.barrier_wait(is_free.at[slot])
                plgpu.copy_gmem_to_smem(row_ref.at[rows, inputs], row_slots.at[slot], barrier)
                plgpu.copy_gmem_to_smem(largest_ref.at[step, rows], largest_slots.at[slot], barrier)
                plgpu.copy_gmem_to_smem(
                    matrix_ref.at[pl.ds(column, tile_columns), inputs], matrix_slots.at[slot], barrier
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
            row, column = find(number)
            first_block = lax.div(column, COLUMNS)

            def add_step(step: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                slot = slot_of(number, step)
                scales = [scale_ref[step, first_block + piece] for piece in range(pieces)]
                plgpu.barrier_wait(is_copied.at[slot])
                largest = plgpu.load(
                    largest_slots.at[slot, own_rows], (), layout=plgpu.Layout.WGMMA.reduce(1), optimized=False
                )
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

            nothing = plgpu.layout_cast(jnp.zeros((ROWS, COLUMNS), jnp.float32), plgpu.Layout.WGMMA)
            sums = lax.fori_loop(0, num_steps, add_step, (nothing,) * pieces)
            stored = out_slots.shape[2]
            for piece, total in enumerate(sums):
                for start in range(0, COLUMNS, stored):
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    out_slots[group] = total[:, start : start + stored].astype(out_ref.dtype)
                    plgpu.commit_smem()
                    at = (
                        pl.ds(row + group * ROWS, ROWS),
                        pl.ds(column + piece * COLUMNS + start, stored),
                    )
                    plgpu.copy_smem_to_gmem(out_slots.at[group], out_ref.at[at])

        lax.fori_loop(0, own_tiles, multiply_tile, None)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    lax.cond(group == COPIER, copy, multiply)
