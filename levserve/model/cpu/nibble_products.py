"""Multiplies a tile on a CPU with matrices of four bits and a scale for every 32 inputs (`int4_blocks`).

A byte holds two codes, which are widened in registers, once for all rows of a tile. The rest is as in
`block_products`: each lane of a vector is an output, and the sums of a block start as the bits of a float so
large that its last bit is worth 1. Here that start also makes up for `CENTER`, which is not subtracted from
the codes. The sums of both terms of activations are combined before they become floats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from levserve.jit.builder import CACHE_LINE_BYTES, F32, I8, I32, ROUNDING_CONSTANT, Builder, Value
from levserve.jit.target import Target
from levserve.jit.tiles import TILE_ROW_BYTES
from levserve.model.cpu.block_places import BlockPlaces
from levserve.model.cpu.block_products import START, WORDS, add_scaled, add_words, load_scales
from levserve.model.cpu.prefetch import FROM_MEMORY
from levserve.model.cpu.products import PreparedRow, Tile
from levserve.model.int4_blocks import CENTER, SECOND_TERM, SECOND_TERM_BITS
from levserve.model.int8_blocks import BLOCK, product_factor
from levserve.model.int8_packing import SIGNED_ORDER, SMALLEST, STEPS, UNSIGNED_ORDER, WORD, BlockOrder

NUM_TERMS = 2
"""int8 terms of each activation."""
SCALE, TOTAL, STARTS = range(3)
"""The words that a block of a prepared row has: its scale, the sum of its activations times the scale, and
the start value of each term's sums."""
HALF = WORDS // 2
"""Words of a block that are stored in the lower halves of its bytes."""


def nibble_product_for(
    size: int, target: Target, *, is_signed: bool, has_middles: bool
) -> SignedNibbles | UnsignedNibbles:
    kind = SignedNibbles if is_signed else UnsignedNibbles
    return kind(size, target, has_middles)


@dataclass(frozen=True)
class NibbleMatrix:
    """The sizes of a matrix of four bits, in any order."""

    size: int
    target: Target
    has_middles: bool
    has_scales: ClassVar[bool] = True

    @property
    def num_blocks(self) -> int:
        return self.size // BLOCK

    @property
    def out_bytes(self) -> int:
        return self.size // 2

    @property
    def out_scale_bytes(self) -> int:
        return self.block_scales * 2 * self.num_blocks

    @property
    def block_scales(self) -> int:
        """Float16 values that each block of an output has: a scale, and possibly a middle."""
        return 2 if self.has_middles else 1


