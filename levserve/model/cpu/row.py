"""One row as the kernel that draws tokens sees it: its rules, its memory, and work buffers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from levserve.jit.builder import F32, Builder, Value
from levserve.jit.xla_call import Call
from levserve.model.cpu.span import LANES, Span
from levserve.model.rules import Masks, Memory, Rules
from levserve.model.search import CHUNK

NAMES = ("logits", "positions", "num_used", *Rules._fields, *Memory._fields, *Masks._fields)
ARGUMENT = {name: index for index, name in enumerate(NAMES)}
"""The arguments of a call."""
FLOATS = frozenset(("temperature", "top_p", "min_p", "presence", "frequency", "repetition"))
INTEGERS = frozenset(("top_k", "prompt_len", "num_edits", "logprobs", "is_constrained"))
assert FLOATS | INTEGERS | {"seed"} == set(Rules._fields), (
    "the kernel would ignore a rule that it does not know"
)
SMALLEST_DIVISOR = 1e-5
SMALL_BYTES = 8192


class Buffers(NamedTuple):
    """A thread's scratch memory. The first three hold a number for each token of the vocabulary, padded to
    whole vectors, and one more vector."""

    edited: Value
    """The logits after penalties and edits."""
    allowed: Value
    """The logits that a mask allows; token counts before that, and logits for log-probabilities later."""
    spare: Value
    """Also token counts, and later the logits among which a floor is searched."""
    chunk_sums: Value
    """float32, one for each chunk of the vocabulary."""
    tail: Value
    """float32 [LANES]: the model's last logits, padded to a vector."""
    small: Value
    """`SMALL_BYTES` for small temporary arrays."""

    @staticmethod
    def divide(scratch: Value, vocab: Value) -> Buffers:
        tail, small = scratch, scratch + 4 * LANES
        edited = small + SMALL_BYTES
        allowed = edited + _bytes_of(vocab)
        spare = allowed + _bytes_of(vocab)
        return Buffers(edited, allowed, spare, spare + _bytes_of(vocab), tail, small)

    @staticmethod
    def num_bytes(vocab: Value) -> Value:
        num_chunks = vocab // (CHUNK // 4) + 1
        return _bytes_of(vocab) * 3 + num_chunks * 4 + (4 * LANES + SMALL_BYTES)


def _bytes_of(vocab: Value) -> Value:
    return (vocab // LANES + 2) * (4 * LANES)


class Row(NamedTuple):
    call: Call
    number: Value
    vocab: Value
    position: Value
    """int64"""
    rules: Mapping[str, Value]
    """float32 or int64, by their names in `Rules`; all but the seed."""
    buffers: Buffers

    @staticmethod
    def read(call: Call, scratch: Value, number: Value) -> Row:
        builder, vocab = call.builder, call.argument_size(ARGUMENT["logits"], 1)
        rules = {
            name: builder.load(call.argument(ARGUMENT[name]) + number * 4, F32)
            if name in FLOATS
            else builder.load_int32(call.argument(ARGUMENT[name]), number)
            for name in Rules._fields
            if name != "seed"
        }
        position = builder.load_int32(call.argument(ARGUMENT["positions"]), number)
        return Row(call, number, vocab, position, rules, Buffers.divide(scratch, vocab))

    @property
    def builder(self) -> Builder:
        return self.call.builder

    @property
    def divisor(self) -> Value:
        """What logits are divided by: the temperature, kept away from 0."""
        return self.rules["temperature"].maximum(SMALLEST_DIVISOR)

    @property
    def model_logits(self) -> Span:
        numbers, _ = self.part("logits")
        return Span(self.builder, numbers, self.vocab, self.buffers.tail)

    def span(self, buffer: Value) -> Span:
        """The numbers of one of the buffers for all tokens."""
        return Span(self.builder, buffer, self.vocab, buffer + self.vocab // LANES * (4 * LANES))

    def part(self, name: str) -> tuple[Value, Value]:
        """The row's part of an argument [row, size], and the size."""
        size = self.call.argument_size(ARGUMENT[name], 1)
        return self.call.argument(ARGUMENT[name]) + self.number * size * 4, size
