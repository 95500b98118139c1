"""Multiplies many rows on a CPU with matrix units (AMX), with the results of the products without them.

They are equal to the last bit, so that a row gets the same alone and beside others. The packed order of a
matrix is that of tiles: a row of 64 bytes has four numbers of each of 16 outputs. One instruction adds the
products of 16 rows and 64 inputs to 16 x 16 sums. What tiles read after the last row of activations is not
used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from levserve.jit.builder import CACHE_LINE_BYTES, I32, Builder, Value
from levserve.jit.tiles import TILE_ROW_BYTES, TILE_ROWS, Tiles, TileShape
from levserve.model.cpu.products import PackedProduct, Product, ProductTask
from levserve.model.int8_packing import OUTS, WORD

GROUP_BYTES = OUTS * WORD
"""Four numbers of each of the outputs that lie together: a row of each of two tiles."""
PREFETCH_BYTES = 8192
"""How far ahead of its use the matrix is prefetched: it is used faster than without tiles."""
ROW_BLOCK_BYTES = 512 << 10
"""Activations that a task multiplies at a time: as many as stay in the second-level cache."""
SCRATCH_BYTES = 2 * TILE_ROWS * OUTS * 4
"""Integer sums of two tiles of rows."""
PADDING_ROWS = TILE_ROWS
"""Rows of memory after the last prepared one, which tiles may read."""


def tile_product_for(product: Product) -> Int8Tiles | None:
    """The same product by tiles, if the CPU has them.

    Where blocks of inputs have scales of their own there is none: the sums of every block would go through
    memory, which was no faster than the product without tiles.
    """
    if isinstance(product, PackedProduct) and product.target.has_amx_int8:
        return Int8Tiles(product)
    return None


@dataclass(frozen=True)
class Int8Tiles:
    """Four tiles of sums, 32 rows by 32 outputs, two of activations and two of the matrix."""

    product: PackedProduct
    min_rows: ClassVar[int] = 8
    """With fewer rows the other product is as fast."""

    @property
    def depth(self) -> int:
        """Inputs that a tile has: 64 if that cuts the rows evenly."""
        return math.gcd(self.product.size, TILE_ROW_BYTES)

    def multiply_range(self, builder: Builder, task: ProductTask) -> None:
        product, step = self.product, 2 * TILE_ROWS
        sums, activations = TileShape(TILE_ROWS, TILE_ROW_BYTES), TileShape(TILE_ROWS, self.depth)
        weights = TileShape(self.depth // WORD, TILE_ROW_BYTES)
        tiles = Tiles(builder, (*[sums] * 4, *[activations] * 2, *[weights] * 2))
        block = max(1, ROW_BLOCK_BYTES // (product.row_bytes * step)) * step
        assert task.matrix.scales is not None
        with tiles.configured(), builder.loop(0, task.num_rows, block) as start:
            stop = (start + block).minimum(task.num_rows)
            with builder.loop(*task.outs, OUTS) as out, builder.loop(start, stop, step) as row:
                weight, rows = (
                    task.matrix.weight + out * product.out_bytes,
                    task.prepared + row * product.row_bytes,
                )
                is_first, count = (row - start).equals(0), (stop - row).minimum(step)
                with builder.when(count >= TILE_ROWS + 1):
                    self._sum(builder, tiles, weight, rows, 2, task.scratch, is_first)
                with builder.when(count < TILE_ROWS + 1):
                    self._sum(builder, tiles, weight, rows, 1, task.scratch, is_first)
                scales = task.matrix.scales + out * product.out_scale_bytes
                with builder.loop(0, count) as index:
                    place = rows + index * product.row_bytes
                    first = builder.load(place + product.size + 4, I32).splat(OUTS)
                    total = builder.load(task.scratch + index * (OUTS * 4), I32, OUTS) + first
                    task.store(row + index, out, product.rescale(builder, place, total, scales))

    def _sum(
        self,
        builder: Builder,
        tiles: Tiles,
        weight: Value,
        rows: Value,
        num_row_tiles: int,
        scratch: Value,
        is_first: Value,
    ) -> None:
        """Stores the sums [row, out] of 16 or 32 rows with 32 outputs in the scratch memory."""
        row_bytes, in_rows, in_outs = self.product.row_bytes, range(num_row_tiles), range(2)
        for row in in_rows:
            for half in in_outs:
                tiles.zero(2 * row + half)
        with builder.loop(0, self.product.size, self.depth) as at:
            group = weight + at * OUTS
            with builder.when(is_first):
                prefetch(builder, group + PREFETCH_BYTES, self.depth * OUTS)
            for half in in_outs:
                tiles.load(6 + half, group + half * TILE_ROW_BYTES, GROUP_BYTES)
            for row in in_rows:
                tiles.load(4 + row, rows + at + row * (TILE_ROWS * row_bytes), row_bytes)
                for half in in_outs:
                    tiles.add_product(2 * row + half, 4 + row, 6 + half)
        for row in in_rows:
            for half in in_outs:
                into = scratch + row * (TILE_ROWS * OUTS * 4) + half * TILE_ROW_BYTES
                tiles.store(2 * row + half, into, OUTS * 4)


def prefetch(builder: Builder, pointer: Value, num_bytes: int) -> None:
    for line in range(0, num_bytes, CACHE_LINE_BYTES):
        builder.prefetch(pointer + line)
