"""Recomputes the largest logits of an int8 head in float32, from the embedding that the head is tied to.

No later layer averages out the rounding errors of the head, and they matter for the few tokens that may be
next. The rows of these tokens in the embedding, which is kept in full precision anyway, give their logits
without rounding to int8.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from levserve.jit.builder import F32, I16, I32, Builder, Value
from levserve.jit.target import Target
from levserve.jit.xla_call import Call, Kernel, Stage, register
from levserve.model.cpu.linear import num_used_rows

LANES, SIZE_LANES = 64, 16
MARGIN = 5.0
"""Logits this near to the largest are recomputed: the largest is at most e ** 5 times as likely as these."""
MAX_NEAR = 512
"""A row with more such logits stays as it is: its next token is uncertain anyway, and it would take long."""
LOGITS, HIDDEN, EMBED, NUM_USED = range(4)
TYPES = (jnp.bfloat16, jnp.float32)


def takes(embed: jax.Array) -> bool:
    return embed.dtype in TYPES and embed.shape[1] % SIZE_LANES == 0


def refine_logits(
    logits: jax.Array, hidden: jax.Array, embed: jax.Array, num_used: jax.Array | None, *, target: Target
) -> jax.Array:
    """Logits float32 [row, vocab] of hidden states [row, embed] with an embedding [vocab, embed].

    Rows after the first `num_used` [1] stay as they are, as do rows with more than `MAX_NEAR` logits near the
    largest.
    """
    count = jnp.asarray([len(logits)], jnp.int32) if num_used is None else num_used
    result = jax.ShapeDtypeStruct(logits.shape, jnp.float32)
    call = jax.ffi.ffi_call(
        register(kernel_for(embed.dtype, target)), result, input_output_aliases={LOGITS: 0}
    )
    return call(logits, hidden.astype(jnp.float32), embed, count)


def kernel_for(dtype: jnp.dtype, target: Target) -> Kernel:
    def refine_row(call: Call, _: Value, scratch: Value, row: Value) -> None:
        builder = call.builder
        vocab, size = call.argument_size(LOGITS, 1), call.argument_size(HIDDEN, 1)
        logits = call.result(0) + row * vocab * 4
        hidden, row_bytes = call.argument(HIDDEN) + row * size * 4, size * dtype.itemsize
        num_near = _list_near(builder, logits, vocab, scratch)
        with builder.loop(0, (num_near < MAX_NEAR + 1).select(num_near, 0)) as index:
            token = builder.load_int32(scratch, index)
            weights = call.argument(EMBED) + token * row_bytes
            builder.store(logits + token * 4, _multiply(builder, hidden, weights, size, dtype))

    return Kernel(
        f"levserve_refine_{dtype}",
        target,
        (Stage(lambda call: num_used_rows(call, NUM_USED, LOGITS), refine_row),),
        scratch_bytes=lambda call: call.builder.constant(4 * (MAX_NEAR + 1)),
        gains_by_unrolling=True,
    )


def _list_near(builder: Builder, logits: Value, vocab: Value, tokens: Value) -> Value:
    """How many logits are near the largest, and a list of their tokens, int32.

    It stops soon after it has found more than `MAX_NEAR`; the last of these overwrite the end of the list.
    """
    floor = _find_largest(builder, logits, vocab) - MARGIN
    count = builder.variable(builder.constant(0))

    def consider(token: Value) -> None:
        with builder.when(builder.load(logits + token * 4, F32) >= floor):
            builder.store(tokens + count.get().minimum(MAX_NEAR) * 4, token.convert("trunc", I32))
            count.set(count.get() + 1)

    end_of_vectors = vocab // LANES * LANES
    with builder.loop(0, end_of_vectors, LANES) as start:
        is_near = builder.load(logits + start * 4, F32, LANES).reduce_max() >= floor
        with builder.when(is_near), builder.when(count.get() < MAX_NEAR + 1):
            with builder.loop(start, start + LANES) as token:
                consider(token)
    with builder.loop(end_of_vectors, vocab) as token:
        consider(token)
    return count.get()


def _find_largest(builder: Builder, logits: Value, vocab: Value) -> Value:
    """The largest of float32 [vocab]; NaN if there is one, and then no logit counts as near."""
    end_of_vectors = vocab // LANES * LANES
    lanes = builder.variable(builder.constant(-math.inf, F32).splat(LANES))
    with builder.loop(0, end_of_vectors, LANES) as at:
        lanes.set(lanes.get().intrinsic("llvm.maximum", builder.load(logits + at * 4, F32, LANES)))
    largest = builder.variable(lanes.get().reduce_max())
    with builder.loop(end_of_vectors, vocab) as at:
        largest.set(largest.get().intrinsic("llvm.maximum", builder.load(logits + at * 4, F32)))
    return largest.get()


def _multiply(builder: Builder, hidden: Value, weights: Value, size: Value, dtype: jnp.dtype) -> Value:
    """The sum of the products of float32 [size] with a row of the embedding."""
    sums = builder.variable(builder.zeros(F32, SIZE_LANES))
    with builder.loop(0, size, SIZE_LANES) as at:
        if dtype == jnp.bfloat16:
            bits = builder.load(weights + at * 2, I16, SIZE_LANES).convert("zext", I32) << 16
            numbers = bits.convert("bitcast", F32)
        else:
            numbers = builder.load(weights + at * 4, F32, SIZE_LANES)
        sums.set(numbers.multiply_add(builder.load(hidden + at * 4, F32, SIZE_LANES), sums.get()))
    return sums.get().reduce_sum()
