"""How a few rows of activations are multiplied with a few rows of a matrix on a CPU, in each type that
matrices have.

In int8 they are the numbers of `quantize`'s product in XLA: activations are turned and rounded, in memory
that stays in the cache, and one instruction sums four products: ARM's of signed numbers, x86's of unsigned
with signed ones, which wants the matrix packed. bfloat16 is widened as it is read, for want of an instruction
for it; XLA would widen the whole matrix first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import jax.numpy as jnp

from levserve.jit.builder import F32, I8, I16, I32, LINE_BYTES, ROUNDER, Builder, Value
from levserve.jit.target import Target
from levserve.model.hadamard import block_size
from levserve.model.int8_packing import OFFSET, OUTS, SMALLEST, STEPS, WORD

AHEAD_BYTES = 4096
"""How far ahead of its use the matrix is asked for."""
INT8_LANES = 16
TAIL_BYTES = 16
"""After a row in int8: its scale, and what its sums begin with."""


def product_for(numbers: jnp.dtype, size: int, target: Target) -> Product:
    """With a matrix of such numbers."""
    if numbers == jnp.bfloat16:
        return Bfloat16Product(size, target)
    return PackedProduct(size, target) if numbers == jnp.uint8 else Int8Product(size, target)


class Product(Protocol):
    """How rows of activations [size] are multiplied with a matrix [out, size]."""

    outs: ClassVar[int]
    """Rows of the matrix that are multiplied at a time: an activation that was loaded is used so often."""
    pieces: ClassVar[int]
    """For each thread: few, because what is asked for ahead of a piece's end is another's, and lost."""
    has_scales: ClassVar[bool]

    @property
    def size(self) -> int: ...

    @property
    def target(self) -> Target: ...

    @property
    def rows(self) -> int:
        """Of activations, at a time."""

    @property
    def matrix_bytes(self) -> int:
        """Of a row of the matrix."""

    @property
    def row_bytes(self) -> int:
        """Of a row of activations that is prepared."""

    def prepare(self, builder: Builder, given: Value, own: Value, into: Value) -> None:
        """Makes of a row of float32 what is multiplied, with memory for another such row, which may be the
        same."""

    def multiply(
        self, builder: Builder, weight: Value, scales: Value, prepared: Value, count: int
    ) -> list[Value]:
        """Of `count` rows with `outs` of the matrix: a vector of floats for each."""


@dataclass(frozen=True)
class WholeRows:
    """Activations for products of whole numbers: each row turned and in int8, then its scale and `OFFSET`
    times its sum, below zero."""

    size: int
    target: Target
    has_scales: ClassVar[bool] = True

    @property
    def matrix_bytes(self) -> int:
        return self.size

    @property
    def row_bytes(self) -> int:
        return self.size + TAIL_BYTES

    def prepare(self, builder: Builder, given: Value, own: Value, into: Value) -> None:
        lanes, block = self.target.lanes, block_size(self.size)
        top = builder.variable(builder.zeros(F32, lanes))
        with builder.loop(0, self.size, block) as start:
            places = [start * 4 + 4 * number for number in range(0, block, lanes)]
            for place, turned in zip(
                places, _turned([builder.load(given + place, F32, lanes) for place in places], lanes)
            ):
                builder.store(own + place, turned)
                top.set(top.get().call("llvm.maximum", turned.call("llvm.fabs")))
        scale = top.get().largest().most(SMALLEST) / STEPS
        share = (builder.number(1.0, F32) / scale).splat(INT8_LANES)
        sums = builder.variable(builder.zeros(I32, INT8_LANES))
        with builder.loop(0, self.size, INT8_LANES) as at:
            small = (
                (builder.load(own + at * 4, F32, INT8_LANES) * share + ROUNDER)
                .convert("bitcast", I32)
                .convert("trunc", I8)
            )
            builder.store(into + at, small)
            sums.set(sums.get() + small.convert("sext", I32))
        builder.store(into + self.size, scale * (1 / math.sqrt(block)))
        builder.store(into + self.size + 4, sums.get().total() * -OFFSET)

    def _scaled(self, builder: Builder, row: Value, sums: Value, scales: Value) -> Value:
        lanes = sums.lanes
        assert lanes is not None
        return (
            sums.convert("sitofp", F32)
            * builder.load(row + self.size, F32).splat(lanes)
            * builder.load(scales, F32, lanes)
        )


class Int8Product(WholeRows):
    """With a matrix as it is, for an instruction that multiplies signed numbers."""

    outs: ClassVar[int] = 4
    pieces: ClassVar[int] = 2
    rows: ClassVar[int] = 6  # 24 sums fit into 32 registers with what they need

    def multiply(
        self, builder: Builder, weight: Value, scales: Value, prepared: Value, count: int
    ) -> list[Value]:
        rows = [prepared + number * self.row_bytes for number in range(count)]
        sums = [
            [builder.variable(builder.zeros(I32, INT8_LANES // 4)) for _ in range(self.outs)] for _ in rows
        ]
        with builder.loop(0, self.size, INT8_LANES) as at:
            builder.prefetch(weight + AHEAD_BYTES + at * self.outs)
            matrix = [
                builder.load(weight + at + number * self.size, I8, INT8_LANES) for number in range(self.outs)
            ]
            for row, each in zip(rows, sums):
                activation = builder.load(row + at, I8, INT8_LANES)
                for part, sum_ in zip(matrix, each):
                    sum_.set(builder.dot_into(sum_.get(), part, activation))
        return [
            self._scaled(builder, row, builder.totals(*(sum_.get() for sum_ in each)), scales)
            for row, each in zip(rows, sums)
        ]


class PackedProduct(WholeRows):
    """With a matrix that is packed: each lane is an output, and a word of activations meets all of them."""

    outs: ClassVar[int] = OUTS
    pieces: ClassVar[int] = 3  # of 18 times `outs` two threads get as many with 3 pieces each, and not with 2

    @property
    def rows(self) -> int:
        return 12 if self.target.vector_bytes == 64 else 2  # 24 sums in 32 registers, or 8 in 16

    def multiply(
        self, builder: Builder, weight: Value, scales: Value, prepared: Value, count: int
    ) -> list[Value]:
        rows = [prepared + number * self.row_bytes for number in range(count)]
        lanes = self.target.lanes
        starts = [builder.load(row + self.size + 4, I32).splat(lanes) for row in rows]
        sums = [[builder.variable(start) for _ in range(OUTS // lanes)] for start in starts]
        with builder.loop(0, self.size, WORD) as at:
            group = weight + at * OUTS
            for line in range(0, OUTS * WORD, LINE_BYTES):
                builder.prefetch(group + AHEAD_BYTES + line)
            matrix = [
                builder.load(group + number * WORD, I8, lanes * WORD) for number in range(0, OUTS, lanes)
            ]
            for row, each in zip(rows, sums):
                word = builder.load(row + at, I32)
                for part, sum_ in zip(matrix, each):
                    sum_.set(builder.dot_word_into(sum_.get(), part, word))
        return [
            self._scaled(builder, row, builder.joined([sum_.get() for sum_ in each]), scales)
            for row, each in zip(rows, sums)
        ]


@dataclass(frozen=True)
class Bfloat16Product:
    size: int
    target: Target
    has_scales: ClassVar[bool] = False
    outs: ClassVar[int] = 4
    pieces: ClassVar[int] = 2

    @property
    def rows(self) -> int:
        return 2 if self.target.vector_bytes == 32 else 6  # 8 sums for 16 registers, 24 for 32

    @property
    def matrix_bytes(self) -> int:
        return 2 * self.size

    @property
    def row_bytes(self) -> int:
        return 4 * self.size

    def prepare(self, builder: Builder, given: Value, own: Value, into: Value) -> None:
        with builder.loop(0, self.size, INT8_LANES) as at:
            builder.store(into + at * 4, builder.load(given + at * 4, F32, INT8_LANES))

    def multiply(
        self, builder: Builder, weight: Value, scales: Value, prepared: Value, count: int
    ) -> list[Value]:
        lanes = self.target.lanes
        if count <= 2 and self.target.vector_bytes < 64:
            lanes *= 2  # with few rows a sum would wait for itself
        sums = [[builder.variable(builder.zeros(F32, lanes)) for _ in range(self.outs)] for _ in range(count)]
        with builder.loop(0, self.size, lanes) as at:
            for line in range(0, 2 * self.outs * lanes, LINE_BYTES):
                builder.prefetch(weight + AHEAD_BYTES + at * (2 * self.outs) + line)
            stored = [
                builder.load(weight + at * 2 + number * (2 * self.size), I16, lanes)
                for number in range(self.outs)
            ]
            matrix = [(part.convert("zext", I32) << 16).convert("bitcast", F32) for part in stored]
            for number, each in enumerate(sums):
                x = builder.load(prepared + at * 4 + number * self.row_bytes, F32, lanes)
                for part, sum_ in zip(matrix, each):
                    sum_.set(part.times_plus(x, sum_.get()))
        return [builder.totals(*(sum_.get() for sum_ in each)) for each in sums]


def _turned(numbers: list[Value], lanes: int) -> list[Value]:
    """A block of `rotation`, but for its scale: sums and differences at every distance."""
    distance = 1
    while distance < lanes:
        numbers = [each.times_plus(each.signs(distance), each.swapped(distance)) for each in numbers]
        distance *= 2
    distance = 1
    while distance < len(numbers):
        for low in range(len(numbers)):
            if not low & distance:
                first, second = numbers[low], numbers[low | distance]
                numbers[low], numbers[low | distance] = first + second, first - second
        distance *= 2
    return numbers