class NibbleProduct(NibbleMatrix):
    """A prepared row of activations has the int8 values of each term and, for each block, a scale, the sum of
    the block's activations times the scale, and the start value of each term's sums."""

    order: ClassVar[BlockOrder]

    @property
    def name(self) -> str:
        return f"nibbles_{self.order.outs}" + ("_middles" if self.has_middles else "")

    @property
    def tile_depth(self) -> int:
        """Bytes of a block in a row of a tile."""
        return NUM_TERMS * BLOCK

    @property
    def row_bytes(self) -> int:
        """Rounded up to whole vectors, so that none lies across two cache lines."""
        num_bytes = NUM_TERMS * self.size + 4 * (2 + NUM_TERMS) * self.num_blocks
        return (num_bytes + BLOCK - 1) // BLOCK * BLOCK

    def block_word(self, row: Value, kind: int, block: Value) -> Value:
        """The address of a word of a block in a prepared row."""
        return row + block * 4 + (NUM_TERMS * self.size + kind * 4 * self.num_blocks)

    def prepare(self, builder: Builder, x: Value, scratch: Value, into: PreparedRow) -> None:
        self.prepare_blocks(builder, x, scratch, self.plain_places(builder, into.start))

    def plain_places(self, builder: Builder, row: Value) -> BlockPlaces:
        words, by_kind = row + NUM_TERMS * self.size, 4 * self.num_blocks
        return BlockPlaces.at(builder, row, (BLOCK, self.size), words, (4, 0, by_kind))

    def prepare_blocks(self, builder: Builder, x: Value, scratch: Value, places: BlockPlaces) -> None:
        lanes = min(self.target.lanes, BLOCK)
        factor = product_factor(is_rotated=False) / SECOND_TERM
        with builder.loop(0, self.num_blocks) as block:
            firsts = [x + block * (4 * BLOCK) + 4 * at for at in range(0, BLOCK, lanes)]
            vectors = [builder.load(first, F32, lanes) for first in firsts]
            largest = builder.largest_magnitude(vectors)
            scale = largest.maximum(SMALLEST) / STEPS
            steps = builder.concatenate(vectors) * (builder.constant(1.0, F32) / scale).splat(BLOCK)
            total = builder.constant(0, I32)
            for term in range(NUM_TERMS):
                rounded = steps + ROUNDING_CONSTANT
                integers = rounded.convert("bitcast", I32).convert("trunc", I8)
                builder.store(places.numbers_of(block, term), integers)
                sums = integers.convert("sext", I32).reduce_sum()
                start = START >> SECOND_TERM_BITS if term == 0 else 0
                builder.store(places.word_of(block, STARTS + term), sums * -CENTER + start)
                total = (total << SECOND_TERM_BITS) + sums
                steps = (steps - (rounded - ROUNDING_CONSTANT)) * SECOND_TERM
            builder.store(places.word_of(block, SCALE), scale * factor)
            sums = total.convert("sitofp", F32) * (scale * factor)
            builder.store(places.word_of(block, TOTAL), sums)

    def widen(self, packed: Value) -> tuple[Value, Value]:
        """The codes in the lower halves of bytes, and those in the upper halves."""
        return packed & 15, packed >> 4

    def add_block(
        self, builder: Builder, row: Value, block: Value, sums: list[Value], scales: list[Value], total: Value
    ) -> Value:
        """Adds the sums of a block's terms to the total of each lane's output, scaled as in `add_scaled`."""
        words = [self.block_word(row, kind, block) for kind in (SCALE, TOTAL)]
        return add_scaled(builder, (sums[0] << SECOND_TERM_BITS) + sums[1], scales, words, total)


class SignedNibbles(NibbleProduct):
    """For ARM's instruction, which takes its word from any lane of a register."""

    order: ClassVar[BlockOrder] = SIGNED_ORDER
    tile_outs: ClassVar[int] = SIGNED_ORDER.outs
    tasks_per_thread: ClassVar[int] = 2
    tile_rows: ClassVar[int] = 8

    def multiply(self, builder: Builder, tile: Tile) -> list[Value]:
        rows = [tile.prepared + index * self.row_bytes for index in range(tile.num_rows)]
        lanes, together = self.tile_outs, 4 // NUM_TERMS
        totals = [builder.variable(builder.zeros(F32, lanes)) for _ in rows]
        block_bytes, scale_bytes = BLOCK // 2 * lanes, 2 * lanes * self.block_scales
        with builder.loop(0, self.num_blocks) as block:
            group = tile.weight + block * block_bytes
            tile.ahead.write_near(builder, block * block_bytes, block_bytes)
            packed = [builder.load(group + WORD * lanes * word, I8, WORD * lanes) for word in range(HALF)]
            lower, upper = zip(*map(self.widen, packed))
            places = [tile.scales + block * scale_bytes + 2 * lanes * at for at in range(self.block_scales)]
            scale, *middles = [load_scales(builder, place, lanes) for place in places]
            of_block = [scale, scale * -ROUNDING_CONSTANT, *middles]
            for first in range(0, tile.num_rows, together):
                some = range(first, min(first + together, tile.num_rows))
                sums = self._sum_block(builder, [*lower, *upper], block, [rows[at] for at in some])
                for number, at in enumerate(some):
                    of_row = sums[number * NUM_TERMS : (number + 1) * NUM_TERMS]
                    total = self.add_block(builder, rows[at], block, of_row, of_block, totals[at].get())
                    totals[at].set(total)
        return [total.get() for total in totals]

    def _sum_block(
        self, builder: Builder, matrix: list[Value], block: Value, rows: list[Value]
    ) -> list[Value]:
        """The sums of a block for all terms of a few rows; none waits for another."""
        terms = [(row, term) for row in rows for term in range(NUM_TERMS)]
        places = [row + block * BLOCK + term * self.size for row, term in terms]
        sums = [
            builder.load(self.block_word(row, STARTS + term, block), I32).splat(self.tile_outs)
            for row, term in terms
        ]
        return add_words(builder, sums, matrix, places)


