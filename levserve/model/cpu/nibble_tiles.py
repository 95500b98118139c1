"""Multiplies many rows on matrix units (AMX) with matrices of four bits, in integers (`int4_blocks`).

Results are bit-identical to those of the products without tiles, so a row gets the same result alone and
beside others. A tile has one block of 16 outputs, as signed numbers, and is multiplied with the same block of
16 rows. The sums are stored in memory that stays in the first-level cache, and then scaled and added up as
without tiles. Both terms of activations are in one tile: a row of the matrix has its numbers multiplied by
`int4_blocks.SECOND_TERM` for the first term, and then as they are for the second.

A few blocks of 32 outputs are widened at a time, for all rows. They stay in the first-level cache too,
together with the same blocks of a tile of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from levserve.jit.builder import CACHE_LINE_BYTES, F32, I32, Builder, Value, Variable
from levserve.jit.tiles import TILE_BYTES, TILE_ROW_BYTES, TILE_ROWS, Tiles, TileShape
from levserve.model.cpu.block_places import BlockPlaces
from levserve.model.cpu.block_products import load_scales
from levserve.model.cpu.nibble_products import UnsignedNibbles
from levserve.model.cpu.prefetch import FROM_MEMORY
from levserve.model.cpu.products import ProductTask
from levserve.model.cpu.tile_products import ROW_BLOCK_BYTES, RowPlace
from levserve.model.int8_blocks import BLOCK
from levserve.model.int8_packing import OUTS, WORD

SUMS, ROWS, WEIGHTS = range(3)
"""The numbers of the tiles."""
SUM_BYTES = OUTS * 4
"""Bytes of the totals of a row's outputs, in scratch memory."""


