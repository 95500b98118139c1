"""Matrices that products by matrix units (AMX) widen to bfloat16 as they read them.

The 32 numbers of a block in four bits have 16 possible values. These are computed and rounded to bfloat16,
and then each code is looked up in this table. Numbers of eight bits are multiplied with their block's scale,
and its middle is added, in float16 and 32 at a time; they are rounded from there.
"""

from __future__ import annotations

from typing import ClassVar, TypeAlias

from llvmlite import ir

from levserve.jit.bfloat16 import TABLE, look_up, make_table, narrow_halves, odd_indices
from levserve.jit.builder import F16, F32, I8, I16, I32, Builder, Value
from levserve.jit.tiles import TILE_BYTES, TILE_ROW_BYTES
from levserve.model.cpu.bfloat16_tiles import OUTS
from levserve.model.cpu.block_products import BlockMatrix, load_scales
from levserve.model.cpu.nibble_products import NibbleMatrix
from levserve.model.int4_blocks import CENTER
from levserve.model.int8_blocks import BLOCK, SCALE_FACTOR

PAIR = 2
"""Blocks that are widened together, and outputs: in four bits a byte has codes of two blocks, and the next
byte those of another output."""
SCALE_EXPONENT = int(SCALE_FACTOR).bit_length() - 1
"""Scales are stored multiplied by 2 to this power."""
TWICE = BLOCK // 2
"""Words that fill a register with a scale, which each has twice."""
LINE_BYTES = PAIR * BLOCK
"""Bytes of a matrix that become `PAIR` rows of tiles, or of four bits twice as many."""


class WidenedNibbles(NibbleMatrix):
    """A matrix in the order `WIDENED_NIBBLES`, and rows of activations in bfloat16."""

    @property
    def name(self) -> str:
        return "widened" + ("_middles" if self.has_middles else "")

    @property
    def row_bytes(self) -> int:
        return 2 * self.size

    @property
    def pair_bytes(self) -> int:
        """Bytes of two blocks of 32 outputs."""
        return OUTS * BLOCK

    def read_scales(self, builder: Builder, scales: Value, into: Value) -> None:
        """Writes the scales of two blocks, and their middles, as float32."""
        for vector in range(PAIR * self.block_scales):
            numbers = load_scales(builder, scales + vector * (OUTS * 2), OUTS) * (1 / SCALE_FACTOR)
            builder.store(into + vector * (OUTS * 4), numbers)

    def widen_line(self, builder: Builder, codes: Value, line: Value, scales: Value, tiles: Value) -> None:
        """Widens a line of two blocks of 32 outputs: both blocks of two outputs."""
        packed = builder.load(codes + line * LINE_BYTES, I8, LINE_BYTES)
        for block, nibbles in enumerate((packed << 4, packed)):
            indices = odd_indices(builder, nibbles)
            of_block = scales + line * (PAIR * 4) + block * self.block_scales * (OUTS * 4)
            into = tiles + line * (PAIR * TILE_ROW_BYTES) + block * (2 * TILE_BYTES)
            for out, places in enumerate((indices, indices >> 8)):
                table = self._table(builder, of_block + out * 4)
                builder.store(into + out * TILE_ROW_BYTES, look_up(builder, table, places))

    def _table(self, builder: Builder, scales: Value) -> Value:
        """The values that a number of a block can have."""
        steps = (builder.lane_numbers(TABLE) - CENTER).convert("sitofp", F32)
        scale, *middles = (
            builder.load(scales + at * (OUTS * 4), F32).splat(TABLE) for at in range(self.block_scales)
        )
        return make_table(builder, steps.multiply_add(scale, middles[0]) if middles else steps * scale)


class WidenedBytes(BlockMatrix):
    """A matrix in the order `WIDENED_BYTES`, in which a middle follows each block's scale, and rows of
    activations in bfloat16."""

    name: ClassVar[str] = "widened_bytes"
    block_scales: ClassVar[int] = 2
    pair_bytes: ClassVar[int] = PAIR * OUTS * BLOCK

    @property
    def out_scale_bytes(self) -> int:
        return 2 * self.block_scales * self.num_blocks

    @property
    def row_bytes(self) -> int:
        return 2 * self.size

    def read_scales(self, builder: Builder, scales: Value, into: Value) -> None:
        """Writes each number of two blocks twice: 32 bits fill a register without a shuffle, 16 do not."""
        for at in range(0, PAIR * self.block_scales * OUTS, TWICE):
            numbers = builder.load(scales + at * 2, I16, TWICE).convert("zext", I32)
            builder.store(into + at * 4, numbers | numbers << 16)

    def widen_line(self, builder: Builder, codes: Value, line: Value, scales: Value, tiles: Value) -> None:
        """Widens a line of two blocks of 32 outputs: a block of two outputs."""
        block = line // (OUTS // PAIR)
        of_line = scales + line * (PAIR * 4) + block * (OUTS * 4)
        for out in range(PAIR):
            integers = builder.load(codes + line * LINE_BYTES + out * BLOCK, I8, BLOCK)
            scale, middle = (_fill(builder, of_line + out * 4 + at * (OUTS * 4)) for at in range(2))
            numbers = integers.convert("sext", I16).convert("sitofp", F16)
            into = tiles + line * (PAIR * TILE_ROW_BYTES) + out * TILE_ROW_BYTES
            builder.store(into, narrow_halves(_multiply_add(builder, numbers, scale, middle), SCALE_EXPONENT))


def _fill(builder: Builder, twice: Value) -> Value:
    """A vector of the float16 that a word has twice."""
    words = builder.load(twice, I32).splat(TWICE)
    return Value(builder, builder.ir.bitcast(words.ir_value, ir.VectorType(F16, BLOCK)))


def _multiply_add(builder: Builder, numbers: Value, scale: Value, middle: Value) -> Value:
    """In float32 where the CPU does not compute in float16; products of such numbers are exact there."""
    if builder.target.has("avx512fp16"):
        return numbers.multiply_add(scale, middle)
    wide = [each.convert("fpext", F32) for each in (numbers, scale, middle)]
    return wide[0].multiply_add(*wide[1:]).convert("fptrunc", F16)


WidenedMatrix: TypeAlias = WidenedNibbles | WidenedBytes
