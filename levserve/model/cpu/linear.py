"""Products with a matrix on a CPU, in calls of their own: each row of the matrix is read once, ahead of its
use.

Rows of activations that are padding are left out: what is given for them is whatever was in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from levserve.jit.builder import Builder, Value
from levserve.jit.target import Target
from levserve.jit.xla_call import Call, Kernel, Work, num_threads, register
from levserve.model.cpu.products import INT8_LANES, Bfloat16Product, Product, product_for

LEAST_ROWS, MOST_ROWS = 32, 1024
"""Of the matrix in a piece."""
BLOCK_BYTES = 36 << 10
"""Of activations that meet a block of the matrix before the next ones do: so many stay in the nearest
cache."""

X, NUM_USED, WEIGHT, SCALE = range(4)
"""The arguments of a product's call; bfloat16 has no scales."""


def refuse_unservable(out: int, size: int) -> str | None:
    """Why these kernels cannot multiply with a matrix [out, size], or None; of one that is packed they
    can."""
    if out % Bfloat16Product.outs or size % INT8_LANES:
        return f"a matrix of {out} x {size} (it takes multiples of {Bfloat16Product.outs} x {INT8_LANES})"
    return None


def multiply(
    weight: jax.Array,
    scale: jax.Array | None,
    x: jax.Array,
    num_used: jax.Array | None = None,
    *,
    target: Target,
) -> jax.Array:
    """x [row, in], or the first `num_used` [1] of its rows, with a matrix [out, in]: float32 [row, out].

    With int8, packed or not, as `multiply_turned`; with bfloat16, which has no scale, in float32 to the end.
    """
    out, size = weight.shape
    name = register(kernel_for(weight.dtype, size, target))
    count = jnp.asarray([x.shape[0]], jnp.int32) if num_used is None else num_used
    arguments = x.astype(jnp.float32), count, weight, *(() if scale is None else (scale,))
    return jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((x.shape[0], out), jnp.float32))(*arguments)


def kernel_for(numbers: jnp.dtype, size: int, target: Target) -> Kernel:
    """Of products with a matrix of such numbers [out, size]. Shared memory: the rows, prepared."""
    product = product_for(numbers, size, target)

    def num_rows(call: Call) -> Value:
        return used_rows(call, NUM_USED).least(call.argument_size(X, 0))

    def shared_bytes(call: Call) -> Value:
        return num_rows(call) * product.row_bytes

    def prepare_row(call: Call, shared: Value, own: Value, row: Value) -> None:
        product.prepare(
            call.builder, call.argument(X) + row * (4 * product.size), own, shared + row * product.row_bytes
        )

    def multiply_piece(call: Call, shared: Value, _: Value, piece: Value) -> None:
        num_out = call.argument_size(WEIGHT, 0)

        def keep(row: Value, out: Value, products: Value) -> None:
            call.builder.store(call.result(0) + (row * num_out + out) * 4, products)

        matrix = Matrix(call.argument(WEIGHT), call.argument(SCALE) if product.has_scales else None)
        multiply_block(
            call.builder, product, matrix, shared, num_rows(call), block_range(product, piece, num_out), keep
        )

    works = (
        Work(num_rows, prepare_row),
        Work(lambda call: num_blocks(product, call.argument_size(WEIGHT, 0)), multiply_piece),
    )
    return Kernel(
        f"levserve_multiply_{numbers}_{size}",
        target,
        works,
        shared_bytes=shared_bytes,
        own_bytes=lambda call: call.builder.number(4 * product.size),
    )


def used_rows(call: Call, argument: int) -> Value:
    return call.builder.index(call.argument(argument), call.builder.number(0))


def num_blocks(product: Product, num_out: Value) -> Value:
    return (num_out + piece_size(product, num_out) - 1) // piece_size(product, num_out)


def block_range(product: Product, piece: Value, num_out: Value) -> tuple[Value, Value]:
    return piece * piece_size(product, num_out), ((piece + 1) * piece_size(product, num_out)).least(num_out)


def piece_size(product: Product, num_out: Value) -> Value:
    """Rows of the matrix in a piece of the work."""
    pieces = product.pieces * num_threads()
    share = (num_out + (pieces - 1)) // pieces
    return (share.least(MOST_ROWS).most(LEAST_ROWS) + (product.outs - 1)) // product.outs * product.outs


@dataclass(frozen=True)
class Matrix:
    """Where a matrix begins, and its scales."""

    weight: Value
    scales: Value | None


def multiply_block(
    builder: Builder,
    product: Product,
    matrix: Matrix,
    prepared: Value,
    num_rows: Value,
    outs: tuple[Value, Value],
    keep: Callable[[Value, Value, Value], None],
) -> None:
    """Multiplies all rows with a range of the matrix; `keep` gets a row, the first of a few outs, and their
    products."""

    def multiply_tile(out: Value, row: Value, count: int) -> None:
        weight, scales = (
            matrix.weight + out * product.matrix_bytes,
            matrix.weight if matrix.scales is None else matrix.scales + out * 4,
        )
        for number, each in enumerate(
            product.multiply(builder, weight, scales, prepared + row * product.row_bytes, count)
        ):
            keep(row + number, out, each)

    block = max(1, BLOCK_BYTES // (product.row_bytes * product.rows)) * product.rows
    with builder.loop(0, num_rows, block) as start:
        held = (num_rows - start).least(block)
        rest = held % product.rows
        stop = start + held - rest
        with builder.loop(*outs, product.outs) as out:
            with builder.loop(start, stop, product.rows) as row:
                multiply_tile(out, row, product.rows)
            # Of what is left as many at a time as may be: the matrix is near by now.
            for count in (
                8,
                4,
                2,
                1,
            ):
                if count < product.rows:
                    with builder.when((rest & count).is_not(0)):
                        multiply_tile(out, stop + rest - rest % (2 * count), count)
