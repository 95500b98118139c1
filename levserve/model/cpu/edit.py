"""Changes a row's logits on a CPU before a token is drawn: penalties, edits and masks."""

from __future__ import annotations

import math

from levserve.jit.builder import F32, I32, Value
from levserve.model.cpu.row import ARGUMENT, Row
from levserve.model.cpu.span import LANES, Span
from levserve.model.rules import FREE, POISONED


def is_edited(row: Row) -> Value:
    return is_penalised(row) | (row.builder.constant(0) < row.rules["num_edits"])


def is_penalised(row: Row) -> Value:
    presence, frequency, repetition = (row.rules[name] for name in ("presence", "frequency", "repetition"))
    is_changed = [_differ(presence, 0.0), _differ(frequency, 0.0), _differ(repetition, 1.0)]
    return is_changed[0] | is_changed[1] | is_changed[2]


def write_edited(row: Row) -> Span:
    """Writes the model's logits, after penalties and the row's edits, to the buffer `edited`."""
    builder, edited = row.builder, row.span(row.buffers.edited)
    with row.model_logits.vectors() as (at, x):
        builder.store(edited.numbers + at * 4, x)
    with builder.when(is_penalised(row)):
        _count(row)
        _penalise(row, edited)
    ids, size = row.part("edit_ids")
    values, until = row.part("edit_values")[0], row.part("edit_until")[0]
    with builder.loop(0, row.rules["num_edits"].minimum(size)) as number:
        token = builder.load_int32(ids, number)
        is_active = row.position < builder.load_int32(until, number)
        with builder.when(is_active & _is_token(row, token)):
            into = edited.numbers + token * 4
            builder.store(into, builder.load(into, F32) + builder.load(values + number * 4, F32))
    return edited


def _count(row: Row) -> None:
    """Counts how often each token is in the text so far, and in the generated part of it."""
    builder, known, generated = row.builder, row.buffers.allowed, row.buffers.spare
    with builder.loop(0, row.vocab, LANES) as at:
        for counts in known, generated:
            builder.store(counts + at * 4, builder.zeros(I32, LANES))
    history, size = row.part("history")
    with builder.loop(0, row.position.minimum(size)) as at:
        token = builder.load_int32(history, at)
        with builder.when(_is_token(row, token)):
            for counts, first in (known, builder.constant(0)), (generated, row.rules["prompt_len"]):
                into, is_counted = counts + token * 4, (at >= first).select(builder.constant(1, I32), 0)
                builder.store(into, builder.load(into, I32) + is_counted)


def _penalise(row: Row, edited: Span) -> None:
    builder = row.builder
    presence, frequency, repetition = (
        row.rules[name].splat(LANES) for name in ("presence", "frequency", "repetition")
    )
    with edited.vectors() as (at, x):
        known = builder.load(row.buffers.allowed + at * 4, I32, LANES)
        generated = builder.load(row.buffers.spare + at * 4, I32, LANES)
        repeated = (x.full_like(0.0) < x).select(x / repetition, x * repetition)
        x = known.differs_from(0).select(repeated, x)
        x = x - frequency * generated.convert("sitofp", F32)
        x = x - presence * generated.differs_from(0).select(x.full_like(1.0), 0.0)
        builder.store(edited.numbers + at * 4, x)


def held_slot(row: Row) -> Value:
    """The slot whose mask constrains the row's draw for this position, or `FREE`."""
    builder, call = row.builder, row.call
    slot = builder.load_int32(call.argument(ARGUMENT["slots"]), row.number)
    last = call.argument_size(ARGUMENT["at"], 0) - 1
    at = builder.load_int32(call.argument(ARGUMENT["at"]), slot.maximum(0).minimum(last))
    return (at - row.position).equals(0).select(slot, FREE)


def is_misfit(row: Row, slot: Value, token: Value) -> Value:
    """1 if the mask of the held slot does not allow the token, otherwise 0."""
    builder = row.builder
    word = builder.load(_words(row, slot) + token.maximum(0) // 32 * 4, I32)
    bit = (word >> (token & 31).convert("trunc", I32)) & 1
    is_bound = slot.differs_from(FREE) & token.differs_from(POISONED)
    return (is_bound & bit.equals(0)).select(builder.constant(1), 0)


def write_allowed(row: Row, slot: Value, logits: Span) -> Span:
    """Writes the logits to the buffer `allowed`, with minus infinity for tokens that the mask forbids."""
    builder, allowed = row.builder, row.span(row.buffers.allowed)
    words, lanes = _words(row, slot), builder.lane_numbers(LANES)
    with logits.vectors() as (at, x):
        bits = (builder.load(words + at // LANES * 4, I32).splat(LANES) >> lanes) & 1
        builder.store(allowed.numbers + at * 4, bits.equals(0).select(x.full_like(-math.inf), x))
    return allowed


def _words(row: Row, slot: Value) -> Value:
    num_words = row.call.argument_size(ARGUMENT["words"], 1)
    return row.call.argument(ARGUMENT["words"]) + slot.maximum(0) * num_words * 4


def _is_token(row: Row, number: Value) -> Value:
    return (number >= 0) & (number < row.vocab)


def _differ(x: Value, number: float) -> Value:
    return (x < number) | (x.full_like(number) < x)
