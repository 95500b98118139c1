"""Multiplies a tile on a CPU with int8 matrices that have a scale for every 32 inputs (`int8_blocks`).

Each lane of a vector is an output, and a word of four activations is multiplied with the weights of all of
them. After the eight words of a block the sums become floats. They start as the bits of a float so large that
its last bit is worth 1, so no instruction is needed to convert them. One multiply-add subtracts that float
and multiplies with the outputs' scales. Another multiplies with the token's scale and adds to the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from levserve.jit.builder import F16, F32, I8, I16, I32, ROUNDING_CONSTANT, Builder, Value
from levserve.jit.target import Target
from levserve.model.cpu.prefetch import FROM_MEMORY
from levserve.model.cpu.products import PreparedRow, Tile
from levserve.model.cpu.rotation import rotate_block
from levserve.model.int8_blocks import BLOCK, SECOND_TERM, product_factor
from levserve.model.int8_packing import (
    OFFSET,
    SIGNED_ORDER,
    SMALLEST,
    STEPS,
    UNSIGNED_ORDER,
    WORD,
    BlockOrder,
)

START = 0x4B400000
"""The bits of `ROUNDING_CONSTANT`. A block's sum is below 2 ** 22, so only the last bits change."""
WORDS = BLOCK // WORD


def block_product_for(
    size: int, target: Target, *, is_signed: bool, in_two_terms: bool
) -> SignedBlocks | UnsignedBlocks:
    num_terms = 2 if in_two_terms else 1
    return SignedBlocks(size, target, num_terms) if is_signed else UnsignedBlocks(size, target, num_terms)


def add_words(builder: Builder, sums: list[Value], matrix: list[Value], places: list[Value]) -> list[Value]:
    """Adds the products of a block of the matrix with the words at each place to `sums`, on ARM."""
    for half in range(0, WORDS, 4):
        words = [builder.load(place + half * WORD, I32, 4) for place in places]
        for word in range(4):
            sums = [
                builder.accumulate_dot_lane(total, matrix[half + word], activations, word)
                for total, activations in zip(sums, words)
            ]
    return builder.finish(sums)


def add_scaled(builder: Builder, sums: Value, scales: list[Value], words: list[Value], total: Value) -> Value:
    """Adds the scaled sums of a block, which are the bits of floats, to the total of each lane's output.

    `scales` are those of the outputs, these times -`ROUNDING_CONSTANT`, and the middles if there are any.
    `words` point to the scale of the row of activations and to the factor of the middles.
    """
    lanes = total.lanes
    assert lanes is not None
    scale, offset, *middles = scales
    product = sums.convert("bitcast", F32).multiply_add(scale, offset)
    for factor, word in zip((product, *middles), words):
        total = factor.multiply_add(builder.load(word, F32).splat(lanes), total)
    return total


def load_scales(builder: Builder, place: Value, lanes: int) -> Value:
    """Scales in float16 as float32.

    Without an instruction for this LLVM would call its runtime library, which is not linked. Instead the bits
    are moved to a float32, and a multiplication corrects its exponent.
    """
    target = builder.target
    if target.has("f16c") or target.has("neon"):
        return builder.load(place, F16, lanes).convert("fpext", F32)
    bits = builder.load(place, I16, lanes).convert("zext", I32)
    moved = ((bits & 0x7FFF) << 13) | ((bits & 0x8000) << 16)
    return moved.convert("bitcast", F32) * 2.0**112


@dataclass(frozen=True)
class BlockMatrix:
    """The sizes of an int8 matrix with scales for blocks, in any order."""

    size: int
    target: Target
    has_scales: ClassVar[bool] = True

    @property
    def num_blocks(self) -> int:
        return self.size // BLOCK

    @property
    def out_bytes(self) -> int:
        return self.size


