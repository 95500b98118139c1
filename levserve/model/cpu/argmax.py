"""The likeliest token of each row of logits on a CPU, and its logit: one pass over those rows that are used.

XLA looks at all of them, twice, and at padding as well.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from levserve.jit.builder import F32, I32, Value
from levserve.jit.target import Target
from levserve.jit.xla_call import Call, Kernel, Work, register
from levserve.model.cpu.linear import used_rows

LANES = 64
"""Of several registers: no comparison waits for the one before."""
LOGITS, NUM_USED = range(2)
TOKENS, VALUES = range(2)


def find_best(logits: jax.Array, num_used: jax.Array, *, target: Target) -> tuple[jax.Array, jax.Array]:
    """int32 and float32 [row] of float32 [row, vocab]: of equals the first; a row that has what is not a
    number is none itself.

    Of rows after the first `num_used` [1] it gives whatever was in memory.
    """
    rows = logits.shape[0]
    name = register(kernel_for(target))
    results = jax.ShapeDtypeStruct((rows,), jnp.int32), jax.ShapeDtypeStruct((rows,), jnp.float32)
    tokens, values = jax.ffi.ffi_call(name, results)(logits, num_used)
    return tokens, values


def kernel_for(target: Target) -> Kernel:
    def num_rows(call: Call) -> Value:
        return used_rows(call, NUM_USED).least(call.argument_size(LOGITS, 0))

    def find(call: Call, _: Value, own: Value, row: Value) -> None:
        builder, vocab = call.builder, call.argument_size(LOGITS, 1)
        logits = call.argument(LOGITS) + row * vocab * 4
        whole = vocab // LANES * LANES
        top = builder.variable(builder.number(-math.inf, F32).splat(LANES))
        place = builder.variable(builder.zeros(I32, LANES))
        spoilt = builder.variable(builder.zeros(F32, LANES))
        with builder.loop(0, whole, LANES) as at:
            each, before = builder.load(logits + at * 4, F32, LANES), top.get()
            is_more = before < each
            top.set(is_more.choose(each, before))
            place.set(is_more.choose(at.convert("trunc", I32).splat(LANES), place.get()))
            spoilt.set((each >= -math.inf).choose(spoilt.get(), math.nan))
        builder.store(own, top.get())
        builder.store(own + 4 * LANES, place.get())
        best, token = builder.variable(builder.number(-math.inf, F32)), builder.variable(builder.number(0))
        sick = builder.variable(spoilt.get().total())

        def look_at(value: Value, number: Value) -> None:
            """At a candidate; they do not come in order."""
            is_first = (value >= best.get()).choose((number < token.get()).choose(1, builder.number(0)), 0)
            is_better = (best.get() < value).choose(builder.number(1), is_first).is_(1)
            best.set(is_better.choose(value, best.get()))
            token.set(is_better.choose(number, token.get()))
            sick.set((value >= -math.inf).choose(sick.get(), math.nan))

        with builder.loop(0, LANES) as lane:
            look_at(builder.load(own + lane * 4, F32), builder.index(own + 4 * LANES, lane) + lane)
        with builder.loop(whole, vocab) as at:
            look_at(builder.load(logits + at * 4, F32), at)
        builder.store(call.result(TOKENS) + row * 4, token.get().convert("trunc", I32))
        builder.store(call.result(VALUES) + row * 4, best.get() + sick.get())

    return Kernel(
        "levserve_best",
        target,
        (Work(num_rows, find),),
        own_bytes=lambda call: call.builder.number(8 * LANES),
    )
