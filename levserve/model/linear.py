"""A matrix that activations are multiplied with, in the layout that CPU and GPU read fastest."""

from __future__ import annotations

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray
from jax import lax

from levserve.model import cache


class Linear(eqx.Module):
    """A matrix [out, in]: the layout CPU and GPU matrix products read fastest, and the one checkpoints have.

    A product is summed in float32 and stays so, unless it `rounds`: then it comes in the weight's type, which halves what a
    GPU writes and reads again. On a CPU a bfloat16 result is 20 times slower.
    """

    weight: NamedArray
    bias: NamedArray | None = None
    rounds: bool = eqx.field(static=True, default=False)

    def __call__(self, x: NamedArray) -> NamedArray:
        In = self.weight.axes[-1]
        given = self.weight.dtype if self.rounds else jnp.float32
        y = hax.dot(x.astype(self.weight.dtype), self.weight, axis=In, preferred_element_type=given).astype(jnp.float32)
        return y if self.bias is None else y + self.bias

    def of_expert(self, number: jax.Array) -> Linear:
        """One of the matrices of a weight [expert, out, in]."""
        _, *axes = self.weight.axes
        matrix = lax.dynamic_index_in_dim(self.weight.array, number, keepdims=False)
        return Linear(hax.named(cache.from_bits(matrix), axes))

    def of_each(self, numbers: NamedArray) -> Linear:
        """A copy of the matrix for each number."""
        return Linear(self.weight.take("expert", numbers))
