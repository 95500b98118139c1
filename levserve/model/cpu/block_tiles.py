"""Multiplies many rows on matrix units (AMX) with int8 matrices that have a scale for every 32 inputs.

Results are bit-identical to those of the product without tiles, so a row gets the same result alone and
beside others. A tile has one block of 16 outputs, as signed numbers, and is multiplied with the same block of
16 rows. The sums are stored in memory that stays in the first-level cache, and then scaled and added up as
without tiles.

A few blocks of 32 outputs are widened at a time, for all rows. They stay in the first-level cache too,
together with the same blocks of a tile of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from levserve.jit.builder import CACHE_LINE_BYTES, F32, I32, Builder, Value, Variable
from levserve.jit.tiles import TILE_BYTES, TILE_ROW_BYTES, TILE_ROWS, Tiles, TileShape
from levserve.model.cpu.block_places import BlockPlaces
from levserve.model.cpu.block_products import UnsignedBlocks, load_scales
from levserve.model.cpu.prefetch import FROM_MEMORY
from levserve.model.cpu.products import ProductTask
from levserve.model.cpu.tile_products import ROW_BLOCK_BYTES, RowPlace
from levserve.model.int8_blocks import BLOCK
from levserve.model.int8_packing import OUTS, WORD

SUMS, ROWS, WEIGHTS = range(3)
"""The numbers of the tiles."""
CHUNK = 16
"""Blocks that are widened at a time."""
BLOCK_BYTES = BLOCK * TILE_ROWS
"""Bytes of a widened block of 16 outputs."""
MIN_SIZE = 2048
"""A matrix with fewer inputs than this does not use tiles."""
SUM_BYTES = OUTS * 4
"""Bytes of the totals of a row's outputs, and of the scales of a block of them, in scratch memory."""
WIDENED = TILE_BYTES
SCALES = WIDENED + 2 * CHUNK * BLOCK_BYTES
TOTALS = SCALES + CHUNK * SUM_BYTES
"""Where the widened blocks, their scales and the totals begin in scratch memory."""


