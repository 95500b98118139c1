"""The likeliest token of each used row of logits on a CPU, and its logit, in one pass.

XLA reads all rows, padding included, and reads them twice.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from levserve.jit.builder import F32, I32, Builder, Value
from levserve.jit.target import Target
from levserve.jit.xla_call import Call, Kernel, Stage, register
from levserve.model.cpu.linear import num_used_rows

LANES = 64
"""The lanes of several registers, so that no comparison waits for the one before."""
LOGITS, NUM_USED = range(2)
TOKENS, VALUES = range(2)


def argmax_rows(logits: jax.Array, num_used: jax.Array, *, target: Target) -> tuple[jax.Array, jax.Array]:
    """The index, int32 [row], and the value, float32 [row], of the largest of float32 [row, vocab].

    Of equal logits the first one wins. The value of a row that has a NaN is NaN. Rows after the first
    `num_used` [1] are not computed: their results are whatever was in memory.
    """
    rows = logits.shape[0]
    name = register(kernel_for(target))
    results = jax.ShapeDtypeStruct((rows,), jnp.int32), jax.ShapeDtypeStruct((rows,), jnp.float32)
    tokens, values = jax.ffi.ffi_call(name, results)(logits, num_used)
    return tokens, values


def kernel_for(target: Target) -> Kernel:
    return Kernel(
        "levserve_argmax",
        target,
        (Stage(lambda call: num_used_rows(call, NUM_USED, LOGITS), _argmax_row),),
        scratch_bytes=lambda call: call.builder.constant(8 * LANES),
        gains_by_unrolling=True,
    )


def _argmax_row(call: Call, _: Value, scratch: Value, row: Value) -> None:
    builder, vocab = call.builder, call.argument_size(LOGITS, 1)
    token, value = find_largest(builder, call.argument(LOGITS) + row * vocab * 4, vocab, scratch)
    builder.store(call.result(TOKENS) + row * 4, token.convert("trunc", I32))
    builder.store(call.result(VALUES) + row * 4, value)


def find_largest(builder: Builder, logits: Value, vocab: Value, scratch: Value) -> tuple[Value, Value]:
    """The index and the value of the first largest of float32 [vocab]; the value is NaN if any of them is.

    Finds the largest of each lane, then the largest of those and of the logits after the last vector. The
    scratch memory holds `8 * LANES` bytes.
    """
    end_of_vectors = vocab // LANES * LANES
    lane_max = builder.variable(builder.constant(-math.inf, F32).splat(LANES))
    lane_start = builder.variable(builder.zeros(I32, LANES))  # of the vector that had the lane's maximum
    lane_nan = builder.variable(builder.zeros(F32, LANES))  # 0, or NaN if the lane had one
    with builder.loop(0, end_of_vectors, LANES) as at:
        values, before = builder.load(logits + at * 4, F32, LANES), lane_max.get()
        is_larger = before < values
        lane_max.set(is_larger.select(values, before))
        lane_start.set(is_larger.select(at.convert("trunc", I32).splat(LANES), lane_start.get()))
        lane_nan.set((values >= -math.inf).select(lane_nan.get(), math.nan))
    builder.store(scratch, lane_max.get())
    builder.store(scratch + 4 * LANES, lane_start.get())
    best, token = builder.variable(builder.constant(-math.inf, F32)), builder.variable(builder.constant(0))
    nan = builder.variable(lane_nan.get().reduce_sum())

    def consider(value: Value, candidate: Value) -> None:
        """Takes a candidate if it is larger, or equal and an earlier token: candidates come in any order."""
        is_at_least = value >= best.get()
        is_earlier = (candidate < token.get()).select(1, builder.constant(0))
        is_first_equal = is_at_least.select(is_earlier, 0)
        is_better = (best.get() < value).select(builder.constant(1), is_first_equal).equals(1)
        best.set(is_better.select(value, best.get()))
        token.set(is_better.select(candidate, token.get()))
        nan.set((value >= -math.inf).select(nan.get(), math.nan))

    with builder.loop(0, LANES) as lane:
        value = builder.load(scratch + lane * 4, F32)
        consider(value, builder.load_int32(scratch + 4 * LANES, lane) + lane)
    with builder.loop(end_of_vectors, vocab) as at:
        consider(builder.load(logits + at * 4, F32), at)
    return token.get(), best.get() + nan.get()
