"""The experts' product of many tokens as a Mosaic GPU kernel, for Hopper.

Rows lie in blocks of 64 with the same expert (see `expert_blocks`). A tile is two blocks of an expert, or
one, times some columns of its matrix. One warp group copies by TMA, several steps ahead and on into the
next tile; two multiply, each with half of the tile's columns. Tiles of two blocks are shared out among
the processors so that their counts differ by at most one; so are tiles of one block.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from levserve.model.gpu.expert_blocks import BLOCK, Blocks
from levserve.model.gpu.gate import Gate
from levserve.model.gpu.hopper import num_processors

DEPTH = 64
"""Elements of a row in one step: 128 bytes, the widest swizzle of shared memory."""
COLUMNS = 128
"""Columns of a matrix that a warp group multiplies with two blocks: results take half of its registers."""
STORED = 64
"""Columns that are stored together."""
NUM_MULTIPLIERS = 2
COPIER = NUM_MULTIPLIERS
COPIER_REGISTERS, MULTIPLIER_REGISTERS = 40, 232
NUM_SLOTS = 4
"""Steps that are copied ahead: 192 KiB of the 227 that a processor has."""


def multiply_blocks(
    rows: jax.Array,
    matrices: jax.Array,
    blocks: Blocks,
    gate: Gate | None,
    *,
    num_programs: int | None = None,
    interpret: object = None,
) -> jax.Array:
    """Rows [slot, depth] times the matrix [expert, column, depth] of their block's expert; with a gate,
    which must have two parts (gate and up), the hidden values that it gives. The results of blocks without an
    expert are undefined. There is a program for each processor, unless `num_programs` is given."""
    num_programs = num_programs or num_processors()
    parts = 1 if gate is None else 2
    width = matrices.shape[1] // parts
    in_tiling = (plgpu.TilingTransform((8, DEPTH)), plgpu.SwizzleTransform(128))
    kernel = plgpu.kernel(
        functools.partial(_kernel, gate=gate, num_programs=num_programs),
        out_type=jax.ShapeDtypeStruct((len(rows), width), rows.dtype),
        grid=(num_programs,),
        grid_names=("program",),
        num_threads=NUM_MULTIPLIERS + 1,
        thread_name="group",
        scratch_types=[
            plgpu.SMEM((NUM_SLOTS, 2 * BLOCK, DEPTH), rows.dtype, transforms=in_tiling),
            plgpu.SMEM((NUM_SLOTS, NUM_MULTIPLIERS * COLUMNS, DEPTH), rows.dtype, transforms=in_tiling),
            plgpu.SMEM((NUM_MULTIPLIERS * 2, BLOCK, STORED), rows.dtype, transforms=in_tiling),
            plgpu.Barrier(num_arrivals=2 + parts * NUM_MULTIPLIERS, num_barriers=NUM_SLOTS),
            plgpu.Barrier(num_arrivals=NUM_MULTIPLIERS, num_barriers=NUM_SLOTS),
        ],
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        interpret=interpret,
    )
    return kernel(rows, matrices, blocks.firsts, blocks.experts, blocks.counts)


def _kernel(
    row_ref: jax.Ref,
    matrix_ref: jax.Ref,
    first_ref: jax.Ref,
    expert_ref: jax.Ref,
    count_ref: jax.Ref,
    out_ref: jax.Ref,
    row_slots: jax.Ref,
    matrix_slots: jax.Ref,
    out_slots: jax.Ref,
    is_copied: jax.Ref,
    is_free: jax.Ref,
    *,
    gate: Gate | None,
    num_programs: int,
) -> None:
    group = lax.axis_index("group")
    parts = 1 if gate is None else 2
    piece = COLUMNS // parts  # columns of each part
    per_tile = NUM_MULTIPLIERS * piece
    width = out_ref.shape[1]
    num_columns = width // per_tile
    num_steps = row_ref.shape[1] // DEPTH
    share = Share.of(lax.axis_index("program"), count_ref, num_columns, num_programs)

    def slot_of(number: jax.Array, step: jax.Array) -> jax.Array:
        return lax.rem(number * num_steps + step, NUM_SLOTS)

    def find(number: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Whether this tile is one block, its first block, its expert and its first column."""
        is_half, unit = share.find(number)
        kind, tile = is_half.astype(jnp.int32), lax.div(unit, num_columns)
        column = lax.rem(unit, num_columns) * per_tile
        return is_half, first_ref[kind, tile], expert_ref[kind, tile], column

    def copy() -> None:
        plgpu.set_max_registers(COPIER_REGISTERS, action="decrease")

        def copy_tile(number: jax.Array, carry: None) -> None:
            is_half, first, expert, column = find(number)

            def copy_step(step: jax.Array, carry: None) -> None:
                slot = slot_of(number, step)
                deep = pl.ds(step * DEPTH, DEPTH)
                barrier = is_copied.at[slot]
                plgpu.barrier_wait(is_free.at[slot])

                def copy_block(index: int) -> None:
                    plgpu.copy_gmem_to_smem(
                        row_ref.at[pl.ds((first + index) * BLOCK, BLOCK), deep],
                        row_slots.at[slot, pl.ds(index * BLOCK, BLOCK)],
                        barrier,
                    )

                copy_block(0)
                lax.cond(is_half, lambda: plgpu.barrier_arrive(barrier), lambda: copy_block(1))
                for sharer in range(NUM_MULTIPLIERS):
                    for part in range(parts):
                        start = part * width + column + sharer * piece
                        plgpu.copy_gmem_to_smem(
                            matrix_ref.at[expert, pl.ds(start, piece), deep],
                            matrix_slots.at[slot, pl.ds(sharer * COLUMNS + part * piece, piece)],
                            barrier,
                        )

            lax.fori_loop(0, num_steps, copy_step, None)

        lax.fori_loop(0, share.total, copy_tile, None)
        for slot in range(NUM_SLOTS):
            plgpu.barrier_wait(is_free.at[slot])

    def multiply() -> None:
        plgpu.set_max_registers(MULTIPLIER_REGISTERS, action="increase")
        for slot in range(NUM_SLOTS):
            plgpu.barrier_arrive(is_free.at[slot])
        own_columns = pl.ds(group * COLUMNS, COLUMNS)

        def multiply_tile(number: jax.Array, carry: None) -> None:
            is_half, first, _, column = find(number)
            start = column + group * piece

            def compute(num_blocks: int) -> None:
                num_rows = num_blocks * BLOCK

                def sum_products(sums: Any) -> jax.Array:
                    def step_on(step: jax.Array, carry: None) -> None:
                        slot = slot_of(number, step)
                        plgpu.barrier_wait(is_copied.at[slot])
                        plgpu.wgmma(
                            sums,
                            row_slots.at[slot, pl.ds(0, num_rows)],
                            matrix_slots.at[slot, own_columns].transpose((1, 0)),
                        )
                        plgpu.wgmma_wait(1)

                        @pl.when(step > 0)
                        def _free_last() -> None:
                            plgpu.barrier_arrive(is_free.at[slot_of(number, step - 1)])

                    lax.fori_loop(0, num_steps, step_on, None)
                    return sums[...]

                accumulator = plgpu.ACC((num_rows, COLUMNS), jnp.float32)  # type: ignore[attr-defined]
                result = pl.run_scoped(sum_products, accumulator)
                plgpu.barrier_arrive(is_free.at[slot_of(number, num_steps - 1)])
                if gate is not None:
                    result = gate.apply((result[:, :piece], result[:, piece:]))
                result = result.astype(out_ref.dtype)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                for block in range(num_blocks):
                    for index in range(piece // STORED):
                        place = group * 2 + (block * (piece // STORED) + index) % 2
                        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                        out_slots[place] = result[
                            block * BLOCK : (block + 1) * BLOCK, index * STORED : (index + 1) * STORED
                        ]
                        plgpu.commit_smem()
                        plgpu.copy_smem_to_gmem(
                            out_slots.at[place],
                            out_ref.at[
                                pl.ds((first + block) * BLOCK, BLOCK),
                                pl.ds(start + index * STORED, STORED),
                            ],
                        )

            lax.cond(is_half, functools.partial(compute, 1), functools.partial(compute, 2))

        lax.fori_loop(0, share.total, multiply_tile, None)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    lax.cond(group == COPIER, copy, multiply)


@dataclass(frozen=True)
class Share:
    """The tiles of one program: those of two blocks and those of one, evenly mixed, so that all programs
    work on about the same expert at a time and read its matrices together."""

    program: jax.Array
    num_programs: int
    num_whole: jax.Array
    num_half: jax.Array

    @classmethod
    def of(cls, program: jax.Array, count_ref: jax.Ref, num_columns: int, num_programs: int) -> Share:
        whole, half = (count_ref[kind] * num_columns for kind in range(2))
        # Extra whole tiles go to the first programs, extra half tiles to the last.
        num_whole = lax.div(whole + num_programs - 1 - program, num_programs)
        return cls(program, num_programs, num_whole, lax.div(half + program, num_programs))

    @property
    def total(self) -> jax.Array:
        return self.num_whole + self.num_half

    def find(self, number: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Whether this program's tile `number` is a half one, and its number among all tiles of its kind."""
        halves, next_halves = (lax.div(count * self.num_half, self.total) for count in (number, number + 1))
        is_half = next_halves > halves
        whole_unit = (number - halves) * self.num_programs + self.program
        half_unit = halves * self.num_programs + self.num_programs - 1 - self.program
        return is_half, jnp.where(is_half, half_unit, whole_unit)