@dataclass(frozen=True)
class Int8BlockTiles:
    """Scratch memory has a tile of sums, the widened blocks, their scales, and the rows' totals."""

    product: UnsignedBlocks
    min_rows: ClassVar[int] = 32
    tile_outs: ClassVar[int] = OUTS
    tasks_per_thread: ClassVar[int] = UnsignedBlocks.tasks_per_thread

    @property
    def rows_bytes(self) -> int:
        """Bytes of the prepared rows of a tile, with the words that follow their numbers."""
        return TILE_ROWS * self.product.row_bytes

    @staticmethod
    def are_for(product: UnsignedBlocks) -> bool:
        """Whether tiles pay: with fewer inputs the product without them is as fast, because its rows stay in
        the first-level cache. Activations in two terms, which only the head has, do not use tiles."""
        return product.size >= MIN_SIZE and product.num_terms == 1

    def scratch_bytes(self, num_rows: Value) -> Value:
        return (num_rows.minimum(self._rows_at_once) + (TILE_ROWS - 1)) * SUM_BYTES + TOTALS

    @property
    def _rows_at_once(self) -> int:
        """Rows that a task multiplies at a time: those that stay in the second-level cache."""
        return max(1, ROW_BLOCK_BYTES // self.rows_bytes) * TILE_ROWS

    def prepare(self, builder: Builder, x: Value, scratch: Value, into: RowPlace) -> None:
        """Prepares a row; if there are enough rows, in tiles: all blocks, then each kind of word."""
        product, index = self.product, into.row % TILE_ROWS
        plain = product.plain_places(builder, into.prepared + into.row * product.row_bytes)
        tiles = into.prepared + into.row // TILE_ROWS * self.rows_bytes
        words = tiles + product.num_blocks * BLOCK_BYTES
        tiled = BlockPlaces.at(
            builder,
            tiles + index * BLOCK,
            (BLOCK_BYTES, BLOCK),
            words + index * WORD,
            (TILE_ROW_BYTES, 0, product.num_blocks * TILE_ROW_BYTES),
        )
        product.prepare_blocks(builder, x, scratch, tiled.or_else(into.num_rows >= self.min_rows, plain))

    def multiply_range(self, builder: Builder, task: ProductTask) -> None:
        product, totals = self.product, task.scratch + TOTALS
        sums, rows = TileShape(TILE_ROWS, TILE_ROW_BYTES), TileShape(TILE_ROWS, BLOCK)
        tiles = Tiles(builder, (sums, rows, TileShape(BLOCK // WORD, TILE_ROW_BYTES)))
        with tiles.configured(), builder.loop(0, task.num_rows, self._rows_at_once) as start:
            count = (task.num_rows - start).minimum(self._rows_at_once)
            num_rows = (count + (TILE_ROWS - 1)) // TILE_ROWS * TILE_ROWS
            first_tile = task.prepared + start * product.row_bytes
            with builder.loop(*task.outs, OUTS) as out:
                with builder.loop(0, num_rows) as row:
                    builder.store(totals + row * SUM_BYTES, builder.zeros(F32, OUTS))
                with builder.loop(0, product.num_blocks, CHUNK) as block:
                    chunk = block, (builder.constant(product.num_blocks) - block).minimum(CHUNK)
                    self._widen(builder, task, out, chunk)
                    with builder.loop(0, num_rows, TILE_ROWS) as row, builder.loop(0, 2) as half:
                        adder = ChunkAdder(
                            builder, tiles, product, task.scratch, first_tile + row * product.row_bytes, half
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
        stored_bytes, blocks_ahead = OUTS * 2, FROM_MEMORY // group_bytes
        with builder.loop(0, count) as index:
            group = weight + (first + index) * group_bytes
            for line in range(0, group_bytes, CACHE_LINE_BYTES):
                builder.prefetch(group + FROM_MEMORY + line)
            into = task.scratch + WIDENED + index * (2 * BLOCK_BYTES)
            for half in range(2):
                product.write_tile(builder, group + half * half_bytes, into + half * BLOCK_BYTES)
            stored = scales + (first + index) * stored_bytes
            builder.prefetch(stored + blocks_ahead * stored_bytes)
            builder.store(task.scratch + SCALES + index * SUM_BYTES, load_scales(builder, stored, OUTS))


@dataclass(frozen=True)
class ChunkAdder:
    """Adds the products of a few blocks of 16 outputs with a tile of rows to their totals."""

    builder: Builder
    tiles: Tiles
    product: UnsignedBlocks
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
        tiles = self.tiles
        matrix = self.scratch + WIDENED + (index * 2 + self.half) * BLOCK_BYTES
        tiles.zero(SUMS)
        tiles.load(ROWS, self.rows + block * BLOCK_BYTES, BLOCK)
        tiles.load(WEIGHTS, matrix, TILE_ROW_BYTES)
        tiles.add_signed_product(SUMS, ROWS, WEIGHTS)
        tiles.store(SUMS, self.scratch, TILE_ROW_BYTES)

    def _scale(self, block: Value, index: Value, totals: list[Variable]) -> None:
        """Scales the sums of a block, which are in the scratch memory, and adds them to the totals."""
        builder = self.builder
        of_block = self.scratch + SCALES + index * SUM_BYTES + self.half * TILE_ROW_BYTES
        scales = builder.load(of_block, F32, TILE_ROWS)
        words = self.rows + self.product.num_blocks * BLOCK_BYTES + block * TILE_ROW_BYTES
        for row, total in enumerate(totals):
            sums = builder.load(self.scratch + row * TILE_ROW_BYTES, I32, TILE_ROWS)
            factor = builder.load(words + row * WORD, F32).splat(TILE_ROWS)
            total.set((sums.convert("sitofp", F32) * scales).multiply_add(factor, total.get()))
