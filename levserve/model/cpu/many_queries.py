"""Attention of many queries of a row on a CPU, as in a prompt: each lane is a query.

Keys and values are read one element at a time. So nothing is summed across lanes, neither for a score nor for
a softmax, and a loaded element is used for every query. The queries are transposed for this once, and a page
is widened to float32 once. Everything is added in the order of `few_queries`, so a query's output is
bit-identical however many queries there are beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from levserve.jit.builder import F32, I32, Builder, Value, sum_like_lanes
from levserve.jit.target import Target
from levserve.model.cpu.heads import KEYS, LANES, VALUES, AttentionArrays, HeadShape, QueryBlock
from levserve.model.cpu.softmax import LOWEST_MAX, MASKED, SMALLEST_SUM, cap_scores, exp

KEYS_TOGETHER = 2
"""Keys that a vector of queries is multiplied with at a time: each has several partial sums."""


def max_queries(target: Target) -> int:
    """As many queries as two registers hold."""
    return 2 * target.lanes


def scratch_bytes(heads: HeadShape, arrays: AttentionArrays) -> Value:
    return (arrays.max_tokens(heads) + _scratch_layout(heads).scores) * (4 * max_queries(heads.target))


class ScratchLayout(NamedTuple):
    """Where each array of the scratch memory begins, in vectors of queries; the queries come first."""

    outputs: int
    starts: int
    stops: int
    tile: int
    sums: int
    scores: int


def _scratch_layout(heads: HeadShape) -> ScratchLayout:
    """Queries and outputs have a vector for each element of a head, scores have one for each token."""
    tile = 2 * heads.size + 2
    sums = tile + -(-heads.page_size * heads.size // max_queries(heads.target))
    return ScratchLayout(heads.size, 2 * heads.size, 2 * heads.size + 1, tile, sums, sums + LANES)


def attend_many(
    builder: Builder, heads: HeadShape, arrays: AttentionArrays, queries: Value, block: QueryBlock
) -> None:
    size, page_size, lanes = heads.size, heads.page_size, max_queries(heads.target)
    vector = 4 * lanes
    outputs, starts, stops, tile, sums, scores = (
        queries + offset * vector for offset in _scratch_layout(heads)
    )
    last = (block.num_queries - 1).maximum(0)
    lowest = builder.variable(block.visible_range(builder.constant(0))[0])
    highest = builder.variable(builder.constant(0))
    with builder.loop(0, lanes) as lane:
        index = lane.minimum(last)  # unused lanes repeat the last query
        start, stop = block.visible_range(index)
        lowest.set(lowest.get().minimum(start))
        highest.set(highest.get().maximum(stop))
        for into, limit in ((starts, start), (stops, stop)):
            builder.store(into + lane * 4, limit.convert("trunc", I32))
        query = block.query_at(index)
        with builder.loop(0, size) as at:
            builder.store(queries + at * vector + lane * 4, builder.load(query + at * 4, F32))
    begin, end = lowest.get() // page_size * page_size, highest.get()

    @contextmanager
    def pages(half: int) -> Iterator[tuple[Value, Value]]:
        """Widens one page after another into the tile; yields its first token and number of visible slots."""
        with builder.loop(begin, end, page_size) as token:
            num_slots, stored = (end - token).minimum(page_size), block.tile_at(half, token)
            next_tile = block.tile_at(half, (token + page_size).minimum(end - 1))
            with builder.loop(0, num_slots) as slot:
                block.prefetch(next_tile, slot, 1)
                for at in range(0, size, LANES):
                    numbers = block.load_floats(stored + slot * heads.slot_bytes, at, LANES)
                    builder.store(tile + slot * (4 * size) + 4 * at, numbers)
            yield token, num_slots

    num_keys = math.gcd(page_size, KEYS_TOGETHER)
    with pages(KEYS) as (token, num_slots), builder.loop(0, num_slots, num_keys) as slot:
        keys = tile + slot * (4 * size)

        def partial_scores(lane: int) -> list[Value]:
            """For each key, the sum of the products that `few_queries` adds in this lane."""
            products = [builder.zeros(F32, lanes)] * num_keys
            for at in range(lane, size, heads.target.lanes):
                numbers = builder.load(queries + at * vector, F32, lanes)
                each = (builder.load(keys + 4 * (number * size + at), F32) for number in range(num_keys))
                products = [
                    numbers.multiply_add(key.splat(lanes), product) for key, product in zip(each, products)
                ]
            return products

        for number, score in enumerate(sum_like_lanes(partial_scores, heads.target.lanes)):
            builder.store(scores + (token + slot + number) * vector, score)

    factor = _softmax(builder, scores, (begin, end), (starts, stops), sums, arrays.softcap)
    with builder.loop(0, size) as at:
        builder.store(outputs + at * vector, builder.zeros(F32, lanes))
    # How many elements of a value each vector of weights is multiplied with at a time.
    together = 8 if heads.target.vector_bytes == 64 else 4
    with pages(VALUES) as (token, num_slots):
        for first in range(0, size, together):
            totals = [
                builder.variable(builder.load(outputs + (first + number) * vector, F32, lanes))
                for number in range(together)
            ]
            with builder.loop(0, num_slots) as slot:
                weights = builder.load(scores + (token + slot) * vector, F32, lanes)
                for number, total in enumerate(totals):
                    value = builder.load(tile + slot * (4 * size) + 4 * (first + number), F32)
                    total.set(weights.multiply_add(value.splat(lanes), total.get()))
            for number, total in enumerate(totals):
                builder.store(outputs + (first + number) * vector, total.get())
    with builder.loop(0, size) as at:
        builder.store(outputs + at * vector, builder.load(outputs + at * vector, F32, lanes) * factor)
    with builder.loop(0, block.num_queries) as index:
        into = block.output_at(index)
        with builder.loop(0, size) as at:
            builder.store(into + at * 4, builder.load(outputs + at * vector + index * 4, F32))


def _softmax(
    builder: Builder,
    scores: Value,
    tokens: tuple[Value, Value],
    visible: tuple[Value, Value],
    sums: Value,
    softcap: Value,
) -> Value:
    """Replaces scores by weights, 0 for tokens that are not visible, and gives the factor of the outputs: 1 /
    the sum of the weights.

    `visible` points to the first visible token of each query, and to the one after the last.
    """
    lanes = max_queries(builder.target)
    vector = 4 * lanes
    cap_scores(builder, softcap, scores, (*tokens, 1), vector, lanes)
    start, stop = (builder.load(limit, I32, lanes) for limit in visible)
    maximum = builder.variable(builder.constant(LOWEST_MAX, F32).splat(lanes))
    with builder.loop(*tokens) as at:
        token = at.convert("trunc", I32).splat(lanes)
        is_started = token >= start
        before_stop = (token < stop).select(builder.load(scores + at * vector, F32, lanes), MASKED)
        score = is_started.select(before_stop, MASKED)
        builder.store(scores + at * vector, score)
        maximum.set(maximum.get().maximum(score))
    highest = maximum.get()
    for lane in range(LANES):
        builder.store(sums + lane * vector, builder.zeros(F32, lanes))
    with builder.loop(*tokens) as at:
        weight = exp(builder.load(scores + at * vector, F32, lanes) - highest)
        total = sums + at % LANES * vector
        builder.store(scores + at * vector, weight)
        builder.store(total, builder.load(total, F32, lanes) + weight)
    (total,) = sum_like_lanes(lambda lane: [builder.load(sums + lane * vector, F32, lanes)], LANES)
    return highest.full_like(1.0) / total.maximum(SMALLEST_SUM)
