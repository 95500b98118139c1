"""A few queries of a row on a CPU: keys and values are read where they lie, each once for all of them.

All scores are kept, so there is no running softmax.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from levserve.jit.builder import F32, Builder, Value
from levserve.model.cpu.heads import LANES, LOWEST, SMALLEST, UNSEEN, Given, Heads, Part, exp, tanh

MOST = 4
"""Queries that share what is read: more would not fit into the registers of every CPU."""
KEYS = 4
"""That are multiplied at a time, so that a query which was loaded is used so often, and their sums are added
up together."""
SUMS = 16
"""Registers that what is mixed may take: the rest is for what it is mixed of."""
LATEST = 2**31
"""After every token."""


def own_bytes(heads: Heads, given: Given) -> Value:
    """What the weights of each query must be divided by, then their scores, which become weights."""
    return _score_bytes(heads, given) * MOST + 4 * LANES


class Page(NamedTuple):
    """Keys or values of one, while it is looked at."""

    tile: Value
    after: Value
    """Those of the next page, or of the last."""
    num_slots: Value
    """To look at."""
    token: Value
    """The first."""


def attend_few(builder: Builder, heads: Heads, given: Given, totals: Value, part: Part) -> None:
    size, page_size, slot_bytes = heads.size, heads.page_size, heads.slot_bytes
    stride, scores = _score_bytes(heads, given), totals + 4 * LANES
    lowest, highest = builder.variable(builder.number(LATEST)), builder.variable(builder.number(0))
    with builder.loop(0, part.held) as index:
        start, stop = part.seen(index)
        lowest.set(lowest.get().least(start))
        highest.set(highest.get().most(stop))
    begin, end = (
        lowest.get() // page_size * page_size,
        (highest.get() + (page_size - 1)) // page_size * page_size,
    )
    # Whole ones, as the scores' memory is.
    vectors = (
        begin // LANES * LANES,
        (end + (LANES - 1)) // LANES * LANES,
        LANES,
    )

    @contextmanager
    def pages(half: int) -> Iterator[Page]:
        with builder.loop(begin, end, page_size) as token:
            after = (token + page_size).least(end - page_size)
            yield Page(
                part.tile_of(half, token),
                part.tile_of(half, after),
                (highest.get() - token).least(page_size),
                token,
            )

    def score(page: Page, queries: list[Value], into: list[Value]) -> None:
        """Products of the queries with each key of a page, a few keys at a time; what comes after the last is
        never seen."""
        num_keys, lanes = KEYS if page_size % KEYS == 0 else 1, heads.target.lanes
        with builder.loop(0, page.num_slots, num_keys) as slot:
            part.ask_for(page.after, slot, num_keys)
            sums = [[builder.zeros(F32, lanes)] * num_keys for _ in queries]
            for at in range(0, size, lanes):
                places = [
                    page.tile + (slot + number) * slot_bytes + at * heads.numbers.itemsize
                    for number in range(num_keys)
                ]
                keys = [part.floats(place, lanes) for place in places]
                for query, each in zip(queries, sums):
                    numbers = builder.load(query + at * 4, F32, lanes)
                    each[:] = [key.times_plus(numbers, sum_) for key, sum_ in zip(keys, each)]
            for each, scores in zip(sums, into):
                builder.store(
                    scores + slot * 4, builder.totals(*each) if num_keys == KEYS else each[0].total()
                )

    def mix(page: Page, weights: list[Value], into: list[Value]) -> None:
        """Adds the values of a page, weighted; as many of their numbers at a time as there are registers
        for."""
        together = max(1, SUMS // (len(into) * max(1, LANES // heads.target.lanes))) * LANES
        for first in range(0, size, together):
            places = range(first, min(first + together, size), LANES)
            sums = [
                [builder.variable(builder.load(place + 4 * at, F32, LANES)) for at in places]
                for place in into
            ]
            with builder.loop(0, page.num_slots) as slot:
                if first == 0:
                    part.ask_for(page.after, slot, 1)
                stored = page.tile + slot * slot_bytes
                values = [part.floats(stored + at * heads.numbers.itemsize, LANES) for at in places]
                for weight, each in zip(weights, sums):
                    share = builder.load(weight + slot * 4, F32).splat(LANES)
                    for value, sum_ in zip(values, each):
                        sum_.set(value.times_plus(share, sum_.get()))
            for place, each in zip(into, sums):
                for at, sum_ in zip(places, each):
                    builder.store(place + 4 * at, sum_.get())

    for number in range(1, MOST + 1):
        places = [builder.number(index) for index in range(number)]
        with builder.when(part.held.is_(number)):
            with pages(0) as page:
                into = [scores + stride * index + page.token * 4 for index in range(number)]
                score(page, [part.query_at(index) for index in places], into)
    with builder.loop(0, part.held) as index:
        builder.store(
            totals + index * 4,
            _soften(builder, scores + stride * index, vectors, part.seen(index), given.softcap),
        )
        for at in range(0, size, LANES):
            builder.store(part.mixed_at(index) + 4 * at, builder.zeros(F32, LANES))
    for number in range(1, MOST + 1):
        places = [builder.number(index) for index in range(number)]
        with builder.when(part.held.is_(number)):
            with pages(1) as page:
                weights = [scores + stride * index + page.token * 4 for index in range(number)]
                mix(page, weights, [part.mixed_at(index) for index in places])
    with builder.loop(0, part.held) as index:
        share = (builder.number(1.0, F32) / builder.load(totals + index * 4, F32)).splat(LANES)
        for at in range(0, size, LANES):
            place = part.mixed_at(index) + 4 * at
            builder.store(place, builder.load(place, F32, LANES) * share)


def _score_bytes(heads: Heads, given: Given) -> Value:
    """Of one query's scores."""
    return given.num_tokens(heads) * 4


def _soften(
    builder: Builder,
    scores: Value,
    among: tuple[Value, Value, int],
    seen: tuple[Value, Value],
    softcap: Value,
) -> Value:
    """Makes weights of scores, next to nothing of those that are not seen, and gives their sum."""
    first, last, _ = among
    with builder.when(softcap.is_not(0)):
        cap = softcap.splat(LANES)
        with builder.loop(*among) as at:
            builder.store(scores + at * 4, tanh(builder.load(scores + at * 4, F32, LANES) / cap) * cap)
    for start, stop in ((first, seen[0]), (seen[1], last)):
        with builder.loop(start, stop) as at:
            builder.store(scores + at * 4, builder.number(UNSEEN, F32))
    top = builder.variable(builder.number(LOWEST, F32).splat(LANES))
    with builder.loop(*among) as at:
        top.set(top.get().most(builder.load(scores + at * 4, F32, LANES)))
    highest = top.get().largest().splat(LANES)
    total = builder.variable(builder.zeros(F32, LANES))
    with builder.loop(*among) as at:
        weight = exp(builder.load(scores + at * 4, F32, LANES) - highest)
        builder.store(scores + at * 4, weight)
        total.set(total.get() + weight)
    return total.get().total().most(SMALLEST)
