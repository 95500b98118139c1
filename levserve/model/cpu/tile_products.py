"""Multiplies many rows with an int8 matrix on matrix units (AMX), and has what bfloat16 tiles share with it.

Results are bit-identical to those of the products without tiles, so a row gets the same result alone and
beside others. The packed order of a matrix is that of tiles: a row of 64 bytes has four numbers of each of 16
outputs. One instruction adds the products of 16 rows and 64 inputs to 16 x 16 sums. Activations are prepared
as tiles too: 16 rows by 64 inputs are contiguous, and the tails of those rows come after all of their tiles.
What tiles read past the last row is not used. `bfloat16_tiles` has the products with bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

from levserve.jit.builder import CACHE_LINE_BYTES, F32, I32, Builder, Value
from levserve.jit.tiles import TILE_ROW_BYTES, TILE_ROWS, Tiles, TileShape
from levserve.model.cpu.products import PackedProduct, PreparedRow, ProductTask, rescale
from levserve.model.int8_packing import OUTS, WORD

GROUP_BYTES = OUTS * WORD
"""Bytes of four numbers of each of the outputs that lie together: a row of each of two tiles."""
PREFETCH_BYTES, PREFETCH_LINES = 8192, 4
"""How far ahead of its use the first rows prefetch the matrix, and how many lines are prefetched at once."""
ROW_BLOCK_BYTES = 1280 << 10
"""Bytes of activations that a task multiplies at a time: as many as stay in the second-level cache."""
STEP_ROWS = 2 * TILE_ROWS
"""Rows that are multiplied at a time."""
SCRATCH_BYTES = STEP_ROWS * OUTS * 4
"""Bytes of the integer sums of these rows."""
PADDING_ROWS = TILE_ROWS
"""Rows of memory after the last prepared row, which tiles may read."""
TAIL_STRIDE = 8
"""Bytes from the tail of one row of a tile to that of the next."""


class RowPlace(NamedTuple):
    """Which of `num_rows` rows is prepared, and where the first one begins."""

    prepared: Value
    row: Value
    num_rows: Value


class TileProduct(Protocol):
    """How rows of activations are multiplied with the help of tiles."""

    min_rows: ClassVar[int]
    """Fewer rows are multiplied without tiles."""
    tile_outs: ClassVar[int]
    tasks_per_thread: ClassVar[int]
    """See `Product`."""

    def scratch_bytes(self, num_rows: Value) -> Value:
        """Memory that each thread needs."""

    def prepare(self, builder: Builder, x: Value, scratch: Value, into: RowPlace) -> None:
        """Prepares a row x of float32, as a `Product` does."""

    def multiply_range(self, builder: Builder, task: ProductTask) -> None:
        """Multiplies all prepared rows with a range of the matrix."""


@dataclass(frozen=True)
class Int8Tiles:
    """Uses four tiles for sums, 32 rows by 32 outputs, two for activations and two for the matrix."""

    product: PackedProduct
    min_rows: ClassVar[int] = 8
    """With fewer rows the other product is as fast."""
    tile_outs: ClassVar[int] = OUTS
    tasks_per_thread: ClassVar[int] = PackedProduct.tasks_per_thread

    @property
    def depth(self) -> int:
        """Inputs that a tile has: 64 if that divides the rows evenly."""
        return math.gcd(self.product.size, TILE_ROW_BYTES)

    def scratch_bytes(self, num_rows: Value) -> Value:
        return num_rows.full_like(SCRATCH_BYTES)

    def prepare(self, builder: Builder, x: Value, scratch: Value, into: RowPlace) -> None:
        """Prepares a row; if there are enough rows, in tiles: its pieces are in one tile after another."""
        product, index = self.product, into.row % TILE_ROWS
        is_many = into.num_rows >= self.min_rows
        plain = into.prepared + into.row * product.row_bytes
        first = into.prepared + (into.row - index) * product.row_bytes
        tail = first + TILE_ROWS * product.size + index * TAIL_STRIDE
        place = PreparedRow(
            is_many.select(first + index * self.depth, plain),
            is_many.select(tail, plain + product.size),
            (self.depth, is_many.select(into.row.full_like(TILE_ROWS * self.depth), self.depth)),
        )
        product.prepare(builder, x, scratch, place)

    def multiply_range(self, builder: Builder, task: ProductTask) -> None:
        sums, activations = TileShape(TILE_ROWS, TILE_ROW_BYTES), TileShape(TILE_ROWS, self.depth)
        weights = TileShape(self.depth // WORD, TILE_ROW_BYTES)
        tiles = Tiles(builder, (*[sums] * 4, *[activations] * 2, *[weights] * 2))
        block = max(1, ROW_BLOCK_BYTES // (self.product.row_bytes * STEP_ROWS)) * STEP_ROWS
        with tiles.configured(), builder.loop(0, task.num_rows, block) as start:
            stop = (start + block).minimum(task.num_rows)
            units = self.depth * OUTS // (CACHE_LINE_BYTES * PREFETCH_LINES)
            far = self.product.size * OUTS
            with steps(builder, task, (start, stop), units=units, near=PREFETCH_BYTES, far=far) as step:
                row, out, ahead = step
                weight = task.matrix.weight + out * self.product.out_bytes
                rows, count = task.prepared + row * self.product.row_bytes, (stop - row).minimum(STEP_ROWS)
                for num_tiles in tiles_for(builder, count):
                    self._sum(builder, tiles, weight, rows, num_tiles, task.scratch, ahead)
                self._rescale(builder, task, row, count, out)

    def _sum(
        self,
        builder: Builder,
        tiles: Tiles,
        weight: Value,
        rows: Value,
        num_row_tiles: int,
        scratch: Value,
        ahead: Ahead,
    ) -> None:
        """Stores the sums [row, out] of 16 or 32 rows with 32 outputs in the scratch memory."""
        in_rows, in_outs = range(num_row_tiles), range(2)
        for row in in_rows:
            for half in in_outs:
                tiles.zero(2 * row + half)
        with builder.loop(0, self.product.size, self.depth) as at:
            group = weight + at * OUTS
            with builder.loop(ahead.begin, ahead.end) as unit:
                first_line = group + ahead.distance + unit * (PREFETCH_LINES * CACHE_LINE_BYTES)
                for line in range(PREFETCH_LINES):
                    builder.prefetch(first_line + line * CACHE_LINE_BYTES)
            for half in in_outs:
                tiles.load(6 + half, group + half * TILE_ROW_BYTES, GROUP_BYTES)
            for row in in_rows:
                first = rows + row * (TILE_ROWS * self.product.row_bytes)
                tiles.load(4 + row, first + at * TILE_ROWS, self.depth)
                for half in in_outs:
                    tiles.add_product(2 * row + half, 4 + row, 6 + half)
        for row in in_rows:
            for half in in_outs:
                into = scratch + row * (TILE_ROWS * OUTS * 4) + half * TILE_ROW_BYTES
                tiles.store(2 * row + half, into, OUTS * 4)

    def _rescale(self, builder: Builder, task: ProductTask, row: Value, count: Value, out: Value) -> None:
        """Multiplies the sums in the scratch memory with their scales, and stores the products."""
        product = self.product
        assert task.matrix.scales is not None
        scales = builder.load(task.matrix.scales + out * product.out_scale_bytes, F32, OUTS)
        with builder.loop(0, count, TILE_ROWS) as first:
            block = task.prepared + (row + first) * product.row_bytes
            with builder.loop(0, (count - first).minimum(TILE_ROWS)) as index:
                tail = block + TILE_ROWS * product.size + index * TAIL_STRIDE
                total = builder.load(task.scratch + (first + index) * (OUTS * 4), I32, OUTS)
                total = total + builder.load(tail + 4, I32).splat(OUTS)
                task.store(row + first + index, out, rescale(builder, tail, total, scales))


@dataclass(frozen=True)
class Ahead:
    """Which lines of the matrix are prefetched for each tile of inputs."""

    distance: Value
    """How far ahead of what is used, in bytes or inputs."""
    begin: Value
    """The first unit of lines, and the one after the last."""
    end: Value


class Step(NamedTuple):
    """The first row and the first output of a step, and what it prefetches."""

    row: Value
    out: Value
    ahead: Ahead


@contextmanager
def steps(
    builder: Builder, task: ProductTask, rows: tuple[Value, Value], *, units: int, near: int, far: int
) -> Iterator[Step]:
    """Loops over the outputs of a task, `OUTS` at a time, and for each of these over a range of its rows."""
    with builder.loop(*task.outs, OUTS) as out, builder.loop(*rows, STEP_ROWS) as row:
        yield Step(row, out, _plan_ahead(builder, task, rows, (row, out), units=units, near=near, far=far))


def tiles_for(builder: Builder, count: Value) -> Iterator[int]:
    """Yields the possible numbers of tiles, two and one; code written for each runs if `count` needs it."""
    with builder.when(count >= TILE_ROWS + 1):
        yield 2
    with builder.when(count < TILE_ROWS + 1):
        yield 1


def _plan_ahead(
    builder: Builder,
    task: ProductTask,
    rows: tuple[Value, Value],
    place: tuple[Value, Value],
    *,
    units: int,
    near: int,
    far: int,
) -> Ahead:
    """What to prefetch at a place, which is a row and an output, in a range of rows.

    The first rows that use a part of the matrix prefetch what is near, unless it is prefetched already. The
    others share the prefetching of the next part, which is far, so that memory is read all the time.
    """
    (start, stop), (row, out) = rows, place
    number = (row - start) // STEP_ROWS
    others = ((stop - start - 1) // STEP_ROWS).maximum(1)
    is_first, is_alone = number.equals(0), (stop - start) < STEP_ROWS + 1
    has_next = (out + OUTS) < task.outs[1]
    begin, end = ((number + before) * units // others for before in (-1, 0))
    end = has_next.select(end, begin)
    is_cold = (out - task.outs[0]).equals(0)
    of_first = is_alone.select(builder.constant(units), is_cold.select(builder.constant(units), 0))
    return Ahead(
        is_first.select(builder.constant(near), far),
        is_first.select(builder.constant(0), begin),
        is_first.select(of_first, end),
    )
