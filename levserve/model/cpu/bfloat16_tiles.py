"""Multiplies rows with a bfloat16 matrix on matrix units (AMX).

The matrix stays in its plain order, 16 outputs by 32 inputs to a tile, and is the first operand. The second
operand has the pairs of inputs of 16 rows side by side, so every task writes its rows in that order first. A
single row already is in that order: it is a tile of one column. A sum does not depend on the number of
columns, so a row's result is bit-identical alone and beside others. Activations are rounded to bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from levserve.jit.builder import F32, Builder, Value
from levserve.jit.tiles import TILE_BYTES, TILE_ROW_BYTES, TILE_ROWS, WORD, Tiles, TileShape, transpose
from levserve.model.cpu.products import INT8_LANES, Bfloat16Product, ProductTask, round_to_bfloat16
from levserve.model.cpu.tile_products import (
    PREFETCH_LINES,
    ROW_BLOCK_BYTES,
    STEP_ROWS,
    Ahead,
    RowPlace,
    steps,
    tiles_for,
)

DEPTH = TILE_ROW_BYTES // 2
"""Inputs that a tile has."""
OUTS = 2 * TILE_ROWS
"""Outputs that are computed at a time."""
PREFETCH_INPUTS = 4 * DEPTH
"""How far ahead of its use the first rows prefetch the matrix, in inputs."""
SUMS_BYTES = STEP_ROWS * OUTS * 4
"""Bytes of a step's sums. Scratch memory has them tile by tile, then row by row, then rows of activations."""


