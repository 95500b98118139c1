"""Functions of scores on a CPU: exp, tanh, the soft cap, and the limits of a softmax."""

from __future__ import annotations

import math

from levserve.jit.builder import F32, I32, ROUNDING_CONSTANT, Builder, Value

LOWEST_MAX, MASKED = -1e20, -1e30
"""The maximum of scores starts at the first; a masked score is so far below it that its weight is 0."""
SMALLEST_SUM = 1e-30
"""Replaces a sum of no weights, so that a query of padding gets zeros."""
LOG2_E = math.log2(math.e)
EXP2_COEFFICIENTS = tuple(math.log(2) ** n / math.factorial(n) for n in range(7))
"""The Taylor series of 2^x, exact to float32's last bit for x from -0.5 to 0.5."""
SMALLEST_EXPONENT = -127.0
"""2 to this power or a lower one becomes 0, so that masked scores add nothing at all."""


def cap_scores(
    builder: Builder, softcap: Value, scores: Value, span: tuple[Value, Value, int], stride: int, lanes: int
) -> None:
    """Applies the soft cap, if there is one, to vectors of scores that lie `stride` bytes apart."""
    with builder.when(softcap.differs_from(0)):
        cap = softcap.splat(lanes)
        with builder.loop(*span) as at:
            into = scores + at * stride
            builder.store(into, tanh(builder.load(scores + at * stride, F32, lanes) / cap) * cap)


def exp(x: Value) -> Value:
    """e^x for x up to about 80; NaN for NaN."""
    exponent = (x * LOG2_E).maximum(SMALLEST_EXPONENT)
    rounded = exponent + ROUNDING_CONSTANT
    fraction = exponent - (rounded - ROUNDING_CONSTANT)
    series = fraction * EXP2_COEFFICIENTS[-1] + EXP2_COEFFICIENTS[-2]
    for coefficient in reversed(EXP2_COEFFICIENTS[:-2]):
        series = series.multiply_add(fraction, series.full_like(coefficient))
    power_of_two = ((rounded.convert("bitcast", I32) + 127) << 23).convert("bitcast", F32)
    return series * power_of_two


def tanh(x: Value) -> Value:
    """(1 - e^-2|x|) / (1 + e^-2|x|) with the sign of x, which cannot overflow."""
    magnitude = x.intrinsic("llvm.fabs")
    decay = exp(magnitude * -2.0)
    return ((decay * -1.0 + 1.0) / (decay + 1.0)).intrinsic("llvm.copysign", x)
