"""Queries over their rows' pages on a CPU: keys and values are read where they lie, each once for up to four queries.

XLA would gather the pages first and multiply matrices of three rows: here a step of 32 rows takes a third of the time. A piece
of the work is a few neighbouring queries of one row over one key-value head, with all scores of those queries in memory of
their own, so there is no running softmax.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from levserve.model.cache import FP8, numbers_of
from levserve.model.kernels.handler import Call, Kernel, Work, register
from levserve.model.kernels.writer import F16, F32, I8, I16, I32, ROUNDER, Value, Writer, vector_bytes

TOGETHER = 4
"""Queries that share what is read: more would not fit into the registers of every CPU."""
LANES = 16
KEYS = 4
"""That are multiplied at a time, so that a query which was loaded is used so often, and their sums are added up together."""
LINE_BYTES = 64
"""Of the cache."""
LOWEST, UNSEEN = -1e20, -1e30
"""Where the highest score is looked for from, and so far below it, in place of what is not seen, that its weight is nothing."""
SMALLEST = 1e-30
"""In place of a sum of nothing: a query of padding gets zeros."""
LATEST = 2**31
"""After every token."""
LOG2_E = math.log2(math.e)
POWERS = tuple(math.log(2) ** n / math.factorial(n) for n in range(7))
"""Of 2^x around 0, to float32's last bit for half a step to either side."""
SMALLEST_POWER = -126.0


def refuse_unservable(head_dim: int) -> str | None:
    """Why this kernel cannot serve a model, or None."""
    if head_dim % LANES:
        return f"a head size of {head_dim} (it takes multiples of {LANES})"
    return None


def paged_attention(
    q: jax.Array, pool: jax.Array, table: jax.Array, positions: jax.Array, *, window: int | None = None, softcap: float | None = None
) -> jax.Array:
    """As `attend`, of queries that are scaled."""
    _, _, kv_heads, group, size = q.shape
    numbers = numbers_of(pool)
    name = f"levserve_attend_{numbers}_{kv_heads}_{group}_{size}_{pool.shape[3]}"
    register(name, kernel_for(Heads(kv_heads, group, size, pool.shape[3], numbers)))
    limits = jnp.asarray([0 if window is None else window], jnp.int32), jnp.asarray([softcap or 0.0], jnp.float32)
    return jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(q.shape, jnp.float32))(q.astype(jnp.float32), pool, table, positions, *limits)


@dataclass(frozen=True)
class Heads:
    """What is known when the kernel is written: key-value heads, queries of each, numbers of a head, slots of a page and their type."""

    kv_heads: int
    group: int
    size: int
    page_size: int
    numbers: jnp.dtype

    @property
    def tile_bytes(self) -> int:
        """Of the keys, or the values, of a page and head."""
        return self.page_size * self.size * self.numbers.itemsize


@dataclass(frozen=True)
class Given:
    """What is known when it runs. Queries lie `q_bytes` apart from one token to the next, and what is mixed for them `mixed_bytes`."""

    q: Value
    mixed: Value
    q_bytes: int
    mixed_bytes: int
    pool: Value
    table: Value
    positions: Value
    window: Value
    softcap: Value
    chunk: Value
    table_width: Value

    def num_queries(self, heads: Heads) -> Value:
        """Of one row and head."""
        return self.chunk * heads.group

    def num_pieces(self, heads: Heads, rows: Value) -> Value:
        return rows * heads.kv_heads * self.num_parts(heads)

    def num_parts(self, heads: Heads) -> Value:
        """Of the queries of one row and head."""
        return (self.num_queries(heads) + (TOGETHER - 1)) // TOGETHER

    def score_bytes(self, heads: Heads) -> Value:
        """Of one query's scores, to a whole number of vectors."""
        return (self.table_width * heads.page_size + (LANES - 1)) // LANES * (4 * LANES)

    def own_bytes(self, heads: Heads) -> Value:
        """Of a few queries: what the weights of each must be divided by, then their scores, which become weights."""
        return self.score_bytes(heads) * TOGETHER + 4 * LANES


