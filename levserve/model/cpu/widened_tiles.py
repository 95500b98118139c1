"""Multiplies rows on matrix units (AMX) with a matrix that is widened to bfloat16 as it is read.

A few blocks of 32 outputs are widened at a time, and multiplied with all rows of activations while they are
in the first-level cache. The rest is as with a matrix that is stored in bfloat16: a row gets bit-identical
results alone and beside others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from levserve.jit.builder import CACHE_LINE_BYTES, F32, Builder, Value
from levserve.jit.tiles import TILE_BYTES, TILE_ROW_BYTES, TILE_ROWS, WORD, Tiles
from levserve.model.cpu.bfloat16_tiles import OUTS, SUMS_BYTES, Bfloat16Rows
from levserve.model.cpu.prefetch import FROM_MEMORY, SECOND_LEVEL
from levserve.model.cpu.products import ProductTask
from levserve.model.cpu.tile_products import STEP_ROWS, tiles_for
from levserve.model.cpu.widened_matrices import LINE_BYTES, PAIR, WidenedMatrix
from levserve.model.int8_blocks import BLOCK

FEW_BLOCKS, MANY_BLOCKS = 2 * PAIR, 4 * PAIR
"""Blocks that are widened before they are multiplied, for the rows of a step and for more. With twice as many
a product took 1.2 times as long, and with half as many for more rows 1.1 times."""
UNROLLED = 8
"""Lines that are widened in one pass of a loop."""
WIDENED = SUMS_BYTES
SCALES = WIDENED + MANY_BLOCKS * 2 * TILE_BYTES
SUMS = SCALES + PAIR * 2 * OUTS * 4
"""Where scratch memory has the widened blocks, their scales, and the sums of all rows, tile by
tile. Before them it has a step's products row by row, and after them the rows of activations."""


