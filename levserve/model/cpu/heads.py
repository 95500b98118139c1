"""What CPU attention is given, how it reads what is stored, and the functions of floats that it needs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp

from levserve.jit.builder import F16, F32, I8, I16, I32, LINE_BYTES, ROUNDER, Builder, Value
from levserve.jit.target import Target
from levserve.model.cache import FP8

LANES = 16
"""Of floats that are read at a time."""
LOWEST, UNSEEN = -1e20, -1e30
"""Where the highest score is looked for from, and so far below it, in place of what is not seen, that its
weight is nothing."""
SMALLEST = 1e-30
"""In place of a sum of nothing: a query of padding gets zeros."""
LOG2_E = math.log2(math.e)
POWERS = tuple(math.log(2) ** n / math.factorial(n) for n in range(7))
"""Of 2^x around 0, to float32's last bit for half a step to either side."""
SMALLEST_POWER = -127.0
"""What is no larger is 0, so that what is not seen adds nothing at all."""


@dataclass(frozen=True)
class Heads:
    """What is known when the kernel is written: key-value heads, queries of each, numbers of a head, slots of
    a page and their type."""

    kv_heads: int
    group: int
    size: int
    page_size: int
    numbers: jnp.dtype
    target: Target

    @property
    def slot_bytes(self) -> int:
        """Of one key or value of a head."""
        return self.size * self.numbers.itemsize

    @property
    def tile_bytes(self) -> int:
        """Of the keys, or the values, of a page and head."""
        return self.page_size * self.slot_bytes


@dataclass(frozen=True)
class Given:
    """What is known when it runs. Queries lie `q_bytes` apart from one token to the next, and what is mixed
    for them `mixed_bytes`."""

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
    joined: Value | None = None
    """For each row of a single token how many follow, itself included, that are attended with it; 0 if it is
    one of those. None: 1."""

    def num_queries(self, heads: Heads) -> Value:
        """Of one row and head."""
        return self.chunk * heads.group

    def num_parts(self, heads: Heads, most: int) -> Value:
        """Of the queries of one row and head, with so many in a part at most."""
        return (self.num_queries(heads) + (most - 1)) // most

    def num_tokens(self, heads: Heads) -> Value:
        """That a row may have, to a whole number of vectors."""
        return (self.table_width * heads.page_size + (LANES - 1)) // LANES * LANES


class Part:
    """A few neighbouring queries over one key-value head of one row, or of some that follow it and have its
    pages."""

    def __init__(
        self, builder: Builder, heads: Heads, given: Given, row: Value, head: Value, first: Value, held: Value
    ) -> None:
        self.builder, self.heads, self.given = builder, heads, given
        self.head, self.first, self.held = head, first, held
        self.row_start = row * given.chunk
        self.table = given.table + row * given.table_width * 4

    def query_at(self, index: Value) -> Value:
        return self.given.q + self._token_of(index) * self.given.q_bytes + self._within_token(index)

    def mixed_at(self, index: Value) -> Value:
        return self.given.mixed + self._token_of(index) * self.given.mixed_bytes + self._within_token(index)

    def seen(self, index: Value) -> tuple[Value, Value]:
        """From which token to which a query may look."""
        stop = (self.builder.index(self.given.positions, self._token_of(index)) + 1).most(0)
        return self.given.window.is_(0).choose(
            self.builder.number(0), (stop - self.given.window).most(0)
        ), stop

    def tile_of(self, half: int, token: Value) -> Value:
        """The keys or the values of a token's page."""
        page = self.builder.index(self.table, token // self.heads.page_size)
        return self.given.pool + ((page * 2 + half) * self.heads.kv_heads + self.head) * self.heads.tile_bytes

    def floats(self, stored: Value, lanes: int) -> Value:
        """A vector of what is stored, in float32."""
        builder, numbers = self.builder, self.heads.numbers
        if numbers == jnp.float32:
            return builder.load(stored, F32, lanes)
        if numbers == jnp.bfloat16:
            return (builder.load(stored, I16, lanes).convert("zext", I32) << 16).convert("bitcast", F32)
        assert numbers == FP8
        # In the places of a float16, whose exponent begins 8 lower.
        bits = builder.load(stored, I8, lanes).convert("zext", I16)
        number = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).convert("bitcast", F16).convert(
            "fpext", F32
        ) * 256.0
        return (bits & 0x7F).is_(0x7F).choose(math.nan, number)

    def ask_for(self, tile: Value, slot: Value, count: int) -> None:
        """Some slots of a page that will be read soon."""
        for line in range(0, count * self.heads.slot_bytes, LINE_BYTES):
            self.builder.prefetch(tile + slot * self.heads.slot_bytes + line)

    def _token_of(self, index: Value) -> Value:
        return self.row_start + (self.first + index) // self.heads.group

    def _within_token(self, index: Value) -> Value:
        return (self.head * self.heads.group + (self.first + index) % self.heads.group) * (
            4 * self.heads.size
        )


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
