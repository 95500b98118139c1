"""Multiplies a tile on a CPU, a few rows of activations with a few rows of a matrix, for each type of matrix.

With int8 it computes the same integers as `quantize.multiply_rotated` in XLA. Activations are rotated and
rounded in memory that stays in the cache, and one instruction sums four products. ARM's instruction
multiplies signed numbers; x86's multiplies unsigned with signed ones, and the matrix is packed for it.
bfloat16 is widened as it is read, with ordinary instructions; XLA would widen the whole matrix first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import jax.numpy as jnp

from levserve.jit.builder import CACHE_LINE_BYTES, F32, I8, I16, I32, ROUNDING_CONSTANT, Builder, Value
from levserve.jit.target import Target
from levserve.model.cpu.prefetch import Prefetch
from levserve.model.cpu.rotation import rotate_block
from levserve.model.hadamard import block_size
from levserve.model.int8_packing import OFFSET, OUTS, SMALLEST, STEPS, WORD

INT8_LANES = 16
TAIL_BYTES = 16
"""Bytes that follow a row in int8: its scale, the number its sums start with, and padding."""

StoreProducts = Callable[[Value, Value, Value], None]
"""Stores the products of a row of activations, given its number, the first output and a vector."""


def product_for(dtype: jnp.dtype, size: int, target: Target) -> Product:
    """The product with a matrix of this type; uint8 is packed int8."""
    if dtype == jnp.bfloat16:
        return Bfloat16Product(size, target)
    return PackedProduct(size, target) if dtype == jnp.uint8 else Int8Product(size, target)


@dataclass(frozen=True)
class Matrix:
    """Pointers to a matrix and its scales."""

    weight: Value
    scales: Value | None


@dataclass(frozen=True)
class Tile:
    """Some prepared rows, and the part of a matrix that they are multiplied with."""

    weight: Value
    scales: Value
    prepared: Value
    num_rows: int
    ahead: Prefetch


@dataclass(frozen=True)
class PreparedRow:
    """Where a row of activations is prepared."""

    start: Value
    tail: Value
    """What follows the row's numbers."""
    pieces: tuple[int, Value] | None = None
    """If the row is not contiguous: the bytes of each contiguous piece, and from one piece to the next."""

    def place(self, at: Value) -> Value:
        """The place of a byte of the row."""
        if self.pieces is None:
            return self.start + at
        piece, stride = self.pieces
        return self.start + at // piece * stride + at % piece


@dataclass(frozen=True)
class ProductTask:
    """What a task multiplies: all prepared rows with a range of a matrix."""

    matrix: Matrix
    prepared: Value
    num_rows: Value
    outs: tuple[Value, Value]
    """The first output, and the one after the last."""
    scratch: Value
    """Memory of this thread."""
    is_first: Value
    """Whether it is this thread's first task with these rows. Later ones find what it left in `scratch`."""
    store: StoreProducts


class Operands(Protocol):
    """What rows of activations [size] and a matrix [out, size] look like in memory."""

    has_scales: ClassVar[bool]

    @property
    def name(self) -> str:
        """Different for each kind of product."""

    @property
    def size(self) -> int: ...

    @property
    def target(self) -> Target: ...

    @property
    def out_bytes(self) -> int:
        """Bytes of a row of the matrix."""

    @property
    def out_scale_bytes(self) -> int:
        """Bytes of the scales of such a row."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a prepared row of activations."""


class Product(Operands, Protocol):
    """How rows of activations are multiplied with a matrix."""

    tile_outs: ClassVar[int]
    """Rows of the matrix in a tile: a loaded activation is used this many times."""
    tasks_per_thread: ClassVar[int]
    """Few, because what a task prefetches at its end belongs to another thread's task, and is wasted."""

    @property
    def tile_rows(self) -> int:
        """Rows of activations in a tile, at most."""

    def prepare(self, builder: Builder, x: Value, scratch: Value, into: PreparedRow) -> None:
        """Prepares a row x of float32 for `multiply`. The scratch memory holds such a row, and may be x."""

    def multiply(self, builder: Builder, tile: Tile) -> list[Value]:
        """Multiplies rows with `tile_outs` rows of the matrix; gives a vector of floats for each."""


