"""The kernel of `wide_kernel` for up to 64 rows and four-bit codes in long groups, where memory is the limit.

The assembler moves loads into registers to where the registers are needed, so here everything is copied to
shared memory first: codes, scales and zero points some units ahead (`code_ring`), and `x` by one thread for
all (`row_parts`). Two groups of four warps share `x`, so it is read half as often. With groups of 32 there
would be four times as many scales and zero points to copy, by instructions that take only four or eight
bytes. With more rows, tensor cores are the limit.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from levserve.model.gpu.code_ring import CodeRing, Stream
from levserve.model.gpu.fragment_dequantizer import Loaded
from levserve.model.gpu.fragment_kernel import LANE_BYTES, UNIT_BYTES
from levserve.model.gpu.fragment_plan import FragmentTiling, Problem
from levserve.model.gpu.row_parts import CHUNK, CHUNK_BYTES, RowParts
from levserve.model.gpu.wide_kernel import DEPTH, WideWriter, in_fragments

NUM_SLOTS = 4
"""Units of codes that are copied ahead."""
NUM_PARTS = 6
"""Parts of `x` in shared memory."""


def in_parts(x: jax.Array, is_nibble: bool, tile_rows: int) -> jax.Array:
    """Rows [row, in] in the order in which shared memory has them, for tiles of `tile_rows` rows.

    The 16 inputs of each instruction (`in_fragments`) are two chunks of eight. The chunks of a tile follow
    one another: [tile, chunk, row, 8 inputs].
    """
    num_rows, num_inputs = x.shape
    chunks = in_fragments(x, is_nibble).reshape(-1, tile_rows, num_inputs // CHUNK, CHUNK)
    return jnp.swapaxes(chunks, 1, 2).reshape(num_rows, num_inputs)


class RingWriter(WideWriter):
    """Writes the kernel for one product; a group is a whole unit or several."""

    upper_half = CHUNK * CHUNK_BYTES >> 4
    """The distance from eight rows to the next, in units of 16 bytes; nothing is swizzled."""

    def __init__(self, problem: Problem, tiling: FragmentTiling) -> None:
        super().__init__(problem, tiling)
        assert self.groups_per_unit == 1
        self.fetches_ahead = False
        self.instruction_bytes = 2 * DEPTH * tiling.rows
        self.parts = RowParts(
            self.asm, part_bytes=self.part_bytes, num_parts=NUM_PARTS, num_warps=tiling.num_warps
        )
        self.groups = [] if self.scheme.columns is None else self._groups()
        unit_bytes = self.outputs * (LANE_BYTES + sum(itemsize for _, itemsize in self.groups))
        self.ring = CodeRing(
            self.asm, unit_bytes=unit_bytes, num_slots=NUM_SLOTS, num_threads=32 * tiling.num_warps
        )

    def _groups(self) -> list[tuple[str, int]]:
        """Arrays that have a value for each group, and the bytes of a value."""
        size = self.scheme.scale.itemsize
        arrays = {"scale": size, "zero": 1, "offset": size}
        return [(name, itemsize) for name, itemsize in arrays.items() if name in self.pointers]

    def _shared_bytes(self) -> int:
        return self.parts.num_bytes + self.ring.num_bytes

    def _find_staged(self) -> None:
        """Where the tile's rows of `x` are."""
        self.rows_at = self._address("x", [(self.first_row, 2 * self.problem.inputs)])

    def _begin_copies(self) -> None:
        asm = self.asm
        memory = asm.set("mov.u32", "memory", name="memory")
        self.ring.begin(memory, self.thread, self.unit, self.last_unit, self._streams())
        memory = asm.set("add.u32", memory, self.ring.num_bytes, name="memory")
        self.parts.begin(memory, self.rows_at, self.thread, self.part, self.last_part)

    def _streams(self) -> list[Stream]:
        rows = tuple(output * self.row_bytes for output in range(self.outputs))
        streams = [Stream(self.code_at, UNIT_BYTES, 1, rows, LANE_BYTES)]
        units = (self.scheme.columns or 0) // self.problem.unit
        for name, itemsize in self.groups:
            source = self._address(name, [(self.column, itemsize)])
            step = itemsize * self.problem.columns
            streams.append(Stream(source, step, units, (0,), itemsize * self.outputs))
        return streams

    def _load(self, stage: Loaded) -> None:
        """Loads nothing: `_compute` takes what was copied."""

    def _compute(self, stage: Loaded) -> None:
        of_groups = [part for part in (stage.scales, stage.zeros, stage.offsets) if part and part[0]]
        self.ring.take([stage.codes, *of_groups])
        super()._compute(stage)
        self.ring.refill()

    def _take_part(self) -> str:
        return self._describe(self.parts.take(), self.tiling.rows * CHUNK_BYTES >> 4)

    def _multiply(self, fragments: list[list[list[str]]], descriptor: str, first: int) -> None:
        super()._multiply(fragments, descriptor, first)
        if first == 0:
            # The instructions of the part before have finished.
            self.parts.release()
