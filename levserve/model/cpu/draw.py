"""Draws the tokens of a step on a CPU: all that `model/sampler.py` does in full mode, in one call.

`model/sampler.py` does everything for all rows; this kernel skips for each row what the row does not ask for.
The random numbers are the same. Sums are added in another order, so one draw in a million may differ from
XLA's: on the border between two tokens or at the edge of top-p. XLA takes a second or more to compile the
sampler into every program; this kernel is compiled once, for all models.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from levserve.jit.builder import F32, I32, Builder, Value, Variable
from levserve.jit.target import Target
from levserve.jit.xla_call import Call, Kernel, Stage, register
from levserve.model.cpu import argmax
from levserve.model.cpu.edit import held_slot, is_edited, is_misfit, write_allowed, write_edited
from levserve.model.cpu.floor import NUM_BUCKETS, NUM_SUMS, Cuts, Scratch, find_floor
from levserve.model.cpu.linear import num_used_rows
from levserve.model.cpu.points import make_points
from levserve.model.cpu.row import ARGUMENT, SMALL_BYTES, Buffers, Row
from levserve.model.cpu.softmax import exp
from levserve.model.cpu.span import LANES, Span
from levserve.model.points import SECOND_DRAW
from levserve.model.rules import (
    NO_LOGPROBS,
    NUM_TOP,
    POISONED,
    PROCESSED_LOGPROBS,
    Drawn,
    Masks,
    Memory,
    Rules,
)
from levserve.model.search import CHUNK

TOKENS, LOGPROBS, TOP_IDS, TOP_LOGPROBS = range(4)


def draw_rows(
    logits: jax.Array,
    positions: jax.Array,
    rules: Rules,
    memory: Memory,
    masks: Masks,
    num_used: jax.Array,
    *,
    target: Target,
) -> Drawn:
    """See `sampler.sample`. Rows after the first `num_used` [1] get whatever was in memory."""
    rows = logits.shape[0]
    results = (
        jax.ShapeDtypeStruct((rows,), jnp.int32),
        jax.ShapeDtypeStruct((rows,), jnp.float32),
        jax.ShapeDtypeStruct((rows, NUM_TOP), jnp.int32),
        jax.ShapeDtypeStruct((rows, NUM_TOP), jnp.float32),
    )
    name = register(kernel_for(target))
    return Drawn(*jax.ffi.ffi_call(name, results)(logits, positions, num_used, *rules, *memory, *masks))


def kernel_for(target: Target) -> Kernel:
    return Kernel(
        "levserve_draw",
        target,
        (Stage(_num_rows, _draw_row),),
        scratch_bytes=_scratch_bytes,
        gains_by_unrolling=True,
    )


def _num_rows(call: Call) -> Value:
    return num_used_rows(call, ARGUMENT["num_used"], ARGUMENT["logits"])


def _scratch_bytes(call: Call) -> Value:
    return Buffers.num_bytes(call.argument_size(ARGUMENT["logits"], 1))


def _draw_row(call: Call, _: Value, scratch: Value, number: Value) -> None:
    builder, row = call.builder, Row.read(call, scratch, number)
    results = _Results.of_row(call, number)
    results.clear(builder)
    best, top = argmax.find_largest(builder, row.model_logits.numbers, row.vocab, row.buffers.small)
    with builder.when(_is_finite(top)):
        row.model_logits.fill_tail()
        draw = _Draw(
            row,
            logits=builder.variable(builder.to_address(row.model_logits.numbers)),
            tail=builder.variable(builder.to_address(row.model_logits.tail)),
            best=builder.variable(best),
            top=builder.variable(top),
            token=builder.variable(builder.constant(POISONED)),
        )
        with builder.when(is_edited(row)):
            draw.take(write_edited(row))
        edited = draw.span()
        floor = _draw_until_it_fits(draw)
        builder.store(results.token, draw.token.get().convert("trunc", I32))
        is_told = row.rules["logprobs"].differs_from(NO_LOGPROBS) & draw.token.get().differs_from(POISONED)
        with builder.when(is_told):
            _write_logprobs(row, edited, floor, draw.token.get(), results)


class _Results(NamedTuple):
    token: Value
    logprob: Value
    top_ids: Value
    top_logprobs: Value

    @staticmethod
    def of_row(call: Call, number: Value) -> _Results:
        token, logprob = (call.result(index) + number * 4 for index in (TOKENS, LOGPROBS))
        tops = (call.result(index) + number * (4 * NUM_TOP) for index in (TOP_IDS, TOP_LOGPROBS))
        return _Results(token, logprob, *tops)

    def clear(self, builder: Builder) -> None:
        """Writes the defaults: `POISONED`, for a row that cannot be drawn from, and zeros for the rest."""
        builder.store(self.token, builder.constant(POISONED, I32))
        builder.store(self.logprob, builder.constant(0, F32))
        with builder.loop(0, NUM_TOP) as place:
            builder.store(self.top_ids + place * 4, builder.constant(0, I32))
            builder.store(self.top_logprobs + place * 4, builder.constant(0, F32))


class _Draw(NamedTuple):
    """A row's draw: the addresses of its logits, the best token and its logit, and the token drawn."""

    row: Row
    logits: Variable
    tail: Variable
    best: Variable
    top: Variable
    token: Variable

    def span(self) -> Span:
        builder = self.row.builder
        numbers, tail = (builder.to_pointer(address.get()) for address in (self.logits, self.tail))
        return Span(builder, numbers, self.row.vocab, tail)

    def take(self, logits: Span) -> None:
        """Makes these the logits that the row draws from."""
        builder = self.row.builder
        best, top = argmax.find_largest(builder, logits.numbers, logits.count, self.row.buffers.small)
        self.logits.set(builder.to_address(logits.numbers))
        self.tail.set(builder.to_address(logits.tail))
        self.best.set(best)
        self.top.set(top)