def kernel_for(heads: Heads) -> Kernel:
    """For arguments q [row, chunk, kv_head, group, size], pool, table [row, page], positions [row, chunk], window, softcap."""
    token_bytes = heads.kv_heads * heads.group * heads.size * 4

    def given(call: Call) -> Given:
        q, pool, table, positions, window, softcap = map(call.argument, range(6))
        writer = call.writer
        limits = writer.index(window, writer.number(0)), writer.load(softcap, F32)
        sizes = call.argument_size(0, 1), call.argument_size(2, 1)
        return Given(q, call.result(0), token_bytes, token_bytes, pool, table, positions, *limits, *sizes)

    def count(call: Call) -> Value:
        return given(call).num_pieces(heads, call.argument_size(0, 0))

    def attend(call: Call, _: Value, own: Value, piece: Value) -> None:
        attend_part(call.writer, heads, given(call), own, piece)

    return Kernel((Work(count, attend),), own_bytes=lambda call: given(call).own_bytes(heads))


class Page(NamedTuple):
    """Keys or values of one, while it is looked at."""

    tile: Value
    after: Value
    """Those of the next page, or of the last."""
    num_slots: Value
    """To look at."""
    token: Value
    """The first."""


def attend_part(writer: Writer, heads: Heads, given: Given, totals: Value, piece: Value) -> None:
    """A few neighbouring queries of one row over one key-value head."""
    size, group, page_size, item = heads.size, heads.group, heads.page_size, heads.numbers.itemsize
    stride, scores = given.score_bytes(heads), totals + 4 * LANES
    parts, queries = given.num_parts(heads), given.num_queries(heads)
    pair, part = piece // parts, piece % parts
    row, head = pair // heads.kv_heads, pair % heads.kv_heads
    each = (queries + (parts - 1)) // parts  # of 5 there are 3 and 2, not 4 and 1
    first = part * each
    held = (queries - first).least(each).most(0)
    row_start = row * given.chunk
    table = given.table + row * given.table_width * 4

    def query_at(index: Value) -> Value:
        return given.q + token_of(index) * given.q_bytes + within_token(index)

    def mixed_at(index: Value) -> Value:
        return given.mixed + token_of(index) * given.mixed_bytes + within_token(index)

    def token_of(index: Value) -> Value:
        return row_start + (first + index) // group

    def within_token(index: Value) -> Value:
        return (head * group + (first + index) % group) * (4 * size)

    def seen(index: Value) -> tuple[Value, Value]:
        """From which token to which a query may look."""
        stop = (writer.index(given.positions, token_of(index)) + 1).most(0)
        return given.window.is_(0).choose(writer.number(0), (stop - given.window).most(0)), stop

    lowest, highest = writer.variable(writer.number(LATEST)), writer.variable(writer.number(0))
    with writer.loop(0, held) as index:
        start, stop = seen(index)
        lowest.set(lowest.get().least(start))
        highest.set(highest.get().most(stop))
    begin, end = lowest.get() // page_size * page_size, (highest.get() + (page_size - 1)) // page_size * page_size
    vectors = begin // LANES * LANES, (end + (LANES - 1)) // LANES * LANES, LANES  # whole ones, as the scores' memory is

    def tile_of(half: int, token: Value) -> Value:
        """The keys or the values of a token's page."""
        return given.pool + ((writer.index(table, token // page_size) * 2 + half) * heads.kv_heads + head) * heads.tile_bytes

    @contextmanager
    def pages(half: int) -> Iterator[Page]:
        with writer.loop(begin, end, page_size) as token:
            after = (token + page_size).least(end - page_size)
            yield Page(tile_of(half, token), tile_of(half, after), (highest.get() - token).least(page_size), token)

    def ask_ahead(page: Page, slot: Value, count: int) -> None:
        for line in range(0, count * size * item, LINE_BYTES):
            writer.prefetch(page.after + slot * (size * item) + line)

    def score(page: Page, queries: list[Value], into: list[Value]) -> None:
        """Products of the queries with each key of a page, a few keys at a time; what comes after the last is never seen."""
        num_keys = KEYS if page_size % KEYS == 0 else 1
        with writer.loop(0, page.num_slots, num_keys) as slot:
            ask_ahead(page, slot, num_keys)
            lanes = vector_bytes() // 4
            sums = [[writer.zeros(F32, lanes)] * num_keys for _ in queries]
            for at in range(0, size, lanes):
                keys = [floats(page.tile + (slot + number) * (size * item) + at * item, lanes) for number in range(num_keys)]
                for query, each in zip(queries, sums):
                    numbers = writer.load(query + at * 4, F32, lanes)
                    each[:] = [key.times_plus(numbers, sum_) for key, sum_ in zip(keys, each)]
            for each, scores in zip(sums, into):
                writer.store(scores + slot * 4, writer.totals(*each) if num_keys == KEYS else each[0].total())

    def mix(page: Page, weights: list[Value], into: list[Value]) -> None:
        """Adds the values of a page, weighted."""
        for at in range(0, size, LANES):
            sums = [writer.variable(writer.load(place + 4 * at, F32, LANES)) for place in into]
            with writer.loop(0, page.num_slots) as slot:
                if at == 0:
                    ask_ahead(page, slot, 1)
                value = floats(page.tile + slot * (size * item) + item * at, LANES)
                for weight, sum_ in zip(weights, sums):
                    sum_.set(value.times_plus(writer.load(weight + slot * 4, F32).splat(LANES), sum_.get()))
            for place, sum_ in zip(into, sums):
                writer.store(place + 4 * at, sum_.get())

    def floats(stored: Value, lanes: int) -> Value:
        """A vector of what is stored, in float32."""
        if heads.numbers == jnp.float32:
            return writer.load(stored, F32, lanes)
        if heads.numbers == jnp.bfloat16:
            return (writer.load(stored, I16, lanes).convert("zext", I32) << 16).convert("bitcast", F32)
        assert heads.numbers == FP8
        bits = writer.load(stored, I8, lanes).convert("zext", I16)  # in the places of a float16, whose exponent begins 8 lower
        number = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).convert("bitcast", F16).convert("fpext", F32) * 256.0
        return (bits & 0x7F).is_(0x7F).choose(math.nan, number)

    for number in range(1, TOGETHER + 1):
        places = [writer.number(index) for index in range(number)]
        with writer.when(held.is_(number)):
            with pages(0) as page:
                into = [scores + stride * index + page.token * 4 for index in range(number)]
                score(page, [query_at(index) for index in places], into)
    with writer.loop(0, held) as index:
        writer.store(totals + index * 4, soften(writer, scores + stride * index, vectors, seen(index), given.softcap))
        for at in range(0, size, LANES):
            writer.store(mixed_at(index) + 4 * at, writer.zeros(F32, LANES))
    for number in range(1, TOGETHER + 1):
        places = [writer.number(index) for index in range(number)]
        with writer.when(held.is_(number)):
            with pages(1) as page:
                weights = [scores + stride * index + page.token * 4 for index in range(number)]
                mix(page, weights, [mixed_at(index) for index in places])
    with writer.loop(0, held) as index:
        share = (writer.number(1.0, F32) / writer.load(totals + index * 4, F32)).splat(LANES)
        for at in range(0, size, LANES):
            place = mixed_at(index) + 4 * at
            writer.store(place, writer.load(place, F32, LANES) * share)


def soften(writer: Writer, scores: Value, among: tuple[Value, Value, int], seen: tuple[Value, Value], softcap: Value) -> Value:
    """Makes weights of scores, next to nothing of those that are not seen, and gives their sum."""
    first, last, _ = among
    with writer.when(softcap.is_not(0)):
        cap = softcap.splat(LANES)
        with writer.loop(*among) as at:
            writer.store(scores + at * 4, tanh(writer.load(scores + at * 4, F32, LANES) / cap) * cap)
    for start, stop in ((first, seen[0]), (seen[1], last)):
        with writer.loop(start, stop) as at:
            writer.store(scores + at * 4, writer.number(UNSEEN, F32))
    top = writer.variable(writer.number(LOWEST, F32).splat(LANES))
    with writer.loop(*among) as at:
        top.set(top.get().most(writer.load(scores + at * 4, F32, LANES)))
    highest = top.get().largest().splat(LANES)
    total = writer.variable(writer.zeros(F32, LANES))
    with writer.loop(*among) as at:
        weight = exp(writer.load(scores + at * 4, F32, LANES) - highest)
        writer.store(scores + at * 4, weight)
        total.set(total.get() + weight)
    return total.get().total().most(SMALLEST)


def exp(x: Value) -> Value:
    """e^x of what is not above some 80; of what is not a number, that."""
    power = (x * LOG2_E).most(SMALLEST_POWER)
    rounded = power + ROUNDER
    rest = power - (rounded - ROUNDER)
    sum_ = rest * POWERS[-1] + POWERS[-2]
    for factor in reversed(POWERS[:-2]):
        sum_ = sum_.times_plus(rest, sum_.like(factor))
    return sum_ * ((rounded.convert("bitcast", I32) + 127) << 23).convert("bitcast", F32)


def tanh(x: Value) -> Value:
    """By what is left of e^-2|x|, which cannot overflow."""
    size = x.call("llvm.fabs")
    left = exp(size * -2.0)
    return ((left * -1.0 + 1.0) / (left + 1.0)).call("llvm.copysign", x)