class UnsignedNibbles(NibbleProduct):
    """For x86's instruction, whose matrix is unsigned."""

    order: ClassVar[BlockOrder] = UNSIGNED_ORDER
    tile_outs: ClassVar[int] = UNSIGNED_ORDER.outs
    tasks_per_thread: ClassVar[int] = 3

    @property
    def tile_rows(self) -> int:
        return 1 if self.target.vector_bytes < 64 else 4  # 24 of 32 registers for totals and sums

    def write_tile(self, builder: Builder, group: Value, into: Value) -> None:
        """Writes a block of 16 outputs, which begins at `group`, as a tile of signed numbers.

        First come the numbers shifted left by `SECOND_TERM_BITS`, for the first term of activations, then the
        numbers as they are, for the second.
        """
        middle, highest = CENTER, CENTER << SECOND_TERM_BITS
        for word in range(HALF):
            packed = builder.load(group + word * (self.tile_outs * WORD), I8, TILE_ROW_BYTES)
            lower, upper = self.widen(packed)
            for row, numbers in enumerate(
                (
                    (packed << SECOND_TERM_BITS) ^ -highest,
                    (packed & -(1 << SECOND_TERM_BITS)) ^ -highest,
                    lower - middle,
                    upper - middle,
                )
            ):
                builder.store(into + (row * HALF + word) * TILE_ROW_BYTES, numbers)

    def multiply(self, builder: Builder, tile: Tile) -> list[Value]:
        rows = [tile.prepared + index * self.row_bytes for index in range(tile.num_rows)]
        lanes, outs, terms = self.target.lanes, self.tile_outs, range(NUM_TERMS)
        firsts = range(0, outs, lanes)
        totals = [[builder.variable(builder.zeros(F32, lanes)) for _ in firsts] for _ in rows]
        block_bytes, scale_bytes = BLOCK // 2 * outs, 2 * outs * self.block_scales
        with builder.loop(0, self.num_blocks) as block:
            group = tile.weight + block * block_bytes
            starts = [
                [builder.load(self.block_word(row, STARTS + term, block), I32).splat(lanes) for term in terms]
                for row in rows
            ]
            sums = [[[start for _ in firsts] for start in of_row] for of_row in starts]
            for word in range(HALF):
                tile.ahead.write_near(builder, (block * HALF + word) * (outs * WORD), outs * WORD)
                places = [group + (word * outs + out) * WORD for out in firsts]
                halves = zip(*(self.widen(builder.load(place, I8, lanes * WORD)) for place in places))
                for at, matrix in zip((word, word + HALF), halves):
                    for row, of_row in zip(rows, sums):
                        for term in terms:
                            place = row + block * BLOCK + (term * self.size + at * WORD)
                            activations = builder.load(place, I32)
                            of_row[term] = [
                                builder.accumulate_dot_word(total, weights, activations)
                                for total, weights in zip(of_row[term], matrix)
                            ]
            of_block = tile.scales + block * scale_bytes
            for line in range(0, scale_bytes, CACHE_LINE_BYTES):
                builder.prefetch(of_block + FROM_MEMORY // block_bytes * scale_bytes + line)
            for number, out in enumerate(firsts):
                places = [of_block + 2 * (outs * at + out) for at in range(self.block_scales)]
                scale, *middles = [load_scales(builder, place, lanes) for place in places]
                shared = [scale, scale * -ROUNDING_CONSTANT, *middles]
                for row, of_row, total in zip(rows, sums, (of_row[number] for of_row in totals)):
                    both = [of_term[number] for of_term in of_row]
                    total.set(self.add_block(builder, row, block, both, shared, total.get()))
        return [builder.concatenate([each.get() for each in of_row]) for of_row in totals]
