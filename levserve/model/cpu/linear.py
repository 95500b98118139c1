"""Products with a matrix on a CPU, as separate kernels: the matrix is read once, and prefetched.

Rows of activations that are padding are skipped: their results are whatever was in memory.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from levserve.jit.builder import Builder, Value
from levserve.jit.target import Target
from levserve.jit.xla_call import Call, Kernel, Stage, num_threads, register
from levserve.model.cpu.bfloat16_tiles import DEPTH, Bfloat16Tiles
from levserve.model.cpu.forms import AnyProduct, Form
from levserve.model.cpu.nibble_products import UnsignedNibbles
from levserve.model.cpu.nibble_tiles import NibbleTiles
from levserve.model.cpu.prefetch import choose_prefetch
from levserve.model.cpu.products import (
    INT8_LANES,
    Bfloat16Product,
    Matrix,
    PackedProduct,
    PreparedRow,
    Product,
    ProductTask,
    Tile,
)
from levserve.model.cpu.tile_products import PADDING_ROWS, Int8Tiles, RowPlace, TileProduct
from levserve.model.cpu.widened_matrices import WidenedMatrix
from levserve.model.cpu.widened_tiles import WidenedTiles

MIN_TASK_OUTS, MAX_TASK_OUTS = 32, 1024
"""Bounds on how many outputs, which are rows of the matrix, one task computes."""
MANY_THREADS, FINER = 5, 2
"""From `MANY_THREADS` threads on, each has `FINER` times as many tasks: the more threads there are, the
longer they wait for the last one."""
ROW_BLOCK_BYTES = {"x86_64": 80 << 10, "aarch64": 36 << 10}
"""Bytes of activations that a task multiplies at a time: as many as stay in the second-level cache, or in the
first-level cache of ARM's CPUs."""
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

    With int8, packed or not, the result is that of `multiply_rotated`, or of `multiply_blocks` if blocks have
    scales; with four bits it is that of `multiply_nibbles`. With bfloat16, which has no scale, it is computed
    in float32; tiles first round x to bfloat16. So do those that widen a matrix to bfloat16.
    """
    out = weight.shape[0]
    product = Form.of(weight, scale).product(x.shape[1], target, in_two_terms=in_two_terms)
    name = register(kernel_for(product, tile_product_for(product, out)))
    count = jnp.asarray([x.shape[0]], jnp.int32) if num_used is None else num_used
    arguments = x.astype(jnp.float32), count, weight, *(() if scale is None else (scale,))
    return jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((x.shape[0], out), jnp.float32))(*arguments)


def tile_product_for(product: AnyProduct, *outs: int) -> TileProduct | None:
    """The same product with tiles, if the CPU has them and they fit matrices with so many outputs."""
    target = product.target
    if isinstance(product, WidenedMatrix):
        return WidenedTiles(product)
    if isinstance(product, PackedProduct) and target.has_amx_int8:
        return Int8Tiles(product)
    if isinstance(product, UnsignedNibbles) and target.has_amx_int8:
        return NibbleTiles(product)
    fits = product.size % DEPTH == 0 and all(out % Bfloat16Tiles.tile_outs == 0 for out in outs)
    if isinstance(product, Bfloat16Product) and target.has_amx_bf16 and fits:
        return Bfloat16Tiles(product)
    return None


def kernel_for(product: AnyProduct, by_tiles: TileProduct | None = None) -> Kernel:
    """The kernel for this product, of many rows with tiles. Its shared memory holds the prepared rows."""

    def num_rows(call: Call) -> Value:
        return num_used_rows(call, NUM_USED, X)

    way = way_of(product, by_tiles)

    def prepare(call: Call, shared: Value, scratch: Value, row: Value) -> None:
        x = call.argument(X) + row * (4 * product.size)
        into = RowPlace(shared, row, num_rows(call))
        prepare_row(call.builder, product, by_tiles, x, scratch, into)

    def multiply_task(call: Call, shared: Value, scratch: Value, task: Value) -> None:
        num_out, result = call.argument_size(WEIGHT, 0), call.result(0)

        def store(row: Value, out: Value, products: Value) -> None:
            call.builder.store(result + (row * num_out + out) * 4, products)

        matrix = Matrix(call.argument(WEIGHT), call.argument(SCALE) if product.has_scales else None)
        rows, outs = num_rows(call), task_range(way, task, num_out)
        work = ProductTask(matrix, shared, rows, outs, scratch, call.num_done.equals(0), store)
        multiply_range(call.builder, product, by_tiles, work)

    def scratch_bytes(call: Call) -> Value:
        row_bytes = call.builder.constant(4 * product.size)
        return row_bytes if by_tiles is None else row_bytes.maximum(by_tiles.scratch_bytes(num_rows(call)))

    return Kernel(
        f"levserve_multiply_{product.name}_{product.size}" + ("" if by_tiles is None else "_tiles"),
        product.target,
        stages=(
            Stage(num_rows, prepare),
            Stage(lambda call: num_tasks(way, call.argument_size(WEIGHT, 0)), multiply_task),
        ),
        shared_bytes=lambda call: (num_rows(call) + PADDING_ROWS) * product.row_bytes,
        scratch_bytes=scratch_bytes,
    )


def way_of(product: AnyProduct, by_tiles: TileProduct | None) -> Product | TileProduct:
    """The way that decides how a matrix is divided into tasks. What is widened always goes by tiles."""
    if by_tiles is not None:
        return by_tiles
    assert not isinstance(product, WidenedMatrix)
    return product


def num_used_rows(call: Call, num_used: int, rows: int) -> Value:
    """How many rows of the argument `rows` are used, as the argument `num_used`, int32 [1], says."""
    return load_num_used(call, num_used).minimum(call.argument_size(rows, 0))


def load_num_used(call: Call, argument: int) -> Value:
    """The number in an argument int32 [1]."""
    return call.builder.load_int32(call.argument(argument), call.builder.constant(0))


def prepare_row(
    builder: Builder,
    product: AnyProduct,
    by_tiles: TileProduct | None,
    x: Value,
    scratch: Value,
    into: RowPlace,
) -> None:
    """Prepares a row x of float32 for `multiply_range`."""
    if by_tiles is not None:
        by_tiles.prepare(builder, x, scratch, into)
        return
    assert not isinstance(product, WidenedMatrix)
    start = into.prepared + into.row * product.row_bytes
    product.prepare(builder, x, scratch, PreparedRow(start, start + product.size))


def num_tasks(way: Product | TileProduct, num_out: Value) -> Value:
    return (num_out + _task_outs(way, num_out) - 1) // _task_outs(way, num_out)


def task_range(way: Product | TileProduct, task: Value, num_out: Value) -> tuple[Value, Value]:
    """The first output of a task, and the one after its last."""
    start = task * _task_outs(way, num_out)
    return start, ((task + 1) * _task_outs(way, num_out)).minimum(num_out)


def _task_outs(way: Product | TileProduct, num_out: Value) -> Value:
    """How many outputs a task computes: whole tiles."""
    finer = FINER if num_threads() >= MANY_THREADS else 1
    tasks, tile = finer * way.tasks_per_thread * num_threads(), way.tile_outs
    share = (num_out + (tasks - 1)) // tasks
    return (share.minimum(MAX_TASK_OUTS).maximum(MIN_TASK_OUTS) + (tile - 1)) // tile * tile


def multiply_range(
    builder: Builder, product: AnyProduct, by_tiles: TileProduct | None, task: ProductTask
) -> None:
    """Multiplies all prepared rows with a range of the matrix: with tiles, if there are enough rows."""
    num_rows = task.num_rows
    if by_tiles is not None:
        is_many = num_rows >= by_tiles.min_rows
        with builder.when(is_many):
            by_tiles.multiply_range(builder, task)
        if by_tiles.min_rows == 1:
            return
        num_rows = is_many.select(builder.constant(0), num_rows)

    assert not isinstance(product, WidenedMatrix)
    tile_rows = product.tile_rows
    row_block_bytes = ROW_BLOCK_BYTES[product.target.arch]
    block = max(1, row_block_bytes // (product.row_bytes * tile_rows)) * tile_rows
    with builder.loop(0, num_rows, block) as start:
        block_rows = (num_rows - start).minimum(block)
        rest = block_rows % tile_rows
        stop = start + block_rows - rest
        num_tiles = (block_rows + (tile_rows - 1)) // tile_rows

        def multiply_tile(out: Value, row: Value, num_rows: int) -> None:
            weight, scales = task.matrix.weight + out * product.out_bytes, task.matrix.weight
            if task.matrix.scales is not None:
                scales = task.matrix.scales + out * product.out_scale_bytes
            rows = task.prepared + row * product.row_bytes
            ahead = choose_prefetch(
                builder,
                product.target,
                weight,
                product.out_bytes * product.tile_outs,
                tile=(row - start) // tile_rows,
                num_tiles=num_tiles,
                is_full=num_rows == tile_rows,
                has_next=out + product.tile_outs < task.outs[1],
            )
            tile = Tile(weight, scales, rows, num_rows, ahead)
            for index, products in enumerate(product.multiply(builder, tile)):
                task.store(row + index, out, products)

        with builder.loop(*task.outs, product.tile_outs) as out:
            with builder.loop(start, stop, tile_rows) as row:
                multiply_tile(out, row, tile_rows)
            # The remaining rows, in as few tiles as possible: the matrix is in the cache by now.
            for count in (8, 4, 2, 1):
                if count < tile_rows:
                    with builder.when((rest & count).differs_from(0)):
                        multiply_tile(out, stop + rest - rest % (2 * count), count)
