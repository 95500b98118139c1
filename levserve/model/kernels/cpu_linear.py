"""Products with a matrix on an ARM CPU, in int8 and in bfloat16: each row of the matrix is read once, ahead of its use.

In int8 they are the numbers of `quantize`'s product in XLA: activations are split into two int8 terms, in memory that stays in
the cache, and one instruction sums four products. bfloat16 is widened as it is read, for want of an instruction for it; XLA
would widen the whole matrix first.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from levserve.model.kernels.handler import Call, Kernel, Work, register
from levserve.model.kernels.writer import F32, I8, I16, I32, Value, Variable, Writer

OUT_TOGETHER = 4
"""Rows of the matrix that are multiplied at a time: an activation that was loaded is used so often."""
BLOCK = 64
"""Rows of the matrix in a piece of the work."""
AHEAD_BYTES = 4096
"""How far ahead of its use the matrix is asked for."""
INT8_LANES, FLOAT_LANES = 16, 4
INT8_ROWS, FLOAT_ROWS = 3, 4
"""Rows of activations that are multiplied at a time: 24 sums of two terms, or 16 sums, fit into 32 registers with what they need."""
ROW_BLOCK = 12
"""Rows of activations that meet a block of the matrix before the next ones do: so many stay in the nearest cache."""
SMALLEST = 1e-20
"""In place of a scale of nothing."""
ROUNDER = 1.5 * 2**23
"""Added to a small float it leaves no room for a fraction, and the rounded number in the lowest bits."""


def refuse_unservable(out: int, size: int) -> str | None:
    """Why these kernels cannot multiply with a matrix [out, size], or None."""
    if out % OUT_TOGETHER or size % INT8_LANES:
        return f"a matrix of {out} x {size} (it takes multiples of {OUT_TOGETHER} x {INT8_LANES})"
    return None


def multiply_int8(weight: jax.Array, scale: jax.Array, x: jax.Array, *, steps: float, fine_steps: float) -> jax.Array:
    """x [row, in] with int8 [out, in] whose rows have a scale each: float32 [row, out]."""
    name = f"levserve_multiply_int8_{weight.shape[1]}"
    register(name, int8_kernel(weight.shape[1], steps, fine_steps))
    return _call(name, x, weight, scale)


def multiply_bfloat16(weight: jax.Array, x: jax.Array) -> jax.Array:
    """x [row, in], in float32 to the end, with bfloat16 [out, in]: float32 [row, out]."""
    name = f"levserve_multiply_bfloat16_{weight.shape[1]}"
    register(name, bfloat16_kernel(weight.shape[1]))
    return _call(name, x, weight)


def _call(name: str, x: jax.Array, weight: jax.Array, *others: jax.Array) -> jax.Array:
    result = jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), jnp.float32)
    return jax.ffi.ffi_call(name, result)(x.astype(jnp.float32), weight, *others)


def int8_kernel(size: int, steps: float, fine_steps: float) -> Kernel:
    """For arguments x [row, in], weight [out, in], scale [out]. Shared memory: each row's scale, then its two terms."""

    def split_row(call: Call, shared: Value, _: Value, row: Value) -> None:
        writer = call.writer
        given, terms = call.argument(0) + row * (4 * size), shared + num_rows(call) * 4 + row * (2 * size)
        top = writer.variable(writer.zeros(F32, INT8_LANES))
        with writer.loop(0, size, INT8_LANES) as at:
            top.set(top.get().call("llvm.maximum", writer.load(given + at * 4, F32, INT8_LANES).call("llvm.fabs")))
        scale = top.get().largest().most(SMALLEST) / steps
        writer.store(shared + row * 4, scale)
        share = (writer.number(1.0, F32) / scale).splat(INT8_LANES)
        with writer.loop(0, size, INT8_LANES) as at:
            scaled = writer.load(given + at * 4, F32, INT8_LANES) * share
            coarse = scaled + ROUNDER
            fine = (scaled - (coarse - ROUNDER)) * fine_steps + ROUNDER
            for term, into in ((coarse, terms), (fine, terms + size)):
                writer.store(into + at, term.convert("bitcast", I32).convert("trunc", I8))

    def multiply_tile(call: Call, shared: Value, out: Value, row: Value, count: int) -> None:
        writer = call.writer
        weight, terms = call.argument(1) + out * size, shared + num_rows(call) * 4 + row * (2 * size)
        sums = [[writer.variable(writer.zeros(I32, INT8_LANES // 4)) for _ in range(OUT_TOGETHER)] for _ in range(2 * count)]
        with writer.loop(0, size, INT8_LANES) as at:
            writer.prefetch(weight + AHEAD_BYTES + at * OUT_TOGETHER)
            matrix = [writer.load(weight + at + number * size, I8, INT8_LANES) for number in range(OUT_TOGETHER)]
            for index, each in enumerate(sums):
                term = writer.load(terms + at + index * size, I8, INT8_LANES)
                for part, sum_ in zip(matrix, each):
                    sum_.set(writer.dot_into(sum_.get(), part, term))
        for number in range(count):
            coarse, fine = (_joined(writer, each).convert("sitofp", F32) for each in sums[2 * number : 2 * number + 2])
            share = writer.load(shared + (row + number) * 4, F32).splat(OUT_TOGETHER)
            scales = writer.load(call.argument(2) + out * 4, F32, OUT_TOGETHER)
            writer.store(_place(call, row + number, out), (fine * (1 / fine_steps) + coarse) * share * scales)

    def shared_bytes(call: Call) -> Value:
        return num_rows(call) * (4 + 2 * size)

    return Kernel((Work(num_rows, split_row), _in_tiles(INT8_ROWS, multiply_tile)), shared_bytes=shared_bytes)


def bfloat16_kernel(size: int) -> Kernel:
    """For arguments x [row, in], weight [out, in]."""

    def multiply_tile(call: Call, _: Value, out: Value, row: Value, count: int) -> None:
        writer = call.writer
        weight, given = call.argument(1) + out * (2 * size), call.argument(0) + row * (4 * size)
        sums = [[writer.variable(writer.zeros(F32, FLOAT_LANES)) for _ in range(OUT_TOGETHER)] for _ in range(count)]
        with writer.loop(0, size, FLOAT_LANES) as at:
            writer.prefetch(weight + AHEAD_BYTES + at * (2 * OUT_TOGETHER))
            stored = [writer.load(weight + at * 2 + number * (2 * size), I16, FLOAT_LANES) for number in range(OUT_TOGETHER)]
            matrix = [(part.convert("zext", I32) << 16).convert("bitcast", F32) for part in stored]
            for number, each in enumerate(sums):
                x = writer.load(given + at * 4 + number * (4 * size), F32, FLOAT_LANES)
                for part, sum_ in zip(matrix, each):
                    sum_.set(part.times_plus(x, sum_.get()))
        for number, each in enumerate(sums):
            writer.store(_place(call, row + number, out), _joined(writer, each))

    return Kernel((_in_tiles(FLOAT_ROWS, multiply_tile),))


def num_rows(call: Call) -> Value:
    return call.argument_size(0, 0)


def _in_tiles(together: int, multiply_tile: Callable[[Call, Value, Value, Value, int], None]) -> Work:
    """All rows in pieces of a block of the matrix each; a tile is (call, shared memory, its first out, its first row, its rows)."""

    def num_blocks(call: Call) -> Value:
        return (call.argument_size(1, 0) + (BLOCK - 1)) // BLOCK

    def multiply_block(call: Call, shared: Value, _: Value, block: Value) -> None:
        writer, rows = call.writer, num_rows(call)
        end = ((block + 1) * BLOCK).least(call.argument_size(1, 0))
        with writer.loop(0, rows, ROW_BLOCK) as start:
            held = (rows - start).least(ROW_BLOCK)
            rest = held % together
            stop = start + held - rest
            with writer.loop(block * BLOCK, end, OUT_TOGETHER) as out:
                with writer.loop(start, stop, together) as row:
                    multiply_tile(call, shared, out, row, together)
                for count in range(1, together):
                    with writer.when(rest.is_(count)):
                        multiply_tile(call, shared, out, stop, count)

    return Work(num_blocks, multiply_block)


def _place(call: Call, row: Value, out: Value) -> Value:
    return call.result(0) + (row * call.argument_size(1, 0) + out) * 4


def _joined(writer: Writer, sums: list[Variable]) -> Value:
    """The totals of four vectors of four."""
    first, second, third, fourth = (sum_.get() for sum_ in sums)
    return writer.add_pairs(writer.add_pairs(first, second), writer.add_pairs(third, fourth))
