"""What CPU attention works on: heads of some shape, the arrays of a call, and blocks of queries."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp

from levserve.jit.builder import CACHE_LINE_BYTES, F16, F32, I8, I16, I32, Builder, Value
from levserve.jit.target import Target
from levserve.model.cache import FP8, INT8, stored_width

LANES = 16
"""How many stored elements are loaded at a time."""
KEYS, VALUES = range(2)
"""The halves of a page."""


@dataclass(frozen=True)
class HeadShape:
    """The sizes of attention that a kernel is compiled for."""

    kv_heads: int
    group: int
    """Query heads of each key-value head."""
    size: int
    """Elements of a head."""
    page_size: int
    dtype: jnp.dtype
    """The type of stored keys and values."""
    target: Target

    @property
    def slot_bytes(self) -> int:
        """Bytes of one key or value of a head."""
        return stored_width(self.size, self.dtype) * self.dtype.itemsize

    @property
    def tile_bytes(self) -> int:
        """Bytes of the keys, or of the values, of one head in a page."""
        return self.page_size * self.slot_bytes


@dataclass(frozen=True)
class AttentionArrays:
    """The arrays and sizes of a call. Strides are the bytes from one token to the next."""

    q: Value
    output: Value
    q_stride: int
    output_stride: int
    pool: Value
    table: Value
    positions: Value
    window: Value
    """0: no window."""
    softcap: Value
    """0: no soft cap."""
    chunk: Value
    table_width: Value
    joined_rows: Value | None = None
    """For rows of one token: how many rows, starting with each one, are attended together; 0 for a row that
    is attended together with an earlier one. None: 1 for every row."""

    def queries_per_row(self, heads: HeadShape) -> Value:
        """Queries of one row over one key-value head."""
        return self.chunk * heads.group

    def num_blocks(self, heads: HeadShape, max_queries: int) -> Value:
        """How many blocks of at most `max_queries` the queries of one row and key-value head are cut into."""
        return (self.queries_per_row(heads) + (max_queries - 1)) // max_queries

    def max_tokens(self, heads: HeadShape) -> Value:
        """How many tokens a row may have, rounded up to whole vectors."""
        return (self.table_width * heads.page_size + (LANES - 1)) // LANES * LANES


class QueryBlock:
    """Some neighbouring queries over one key-value head, of one row or of rows that are attended together."""

    def __init__(
        self,
        builder: Builder,
        heads: HeadShape,
        arrays: AttentionArrays,
        *,
        row: Value,
        kv_head: Value,
        first_query: Value,
        num_queries: Value,
    ) -> None:
        self.builder, self.heads, self.arrays = builder, heads, arrays
        self.kv_head, self.first_query, self.num_queries = kv_head, first_query, num_queries
        self.row_start = row * arrays.chunk
        self.table = arrays.table + row * arrays.table_width * 4

    def query_at(self, index: Value) -> Value:
        return self.arrays.q + self._token_of(index) * self.arrays.q_stride + self._offset_in_token(index)

    def output_at(self, index: Value) -> Value:
        token = self._token_of(index)
        return self.arrays.output + token * self.arrays.output_stride + self._offset_in_token(index)

    def visible_range(self, index: Value) -> tuple[Value, Value]:
        """The positions that a query attends to: the first, and the one after the last."""
        window = self.arrays.window
        stop = (self.builder.load_int32(self.arrays.positions, self._token_of(index)) + 1).maximum(0)
        start = window.equals(0).select(self.builder.constant(0), (stop - window).maximum(0))
        return start, stop

    def tile_at(self, half: int, position: Value) -> Value:
        """The keys or the values of the page that holds this position."""
        heads = self.heads
        page = self.builder.load_int32(self.table, position // heads.page_size)
        return self.arrays.pool + ((page * 2 + half) * heads.kv_heads + self.kv_head) * heads.tile_bytes

    def load_floats(self, slot: Value, at: int, lanes: int) -> Value:
        """Elements of a key or value, from element `at` on, as a vector of float32."""
        builder, dtype = self.builder, self.heads.dtype
        pointer = slot + at * dtype.itemsize
        if dtype == INT8:
            scale = builder.load(slot + self.heads.size, F32).splat(lanes)
            return builder.load(pointer, I8, lanes).convert("sext", I32).convert("sitofp", F32) * scale
        if dtype == jnp.float32:
            return builder.load(pointer, F32, lanes)
        if dtype == jnp.bfloat16:
            return (builder.load(pointer, I16, lanes).convert("zext", I32) << 16).convert("bitcast", F32)
        assert dtype == FP8
        # Moved to a float16, whose exponent bias is larger by 8.
        bits = builder.load(pointer, I8, lanes).convert("zext", I16)
        moved = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        number = moved.convert("bitcast", F16).convert("fpext", F32) * 256.0
        return (bits & 0x7F).equals(0x7F).select(math.nan, number)

    def prefetch(self, tile: Value, slot: Value, count: int) -> None:
        """Prefetches some slots of a tile that will be read soon."""
        for line in range(0, count * self.heads.slot_bytes, CACHE_LINE_BYTES):
            self.builder.prefetch(tile + slot * self.heads.slot_bytes + line)

    def _token_of(self, index: Value) -> Value:
        return self.row_start + (self.first_query + index) // self.heads.group

    def _offset_in_token(self, index: Value) -> Value:
        group = self.heads.group
        return (self.kv_head * group + (self.first_query + index) % group) * (4 * self.heads.size)
