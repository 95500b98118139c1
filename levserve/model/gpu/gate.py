"""The activation that turns an expert's first product into hidden values, for all kernels for NVIDIA GPUs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from levserve.model.config import Activation


class Gate(NamedTuple):
    """Turns the first product into hidden values; see `ModelConfig`."""

    activation: Activation
    is_gated: bool
    limit: float | None
    up_offset: float

    def apply(self, results: tuple[jax.Array, ...]) -> jax.Array:
        activate = ACTIVATIONS[self.activation]
        if not self.is_gated:
            return activate(results[0])
        gate, up = results
        if self.limit is not None:
            gate = jnp.minimum(gate, self.limit)
            up = jnp.maximum(jnp.minimum(up, self.limit), -self.limit)
        return activate(gate) * (up + self.up_offset if self.up_offset else up)


def silu(x: jax.Array) -> jax.Array:
    """SiLU, written out because Mosaic GPU in jax 0.10 has no logistic function."""
    return x / (1.0 + jnp.exp(-x))


def gelu(x: jax.Array) -> jax.Array:
    """GELU, with a polynomial for the error function, which Pallas lacks (Abramowitz and Stegun, 7.1.26). Its
    error is at most 1.5e-7."""
    size = jnp.abs(x) * math.sqrt(0.5)
    t = 1.0 / (1.0 + 0.3275911 * size)
    series = jnp.float32(0.0)
    for factor in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592):
        series = (series + factor) * t
    tail = 0.5 * series * jnp.exp(-size * size)  # the tail of the normal distribution beyond |x|
    return x * jnp.where(x < 0, tail, 1.0 - tail)


ACTIVATIONS: dict[Activation, Callable[[jax.Array], jax.Array]] = {
    Activation.SILU: silu,
    Activation.GELU: gelu,
    Activation.GELU_TANH: functools.partial(jax.nn.gelu, approximate=True),
    Activation.GELU_QUICK: lambda x: x / (1.0 + jnp.exp(-1.702 * x)),
}
