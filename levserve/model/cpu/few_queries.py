"""Attention of a few queries of a row on a CPU: keys and values are read in place, each once for all queries.

All scores are kept in memory, so there is no running softmax.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from levserve.jit.builder import F32, Builder, Value
from levserve.model.cpu.heads import KEYS, LANES, VALUES, AttentionArrays, HeadShape, QueryBlock
from levserve.model.cpu.softmax import LOWEST_MAX, MASKED, SMALLEST_SUM, cap_scores, exp

MAX_QUERIES = 4
"""Queries that share what is read: more would not fit into the registers of every CPU."""
KEYS_TOGETHER = 4
"""Keys that are multiplied at a time: they share each loaded query, and their sums are reduced together."""
OUTPUT_REGISTERS = 16
"""Registers for sums of weighted values; the others hold what is being added."""
AFTER_ALL_TOKENS = 2**31


class Page(NamedTuple):
    """The keys or the values of a page that is being visited."""

    tile: Value
    next_tile: Value
    """The tile of the next page, to be prefetched; for the last page its own."""
    num_slots: Value
    """Slots that any query of the block can see."""


def scratch_bytes(heads: HeadShape, arrays: AttentionArrays) -> Value:
    """Room for the sum of each query's weights, then for its scores, which become weights in place."""
    return _score_bytes(heads, arrays) * MAX_QUERIES + 4 * LANES


def attend_few(
    builder: Builder, heads: HeadShape, arrays: AttentionArrays, sums: Value, block: QueryBlock
) -> None:
    size, page_size, slot_bytes = heads.size, heads.page_size, heads.slot_bytes
    stride, scores = _score_bytes(heads, arrays), sums + 4 * LANES
    lowest, highest = (
        builder.variable(builder.constant(AFTER_ALL_TOKENS)),
        builder.variable(builder.constant(0)),
    )
    with builder.loop(0, block.num_queries) as index:
        start, stop = block.visible_range(index)
        lowest.set(lowest.get().minimum(start))
        highest.set(highest.get().maximum(stop))
    begin = lowest.get() // page_size * page_size
    end = (highest.get() + (page_size - 1)) // page_size * page_size
    vectors = begin // LANES * LANES, (end + (LANES - 1)) // LANES * LANES, LANES

    def visit_pages(half: int, visit: Callable[[Page, list[Value]], None]) -> None:
        """Visits each page with a pointer for each query to the scores of the page's tokens.

        The code is written once for each number of queries that a block may have.
        """
        for count in range(1, MAX_QUERIES + 1):
            with builder.when(block.num_queries.equals(count)), builder.loop(begin, end, page_size) as token:
                following = (token + page_size).minimum(end - page_size)
                tiles = block.tile_at(half, token), block.tile_at(half, following)
                page = Page(*tiles, (highest.get() - token).minimum(page_size))
                visit(page, [scores + stride * index + token * 4 for index in range(count)])

    def score(page: Page, page_scores: list[Value]) -> None:
        """Stores the products of the queries with each key of a page, a few keys at a time; what is stored
        beyond the last key is masked later."""
        queries = [block.query_at(builder.constant(index)) for index in range(len(page_scores))]
        num_keys, lanes = KEYS_TOGETHER if page_size % KEYS_TOGETHER == 0 else 1, heads.target.lanes
        with builder.loop(0, page.num_slots, num_keys) as slot:
            block.prefetch(page.next_tile, slot, num_keys)
            products = [[builder.zeros(F32, lanes)] * num_keys for _ in queries]
            for at in range(0, size, lanes):
                slots = [page.tile + (slot + number) * slot_bytes for number in range(num_keys)]
                keys = [block.load_floats(key, at, lanes) for key in slots]
                for query, each in zip(queries, products):
                    numbers = builder.load(query + at * 4, F32, lanes)
                    each[:] = [key.multiply_add(numbers, product) for key, product in zip(keys, each)]
            for each, row in zip(products, page_scores):
                into = row + slot * 4
                builder.store(
                    into, builder.reduce_sums(*each) if num_keys == KEYS_TOGETHER else each[0].reduce_sum()
                )

    def add_values(page: Page, weights: list[Value]) -> None:
        """Adds the weighted values of a page to the outputs, as many elements at a time as registers hold."""
        outputs = [block.output_at(builder.constant(index)) for index in range(len(weights))]
        registers = len(outputs) * max(1, LANES // heads.target.lanes)
        together = max(1, OUTPUT_REGISTERS // registers) * LANES
        for first in range(0, size, together):
            offsets = range(first, min(first + together, size), LANES)
            totals = [
                [builder.variable(builder.load(output + 4 * at, F32, LANES)) for at in offsets]
                for output in outputs
            ]
            with builder.loop(0, page.num_slots) as slot:
                if first == 0:
                    block.prefetch(page.next_tile, slot, 1)
                stored = page.tile + slot * slot_bytes
                values = [block.load_floats(stored, at, LANES) for at in offsets]
                for row, each in zip(weights, totals):
                    weight = builder.load(row + slot * 4, F32).splat(LANES)
                    for value, total in zip(values, each):
                        total.set(value.multiply_add(weight, total.get()))
            for output, each in zip(outputs, totals):
                for at, total in zip(offsets, each):
                    builder.store(output + 4 * at, total.get())

    visit_pages(KEYS, score)
    with builder.loop(0, block.num_queries) as index:
        into, row = sums + index * 4, scores + stride * index
        builder.store(into, _softmax(builder, row, vectors, block.visible_range(index), arrays.softcap))
        for at in range(0, size, LANES):
            builder.store(block.output_at(index) + 4 * at, builder.zeros(F32, LANES))
    visit_pages(VALUES, add_values)
    with builder.loop(0, block.num_queries) as index:
        factor = (builder.constant(1.0, F32) / builder.load(sums + index * 4, F32)).splat(LANES)
        for at in range(0, size, LANES):
            output = block.output_at(index) + 4 * at
            builder.store(output, builder.load(output, F32, LANES) * factor)


def _score_bytes(heads: HeadShape, arrays: AttentionArrays) -> Value:
    """Bytes of one query's scores."""
    return arrays.max_tokens(heads) * 4


def _softmax(
    builder: Builder,
    scores: Value,
    vectors: tuple[Value, Value, int],
    visible: tuple[Value, Value],
    softcap: Value,
) -> Value:
    """Replaces scores by weights, 0 for tokens that are not visible, and gives the sum of the weights."""
    first, last, _ = vectors
    cap_scores(builder, softcap, scores, vectors, 4, LANES)
    for start, stop in ((first, visible[0]), (visible[1], last)):
        with builder.loop(start, stop) as at:
            builder.store(scores + at * 4, builder.constant(MASKED, F32))
    maximum = builder.variable(builder.constant(LOWEST_MAX, F32).splat(LANES))
    with builder.loop(*vectors) as at:
        maximum.set(maximum.get().maximum(builder.load(scores + at * 4, F32, LANES)))
    highest = maximum.get().reduce_max().splat(LANES)
    total = builder.variable(builder.zeros(F32, LANES))
    with builder.loop(*vectors) as at:
        weight = exp(builder.load(scores + at * 4, F32, LANES) - highest)
        builder.store(scores + at * 4, weight)
        total.set(total.get() + weight)
    return total.get().reduce_sum().maximum(SMALLEST_SUM)
