"""Many queries of a row on a CPU, as a prompt has: each lane is a query, and keys and values come one number
at a time.

So nothing is added up across lanes, not for a score and not for a softmax, and a number that was read meets
every query. The queries are laid out anew for it once, and the numbers of a page are widened once. All is
added in the order of `cpu_few_queries`: what a query gets does not depend, to the last bit, on how many there
are beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from levserve.jit.builder import F32, I32, Builder, Value, add_up
from levserve.jit.target import Target
from levserve.model.cpu.heads import LANES, LOWEST, SMALLEST, UNSEEN, Given, Heads, Part, exp, tanh

KEYS = 2
"""That a vector of queries meets before the next: of each there are several sums at a time, until they are
added up."""


def most_queries(target: Target) -> int:
    """Queries that two registers hold."""
    return 2 * target.lanes


def own_bytes(heads: Heads, given: Given) -> Value:
    return (given.num_tokens(heads) + _memory(heads).score_place) * (4 * most_queries(heads.target))


class Memory(NamedTuple):
    """Where a part's own numbers begin, in vectors."""

    mixed_place: int
    start_place: int
    stop_place: int
    tile_place: int
    total_place: int
    score_place: int


def _memory(heads: Heads) -> Memory:
    """First the queries and what is mixed for them, number by number; then what they see, a page, sums, and
    the scores, key by key."""
    tile = 2 * heads.size + 2
    total = tile + -(-heads.page_size * heads.size // most_queries(heads.target))
    return Memory(heads.size, 2 * heads.size, 2 * heads.size + 1, tile, total, total + LANES)


def attend_many(builder: Builder, heads: Heads, given: Given, own: Value, part: Part) -> None:
    size, page_size, most = heads.size, heads.page_size, most_queries(heads.target)
    vector = 4 * most
    # Numbers of values that a vector of weights meets before the next.
    together = 8 if heads.target.vector_bytes == 64 else 4
    mixed, starts, stops, tile, totals, scores = (own + place * vector for place in _memory(heads))
    last = (part.held - 1).most(0)
    lowest, highest = builder.variable(part.seen(builder.number(0))[0]), builder.variable(builder.number(0))
    with builder.loop(0, most) as lane:
        index = lane.least(last)  # lanes that are left over repeat the last query
        start, stop = part.seen(index)
        lowest.set(lowest.get().least(start))
        highest.set(highest.get().most(stop))
        for into, limit in ((starts, start), (stops, stop)):
            builder.store(into + lane * 4, limit.convert("trunc", I32))
        query = part.query_at(index)
        with builder.loop(0, size) as at:
            builder.store(own + at * vector + lane * 4, builder.load(query + at * 4, F32))
    begin, end = lowest.get() // page_size * page_size, highest.get()

    @contextmanager
    def pages(half: int) -> Iterator[tuple[Value, Value]]:
        """The first token of each page, and how many slots there are to look at, whose numbers are in the
        tile."""
        with builder.loop(begin, end, page_size) as token:
            num_slots, stored = (end - token).least(page_size), part.tile_of(half, token)
            after = part.tile_of(half, (token + page_size).least(end - 1))
            with builder.loop(0, num_slots) as slot:
                part.ask_for(after, slot, 1)
                for at in range(0, size, LANES):
                    numbers = part.floats(
                        stored + slot * heads.slot_bytes + at * heads.numbers.itemsize, LANES
                    )
                    builder.store(tile + slot * (4 * size) + 4 * at, numbers)
            yield token, num_slots

    num_keys = math.gcd(page_size, KEYS)
    with pages(0) as (token, num_slots):
        with builder.loop(0, num_slots, num_keys) as slot:

            def products(lane: int, keys: Value = tile + slot * (4 * size)) -> list[Value]:
                """Of the numbers that have this lane where a query's are read as vectors, with each key."""
                sums = [builder.zeros(F32, most)] * num_keys
                for at in range(lane, size, heads.target.lanes):
                    queries = builder.load(own + at * vector, F32, most)
                    each = (builder.load(keys + 4 * (number * size + at), F32) for number in range(num_keys))
                    sums = [queries.times_plus(key.splat(most), sum_) for key, sum_ in zip(each, sums)]
                return sums

            for number, score in enumerate(add_up(products, heads.target.lanes)):
                builder.store(scores + (token + slot + number) * vector, score)

    share = _soften(builder, scores, (begin, end), (starts, stops), totals, given.softcap)
    with builder.loop(0, size) as at:
        builder.store(mixed + at * vector, builder.zeros(F32, most))
    with pages(1) as (token, num_slots):
        for first in range(0, size, together):
            sums = [
                builder.variable(builder.load(mixed + (first + number) * vector, F32, most))
                for number in range(together)
            ]
            with builder.loop(0, num_slots) as slot:
                weights = builder.load(scores + (token + slot) * vector, F32, most)
                for number, sum_ in enumerate(sums):
                    value = builder.load(tile + slot * (4 * size) + 4 * (first + number), F32)
                    sum_.set(weights.times_plus(value.splat(most), sum_.get()))
            for number, sum_ in enumerate(sums):
                builder.store(mixed + (first + number) * vector, sum_.get())
    with builder.loop(0, size) as at:
        builder.store(mixed + at * vector, builder.load(mixed + at * vector, F32, most) * share)
    with builder.loop(0, part.held) as index:
        into = part.mixed_at(index)
        with builder.loop(0, size) as at:
            builder.store(into + at * 4, builder.load(mixed + at * vector + index * 4, F32))


def _soften(
    builder: Builder,
    scores: Value,
    among: tuple[Value, Value],
    seen: tuple[Value, Value],
    totals: Value,
    softcap: Value,
) -> Value:
    """Makes weights of scores, next to nothing of those that are not seen, and gives what their sum must be
    multiplied with."""
    most = most_queries(builder.target)
    vector = 4 * most
    with builder.when(softcap.is_not(0)):
        cap = softcap.splat(most)
        with builder.loop(*among) as at:
            builder.store(
                scores + at * vector, tanh(builder.load(scores + at * vector, F32, most) / cap) * cap
            )
    start, stop = (builder.load(limit, I32, most) for limit in seen)
    top = builder.variable(builder.number(LOWEST, F32).splat(most))
    with builder.loop(*among) as at:
        token = at.convert("trunc", I32).splat(most)
        score = (token >= start).choose(
            (token < stop).choose(builder.load(scores + at * vector, F32, most), UNSEEN), UNSEEN
        )
        builder.store(scores + at * vector, score)
        top.set(top.get().most(score))
    highest = top.get()
    for lane in range(LANES):
        builder.store(totals + lane * vector, builder.zeros(F32, most))
    with builder.loop(*among) as at:
        weight, total = (
            exp(builder.load(scores + at * vector, F32, most) - highest),
            totals + at % LANES * vector,
        )
        builder.store(scores + at * vector, weight)
        builder.store(total, builder.load(total, F32, most) + weight)
    (sum_,) = add_up(lambda lane: [builder.load(totals + lane * vector, F32, most)], LANES)
    return highest.like(1.0) / sum_.most(SMALLEST)
