"""One row of numbers on a CPU, read in vectors of `LANES`: their log-sum-exp and the largest of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from levserve.jit.builder import F32, I32, Builder, Value
from levserve.model.cpu.softmax import exp

LANES = 32
"""As many as the bits of a word of a mask."""


@dataclass(frozen=True)
class Span:
    """float32 [count]. A last vector that is not full is read from `tail`, where it is padded with minus
    infinity."""

    builder: Builder
    numbers: Value
    count: Value
    tail: Value

    def fill_tail(self) -> None:
        """Copies the numbers after the last full vector to the tail."""
        builder, start = self.builder, self.count // LANES * LANES
        builder.store(self.tail, builder.constant(-math.inf, F32).splat(LANES))
        with builder.loop(start, self.count) as at:
            builder.store(self.tail + (at - start) * 4, builder.load(self.numbers + at * 4, F32))

    def load(self, at: Value) -> Value:
        """The vector that begins at a multiple of `LANES`."""
        is_full = self.count >= at + LANES
        numbers = is_full.select(self.numbers + at * 4, self.tail)
        return self.builder.load(numbers, F32, LANES)

    @contextmanager
    def vectors(self) -> Iterator[tuple[Value, Value]]:
        """Repeats what is written inside for each vector, given where it begins."""
        with self.builder.loop(0, self.count, LANES) as at:
            yield at, self.load(at)

    def logsumexp(self, largest: Value) -> Value:
        """The logarithm of the sum of e^x over all numbers, of which the largest is known."""
        builder, top = self.builder, largest.splat(LANES)
        sums = builder.variable(builder.zeros(F32, LANES))
        with self.vectors() as (_, x):
            sums.set(sums.get() + exp(x - top))
        return log(builder, sums.get().reduce_sum()) + largest

    def write_largest(self, num: int, scratch: Value, total: Value, ids: Value, values: Value) -> None:
        """Writes the indices of the largest numbers, int32 [num], and these less `total`, float32 [num].

        They are in descending order, equal ones by index. The scratch memory holds `num` int32.
        """
        builder, count = self.builder, self.count
        lowest = builder.constant(-(2**31), I32)
        with builder.loop(0, num) as place:
            builder.store(scratch + place * 4, lowest)
        last = builder.variable(lowest)
        with self.vectors() as (at, x):
            is_larger = last.get().splat(LANES) < sortable(x)
            any_larger = is_larger.select(builder.zeros(I32, LANES) + 1, 0).reduce_sum().differs_from(0)
            with builder.when(any_larger), builder.loop(at, (at + LANES).minimum(count)) as index:
                number = builder.load(self.numbers + index * 4, F32)
                with builder.when(last.get() < sortable(number)):
                    self._insert(number, index, num, scratch, ids, values)
                    last.set(builder.load(scratch + 4 * (num - 1), I32))
        with builder.loop(0, num) as place:
            builder.store(values + place * 4, builder.load(values + place * 4, F32) - total)

    def _insert(self, number: Value, index: Value, num: int, keys: Value, ids: Value, values: Value) -> None:
        """Moves smaller numbers to the right, which drops the last, and writes the number before them."""
        builder, key = self.builder, sortable(number)
        place = builder.variable(builder.constant(num - 1))
        with builder.repeat() as after:
            builder.break_if(place.get().equals(0), after)
            before = place.get() - 1
            builder.break_if(builder.load(keys + before * 4, I32) >= key, after)
            for array, dtype in (keys, I32), (ids, I32), (values, F32):
                builder.store(array + place.get() * 4, builder.load(array + before * 4, dtype))
            place.set(before)
        builder.store(keys + place.get() * 4, key)
        builder.store(ids + place.get() * 4, index.convert("trunc", I32))
        builder.store(values + place.get() * 4, number)


def sortable(x: Value) -> Value:
    """Floats as int32 that compare in the same order; no float becomes the lowest int32."""
    bits = x.convert("bitcast", I32)
    return (bits < 0).select(bits ^ 0x7FFFFFFF, bits)


def from_sortable(bits: Value) -> Value:
    return (bits < 0).select(bits ^ 0x7FFFFFFF, bits).convert("bitcast", F32)


def log(builder: Builder, x: Value) -> Value:
    """The C library's logarithm."""
    return Value(builder, builder.call_symbol("logf", F32, x.ir_value))