@dataclass(frozen=True)
class Int8Activations:
    """Activations for integer products.

    A prepared row is rotated and rounded to int8. After it come its scale and -`OFFSET` times its sum.
    """

    size: int
    target: Target
    has_scales: ClassVar[bool] = True

    out_scale_bytes: ClassVar[int] = 4

    @property
    def out_bytes(self) -> int:
        return self.size

    @property
    def row_bytes(self) -> int:
        return self.size + TAIL_BYTES

    def prepare(self, builder: Builder, x: Value, scratch: Value, into: PreparedRow) -> None:
        lanes, block = self.target.lanes, block_size(self.size)
        largest = builder.variable(builder.zeros(I32, lanes))
        with builder.loop(0, self.size, block) as start:
            offsets = [start * 4 + 4 * number for number in range(0, block, lanes)]
            rotated = rotate_block([builder.load(x + offset, F32, lanes) for offset in offsets], lanes)
            for offset, numbers in zip(offsets, rotated):
                builder.store(scratch + offset, numbers)
                largest.set(largest.get().intrinsic("llvm.smax", numbers.magnitude()))
        scale = largest.get().reduce_magnitudes().maximum(SMALLEST) / STEPS
        inverse = (builder.constant(1.0, F32) / scale).splat(INT8_LANES)
        sums = builder.variable(builder.zeros(I32, INT8_LANES))
        with builder.loop(0, self.size, INT8_LANES) as at:
            rounded = builder.load(scratch + at * 4, F32, INT8_LANES) * inverse + ROUNDING_CONSTANT
            integers = rounded.convert("bitcast", I32).convert("trunc", I8)
            builder.store(into.place(at), integers)
            sums.set(sums.get() + integers.convert("sext", I32))
        builder.store(into.tail, scale * (1 / math.sqrt(block)))
        builder.store(into.tail + 4, sums.get().reduce_sum() * -OFFSET)

    def rescale(self, builder: Builder, row: Value, sums: Value, scales: Value) -> Value:
        """Integer sums times the scale of the row of activations and the scales of the outputs."""
        lanes = sums.lanes
        assert lanes is not None
        return rescale(builder, row + self.size, sums, builder.load(scales, F32, lanes))


