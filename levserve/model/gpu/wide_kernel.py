"""The kernel of `fragment_kernel` for many rows: four warps multiply together, with Hopper's instructions.

These take the matrix from registers, in the same fragments, and `x` from shared memory, and run on while the
warps widen the next codes. The sums they add to must not be touched meanwhile, so scales are applied while
codes are widened: in bfloat16, as in a matrix that is widened in memory.

The inputs of a fragment must lie side by side in shared memory, and codes of neighbouring fragments share a
word, so `x` is put in the order of `in_fragments` first.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from levserve.model.gpu.assembly import Kernel
from levserve.model.gpu.fragment_dequantizer import Loaded
from levserve.model.gpu.fragment_kernel import UNIT_BYTES, Writer
from levserve.model.gpu.fragment_plan import FragmentTiling, Problem
from levserve.model.gpu.wide_dequantizer import WideDequantizer
from levserve.model.lanes import LANES, WORDS

PART = 64
"""Inputs of `x` that are copied at once: 128 bytes of each row, which shared memory swizzles."""
PART_BYTES = 2 * PART
DEPTH = 16
"""Inputs of one instruction."""
BATCH = 2
"""Instructions on the same sums that are issued together, with registers that are widened together."""
MAX_PARTS = 6
ALIGNMENT = 1024
"""Bytes of eight rows, within which shared memory is swizzled."""
DESCRIPTOR = ALIGNMENT >> 4 | 1 << 30
"""The distance from eight rows to the next, in units of 16 bytes, and the kind of swizzle."""
FEW_TILES = 8
"""With up to this many tiles of rows, a program waits for the matrix rather than for tensor cores."""
AHEAD = 4
"""How many units ahead of its loads such a program prefetches into the second-level cache."""


def in_fragments(x: jax.Array, is_nibble: bool) -> jax.Array:
    """Rows [row, in] with the inputs of each instruction side by side, in the order of its fragments."""
    num_rows, num_inputs = x.shape
    halves = 2 if is_nibble else 1
    parts = x.reshape(num_rows, -1, LANES, halves, 2, 2)  # [row, word, lane, half, upper, odd]
    return jnp.moveaxis(parts, 2, 4).reshape(num_rows, num_inputs)


class WideWriter(Writer):
    """Writes the kernel for one product."""

    alignment = ALIGNMENT
    upper_half = DESCRIPTOR
    """The upper half of what tells tensor cores where `x` is (see `_describe`)."""
    instruction_bytes = 2 * DEPTH
    """Bytes from the inputs of an instruction to those of the next, in a part of `x`."""

    def __init__(self, problem: Problem, tiling: FragmentTiling) -> None:
        super().__init__(problem, tiling)
        self.part_bytes = tiling.rows * PART_BYTES
        self.num_parts = parts_in_memory(tiling)
        self.words_per_part = PART // (problem.numbers_per_word * LANES)
        self.parts_per_unit = WORDS // self.words_per_part
        self.fetches_ahead = tiling.n_tiles <= FEW_TILES
        if self.fetches_ahead:
            # The assembler moves loads with `.nc` past barriers, to where their values are needed; plain
            # loads stay a step ahead. With plain loads and prefetching, products of 64 rows take 6 %
            # less time (with groups of 32 and offsets, 18 %), but those of 256 rows take 6 % more.
            self.load = "ld.global"

    def write(self) -> Kernel:
        self.wide = WideDequantizer(self.asm, self.scheme)
        return super().write()

    def _shared_bytes(self) -> int:
        return self.num_parts * self.part_bytes

    def _find_staged(self) -> None:
        """Where this thread copies `x` from and to."""
        asm, tiling = self.asm, self.tiling
        chunks = PART_BYTES // 16
        self.copy_rows = tiling.num_warps * 32 // chunks
        row = asm.quotient(self.thread, chunks)
        chunk = asm.remainder(self.thread, chunks)
        from_row = asm.set("add.u32", self.first_row, row)
        at = asm.set("mul.lo.u32", chunk, 16)
        self.copy_from = self._address("x", [(from_row, 2 * self.problem.inputs), (at, 1)])
        self.memory = asm.set("mov.u32", "memory", name="memory")
        turned = asm.set("and.b32", row, 7)
        turned = asm.set("xor.b32", turned, chunk)
        at = asm.set("mul.lo.u32", turned, 16)
        at = asm.set("mad.lo.u32", row, PART_BYTES, at)
        self.copy_to = asm.set("add.u32", at, self.memory, name="at")

    # The loop.

    def _loop(self) -> None:
        asm = self.asm
        self.always = asm.set("setp.eq.u32", 0, 0, kind="pred", name="p")
        self.upper = asm.set("mov.u32", self.upper_half, name="upper")
        self.part = asm.set("mul.lo.u32", self.unit, self.parts_per_unit, name="part")
        last = asm.set("mul.lo.u32", self.last_unit, self.parts_per_unit)
        self.last_part = asm.set("add.u32", last, self.parts_per_unit - 1, name="last")
        if self.fetches_ahead:
            # The four threads that share outputs prefetch one each.
            output = asm.remainder(self.t, self.outputs)
            output = asm.set("add.u32", self.column, output)
            self.fetch_at = self._address("codes", [(output, self.row_bytes)])
        super()._loop()
        asm("wgmma.wait_group.sync.aligned 0")
        asm("cp.async.wait_group 0")

    def _load(self, stage: Loaded) -> None:
        super()._load(stage)
        if self.fetches_ahead:
            asm = self.asm
            unit = asm.set("add.u32", self.unit, AHEAD)
            unit = asm.set("min.u32", unit, self.last_unit)
            at = asm.set("mul.wide.u32", unit, UNIT_BYTES, kind="b64", name="wide")
            at = asm.set("add.u64", at, self.fetch_at, kind="b64", name="wide")
            for output in range(0, self.outputs, 4):
                asm(f"prefetch.global.L2 [{at}+{output * self.row_bytes}]")

    def _begin_copies(self) -> None:
        self.stage_in = self.asm.set("mov.u32", 0, name="stage")
        self.stage_out = self.asm.set("mov.u32", 0, name="stage")
        for _ in range(self.num_parts - 2):
            self._copy_x()

    def _take_copied(self) -> None:
        """Does nothing: parts of `x` are smaller than a unit, so `_compute` takes them."""

    def _copy_x(self) -> None:
        """Begins to copy a part of `x`; past the end, the last one again."""
        asm, tiling = self.asm, self.tiling
        asm(f"min.u32 {self.part}, {self.part}, {self.last_part}")
        at = asm.set("mul.wide.u32", self.part, PART_BYTES, kind="b64", name="wide")
        at = asm.set("add.u64", at, self.copy_from, kind="b64", name="wide")
        to = asm.set("add.u32", self.copy_to, self.stage_in)
        for row in range(0, tiling.rows, self.copy_rows):
            guard = ""
            if row + self.copy_rows > tiling.rows:
                most = asm.set("mov.u32", (tiling.rows - row) * PART_BYTES // 16)
                guard = f"@{asm.set('setp.lt.u32', self.thread, most, kind='pred', name='p')} "
            source = row * 2 * self.problem.inputs
            asm(f"{guard}cp.async.cg.shared.global [{to}+{row * PART_BYTES}], [{at}+{source}], 16")
        asm("cp.async.commit_group")
        asm(f"add.u32 {self.part}, {self.part}, 1")
        self._advance(self.stage_in)

    def _advance(self, stage: str) -> None:
        asm = self.asm
        asm(f"add.u32 {stage}, {stage}, {self.part_bytes}")
        is_end = asm.set("setp.ge.u32", stage, self.num_parts * self.part_bytes, kind="pred", name="p")
        asm(f"@{is_end} mov.u32 {stage}, 0")

    # One step.

    def _compute(self, stage: Loaded) -> None:
        words_per_batch = BATCH * WORDS // (self.problem.unit // DEPTH)
        descriptor = ""
        for first in range(0, WORDS, words_per_batch):
            fragments = []
            for word in range(first, first + words_per_batch):
                fragments += self._widen_word(stage, word)
            place = first % self.words_per_part * LANES * self.problem.numbers_per_word // DEPTH
            if place == 0:
                descriptor = self._take_part()
            self._multiply(fragments, descriptor, place)

    def _widen_word(self, stage: Loaded, word: int) -> list[list[list[str]]]:
        """The factors of each instruction, for each tile of outputs."""
        group, place = divmod(word, self.words_per_group)
        if place == 0:
            self.wide.begin_group(
                *([] if not part else part[group] for part in (stage.scales, stage.zeros, stage.offsets)),
                num_outputs=self.outputs,
            )
        numbers = [self.wide.widen(stage.codes[each][word], each) for each in range(self.outputs)]
        found = []
        for half in range(0, len(numbers[0]), 2):
            tiles = []
            for m in range(self.tiling.m_tiles):
                low, high = numbers[2 * m], numbers[2 * m + 1]
                tiles.append([low[half], high[half], low[half + 1], high[half + 1]])
            found.append(tiles)
        return found

    def _take_part(self) -> str:
        """Waits until the next part of `x` has been copied, and returns its descriptor.

        Also begins to copy one more part, to the place of the second part before this one, whose instructions
        have finished.
        """
        asm = self.asm
        asm(f"cp.async.wait_group {self.num_parts - 3}")
        asm("fence.proxy.async.shared::cta")
        asm("bar.sync 0")
        self._copy_x()
        at = asm.set("add.u32", self.memory, self.stage_out)
        self._advance(self.stage_out)
        return self._describe(at, 1)

    def _describe(self, at: str, from_chunk_to_chunk: int) -> str:
        """Tells tensor cores where a part of `x` is, and how far its second eight inputs are from the
        first, in units of 16 bytes (ignored if it is swizzled)."""
        asm = self.asm
        at = asm.set("shr.u32", at, 4)
        at = asm.set("or.b32", at, from_chunk_to_chunk << 16)
        descriptor = asm.new("descriptor", "b64")
        asm(f"mov.b64 {descriptor}, {{{at}, {self.upper}}}")
        return descriptor

    def _multiply(self, fragments: list[list[list[str]]], descriptor: str, first: int) -> None:
        """Issues the instructions of a batch, and waits for those of the batch before it."""
        asm, tiling = self.asm, self.tiling
        asm("wgmma.fence.sync.aligned")
        for number, tiles in enumerate(fragments, first):
            at = descriptor
            if number:
                offset = number * self.instruction_bytes >> 4
                at = asm.set("add.u64", descriptor, offset, kind="b64", name="descriptor")
            for m, left in enumerate(tiles):
                sums = [register for tile in self.totals for register in tile[m]]
                operands = f"{{{', '.join(sums)}}}, {{{', '.join(left)}}}, {at}, {self.always}, 1, 1, 0"
                asm(f"wgmma.mma_async.sync.aligned.m64n{tiling.rows}k16.f32.bf16.bf16 {operands}")
        asm("wgmma.commit_group.sync.aligned")
        asm("wgmma.wait_group.sync.aligned 1")


def parts_in_memory(tiling: FragmentTiling) -> int:
    """Parts of `x` in shared memory at once; a program has 48 KB of it without asking for more."""
    return min(MAX_PARTS, 48 * 1024 // (tiling.rows * PART_BYTES))
