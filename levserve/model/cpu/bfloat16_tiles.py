"""Multiplies rows with a bfloat16 matrix on matrix units (AMX).

The matrix is the first operand, 16 outputs by 32 inputs to a tile; here it stays in its plain order. The
second operand has the pairs of inputs of 16 rows side by side, so every task writes its rows in that order
first. A single row already is in that order: it is a tile of one column. A sum does not depend on the number
of columns, so a row's result is bit-identical alone and beside others. Activations are rounded to bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from levserve.jit.bfloat16 import round_to_bfloat16
from levserve.jit.builder import F32, Builder, Value
from levserve.jit.tiles import TILE_BYTES, TILE_ROW_BYTES, TILE_ROWS, WORD, Tiles, TileShape, transpose
from levserve.model.cpu.products import INT8_LANES, Bfloat16Product, Operands, ProductTask
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
"""Bytes of a step's sums."""


@dataclass(frozen=True)
class Bfloat16Rows:
    """What products whose activations are bfloat16 tiles have in common. Their tiles have these numbers: four
    for sums, 32 outputs by 32 rows, then two for the matrix and two for activations."""

    product: Operands
    min_rows: ClassVar[int] = 1
    tile_outs: ClassVar[int] = OUTS

    @property
    def row_bytes(self) -> int:
        """Bytes of a prepared row of activations."""
        return 2 * self.product.size

    @property
    def block_rows(self) -> int:
        """Rows that a task multiplies at a time: those that stay in the second-level cache."""
        return max(1, ROW_BLOCK_BYTES // (self.row_bytes * STEP_ROWS)) * STEP_ROWS

    def whole_tiles(self, num_rows: Value) -> Value:
        """The rows that a task multiplies at a time, rounded up to whole tiles."""
        return ((num_rows + (TILE_ROWS - 1)) // TILE_ROWS * TILE_ROWS).minimum(self.block_rows)

    def prepare(self, builder: Builder, x: Value, scratch: Value, into: RowPlace) -> None:
        start = into.prepared + into.row * self.row_bytes
        with builder.loop(0, self.product.size, INT8_LANES) as at:
            builder.store(start + at * 2, round_to_bfloat16(builder.load(x + at * 4, F32, INT8_LANES)))

    def tiles(self, builder: Builder, columns: int) -> Tiles:
        sums, activations = TileShape(TILE_ROWS, columns * 4), TileShape(TILE_ROWS, columns * WORD)
        weights = TileShape(TILE_ROWS, TILE_ROW_BYTES)
        return Tiles(builder, (*[sums] * 4, *[weights] * 2, *[activations] * 2))

    def arrange(self, builder: Builder, task: ProductTask, rows: tuple[Value, Value], into: Value) -> None:
        """Writes rows in the order of tiles. What follows the last row is written too, but not used.

        If a task multiplies all rows at a time, the thread's next task finds them in that order.
        """
        start, stop = rows
        have_changed = task.is_first | (task.num_rows >= self.block_rows + 1)
        with builder.when(have_changed), builder.loop(start, stop, TILE_ROWS) as row:
            source = task.prepared + row * self.row_bytes
            first_tile = into + (row - start) * self.row_bytes
            with builder.loop(0, self.product.size, DEPTH) as at:
                tile = first_tile + at * (TILE_BYTES // DEPTH)
                transpose(builder, source + at * 2, self.row_bytes, tile, TILE_ROW_BYTES)

    def store(
        self, builder: Builder, task: ProductTask, row: Value, count: Value, out: Value, sums: Value
    ) -> None:
        """Stores the sums of a step, which are tile by tile in memory, row by row; they are transposed in
        the scratch memory, of which this takes the first `SUMS_BYTES`."""
        with builder.loop(0, count, TILE_ROWS) as first:
            for half in range(2):
                tile = sums + (first // TILE_ROWS * 2 + half) * TILE_BYTES
                into = task.scratch + first * (OUTS * 4) + half * TILE_ROW_BYTES
                transpose(builder, tile, TILE_ROW_BYTES, into, OUTS * 4)
        with builder.loop(0, count) as index:
            task.store(row + index, out, builder.load(task.scratch + index * (OUTS * 4), F32, OUTS))


@dataclass(frozen=True)
class Bfloat16Tiles(Bfloat16Rows):
    """Scratch memory has a step's products row by row, its sums tile by tile, and the rows of activations."""

    product: Bfloat16Product
    tasks_per_thread: ClassVar[int] = 2

    def scratch_bytes(self, num_rows: Value) -> Value:
        return self.whole_tiles(num_rows) * self.row_bytes + 2 * SUMS_BYTES

    def multiply_range(self, builder: Builder, task: ProductTask) -> None:
        with builder.when(task.num_rows.equals(1)):
            self._multiply_row(builder, task)
        with builder.when(task.num_rows >= 2):
            self._multiply_rows(builder, task)

    def _multiply_row(self, builder: Builder, task: ProductTask) -> None:
        tiles, first_row = self.tiles(builder, 1), builder.constant(0)
        units = builder.constant(OUTS // PREFETCH_LINES)
        ahead = Ahead(builder.constant(PREFETCH_INPUTS), builder.constant(0), units)
        with tiles.configured(), builder.loop(*task.outs, OUTS) as out:
            weight = task.matrix.weight + out * self.row_bytes
            self._sum(builder, tiles, weight, task.prepared, 1, task.scratch, ahead, columns=1)
            task.store(first_row, out, builder.load(task.scratch, F32, OUTS))

    def _multiply_rows(self, builder: Builder, task: ProductTask) -> None:
        tiles, block = self.tiles(builder, TILE_ROWS), self.block_rows
        activations = task.scratch + 2 * SUMS_BYTES
        with tiles.configured(), builder.loop(0, task.num_rows, block) as start:
            stop = (start + block).minimum(task.num_rows)
            self.arrange(builder, task, (start, stop), activations)
            units, far = OUTS // PREFETCH_LINES, self.product.size
            with steps(builder, task, (start, stop), units=units, near=PREFETCH_INPUTS, far=far) as step:
                row, out, ahead = step
                weight = task.matrix.weight + out * self.row_bytes
                rows = activations + (row - start) * self.row_bytes
                count = (stop - row).minimum(STEP_ROWS)
                for num_tiles in tiles_for(builder, count):
                    self._sum(builder, tiles, weight, rows, num_tiles, task.scratch + SUMS_BYTES, ahead)
                self.store(builder, task, row, count, out, task.scratch + SUMS_BYTES)

    def _sum(
        self,
        builder: Builder,
        tiles: Tiles,
        weight: Value,
        rows: Value,
        num_row_tiles: int,
        sums: Value,
        ahead: Ahead,
        columns: int = TILE_ROWS,
    ) -> None:
        """Stores the sums [out, row] of 32 outputs with one or two tiles of rows, tile by tile."""
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
            tiles.store(tile, sums + tile * (TILE_ROWS * columns * 4), columns * 4)

    def _prefetch(self, builder: Builder, weight: Value, at: Value, ahead: Ahead) -> None:
        """Prefetches some lines; after the last inputs of these outputs come the first ones of the next."""
        inputs = at + ahead.distance
        is_here = inputs < self.product.size
        place = is_here.select(inputs * 2, inputs * 2 + (OUTS - 1) * self.row_bytes)
        with builder.loop(ahead.begin, ahead.end) as unit:
            first_line = weight + place + unit * (PREFETCH_LINES * self.row_bytes)
            for line in range(PREFETCH_LINES):
                builder.prefetch(first_line + line * self.row_bytes)