def _draw_until_it_fits(draw: _Draw) -> Value:
    """Draws a token, and again under the row's mask if the mask does not allow the first one.

    Returns the floor of the first draw.
    """
    row = draw.row
    builder, slot = row.builder, held_slot(row)
    first_floor = builder.variable(builder.constant(-math.inf, F32))
    is_wanted = builder.variable(builder.constant(1))
    with builder.loop(0, 2) as attempt, builder.when(is_wanted.get().equals(1)):
        with builder.when(attempt.equals(1)):
            draw.take(write_allowed(row, slot, draw.span()))
        draw.token.set(_is_finite(draw.top.get()).select(draw.best.get(), POISONED))
        is_drawn = builder.constant(0, F32) < row.rules["temperature"]
        with builder.when(is_drawn & _is_finite(draw.top.get())):
            logits, top = draw.span(), draw.top.get()
            floor = find_floor(logits, row.divisor, top / row.divisor, _cuts(row), _floor_scratch(row))
            first_floor.set(attempt.equals(0).select(floor, first_floor.get()))
            draw.token.set(_choose(row, logits, top, floor, attempt))
        is_wanted.set(is_misfit(row, slot, draw.token.get()))
    return first_floor.get()


def _cuts(row: Row) -> Cuts:
    return Cuts(row.rules["top_k"], row.rules["top_p"], row.rules["min_p"])


def _floor_scratch(row: Row) -> Scratch:
    sums = row.buffers.small
    lanes = sums + 4 * NUM_SUMS * NUM_BUCKETS
    assert 4 * NUM_SUMS * NUM_BUCKETS + 8 * LANES <= SMALL_BYTES
    return Scratch(row.buffers.spare, sums, lanes, lanes + 4 * LANES)


