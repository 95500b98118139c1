"""Products with a matrix on an ARM CPU, in int8 and in bfloat16: each row of the matrix is read once, ahead of its use.

In int8 they are the numbers of `quantize`'s product in XLA: activations are turned and rounded, in memory that stays in the
cache, and one instruction sums four products. bfloat16 is widened as it is read, for want of an instruction for it; XLA
would widen the whole matrix first.

Rows of activations that are padding are left out: what is given for them is whatever was in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import jax
import jax.numpy as jnp

from levserve.model.kernels.handler import Call, Kernel, Work, num_threads, register
from levserve.model.kernels.writer import F32, I8, I16, I32, Value, Writer
from levserve.model.quantize import SMALLEST, STEPS
from levserve.model.rotation import block_size

OUT_TOGETHER = 4
"""Rows of the matrix that are multiplied at a time: an activation that was loaded is used so often."""
PIECES_EACH = 2
LEAST_ROWS, MOST_ROWS = 32, 1024
"""Pieces of a product for each thread, and rows of the matrix in one: what is asked for ahead of a piece's end is another's, and lost."""
AHEAD_BYTES = 4096
"""How far ahead of its use the matrix is asked for."""
INT8_LANES, FLOAT_LANES = 16, 4
BLOCK_BYTES = 36 << 10
"""Of activations that meet a block of the matrix before the next ones do: so many stay in the nearest cache."""
ROUNDER = 1.5 * 2**23
"""Added to a small float it leaves no room for a fraction, and the rounded number in the lowest bits."""

X, NUM_USED, WEIGHT, SCALE = range(4)
"""The arguments of a product's call; bfloat16 has no scales."""


def refuse_unservable(out: int, size: int) -> str | None:
    """Why these kernels cannot multiply with a matrix [out, size], or None."""
    if out % OUT_TOGETHER or size % INT8_LANES:
        return f"a matrix of {out} x {size} (it takes multiples of {OUT_TOGETHER} x {INT8_LANES})"
    return None


class Product(Protocol):
    """How rows of activations [size] are multiplied with a matrix [out, size]."""

    rows: ClassVar[int]
    """That are multiplied at a time."""
    has_scales: ClassVar[bool]

    @property
    def size(self) -> int: ...

    @property
    def matrix_bytes(self) -> int:
        """Of a row of the matrix."""

    @property
    def row_bytes(self) -> int:
        """Of a row of activations that is prepared."""

    def prepare(self, writer: Writer, given: Value, own: Value, into: Value) -> None:
        """Makes of a row of float32 what is multiplied, with memory for another such row, which may be the same."""

    def multiply(self, writer: Writer, weight: Value, scales: Value, prepared: Value, count: int) -> list[Value]:
        """Of `count` rows with `OUT_TOGETHER` rows of the matrix: a vector of floats for each."""