class Int8Product(Int8Activations):
    """The product with a matrix in plain order, for ARM's instruction that multiplies signed numbers."""

    name: ClassVar[str] = "int8"
    tile_outs: ClassVar[int] = 4
    tasks_per_thread: ClassVar[int] = 2
    tile_rows: ClassVar[int] = 6  # 24 sums, which leaves 8 of 32 registers for the operands

    def multiply(self, builder: Builder, tile: Tile) -> list[Value]:
        rows = [tile.prepared + index * self.row_bytes for index in range(tile.num_rows)]
        sums = [
            [builder.variable(builder.zeros(I32, INT8_LANES // 4)) for _ in range(self.tile_outs)]
            for _ in rows
        ]
        with builder.loop(0, self.size, INT8_LANES) as at:
            tile.ahead.write_near(builder, at * self.tile_outs, CACHE_LINE_BYTES)
            matrix = [
                builder.load(tile.weight + at + index * self.size, I8, INT8_LANES)
                for index in range(self.tile_outs)
            ]
            for row, row_sums in zip(rows, sums):
                activations = builder.load(row + at, I8, INT8_LANES)
                for weights, total in zip(matrix, row_sums):
                    total.set(builder.accumulate_dot(total.get(), weights, activations))
        return [
            self.rescale(builder, row, builder.reduce_sums(*(total.get() for total in row_sums)), tile.scales)
            for row, row_sums in zip(rows, sums)
        ]


class PackedProduct(Int8Activations):
    """The product with a packed matrix: each lane is an output, and all lanes share a word of activations."""

    name: ClassVar[str] = "uint8"
    tile_outs: ClassVar[int] = OUTS
    tasks_per_thread: ClassVar[int] = 3  # 18 tiles are 6 equal tasks for two threads, but not 4

    @property
    def tile_rows(self) -> int:
        return 12 if self.target.vector_bytes == 64 else 2  # 24 sums in 32 registers, or 8 in 16

    def multiply(self, builder: Builder, tile: Tile) -> list[Value]:
        rows = [tile.prepared + index * self.row_bytes for index in range(tile.num_rows)]
        lanes = self.target.lanes
        starts = [builder.load(row + self.size + 4, I32).splat(lanes) for row in rows]
        sums = [[builder.variable(start) for _ in range(OUTS // lanes)] for start in starts]
        with builder.loop(0, self.size, WORD) as at:
            group = tile.weight + at * OUTS
            tile.ahead.write_near(builder, at * OUTS, OUTS * WORD)
            tile.ahead.write_far(builder, at * OUTS, OUTS * WORD)
            matrix = [builder.load(group + out * WORD, I8, lanes * WORD) for out in range(0, OUTS, lanes)]
            for row, row_sums in zip(rows, sums):
                word = builder.load(row + at, I32)
                for weights, total in zip(matrix, row_sums):
                    total.set(builder.accumulate_dot_word(total.get(), weights, word))
        return [
            self.rescale(builder, row, builder.concatenate([total.get() for total in row_sums]), tile.scales)
            for row, row_sums in zip(rows, sums)
        ]


@dataclass(frozen=True)
class Bfloat16Product:
    size: int
    target: Target
    name: ClassVar[str] = "bfloat16"
    has_scales: ClassVar[bool] = False
    out_scale_bytes: ClassVar[int] = 0
    tile_outs: ClassVar[int] = 4
    tasks_per_thread: ClassVar[int] = 2

    @property
    def tile_rows(self) -> int:
        return 2 if self.target.vector_bytes == 32 else 6  # 8 sums in 16 registers, or 24 in 32

    @property
    def out_bytes(self) -> int:
        return 2 * self.size

    @property
    def row_bytes(self) -> int:
        return 4 * self.size

    def prepare(self, builder: Builder, x: Value, scratch: Value, into: PreparedRow) -> None:
        with builder.loop(0, self.size, INT8_LANES) as at:
            builder.store(into.start + at * 4, builder.load(x + at * 4, F32, INT8_LANES))

    def multiply(self, builder: Builder, tile: Tile) -> list[Value]:
        lanes, outs = self.target.lanes, range(self.tile_outs)
        if tile.num_rows <= 2 and self.target.vector_bytes < 64:
            lanes *= 2  # with few rows each addition would wait for the one before
        sums = [[builder.variable(builder.zeros(F32, lanes)) for _ in outs] for _ in range(tile.num_rows)]
        with builder.loop(0, self.size, lanes) as at:
            tile.ahead.write_near(builder, at * (2 * self.tile_outs), 2 * self.tile_outs * lanes)
            bits = [builder.load(tile.weight + at * 2 + out * (2 * self.size), I16, lanes) for out in outs]
            matrix = [(each.convert("zext", I32) << 16).convert("bitcast", F32) for each in bits]
            for index, row_sums in enumerate(sums):
                activations = builder.load(tile.prepared + at * 4 + index * self.row_bytes, F32, lanes)
                for weights, total in zip(matrix, row_sums):
                    total.set(weights.multiply_add(activations, total.get()))
        return [builder.reduce_sums(*(total.get() for total in row_sums)) for row_sums in sums]


def rescale(builder: Builder, tail: Value, sums: Value, scales: Value) -> Value:
    """Integer sums times the scale of a row of activations, at its tail, and the scales of the outputs."""
    assert sums.lanes is not None
    return sums.convert("sitofp", F32) * builder.load(tail, F32).splat(sums.lanes) * scales