@dataclass(frozen=True)
class NibbleTiles:
    """Scratch memory has a tile of sums, the widened blocks, their scales, and the rows' totals."""

    product: UnsignedNibbles
    min_rows: ClassVar[int] = 16
    chunk: ClassVar[int] = 4
    """Blocks that are widened at a time."""
    tile_outs: ClassVar[int] = OUTS
    tasks_per_thread: ClassVar[int] = UnsignedNibbles.tasks_per_thread

    @property
    def rows_bytes(self) -> int:
        """Bytes of the prepared rows of a tile, with the words that follow their numbers."""
        return TILE_ROWS * self.product.row_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of a widened block of 16 outputs."""
        return self.product.tile_depth * TILE_ROWS

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of a block of 32 outputs, and of its middles, as float32."""
        return self.product.block_scales * OUTS * 4

    @property
    def places(self) -> tuple[int, int, int]:
        """Where the widened blocks, their scales and the totals begin in scratch memory."""
        scales = TILE_BYTES + 2 * self.chunk * self.block_bytes
        return TILE_BYTES, scales, scales + self.chunk * self.scale_bytes

    def scratch_bytes(self, num_rows: Value) -> Value:
        return (num_rows.minimum(self._rows_at_once) + (TILE_ROWS - 1)) * SUM_BYTES + self.places[2]

    @property
    def _rows_at_once(self) -> int:
        """Rows that a task multiplies at a time: those that stay in the second-level cache."""
        return max(1, ROW_BLOCK_BYTES // self.rows_bytes) * TILE_ROWS

    def prepare(self, builder: Builder, x: Value, scratch: Value, into: RowPlace) -> None:
        """Prepares a row; if there are enough rows, in tiles: all blocks, then each kind of word."""
        product, index = self.product, into.row % TILE_ROWS
        plain = product.plain_places(builder, into.prepared + into.row * product.row_bytes)
        tiles = into.prepared + into.row // TILE_ROWS * self.rows_bytes
        words = tiles + product.num_blocks * self.block_bytes
        tiled = BlockPlaces.at(
            builder,
            tiles + index * product.tile_depth,
            (self.block_bytes, BLOCK),
            words + index * WORD,
            (TILE_ROW_BYTES, 0, product.num_blocks * TILE_ROW_BYTES),
        )
        product.prepare_blocks(builder, x, scratch, tiled.or_else(into.num_rows >= self.min_rows, plain))

    def multiply_range(self, builder: Builder, task: ProductTask) -> None:
        product, totals = self.product, task.scratch + self.places[2]
        sums, rows = TileShape(TILE_ROWS, TILE_ROW_BYTES), TileShape(TILE_ROWS, product.tile_depth)
        tiles = Tiles(builder, (sums, rows, TileShape(product.tile_depth // WORD, TILE_ROW_BYTES)))
        with tiles.configured(), builder.loop(0, task.num_rows, self._rows_at_once) as start:
            count = (task.num_rows - start).minimum(self._rows_at_once)
            num_rows = (count + (TILE_ROWS - 1)) // TILE_ROWS * TILE_ROWS
            first_tile = task.prepared + start * product.row_bytes
            with builder.loop(*task.outs, OUTS) as out:
                with builder.loop(0, num_rows) as row:
                    builder.store(totals + row * SUM_BYTES, builder.zeros(F32, OUTS))
                with builder.loop(0, product.num_blocks, self.chunk) as block:
                    chunk = block, (builder.constant(product.num_blocks) - block).minimum(self.chunk)
                    self._widen(builder, task, out, chunk)
                    with builder.loop(0, num_rows, TILE_ROWS) as row, builder.loop(0, 2) as half:
                        adder = ChunkAdder(
                            builder, tiles, self, task.scratch, first_tile + row * product.row_bytes, half
                        )
                        adder.add(chunk, totals + row * SUM_BYTES + half * TILE_ROW_BYTES)
                with builder.loop(0, count) as row:
                    task.store(start + row, out, builder.load(totals + row * SUM_BYTES, F32, OUTS))

    def _widen(self, builder: Builder, task: ProductTask, out: Value, chunk: tuple[Value, Value]) -> None:
        """Writes blocks of 32 outputs as tiles, and their scales as float32; prefetches what comes next."""
        product, (first, count) = self.product, chunk
        assert task.matrix.scales is not None
        weight = task.matrix.weight + out * product.out_bytes
        scales = task.matrix.scales + out * product.out_scale_bytes
        group_bytes, half_bytes = product.out_bytes // product.num_blocks * OUTS, OUTS // 2 * WORD
        stored_bytes = product.block_scales * OUTS * 2
        blocks_ahead = FROM_MEMORY // group_bytes
        widened, floats, _ = self.places
        with builder.loop(0, count) as index:
            group = weight + (first + index) * group_bytes
            for line in range(0, group_bytes, CACHE_LINE_BYTES):
                builder.prefetch(group + FROM_MEMORY + line)
            into = task.scratch + widened + index * (2 * self.block_bytes)
            for half in range(2):
                product.write_tile(builder, group + half * half_bytes, into + half * self.block_bytes)
            stored = scales + (first + index) * stored_bytes
            for line in range(0, stored_bytes, CACHE_LINE_BYTES):
                builder.prefetch(stored + blocks_ahead * stored_bytes + line)
            for at in range(product.block_scales):
                numbers = load_scales(builder, stored + at * (OUTS * 2), OUTS)
                builder.store(task.scratch + floats + index * self.scale_bytes + at * SUM_BYTES, numbers)


@dataclass(frozen=True)
class ChunkAdder:
    """Adds the products of a few blocks of 16 outputs with a tile of rows to their totals."""

    builder: Builder
    tiles: Tiles
    way: NibbleTiles
    scratch: Value
    rows: Value
    """Where the tiles of these rows begin."""
    half: Value
    """Which half of 32 outputs."""

    def add(self, chunk: tuple[Value, Value], totals: Value) -> None:
        builder, (first, count) = self.builder, chunk
        places = [totals + row * SUM_BYTES for row in range(TILE_ROWS)]
        sums = [builder.variable(builder.load(place, F32, TILE_ROWS)) for place in places]
        with builder.loop(0, count) as index:
            self._multiply(first + index, index)
            self._scale(first + index, index, sums)
        for place, total in zip(places, sums):
            builder.store(place, total.get())

    def _multiply(self, block: Value, index: Value) -> None:
        """Stores the sums of a block in the scratch memory; `index` says where the block is widened."""
        tiles, way = self.tiles, self.way
        matrix = self.scratch + way.places[0] + (index * 2 + self.half) * way.block_bytes
        tiles.zero(SUMS)
        tiles.load(ROWS, self.rows + block * way.block_bytes, way.product.tile_depth)
        tiles.load(WEIGHTS, matrix, TILE_ROW_BYTES)
        tiles.add_signed_product(SUMS, ROWS, WEIGHTS)
        tiles.store(SUMS, self.scratch, TILE_ROW_BYTES)

    def _scale(self, block: Value, index: Value, totals: list[Variable]) -> None:
        """Scales the sums of a block, which are in the scratch memory, and adds them to the totals."""
        builder, way, product = self.builder, self.way, self.way.product
        of_block = self.scratch + way.places[1] + index * way.scale_bytes + self.half * TILE_ROW_BYTES
        scales = [
            builder.load(of_block + at * SUM_BYTES, F32, TILE_ROWS) for at in range(product.block_scales)
        ]
        words = self.rows + product.num_blocks * way.block_bytes + block * TILE_ROW_BYTES
        for row, total in enumerate(totals):
            place = self.scratch + row * TILE_ROW_BYTES
            scaled = builder.load(place, I32, TILE_ROWS).convert("sitofp", F32) * scales[0]
            for kind, factor in enumerate((scaled, *scales[1:])):
                word = words + kind * (product.num_blocks * TILE_ROW_BYTES) + row * WORD
                total.set(factor.multiply_add(builder.load(word, F32).splat(TILE_ROWS), total.get()))