@dataclass(frozen=True)
class Int8Product:
    """Each row turned and in int8, then its scale."""

    size: int
    rows: ClassVar[int] = 6  # 24 sums fit into 32 registers with what they need
    has_scales: ClassVar[bool] = True

    @property
    def matrix_bytes(self) -> int:
        return self.size

    @property
    def row_bytes(self) -> int:
        return self.size + INT8_LANES

    def prepare(self, writer: Writer, given: Value, own: Value, into: Value) -> None:
        block, top = block_size(self.size), writer.variable(writer.zeros(F32, FLOAT_LANES))
        with writer.loop(0, self.size, block) as start:
            places = [start * 4 + 4 * number for number in range(0, block, FLOAT_LANES)]
            for place, turned in zip(places, _turned([writer.load(given + place, F32, FLOAT_LANES) for place in places])):
                writer.store(own + place, turned)
                top.set(top.get().call("llvm.maximum", turned.call("llvm.fabs")))
        scale = top.get().largest().most(SMALLEST) / STEPS
        writer.store(into + self.size, scale * (1 / math.sqrt(block)))
        share = (writer.number(1.0, F32) / scale).splat(INT8_LANES)
        with writer.loop(0, self.size, INT8_LANES) as at:
            rounded = writer.load(own + at * 4, F32, INT8_LANES) * share + ROUNDER
            writer.store(into + at, rounded.convert("bitcast", I32).convert("trunc", I8))

    def multiply(self, writer: Writer, weight: Value, scales: Value, prepared: Value, count: int) -> list[Value]:
        rows = [prepared + number * self.row_bytes for number in range(count)]
        sums = [[writer.variable(writer.zeros(I32, INT8_LANES // 4)) for _ in range(OUT_TOGETHER)] for _ in rows]
        with writer.loop(0, self.size, INT8_LANES) as at:
            writer.prefetch(weight + AHEAD_BYTES + at * OUT_TOGETHER)
            matrix = [writer.load(weight + at + number * self.size, I8, INT8_LANES) for number in range(OUT_TOGETHER)]
            for row, each in zip(rows, sums):
                activation = writer.load(row + at, I8, INT8_LANES)
                for part, sum_ in zip(matrix, each):
                    sum_.set(writer.dot_into(sum_.get(), part, activation))
        products = []
        for row, each in zip(rows, sums):
            total = _joined(writer, [sum_.get() for sum_ in each]).convert("sitofp", F32)
            products.append(total * writer.load(row + self.size, F32).splat(OUT_TOGETHER) * writer.load(scales, F32, OUT_TOGETHER))
        return products


@dataclass(frozen=True)
class Bfloat16Product:
    size: int
    rows: ClassVar[int] = 6  # 24 sums
    has_scales: ClassVar[bool] = False

    @property
    def matrix_bytes(self) -> int:
        return 2 * self.size

    @property
    def row_bytes(self) -> int:
        return 4 * self.size

    def prepare(self, writer: Writer, given: Value, own: Value, into: Value) -> None:
        with writer.loop(0, self.size, INT8_LANES) as at:
            writer.store(into + at * 4, writer.load(given + at * 4, F32, INT8_LANES))

    def multiply(self, writer: Writer, weight: Value, scales: Value, prepared: Value, count: int) -> list[Value]:
        lanes = FLOAT_LANES if count > 2 else 2 * FLOAT_LANES  # with few rows a sum would wait for itself
        sums = [[writer.variable(writer.zeros(F32, lanes)) for _ in range(OUT_TOGETHER)] for _ in range(count)]
        with writer.loop(0, self.size, lanes) as at:
            writer.prefetch(weight + AHEAD_BYTES + at * (2 * OUT_TOGETHER))
            stored = [writer.load(weight + at * 2 + number * (2 * self.size), I16, lanes) for number in range(OUT_TOGETHER)]
            matrix = [(part.convert("zext", I32) << 16).convert("bitcast", F32) for part in stored]
            for number, each in enumerate(sums):
                x = writer.load(prepared + at * 4 + number * self.row_bytes, F32, lanes)
                for part, sum_ in zip(matrix, each):
                    sum_.set(part.times_plus(x, sum_.get()))
        return [_joined(writer, [sum_.get() for sum_ in each]) for each in sums]


def multiply_int8(weight: jax.Array, scale: jax.Array, x: jax.Array, num_used: jax.Array | None = None) -> jax.Array:
    """As `multiply_turned`: of x [row, in], or the first `num_used` [1] of its rows, float32 [row, out]."""
    return _call(f"levserve_multiply_int8_{weight.shape[1]}", Int8Product(weight.shape[1]), x, num_used, weight, scale)


def multiply_bfloat16(weight: jax.Array, x: jax.Array, num_used: jax.Array | None = None) -> jax.Array:
    """x [row, in], or so many of its rows, in float32 to the end, with bfloat16 [out, in]: float32 [row, out]."""
    return _call(f"levserve_multiply_bfloat16_{weight.shape[1]}", Bfloat16Product(weight.shape[1]), x, num_used, weight)


def _call(name: str, product: Product, x: jax.Array, num_used: jax.Array | None, weight: jax.Array, *scales: jax.Array) -> jax.Array:
    register(name, product_kernel(product))
    result = jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), jnp.float32)
    count = jnp.asarray([x.shape[0]], jnp.int32) if num_used is None else num_used
    return jax.ffi.ffi_call(name, result)(x.astype(jnp.float32), count, weight, *scales)


def product_kernel(product: Product) -> Kernel:
    """Of one call. Shared memory: the rows, prepared."""

    def num_rows(call: Call) -> Value:
        return used_rows(call, NUM_USED).least(call.argument_size(X, 0))

    def shared_bytes(call: Call) -> Value:
        return num_rows(call) * product.row_bytes

    def prepare_row(call: Call, shared: Value, own: Value, row: Value) -> None:
        product.prepare(call.writer, call.argument(X) + row * (4 * product.size), own, shared + row * product.row_bytes)

    def multiply_piece(call: Call, shared: Value, _: Value, piece: Value) -> None:
        num_out = call.argument_size(WEIGHT, 0)

        def keep(row: Value, out: Value, products: Value) -> None:
            call.writer.store(call.result(0) + (row * num_out + out) * 4, products)

        matrix = Matrix(call.argument(WEIGHT), call.argument(SCALE) if product.has_scales else None)
        multiply_block(call.writer, product, matrix, shared, num_rows(call), block_range(piece, num_out), keep)

    works = (Work(num_rows, prepare_row), Work(lambda call: num_blocks(call.argument_size(WEIGHT, 0)), multiply_piece))
    return Kernel(works, shared_bytes=shared_bytes, own_bytes=lambda call: call.writer.number(4 * product.size))


def used_rows(call: Call, argument: int) -> Value:
    return call.writer.index(call.argument(argument), call.writer.number(0))


def num_blocks(num_out: Value) -> Value:
    return (num_out + piece_size(num_out) - 1) // piece_size(num_out)


def block_range(piece: Value, num_out: Value) -> tuple[Value, Value]:
    return piece * piece_size(num_out), ((piece + 1) * piece_size(num_out)).least(num_out)


def piece_size(num_out: Value) -> Value:
    """Rows of the matrix in a piece of the work."""
    share = (num_out + (PIECES_EACH * num_threads() - 1)) // (PIECES_EACH * num_threads())
    return (share.least(MOST_ROWS).most(LEAST_ROWS) + (OUT_TOGETHER - 1)) // OUT_TOGETHER * OUT_TOGETHER


@dataclass(frozen=True)
class Matrix:
    """Where a matrix begins, and its scales."""

    weight: Value
    scales: Value | None


def multiply_block(
    writer: Writer, product: Product, matrix: Matrix, prepared: Value, num_rows: Value, outs: tuple[Value, Value],
    keep: Callable[[Value, Value, Value], None],
) -> None:  # fmt: skip
    """Multiplies all rows with a range of the matrix; `keep` gets a row, the first of a few outs, and their products."""

    def multiply_tile(out: Value, row: Value, count: int) -> None:
        weight, scales = matrix.weight + out * product.matrix_bytes, matrix.weight if matrix.scales is None else matrix.scales + out * 4
        for number, each in enumerate(product.multiply(writer, weight, scales, prepared + row * product.row_bytes, count)):
            keep(row + number, out, each)

    block = max(1, BLOCK_BYTES // (product.row_bytes * product.rows)) * product.rows
    with writer.loop(0, num_rows, block) as start:
        held = (num_rows - start).least(block)
        rest = held % product.rows
        stop = start + held - rest
        with writer.loop(*outs, OUT_TOGETHER) as out:
            with writer.loop(start, stop, product.rows) as row:
                multiply_tile(out, row, product.rows)
            for count in range(1, product.rows):
                with writer.when(rest.is_(count)):
                    multiply_tile(out, stop, count)


def _turned(numbers: list[Value]) -> list[Value]:
    """A block of `rotation`, but for its scale: sums and differences at every distance."""
    for distance in (1, 2):
        numbers = [each.times_plus(each.signs(distance), each.swapped(distance)) for each in numbers]
    distance = 1
    while distance < len(numbers):
        for low in range(len(numbers)):
            if not low & distance:
                first, second = numbers[low], numbers[low | distance]
                numbers[low], numbers[low | distance] = first + second, first - second
        distance *= 2
    return numbers


def _joined(writer: Writer, sums: list[Value]) -> Value:
    """The totals of four vectors of four, or of eight."""
    return writer.totals(*(writer.fold(sum_) if sum_.lanes == 2 * OUT_TOGETHER else sum_ for sum_ in sums))
