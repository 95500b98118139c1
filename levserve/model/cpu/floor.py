"""Finds where top-k, top-p and min-p cut off a row's logits on a CPU, as `model/truncation.py` does with XLA.

The floor is the highest logit such that the tokens at or above it weigh enough: for top-k a token weighs 1,
for top-p its probability. A radix search finds it one byte at a time, from the highest. The weights of the
remaining logits are summed by their next byte. The sums, added from the largest byte on, show at which byte
there is enough weight, and only the logits with that byte remain.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from levserve.jit.builder import F32, I32, Builder, Value
from levserve.model.cpu.softmax import exp
from levserve.model.cpu.span import LANES, Span, from_sortable, log, sortable

NUM_BYTES, NUM_BUCKETS = 4, 256
NUM_SUMS = 4
"""Sums for each byte, used by turns, so that an addition need not wait for the one before."""
TOP_K, TOP_P = range(2)


class Cuts(NamedTuple):
    """The rules of a row: int64, float32, float32."""

    top_k: Value
    top_p: Value
    min_p: Value


class Scratch(NamedTuple):
    numbers: Value
    """float32, one for each token of the vocabulary and `LANES` more."""
    sums: Value
    """float32 [NUM_SUMS, NUM_BUCKETS]"""
    bytes: Value
    """int32 [LANES]"""
    weights: Value
    """float32 [LANES]"""


def find_floor(logits: Span, divisor: Value, top: Value, cuts: Cuts, scratch: Scratch) -> Value:
    """The lowest logit, divided by the temperature, that may be drawn. `top` is the largest, divided."""
    builder = logits.builder
    floor = builder.variable(builder.constant(-math.inf, F32))
    with builder.loop(TOP_K, TOP_P + 1) as rule:
        is_top_k = rule.equals(TOP_K)
        limits_k = (cuts.top_k >= 1) & (cuts.top_k < logits.count)
        with builder.when(is_top_k.select(limits_k, cuts.top_p < 1)):
            search = _Search(builder, scratch, top, floor.get(), is_top_k)
            floor.set(floor.get().maximum(search.find(logits, divisor, cuts)))
    with builder.when(builder.constant(0, F32) < cuts.min_p):
        floor.set(floor.get().maximum(top + log(builder, cuts.min_p)))
    return floor.get()


class _Search(NamedTuple):
    """The search for one of the two rules."""

    builder: Builder
    scratch: Scratch
    top: Value
    floor: Value
    """The floor of the rule before; logits below it weigh nothing."""
    is_top_k: Value

    def find(self, logits: Span, divisor: Value, cuts: Cuts) -> Value:
        builder, numbers = self.builder, self.scratch.numbers
        with logits.vectors() as (at, x):
            builder.store(numbers + at * 4, x / divisor.splat(LANES))
        count, above = builder.variable(logits.count), builder.variable(builder.constant(0, F32))
        wanted, found = builder.variable(builder.constant(0, F32)), builder.variable(builder.constant(0, I32))
        with builder.loop(0, NUM_BYTES) as number:
            shift = ((number - (NUM_BYTES - 1)) * -8).convert("trunc", I32)
            self._sum_by_byte(count.get(), shift)
            with builder.when(number.equals(0)):
                share = cuts.top_p * self._total()
                wanted.set(self.is_top_k.select(cuts.top_k.convert("sitofp", F32), share))
            byte, before = self._choose_byte(wanted.get(), above.get())
            above.set(before)
            count.set(self._keep(count.get(), shift, byte))
            found.set((found.get() << 8) | byte.convert("trunc", I32))
        return from_sortable(found.get() ^ -(2**31))

    def _bytes(self, x: Value, shift: Value) -> Value:
        """The byte at `shift` of each float32, converted so that bytes compare as the floats do."""
        return ((sortable(x) ^ -(2**31)) >> shift.splat(LANES)) & (NUM_BUCKETS - 1)

    def _sum_by_byte(self, count: Value, shift: Value) -> None:
        builder, (numbers, sums, bytes_, weights) = self.builder, self.scratch
        with builder.loop(0, NUM_SUMS * NUM_BUCKETS, LANES) as at:
            builder.store(sums + at * 4, builder.zeros(F32, LANES))
        with builder.loop(0, count, LANES) as at:
            x = builder.load(numbers + at * 4, F32, LANES)
            probabilities = (x >= self.floor.splat(LANES)).select(exp(x - self.top.splat(LANES)), 0.0)
            ones = (x.full_like(-math.inf) < x).select(x.full_like(1.0), 0.0)
            builder.store(weights, self.is_top_k.select(ones, probabilities))
            builder.store(bytes_, self._bytes(x, shift))
            with builder.loop(0, LANES, NUM_SUMS) as lane:
                for turn in range(NUM_SUMS):
                    byte = builder.load_int32(bytes_, lane + turn)
                    into = sums + (byte + turn * NUM_BUCKETS) * 4
                    weight = builder.load(weights + (lane + turn) * 4, F32)
                    builder.store(into, builder.load(into, F32) + weight)
        with builder.loop(0, NUM_BUCKETS, LANES) as at:
            parts = [
                builder.load(sums + (at + turn * NUM_BUCKETS) * 4, F32, LANES) for turn in range(NUM_SUMS)
            ]
            builder.store(sums + at * 4, parts[0] + parts[1] + parts[2] + parts[3])

    def _total(self) -> Value:
        builder = self.builder
        total = builder.variable(builder.zeros(F32, LANES))
        with builder.loop(0, NUM_BUCKETS, LANES) as at:
            total.set(total.get() + builder.load(self.scratch.sums + at * 4, F32, LANES))
        return total.get().reduce_sum()

    def _choose_byte(self, wanted: Value, above: Value) -> tuple[Value, Value]:
        """The largest byte at which there is enough weight, or else the smallest that has any; and the weight
        of all larger ones."""
        builder = self.builder
        byte, before = builder.variable(builder.constant(0)), builder.variable(above)
        reached, is_enough = builder.variable(above), builder.variable(builder.constant(0))
        with builder.loop(0, NUM_BUCKETS) as number:
            candidate = (number - (NUM_BUCKETS - 1)) * -1
            weight = builder.load(self.scratch.sums + candidate * 4, F32)
            with builder.when(is_enough.get().equals(0)), builder.when(weight.full_like(0.0) < weight):
                byte.set(candidate)
                before.set(reached.get())
                reached.set(reached.get() + weight)
                is_enough.set((reached.get() >= wanted).select(builder.constant(1), 0))
        return byte.get(), before.get()

    def _keep(self, count: Value, shift: Value, byte: Value) -> Value:
        """Moves the numbers with this byte to the front, followed by minus infinity; returns their count."""
        builder, numbers, bytes_ = self.builder, self.scratch.numbers, self.scratch.bytes
        kept, wanted = builder.variable(builder.constant(0)), byte.convert("trunc", I32).splat(LANES)
        with builder.loop(0, count, LANES) as at:
            x = builder.load(numbers + at * 4, F32, LANES)
            is_kept = (self._bytes(x, shift) ^ wanted).equals(0).select(builder.zeros(I32, LANES) + 1, 0)
            with builder.when(is_kept.reduce_sum().differs_from(0)):
                builder.store(bytes_, is_kept)
                with builder.loop(0, LANES) as lane:
                    number = builder.load(numbers + (at + lane) * 4, F32)
                    builder.store(numbers + kept.get() * 4, number)
                    kept.set(kept.get() + builder.load_int32(bytes_, lane))
        builder.store(numbers + kept.get() * 4, builder.constant(-math.inf, F32).splat(LANES))
        return kept.get()