@dataclass(frozen=True)
class WidenedTiles(Bfloat16Rows):
    product: WidenedMatrix
    tasks_per_thread: ClassVar[int] = 3

    def scratch_bytes(self, num_rows: Value) -> Value:
        return self._activations(num_rows) + self.whole_tiles(num_rows) * self.row_bytes

    def _activations(self, num_rows: Value) -> Value:
        """Where scratch memory has the rows of activations."""
        return self.whole_tiles(num_rows) * (OUTS * 4) + SUMS

    def multiply_range(self, builder: Builder, task: ProductTask) -> None:
        with builder.when(task.num_rows.equals(1)):
            tiles, none = self.tiles(builder, 1), builder.constant(0)
            with tiles.configured():
                self._multiply(Rows(builder, task, tiles, 1, none, none + 1, task.prepared), FEW_BLOCKS)
        with builder.when(task.num_rows >= 2):
            tiles, block = self.tiles(builder, TILE_ROWS), self.block_rows
            activations = task.scratch + self._activations(task.num_rows)
            with tiles.configured(), builder.loop(0, task.num_rows, block) as start:
                stop = (start + block).minimum(task.num_rows)
                self.arrange(builder, task, (start, stop), activations)
                rows = Rows(builder, task, tiles, TILE_ROWS, start, stop - start, activations)
                with builder.when(task.num_rows < STEP_ROWS + 1):
                    self._multiply(rows, FEW_BLOCKS)
                with builder.when(task.num_rows >= STEP_ROWS + 1):
                    self._multiply(rows, MANY_BLOCKS)

    def _multiply(self, rows: Rows, chunk: int) -> None:
        """Multiplies the rows with all outputs of the task, a few blocks at a time."""
        builder, num_blocks = rows.builder, self.product.num_blocks
        with builder.loop(*rows.task.outs, OUTS) as out:
            with builder.loop(0, num_blocks, chunk) as first:
                stop = (first + chunk).minimum(num_blocks)
                with builder.loop(first, stop, PAIR) as block:
                    self._widen(builder, rows.task, out, block, block - first)
                with builder.loop(0, rows.number, STEP_ROWS) as row:
                    for num_tiles in (1,) if rows.columns == 1 else tiles_for(builder, rows.number - row):
                        rows.add_products(row, num_tiles, (first, stop), num_blocks)
            if rows.columns == 1:
                rows.task.store(rows.start, out, builder.load(rows.sums, F32, OUTS))
            else:
                with builder.loop(0, rows.number, STEP_ROWS) as row:
                    count = (rows.number - row).minimum(STEP_ROWS)
                    self.store(builder, rows.task, rows.start + row, count, out, rows.sums_of(row))

    def _widen(self, builder: Builder, task: ProductTask, out: Value, block: Value, place: Value) -> None:
        """Writes a pair of blocks of 32 outputs as tiles; `place` is their number among the widened ones."""
        product, vectors = self.product, PAIR * self.product.block_scales
        assert task.matrix.scales is not None
        pair_bytes, scale_bytes, pair = product.pair_bytes, vectors * OUTS * 2, block // PAIR
        codes = task.matrix.weight + out * product.out_bytes + pair * pair_bytes
        scales = task.matrix.scales + out * product.out_scale_bytes + pair * scale_bytes
        for at in range(0, scale_bytes, CACHE_LINE_BYTES):
            builder.prefetch(scales + (FROM_MEMORY // pair_bytes * scale_bytes + at), SECOND_LEVEL)
        numbers = task.scratch + SCALES
        product.read_scales(builder, scales, numbers)
        tiles = task.scratch + place * (2 * TILE_BYTES) + WIDENED
        unrolled = UNROLLED if builder.target.has_amx_bf16 else 1  # what emulates tiles is compiled sooner
        with builder.loop(0, pair_bytes // LINE_BYTES, unrolled) as first:
            for each in range(unrolled):
                line = first + each
                # A line at a time: the CPU waits if more are asked for than it can fetch at once.
                builder.prefetch(codes + line * LINE_BYTES + FROM_MEMORY, SECOND_LEVEL)
                product.widen_line(builder, codes, line, numbers, tiles)


@dataclass(frozen=True)
class Rows:
    """The rows that a task multiplies at a time, with the blocks that are widened."""

    builder: Builder
    task: ProductTask
    tiles: Tiles
    columns: int
    """Rows that a tile has."""
    start: Value
    number: Value
    activations: Value
    """Where the rows begin, in the order of tiles."""

    @property
    def sums(self) -> Value:
        return self.task.scratch + SUMS

    def sums_of(self, row: Value) -> Value:
        return self.sums + row * (OUTS * 4)

    def add_products(self, row: Value, num_tiles: int, blocks: tuple[Value, Value], num_blocks: int) -> None:
        """Adds the products of widened blocks with one or two tiles of rows, from `row` on, to their sums.

        If there are no other rows, their sums stay in tiles until the last blocks are added.
        """
        builder, tiles, (first, stop) = self.builder, self.tiles, blocks
        are_several, sums = self.number >= STEP_ROWS + 1, self.sums_of(row)
        places = [sums + tile * (TILE_ROWS * self.columns * 4) for tile in range(2 * num_tiles)]
        with builder.when(first.equals(0)):
            for tile in range(len(places)):
                tiles.zero(tile)
        with builder.when(first.differs_from(0) & are_several):
            for tile, place in enumerate(places):
                tiles.load(tile, place, self.columns * 4)
        with builder.loop(first, stop) as block:
            widened = self.task.scratch + (block - first) * (2 * TILE_BYTES) + WIDENED
            for half in range(2):
                tiles.load(4 + half, widened + half * TILE_BYTES, TILE_ROW_BYTES)
            for tile in range(num_tiles):
                pairs = self.activations + (row + tile * TILE_ROWS) * (2 * BLOCK * num_blocks)
                tiles.load(6 + tile, pairs + block * (TILE_ROWS * self.columns * WORD), self.columns * WORD)
                for half in range(2):
                    tiles.add_bfloat16_product(2 * tile + half, 4 + half, 6 + tile)
        with builder.when((stop >= num_blocks) | are_several):
            for tile, place in enumerate(places):
                tiles.store(tile, place, self.columns * 4)
