"""Products with an int8 matrix on a CPU that sums products of int8 four at a time in one instruction.

The same numbers as `quantize`'s product in XLA, in one pass: activations are split into two int8 terms in memory that stays in
the cache, and the matrix is read once, four of its rows at a time, ahead of its use.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from levserve.model.kernels.handler import Call, Kernel, Work, register
from levserve.model.kernels.writer import F32, I8, I32, Value, Writer

LANES = 16
OUT_TOGETHER = 4
ROWS_TOGETHER = 3
"""Four rows of the matrix and three of activations, each in two terms: 24 sums, which fit into 32 registers with what they need."""
BLOCK = 64
"""Rows of the matrix in a piece of the work."""
ROW_BLOCK = 5 * ROWS_TOGETHER
"""Rows of activations that meet a block of the matrix before the next ones do: their terms stay in the nearest cache."""
AHEAD_BYTES = 4096
"""How far ahead of its use the matrix is asked for."""
SMALLEST = 1e-20
"""In place of a scale of nothing."""
ROUNDER = 1.5 * 2**23
"""Added to a small float it leaves no room for a fraction, and the rounded number in the lowest bits."""


def refuse_unservable(out: int, size: int) -> str | None:
    """Why this kernel cannot multiply with a matrix [out, size], or None."""
    if out % OUT_TOGETHER or size % LANES:
        return f"a matrix of {out} x {size} (it takes multiples of {OUT_TOGETHER} x {LANES})"
    return None


def multiply(weight: jax.Array, scale: jax.Array, x: jax.Array, *, steps: float, fine_steps: float) -> jax.Array:
    """x [row, in] with int8 [out, in] whose rows have a scale each: float32 [row, out]."""
    out, size = weight.shape
    name = f"levserve_multiply_{size}"
    register(name, kernel_for(size, steps, fine_steps))
    return jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((x.shape[0], out), jnp.float32))(x.astype(jnp.float32), weight, scale)


def kernel_for(size: int, steps: float, fine_steps: float) -> Kernel:
    """For arguments x [row, in], weight [out, in], scale [out]. Shared memory: each row's scale, then its two terms."""

    def num_rows(call: Call) -> Value:
        return call.argument_size(0, 0)

    def num_blocks(call: Call) -> Value:
        return (call.argument_size(1, 0) + (BLOCK - 1)) // BLOCK

    def split_row(call: Call, shared: Value, _: Value, row: Value) -> None:
        writer = call.writer
        given, terms = call.argument(0) + row * (4 * size), shared + num_rows(call) * 4 + row * (2 * size)
        top = writer.variable(writer.zeros(F32, LANES))
        with writer.loop(0, size, LANES) as at:
            top.set(top.get().call("llvm.maximum", writer.load(given + at * 4, F32, LANES).call("llvm.fabs")))
        scale = top.get().largest().most(SMALLEST) / steps
        writer.store(shared + row * 4, scale)
        share = (writer.number(1.0, F32) / scale).splat(LANES)
        with writer.loop(0, size, LANES) as at:
            scaled = writer.load(given + at * 4, F32, LANES) * share
            coarse = scaled + ROUNDER
            fine = (scaled - (coarse - ROUNDER)) * fine_steps + ROUNDER
            for term, into in ((coarse, terms), (fine, terms + size)):
                writer.store(into + at, term.convert("bitcast", I32).convert("trunc", I8))

    def multiply_block(call: Call, shared: Value, _: Value, block: Value) -> None:
        writer, rows, outs = call.writer, num_rows(call), call.argument_size(1, 0)
        terms, weight, scales, result = shared + rows * 4, call.argument(1), call.argument(2), call.result(0)

        def multiply_rows(out: Value, row: Value, number: int) -> None:
            multiply_tile(
                writer, weight + out * size, scales + out * 4, terms + row * (2 * size), shared + row * 4, result + (row * outs + out) * 4,
                outs * 4, number,
            )  # fmt: skip

        with writer.loop(0, rows, ROW_BLOCK) as start:
            held = (rows - start).least(ROW_BLOCK)
            rest = held % ROWS_TOGETHER
            stop = start + held - rest
            with writer.loop(block * BLOCK, ((block + 1) * BLOCK).least(outs), OUT_TOGETHER) as out:
                with writer.loop(start, stop, ROWS_TOGETHER) as row:
                    multiply_rows(out, row, ROWS_TOGETHER)
                for number in range(1, ROWS_TOGETHER):
                    with writer.when(rest.is_(number)):
                        multiply_rows(out, stop, number)

    def multiply_tile(
        writer: Writer, weight: Value, scales: Value, terms: Value, shares: Value, result: Value, stride: Value, rows: int
    ) -> None:
        sums = [[writer.variable(writer.zeros(I32, LANES // 4)) for _ in range(OUT_TOGETHER)] for _ in range(2 * rows)]
        with writer.loop(0, size, LANES) as at:
            writer.prefetch(weight + AHEAD_BYTES + at * OUT_TOGETHER)
            matrix = [writer.load(weight + at + out * size, I8, LANES) for out in range(OUT_TOGETHER)]
            for index, each in enumerate(sums):
                term = writer.load(terms + at + index * size, I8, LANES)
                for row, sum_ in zip(matrix, each):
                    sum_.set(writer.dot_into(sum_.get(), row, term))
        for number in range(rows):
            coarse, fine = (joined(writer, [sum_.get() for sum_ in each]) for each in sums[2 * number : 2 * number + 2])
            share = writer.load(shares + 4 * number, F32).splat(OUT_TOGETHER) * writer.load(scales, F32, OUT_TOGETHER)
            writer.store(result + stride * number, (fine * (1 / fine_steps) + coarse) * share)

    def shared_bytes(call: Call) -> Value:
        return num_rows(call) * (4 + 2 * size)

    return Kernel((Work(num_rows, split_row), Work(num_blocks, multiply_block)), shared_bytes=shared_bytes)


def joined(writer: Writer, sums: list[Value]) -> Value:
    """The totals of four vectors of four whole numbers, as floats."""
    first, second, third, fourth = sums
    return writer.add_pairs(writer.add_pairs(first, second), writer.add_pairs(third, fourth)).convert("sitofp", F32)
