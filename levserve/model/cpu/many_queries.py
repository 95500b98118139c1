"""Many queries of a row on a CPU, as a prompt has: each model_loop is a query, and keys and values come one number at a time.

So nothing is added up across lanes, not for a score and not for a softmax, and a number that was read meets every query. The
queries are laid out anew for it once, and the numbers of a page are widened once. All is added in the order of `cpu_few_queries`: what
a query gets does not depend, to the last bit, on how many there are beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from levserve.jit.builder import F32, I32, Builder, Value, add_up, vector_bytes
from levserve.model.cpu.few_queries import SCORE_LANES
from levserve.model.cpu.heads import LANES, LOWEST, SMALLEST, UNSEEN, Given, Heads, Part, exp, tanh

MOST = 2 * (vector_bytes() // 4)
"""Queries, in two registers."""
KEYS = 2
"""That a vector of queries meets before the next: of each there are several sums at a time, until they are added up."""
TOGETHER = 8 if vector_bytes() == 64 else 4
"""Numbers of values that a vector of weights meets before the next: so many sums, of two registers each."""


def own_bytes(heads: Heads, given: Given) -> Value:
    return (given.num_tokens(heads) + _memory(heads).score_place) * (4 * MOST)


class Memory(NamedTuple):
    """Where a part's own numbers begin, in vectors."""

    mixed_place: int
    start_place: int
    stop_place: int
    tile_place: int
    total_place: int
    score_place: int


def _memory(heads: Heads) -> Memory:
    """First the queries and what is mixed for them, number by number; then what they see, a page, sums, and the scores, key by key."""
    tile = 2 * heads.size + 2
    total = tile + -(-heads.page_size * heads.size // MOST)
    return Memory(heads.size, 2 * heads.size, 2 * heads.size + 1, tile, total, total + LANES)


def attend_many(writer: Builder, heads: Heads, given: Given, own: Value, part: Part) -> None:
    size, page_size, vector = heads.size, heads.page_size, 4 * MOST
    mixed, starts, stops, tile, totals, scores = (own + place * vector for place in _memory(heads))
    last = (part.held - 1).most(0)
    lowest, highest = writer.variable(part.seen(writer.number(0))[0]), writer.variable(writer.number(0))
    with writer.loop(0, MOST) as model_loop:
        index = model_loop.least(last)  # lanes that are left over repeat the last query
        start, stop = part.seen(index)
        lowest.set(lowest.get().least(start))
        highest.set(highest.get().most(stop))
        for into, limit in ((starts, start), (stops, stop)):
            writer.store(into + model_loop * 4, limit.convert("trunc", I32))
        query = part.query_at(index)
        with writer.loop(0, size) as at:
            writer.store(own + at * vector + model_loop * 4, writer.load(query + at * 4, F32))
    begin, end = lowest.get() // page_size * page_size, highest.get()

    @contextmanager
    def pages(half: int) -> Iterator[tuple[Value, Value]]:
        """The first token of each page, and how many slots there are to look at, whose numbers are in the tile."""
        with writer.loop(begin, end, page_size) as token:
            num_slots, stored = (end - token).least(page_size), part.tile_of(half, token)
            after = part.tile_of(half, (token + page_size).least(end - 1))
            with writer.loop(0, num_slots) as slot:
                part.ask_for(after, slot, 1)
                for at in range(0, size, LANES):
                    numbers = part.floats(
                        stored + slot * heads.slot_bytes + at * heads.numbers.itemsize, LANES
                    )
                    writer.store(tile + slot * (4 * size) + 4 * at, numbers)
            yield token, num_slots

    num_keys = math.gcd(page_size, KEYS)
    with pages(0) as (token, num_slots):
        with writer.loop(0, num_slots, num_keys) as slot:

            def products(model_loop: int, keys: Value = tile + slot * (4 * size)) -> list[Value]:
                """Of the numbers that have this model_loop where a query's are read as vectors, with each key."""
                sums = [writer.zeros(F32, MOST)] * num_keys
                for at in range(model_loop, size, SCORE_LANES):
                    queries = writer.load(own + at * vector, F32, MOST)
                    each = (writer.load(keys + 4 * (number * size + at), F32) for number in range(num_keys))
                    sums = [queries.times_plus(key.splat(MOST), sum_) for key, sum_ in zip(each, sums)]
                return sums

            for number, score in enumerate(add_up(products, SCORE_LANES)):
                writer.store(scores + (token + slot + number) * vector, score)

    share = _soften(writer, scores, (begin, end), (starts, stops), totals, given.softcap)
    with writer.loop(0, size) as at:
        writer.store(mixed + at * vector, writer.zeros(F32, MOST))
    with pages(1) as (token, num_slots):
        for first in range(0, size, TOGETHER):
            sums = [
                writer.variable(writer.load(mixed + (first + number) * vector, F32, MOST))
                for number in range(TOGETHER)
            ]
            with writer.loop(0, num_slots) as slot:
                weights = writer.load(scores + (token + slot) * vector, F32, MOST)
                for number, sum_ in enumerate(sums):
                    value = writer.load(tile + slot * (4 * size) + 4 * (first + number), F32)
                    sum_.set(weights.times_plus(value.splat(MOST), sum_.get()))
            for number, sum_ in enumerate(sums):
                writer.store(mixed + (first + number) * vector, sum_.get())
    with writer.loop(0, size) as at:
        writer.store(mixed + at * vector, writer.load(mixed + at * vector, F32, MOST) * share)
    with writer.loop(0, part.held) as index:
        into = part.mixed_at(index)
        with writer.loop(0, size) as at:
            writer.store(into + at * 4, writer.load(mixed + at * vector + index * 4, F32))


def _soften(
    writer: Builder,
    scores: Value,
    among: tuple[Value, Value],
    seen: tuple[Value, Value],
    totals: Value,
    softcap: Value,
) -> Value:
    """Makes weights of scores, next to nothing of those that are not seen, and gives what their sum must be multiplied with."""
    vector = 4 * MOST
    with writer.when(softcap.is_not(0)):
        cap = softcap.splat(MOST)
        with writer.loop(*among) as at:
            writer.store(scores + at * vector, tanh(writer.load(scores + at * vector, F32, MOST) / cap) * cap)
    start, stop = (writer.load(limit, I32, MOST) for limit in seen)
    top = writer.variable(writer.number(LOWEST, F32).splat(MOST))
    with writer.loop(*among) as at:
        token = at.convert("trunc", I32).splat(MOST)
        score = (token >= start).choose(
            (token < stop).choose(writer.load(scores + at * vector, F32, MOST), UNSEEN), UNSEEN
        )
        writer.store(scores + at * vector, score)
        top.set(top.get().most(score))
    highest = top.get()
    for model_loop in range(LANES):
        writer.store(totals + model_loop * vector, writer.zeros(F32, MOST))
    with writer.loop(*among) as at:
        weight, total = (
            exp(writer.load(scores + at * vector, F32, MOST) - highest),
            totals + at % LANES * vector,
        )
        writer.store(scores + at * vector, weight)
        writer.store(total, writer.load(total, F32, MOST) + weight)
    (sum_,) = add_up(lambda model_loop: [writer.load(totals + model_loop * vector, F32, MOST)], LANES)
    return highest.like(1.0) / sum_.most(SMALLEST)