@dataclass(frozen=True)
class BlockProduct(BlockMatrix):
    """A prepared row of activations has, for each term, its int8 values, then a scale for each block, then
    the start value of each block's sums."""

    num_terms: int
    """1: activations and matrix are rotated. 2: neither is."""
    order: ClassVar[BlockOrder]

    @property
    def name(self) -> str:
        return f"blocks_{self.order.offset}_{self.num_terms}"

    @property
    def out_scale_bytes(self) -> int:
        return 2 * self.num_blocks

    @property
    def term_bytes(self) -> int:
        """Rounded up to whole vectors, so that none lies across two cache lines."""
        return (self.size + 8 * self.num_blocks + BLOCK - 1) // BLOCK * BLOCK

    @property
    def row_bytes(self) -> int:
        return self.num_terms * self.term_bytes

    def prepare(self, builder: Builder, x: Value, scratch: Value, into: PreparedRow) -> None:
        """Prepares a row in three passes: in one, each block would wait for its largest number and two
        divisions."""
        lanes, is_rotated = min(self.target.lanes, BLOCK), self.num_terms == 1
        factor, offsets = product_factor(is_rotated=is_rotated), range(0, 4 * BLOCK, 4 * lanes)
        numbers, scales, inverses = (
            scratch if is_rotated else x,
            *(self._block_floats(builder) for _ in range(2)),
        )
        with builder.loop(0, self.num_blocks) as block:
            first = block * (4 * BLOCK)
            vectors = [builder.load(x + first + at, F32, lanes) for at in offsets]
            if is_rotated:
                vectors = rotate_block(vectors, lanes)
                for vector, at in zip(vectors, offsets):
                    builder.store(scratch + first + at, vector)
            builder.store(scales + block * 4, builder.largest_magnitude(vectors))
        with builder.loop(0, self.num_blocks, lanes) as block:
            scale = builder.load(scales + block * 4, F32, lanes).maximum(SMALLEST) / STEPS
            builder.store(scales + block * 4, scale)
            builder.store(inverses + block * 4, scale.full_like(1.0) / scale)
        with builder.loop(0, self.num_blocks) as block:
            scale, inverse = (builder.load(each + block * 4, F32) for each in (scales, inverses))
            steps = builder.load(numbers + block * (4 * BLOCK), F32, BLOCK) * inverse.splat(BLOCK)
            for term in range(self.num_terms):
                start = into.start + term * self.term_bytes
                word = start + block * 4 + self.size
                rounded = steps + ROUNDING_CONSTANT
                integers = rounded.convert("bitcast", I32).convert("trunc", I8)
                builder.store(start + block * BLOCK, integers)
                builder.store(word, scale * (factor / SECOND_TERM**term))
                if self.order.offset:
                    # x86 adds up unsigned bytes with one instruction.
                    total = (integers ^ -OFFSET).convert("zext", I32).reduce_sum() - OFFSET * BLOCK
                    total = total * -self.order.offset + START
                    builder.store(word + 4 * self.num_blocks, total)
                steps = (steps - (rounded - ROUNDING_CONSTANT)) * SECOND_TERM

    def _block_floats(self, builder: Builder) -> Value:
        """Memory for a float32 of each block, in whole vectors."""
        return builder.stack_words((self.num_blocks + BLOCK - 1) // BLOCK * (BLOCK // 2))

    def add_terms(self, sums: list[Value]) -> list[Value]:
        """Adds up the terms of each row: one vector for each row."""
        if self.num_terms == 1:
            return sums
        return [first + second for first, second in zip(sums[::2], sums[1::2])]


class SignedBlocks(BlockProduct):
    """For ARM's instruction, which takes its word from any lane of a register."""

    order: ClassVar[BlockOrder] = SIGNED_ORDER
    tile_outs: ClassVar[int] = SIGNED_ORDER.outs
    tasks_per_thread: ClassVar[int] = 2

    @property
    def tile_rows(self) -> int:
        return 8 // self.num_terms  # 8 sums beside a block of the matrix in 8 registers

    def multiply(self, builder: Builder, tile: Tile) -> list[Value]:
        terms = [tile.prepared + index * self.term_bytes for index in range(tile.num_rows * self.num_terms)]
        lanes = self.tile_outs
        totals = [builder.variable(builder.zeros(F32, lanes)) for _ in terms]
        # Copying a register would delay the multiplications; loading does not.
        memory = builder.stack_words(4)
        builder.store(memory, builder.constant(START, I32).splat(lanes))
        with builder.loop(0, self.num_blocks) as block:
            group = tile.weight + block * (BLOCK * lanes)
            tile.ahead.write_near(builder, block * (BLOCK * lanes), BLOCK * lanes)
            matrix = [builder.load(group + WORD * lanes * word, I8, WORD * lanes) for word in range(WORDS)]
            scale = load_scales(builder, tile.scales + block * (2 * lanes), lanes)
            builder.store(memory + 4 * lanes, scale * -ROUNDING_CONSTANT)
            for first in range(0, len(terms), 4):
                some = range(first, min(first + 4, len(terms)))
                sums = self._sum_block(builder, matrix, memory, [terms[at] + block * BLOCK for at in some])
                for at, total in zip(some, sums):
                    offset = builder.load(builder.hide(memory) + 4 * lanes, F32, lanes)
                    product = total.convert("bitcast", F32).multiply_add(scale, offset)
                    x_scale = builder.load(terms[at] + self.size + block * 4, F32).splat(lanes)
                    totals[at].set(product.multiply_add(x_scale, totals[at].get()))
        return self.add_terms([total.get() for total in totals])

    def _sum_block(
        self, builder: Builder, matrix: list[Value], memory: Value, places: list[Value]
    ) -> list[Value]:
        """The sums of a block for a few rows at a time; none waits for another."""
        sums = [builder.load(builder.hide(memory), I32, self.tile_outs) for _ in places]
        return add_words(builder, sums, matrix, places)


class UnsignedBlocks(BlockProduct):
    """For x86's instruction, whose matrix is unsigned: the start of the sums cancels its offset."""

    order: ClassVar[BlockOrder] = UNSIGNED_ORDER
    tile_outs: ClassVar[int] = UNSIGNED_ORDER.outs
    tasks_per_thread: ClassVar[int] = 3

    @property
    def tile_rows(self) -> int:
        rows = 6 if self.target.vector_bytes == 64 else 2  # 24 of 32 registers; or 16 of 16, some spilled
        return rows // self.num_terms

    def multiply(self, builder: Builder, tile: Tile) -> list[Value]:
        terms = [tile.prepared + index * self.term_bytes for index in range(tile.num_rows * self.num_terms)]
        lanes, outs = self.target.lanes, self.tile_outs
        firsts = range(0, outs, lanes)
        totals = [[builder.variable(builder.zeros(F32, lanes)) for _ in firsts] for _ in terms]
        with builder.loop(0, self.num_blocks) as block:
            group = tile.weight + block * (BLOCK * outs)
            starts = [
                builder.load(term + self.size + self.num_blocks * 4 + block * 4, I32).splat(lanes)
                for term in terms
            ]
            sums = [[start for _ in firsts] for start in starts]
            tile.ahead.write_far(builder, block * (BLOCK * outs), BLOCK * outs)
            for word in range(WORDS):
                tile.ahead.write_near(builder, (block * WORDS + word) * (outs * WORD), outs * WORD)
                places = [group + (word * outs + out) * WORD for out in firsts]
                matrix = [builder.load(place, I8, lanes * WORD) for place in places]
                for index, term in enumerate(terms):
                    activations = builder.load(term + block * BLOCK + word * WORD, I32)
                    sums[index] = [
                        builder.accumulate_dot_word(total, weights, activations)
                        for total, weights in zip(sums[index], matrix)
                    ]
            builder.prefetch(tile.scales + (block + FROM_MEMORY // (BLOCK * outs)) * (2 * outs))
            for number, out in enumerate(firsts):
                scale = load_scales(builder, tile.scales + block * (2 * outs) + 2 * out, lanes)
                shared = [scale, scale * -ROUNDING_CONSTANT]
                for term, of_term, sums_of_term in zip(terms, totals, sums):
                    words, total = [term + self.size + block * 4], of_term[number].get()
                    of_term[number].set(add_scaled(builder, sums_of_term[number], shared, words, total))
        return self.add_terms([builder.concatenate([each.get() for each in of_term]) for of_term in totals])