@dataclass(frozen=True)
class Bfloat16Tiles:
    """Uses four tiles for sums, 32 outputs by 32 rows, two for the matrix and two for activations."""

    product: Bfloat16Product
    min_rows: ClassVar[int] = 1
    tile_outs: ClassVar[int] = OUTS
    tasks_per_thread: ClassVar[int] = 2

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of the matrix, and of a prepared row of activations."""
        return 2 * self.product.size

    @property
    def block_rows(self) -> int:
        """Rows that a task multiplies at a time: those that stay in the second-level cache."""
        return max(1, ROW_BLOCK_BYTES // (self.row_bytes * STEP_ROWS)) * STEP_ROWS

    def scratch_bytes(self, num_rows: Value) -> Value:
        whole_tiles = (num_rows + (TILE_ROWS - 1)) // TILE_ROWS * TILE_ROWS
        return whole_tiles.minimum(self.block_rows) * self.row_bytes + 2 * SUMS_BYTES

    def prepare(self, builder: Builder, x: Value, scratch: Value, into: RowPlace) -> None:
        start = into.prepared + into.row * self.row_bytes
        with builder.loop(0, self.product.size, INT8_LANES) as at:
            builder.store(start + at * 2, round_to_bfloat16(builder.load(x + at * 4, F32, INT8_LANES)))

    def multiply_range(self, builder: Builder, task: ProductTask) -> None:
        with builder.when(task.num_rows.equals(1)):
            self._multiply_row(builder, task)
        with builder.when(task.num_rows >= 2):
            self._multiply_rows(builder, task)

    def _multiply_row(self, builder: Builder, task: ProductTask) -> None:
        tiles, first_row = self._tiles(builder, 1), builder.constant(0)
        units = builder.constant(OUTS // PREFETCH_LINES)
        ahead = Ahead(builder.constant(PREFETCH_INPUTS), builder.constant(0), units)
        with tiles.configured(), builder.loop(*task.outs, OUTS) as out:
            weight = task.matrix.weight + out * self.row_bytes
            self._sum(builder, tiles, weight, task.prepared, 1, task.scratch, ahead, columns=1)
            task.store(first_row, out, builder.load(task.scratch, F32, OUTS))

    def _multiply_rows(self, builder: Builder, task: ProductTask) -> None:
        tiles, block = self._tiles(builder, TILE_ROWS), self.block_rows
        activations = task.scratch + 2 * SUMS_BYTES
        with tiles.configured(), builder.loop(0, task.num_rows, block) as start:
            stop = (start + block).minimum(task.num_rows)
            self._arrange(builder, task, (start, stop), activations)
            units, far = OUTS // PREFETCH_LINES, self.product.size
            with steps(builder, task, (start, stop), units=units, near=PREFETCH_INPUTS, far=far) as step:
                row, out, ahead = step
                weight = task.matrix.weight + out * self.row_bytes
                rows = activations + (row - start) * self.row_bytes
                count = (stop - row).minimum(STEP_ROWS)
                for num_tiles in tiles_for(builder, count):
                    self._sum(builder, tiles, weight, rows, num_tiles, task.scratch, ahead)
                self._store(builder, task, row, count, out)

    def _tiles(self, builder: Builder, columns: int) -> Tiles:
        sums, activations = TileShape(TILE_ROWS, columns * 4), TileShape(TILE_ROWS, columns * WORD)
        weights = TileShape(TILE_ROWS, TILE_ROW_BYTES)
        return Tiles(builder, (*[sums] * 4, *[weights] * 2, *[activations] * 2))

    def _arrange(self, builder: Builder, task: ProductTask, rows: tuple[Value, Value], into: Value) -> None:
        """Writes rows in the order of tiles. What follows the last row is written too, but not used."""
        start, stop = rows
        with builder.loop(start, stop, TILE_ROWS) as row:
            source = task.prepared + row * self.row_bytes
            first_tile = into + (row - start) * self.row_bytes
            with builder.loop(0, self.product.size, DEPTH) as at:
                tile = first_tile + at * (TILE_BYTES // DEPTH)
                transpose(builder, source + at * 2, self.row_bytes, tile, TILE_ROW_BYTES)

    def _sum(
        self,
        builder: Builder,
        tiles: Tiles,
        weight: Value,
        rows: Value,
        num_row_tiles: int,
        scratch: Value,
        ahead: Ahead,
        columns: int = TILE_ROWS,
    ) -> None:
        """Stores the sums [out, row] of 32 outputs with one or two tiles of rows in the scratch memory, tile
        by tile."""
        in_rows, in_outs = range(num_row_tiles), range(2)
        for tile in range(2 * num_row_tiles):
            tiles.zero(tile)
        with builder.loop(0, self.product.size, DEPTH) as at:
            self._prefetch(builder, weight, at, ahead)
            for half in in_outs:
                outs = weight + half * (TILE_ROWS * self.row_bytes)
                tiles.load(4 + half, outs + at * 2, self.row_bytes)
            for row in in_rows:
                pairs = rows + row * (TILE_ROWS * self.row_bytes)
                tiles.load(6 + row, pairs + at * (2 * columns), columns * WORD)
                for half in in_outs:
                    tiles.add_bfloat16_product(2 * row + half, 4 + half, 6 + row)
        for tile in range(2 * num_row_tiles):
            tiles.store(tile, scratch + tile * (TILE_ROWS * columns * 4), columns * 4)

    def _prefetch(self, builder: Builder, weight: Value, at: Value, ahead: Ahead) -> None:
        """Prefetches some lines; after the last inputs of these outputs come the first ones of the next."""
        inputs = at + ahead.distance
        is_here = inputs < self.product.size
        place = is_here.select(inputs * 2, inputs * 2 + (OUTS - 1) * self.row_bytes)
        with builder.loop(ahead.begin, ahead.end) as unit:
            first_line = weight + place + unit * (PREFETCH_LINES * self.row_bytes)
            for line in range(PREFETCH_LINES):
                builder.prefetch(first_line + line * self.row_bytes)

    def _store(self, builder: Builder, task: ProductTask, row: Value, count: Value, out: Value) -> None:
        """Stores the sums in the scratch memory, row by row."""
        by_row = task.scratch + SUMS_BYTES
        with builder.loop(0, count, TILE_ROWS) as first:
            for half in range(2):
                tile = task.scratch + (first // TILE_ROWS * 2 + half) * TILE_BYTES
                into = by_row + first * (OUTS * 4) + half * TILE_ROW_BYTES
                transpose(builder, tile, TILE_ROW_BYTES, into, OUTS * 4)
        with builder.loop(0, count) as index:
            task.store(row + index, out, builder.load(by_row + index * (OUTS * 4), F32, OUTS))
