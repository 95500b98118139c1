"""Products with a matrix on a CPU, as kernels of their own: the matrix is read once, and prefetched.

Rows of activations that are padding are skipped: their results are whatever was in memory.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from levserve.jit.builder import Builder, Value
from levserve.jit.target import Target
from levserve.jit.xla_call import Call, Kernel, Stage, num_threads, register
from levserve.model.cpu.block_products import block_product_for
from levserve.model.cpu.products import (
    INT8_LANES,
    Bfloat16Product,
    Matrix,
    Product,
    ProductTask,
    product_for,
)
from levserve.model.cpu.tile_products import (
    PADDING_ROWS,
    SCRATCH_BYTES,
    Int8Tiles,
    prepared_row,
    tile_product_for,
)

MIN_TASK_OUTS, MAX_TASK_OUTS = 32, 1024
"""Bounds of how many rows of the matrix, which are outputs of the product, one task multiplies."""
ROW_BLOCK_BYTES = 36 << 10
"""Activations that a task multiplies at a time: as many as stay in the first-level cache."""
X, NUM_USED, WEIGHT, SCALE = range(4)
"""The arguments of a product's call; bfloat16 has no scale."""


def unsupported_reason(out: int, size: int) -> str | None:
    """Why these kernels cannot multiply with a matrix [out, size] that is not packed, or None."""
    if out % Bfloat16Product.tile_outs or size % INT8_LANES:
        multiples = f"{Bfloat16Product.tile_outs} x {INT8_LANES}"
        return f"a matrix of {out} x {size} (it takes multiples of {multiples})"
    return None


def multiply(
    weight: jax.Array,
    scale: jax.Array | None,
    x: jax.Array,
    num_used: jax.Array | None = None,
    *,
    target: Target,
    in_two_terms: bool = False,
) -> jax.Array:
    """x [row, in], or the first `num_used` [1] of its rows, times a matrix [out, in]: float32 [row, out].

    With int8, packed or not, it computes what `multiply_rotated` computes, or `multiply_blocks` where scales
    are for blocks. With bfloat16, which has no scale, it computes in float32.
    """
    out, size = weight.shape
    product: Product = product_for(weight.dtype, size, target)
    if scale is not None and scale.ndim == 2:
        product = block_product_for(
            size, target, is_signed=weight.dtype == jnp.int8, in_two_terms=in_two_terms
        )
    name = register(kernel_for(product, tile_product_for(product)))
    count = jnp.asarray([x.shape[0]], jnp.int32) if num_used is None else num_used
    arguments = x.astype(jnp.float32), count, weight, *(() if scale is None else (scale,))
    return jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((x.shape[0], out), jnp.float32))(*arguments)


def kernel_for(product: Product, by_tiles: Int8Tiles | None = None) -> Kernel:
    """The kernel for such products, of many rows by tiles. Its shared memory holds the prepared rows."""

    def num_rows(call: Call) -> Value:
        return load_num_used(call, NUM_USED).minimum(call.argument_size(X, 0))

    def prepare_row(call: Call, shared: Value, scratch: Value, row: Value) -> None:
        x = call.argument(X) + row * (4 * product.size)
        into = prepared_row(product, by_tiles, shared, row, num_rows(call))
        product.prepare(call.builder, x, scratch, into)

    def multiply_task(call: Call, shared: Value, scratch: Value, task: Value) -> None:
        num_out, result = call.argument_size(WEIGHT, 0), call.result(0)

        def store(row: Value, out: Value, products: Value) -> None:
            call.builder.store(result + (row * num_out + out) * 4, products)

        matrix = Matrix(call.argument(WEIGHT), call.argument(SCALE) if product.has_scales else None)
        rows, outs = num_rows(call), task_range(product, task, num_out)
        work = ProductTask(matrix, shared, rows, outs, scratch, store)
        multiply_range(call.builder, product, by_tiles, work)

    return Kernel(
        f"levserve_multiply_{product.name}_{product.size}",
        product.target,
        stages=(
            Stage(num_rows, prepare_row),
            Stage(lambda call: num_tasks(product, call.argument_size(WEIGHT, 0)), multiply_task),
        ),
        shared_bytes=lambda call: (num_rows(call) + PADDING_ROWS) * product.row_bytes,
        scratch_bytes=lambda call: call.builder.constant(max(4 * product.size, SCRATCH_BYTES)),
    )


def load_num_used(call: Call, argument: int) -> Value:
    """The number in an argument int32 [1]."""
    return call.builder.load_int32(call.argument(argument), call.builder.constant(0))


def num_tasks(product: Product, num_out: Value) -> Value:
    return (num_out + _task_outs(product, num_out) - 1) // _task_outs(product, num_out)


def task_range(product: Product, task: Value, num_out: Value) -> tuple[Value, Value]:
    """The first output of a task, and the one after its last."""
    start = task * _task_outs(product, num_out)
    return start, ((task + 1) * _task_outs(product, num_out)).minimum(num_out)


def _task_outs(product: Product, num_out: Value) -> Value:
    """How many outputs a task computes: whole tiles."""
    tasks, tile = product.tasks_per_thread * num_threads(), product.tile_outs
    share = (num_out + (tasks - 1)) // tasks
    return (share.minimum(MAX_TASK_OUTS).maximum(MIN_TASK_OUTS) + (tile - 1)) // tile * tile


def multiply_range(builder: Builder, product: Product, by_tiles: Int8Tiles | None, task: ProductTask) -> None:
    """Multiplies all prepared rows with a range of the matrix: by tiles, if there are enough rows."""
    num_rows = task.num_rows
    if by_tiles is not None:
        is_many = by_tiles.is_used(num_rows)
        with builder.when(is_many):
            by_tiles.multiply_range(builder, task)
        num_rows = is_many.select(builder.constant(0), num_rows)

    def multiply_tile(out: Value, row: Value, num_rows: int) -> None:
        weight, scales = task.matrix.weight + out * product.out_bytes, task.matrix.weight
        if task.matrix.scales is not None:
            scales = task.matrix.scales + out * product.out_scale_bytes
        rows = task.prepared + row * product.row_bytes
        for index, products in enumerate(product.multiply(builder, weight, scales, rows, num_rows)):
            task.store(row + index, out, products)

    tile_rows = product.tile_rows
    block = max(1, ROW_BLOCK_BYTES // (product.row_bytes * tile_rows)) * tile_rows
    with builder.loop(0, num_rows, block) as start:
        block_rows = (num_rows - start).minimum(block)
        rest = block_rows % tile_rows
        stop = start + block_rows - rest
        with builder.loop(*task.outs, product.tile_outs) as out:
            with builder.loop(start, stop, tile_rows) as row:
                multiply_tile(out, row, tile_rows)
            # The remaining rows, in as few tiles as possible: the matrix is in the cache by now.
            for count in (8, 4, 2, 1):
                if count < tile_rows:
                    with builder.when((rest & count).differs_from(0)):
                        multiply_tile(out, stop + rest - rest % (2 * count), count)
