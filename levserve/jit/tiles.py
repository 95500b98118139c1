"""The matrix units of x86 CPUs (AMX): registers that hold a tile each, and instructions that multiply tiles.

A tile has up to 16 rows of 64 bytes. LLVM does not allocate these registers: code names them by number. On a
CPU without AMX, plain instructions emulate tiles on the stack: slowly, but so that every machine can test the
code that uses them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from llvmlite import ir

from levserve.jit.builder import F32, I8, I32, I64, Builder, Value

NUM_TILES, TILE_ROWS, TILE_ROW_BYTES = 8, 16, 64
TILE_BYTES = TILE_ROWS * TILE_ROW_BYTES
WORD = 4
"""Bytes of a sum, and of the four int8 or two bfloat16 whose products are added to it."""
CONFIG_BYTES, PALETTE, CONFIG_ROW_BYTES, CONFIG_ROWS = 64, 1, 16, 48
"""The layout of the tile configuration: its size, its first byte, and where row sizes and counts begin."""


class TileShape(NamedTuple):
    rows: int
    row_bytes: int


class Tiles:
    """The tiles of one task, by number. They can be used only inside `configured`."""

    def __init__(self, builder: Builder, shapes: tuple[TileShape, ...]) -> None:
        assert len(shapes) <= NUM_TILES
        self._builder, self._shapes = builder, shapes
        self._is_real = builder.target.has("amx-tile")
        self._memory = None if self._is_real else builder.stack_words(len(shapes) * TILE_BYTES // 8)

    @contextmanager
    def configured(self) -> Iterator[None]:
        """Sets the shapes of all tiles; on leaving, releases the tiles, which loses their contents."""
        if self._is_real:
            config = self._builder.constant_bytes(config_bytes(self._shapes))
            self._call("ldtilecfg", config.ir_value)
        yield
        if self._is_real:
            self._call("tilerelease")

    def zero(self, tile: int) -> None:
        if self._is_real:
            self._call("tilezero", ir.Constant(I8, tile))
            return
        with self._builder.loop(0, self._shapes[tile].rows) as row:
            self._builder.store(self._row(tile, row), self._builder.zeros(I8, TILE_ROW_BYTES))

    def load(self, tile: int, pointer: Value, stride: int) -> None:
        """Loads the rows of a tile; `stride` is the number of bytes from one row to the next."""
        if self._is_real:
            self._call("tileloadd64", ir.Constant(I8, tile), pointer.ir_value, ir.Constant(I64, stride))
            return
        shape = self._shapes[tile]
        with self._builder.loop(0, shape.rows) as row:
            numbers = self._builder.load(pointer + row * stride, I8, shape.row_bytes)
            self._builder.store(self._row(tile, row), numbers)

    def store(self, tile: int, pointer: Value, stride: int) -> None:
        if self._is_real:
            self._call("tilestored64", ir.Constant(I8, tile), pointer.ir_value, ir.Constant(I64, stride))
            return
        shape = self._shapes[tile]
        with self._builder.loop(0, shape.rows) as row:
            numbers = self._builder.load(self._row(tile, row), I8, shape.row_bytes)
            self._builder.store(pointer + row * stride, numbers)

    def add_product(self, sums: int, signed: int, unsigned: int) -> None:
        """Adds the product of int8 [rows, 4 n] with uint8 [n, columns, 4] to int32 [rows, columns]."""
        if self._is_real:
            self._call("tdpbsud", *(ir.Constant(I8, tile) for tile in (sums, signed, unsigned)))
            return
        builder, columns = self._builder, self._shapes[sums].row_bytes // WORD
        words = self._shapes[unsigned].rows
        with builder.loop(0, self._shapes[sums].rows) as row, builder.loop(0, words) as word:
            place = self._row(sums, row)
            added = builder.accumulate_dot_word(
                builder.load(place, I32, columns),
                builder.load(self._row(unsigned, word), I8, WORD * columns),
                builder.load(self._row(signed, row) + word * WORD, I32),
            )
            builder.store(place, added)

    def add_signed_product(self, sums: int, x: int, y: int) -> None:
        """Adds the product of int8 [rows, 4 n] with int8 [n, columns, 4] to int32 [rows, columns]."""
        if self._is_real:
            self._call("tdpbssd", *(ir.Constant(I8, tile) for tile in (sums, x, y)))
            return
        builder, columns = self._builder, self._shapes[sums].row_bytes // WORD
        with builder.loop(0, self._shapes[sums].rows) as row, builder.loop(0, self._shapes[y].rows) as word:
            factors = builder.load(self._row(x, row) + word * WORD, I32).splat(columns)
            others, place = builder.load(self._row(y, word), I32, columns), self._row(sums, row)
            total = builder.load(place, I32, columns)
            for byte in range(WORD):
                total = total + builder.signed_byte(factors, byte) * builder.signed_byte(others, byte)
            builder.store(place, total)

    def add_bfloat16_product(self, sums: int, x: int, y: int) -> None:
        """Adds the product of bfloat16 [rows, 2 n] with [n, columns, 2] to float32 [rows, columns].

        The even and the odd inputs are added up separately, then to each other, and then to the sum. The
        product of two bfloat16 is exact in float32, so plain instructions give bit-identical results, except
        that matrix units treat magnitudes below 2^-126 as zero.
        """
        if self._is_real:
            self._call("tdpbf16ps", *(ir.Constant(I8, tile) for tile in (sums, x, y)))
            return
        builder, columns = self._builder, self._shapes[sums].row_bytes // WORD
        with builder.loop(0, self._shapes[sums].rows) as row:
            halves = [builder.variable(builder.zeros(F32, columns)) for _ in range(2)]
            with builder.loop(0, self._shapes[y].rows) as word:
                factors = builder.load(self._row(x, row) + word * WORD, I32).splat(columns)
                others = builder.load(self._row(y, word), I32, columns)
                for half, total in enumerate(halves):
                    product = _bfloat16_half(factors, half) * _bfloat16_half(others, half)
                    total.set(total.get() + product)
            place = self._row(sums, row)
            added = halves[0].get() + halves[1].get()
            builder.store(place, builder.load(place, F32, columns) + added)

    def _row(self, tile: int, row: Value) -> Value:
        assert self._memory is not None
        return self._memory + tile * TILE_BYTES + row * TILE_ROW_BYTES

    def _call(self, name: str, *arguments: ir.Value) -> None:
        self._builder.call_symbol(f"llvm.x86.{name}", ir.VoidType(), *arguments)


def transpose(builder: Builder, source: Value, source_stride: int, into: Value, stride: int) -> None:
    """Transposes 16 x 16 words in memory; the strides are the bytes from one row to the next."""
    rows = [builder.load(source + row * source_stride, I32, TILE_ROWS) for row in range(TILE_ROWS)]
    distance = 1
    while distance < TILE_ROWS:
        lower = [lane + (TILE_ROWS - distance if lane & distance else 0) for lane in range(TILE_ROWS)]
        upper = [lane + distance for lane in lower]
        for row in range(TILE_ROWS):
            if not row & distance:
                pair = rows[row], rows[row | distance]
                rows[row], rows[row | distance] = (builder.shuffle(*pair, lanes) for lanes in (lower, upper))
        distance *= 2
    for row, words in enumerate(rows):
        builder.store(into + row * stride, words)


def _bfloat16_half(words: Value, half: int) -> Value:
    """The first or the second of the two bfloat16 of each word, as float32."""
    bits = words & -0x10000 if half else words << 16
    return bits.convert("bitcast", F32)


def config_bytes(shapes: tuple[TileShape, ...]) -> bytes:
    """The bytes that the instruction `ldtilecfg` reads."""
    config = bytearray(CONFIG_BYTES)
    config[0] = PALETTE
    for tile, shape in enumerate(shapes):
        at = CONFIG_ROW_BYTES + 2 * tile
        config[at : at + 2] = shape.row_bytes.to_bytes(2, "little")
        config[CONFIG_ROWS + tile] = shape.rows
    return bytes(config)