def _choose(row: Row, logits: Span, top: Value, floor: Value, attempt: Value) -> Value:
    """Draws a chunk of the vocabulary and then a token in it, with a random number for each."""
    builder, call = row.builder, row.call
    seed = call.argument(ARGUMENT["seed"]) + row.number * 8
    at = (row.position + attempt * SECOND_DRAW).convert("trunc", I32)
    points = make_points(builder, (builder.load(seed, I32), builder.load(seed + 4, I32)), at)
    divisor, least, best = (number.splat(LANES) for number in (row.divisor, floor, top))

    def weights(at: Value) -> Value:
        x = logits.load(at)
        return (x / divisor >= least).select(exp((x - best) / divisor), 0.0)

    size, sums = _chunk_size(row), row.buffers.chunk_sums
    num_chunks = (row.vocab + size - 1) // size
    with builder.loop(0, num_chunks) as number:
        total = builder.variable(builder.zeros(F32, LANES))
        with builder.loop(number * size, (number * size + size).minimum(row.vocab), LANES) as at:
            total.set(total.get() + weights(at))
        builder.store(sums + number * 4, total.get().reduce_sum())
    chunk = _first_beyond(builder, sums, num_chunks, points[0])
    start, within = chunk * size, row.buffers.small
    count = (row.vocab - start).minimum(size)
    with builder.loop(0, count, LANES) as at:
        builder.store(within + at * 4, weights(start + at))
    return start + _first_beyond(builder, within, count, points[1])


def _chunk_size(row: Row) -> Value:
    """The chunk size that `search.chunked` uses."""
    size = row.builder.constant(CHUNK)
    for smaller in (CHUNK // 4, CHUNK // 2, CHUNK):
        size = (row.vocab % smaller).equals(0).select(row.builder.constant(smaller), size)
    return size


def _first_beyond(builder: Builder, weights: Value, count: Value, point: Value) -> Value:
    """The first index at which the running sum exceeds the share `point` of the total; if rounding leaves
    none, the index of the largest weight."""
    total = builder.variable(builder.constant(0, F32))
    largest, fallback = builder.variable(builder.constant(0, F32)), builder.variable(builder.constant(0))
    with builder.loop(0, count) as at:
        weight = builder.load(weights + at * 4, F32)
        total.set(total.get() + weight)
        is_larger = largest.get() < weight
        fallback.set(is_larger.select(at, fallback.get()))
        largest.set(is_larger.select(weight, largest.get()))
    wanted = point * total.get()
    found, reached = builder.variable(fallback.get()), builder.variable(builder.constant(0, F32))
    place = builder.variable(builder.constant(0))
    with builder.repeat() as after:
        builder.break_if(place.get() >= count, after)
        weight = builder.load(weights + place.get() * 4, F32)
        reached.set(reached.get() + weight)
        is_found = (wanted < reached.get()) & (weight.full_like(0.0) < weight)
        found.set(is_found.select(place.get(), found.get()))
        builder.break_if(is_found, after)
        place.set(place.get() + 1)
    return found.get()


def _write_logprobs(row: Row, edited: Span, floor: Value, token: Value, results: _Results) -> None:
    """Writes log-probabilities: of the model's logits, or of the edited ones that are not below the floor."""
    builder, shown = row.builder, row.span(row.buffers.allowed)
    with builder.when(row.rules["logprobs"].equals(PROCESSED_LOGPROBS)):
        is_drawn = builder.constant(0, F32) < row.rules["temperature"]
        divisor = is_drawn.select(row.divisor, 1.0)
        own = builder.load(edited.numbers + token * 4, F32) / divisor
        lowest = is_drawn.select(floor.minimum(own), -math.inf).splat(LANES)
        with edited.vectors() as (at, x):
            scaled = x / divisor.splat(LANES)
            builder.store(shown.numbers + at * 4, (scaled >= lowest).select(scaled, -math.inf))
    with builder.when(row.rules["logprobs"].differs_from(PROCESSED_LOGPROBS)):
        with row.model_logits.vectors() as (at, x):
            builder.store(shown.numbers + at * 4, x)
    _, top = argmax.find_largest(builder, shown.numbers, shown.count, row.buffers.small)
    total = shown.logsumexp(top)
    builder.store(results.logprob, builder.load(shown.numbers + token * 4, F32) - total)
    shown.write_largest(NUM_TOP, row.buffers.small, total, results.top_ids, results.top_logprobs)


def _is_finite(x: Value) -> Value:
    return x.intrinsic("llvm.fabs") < math.inf
