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
    """A matrix [out, in]: the layout CPU and GPU matrix products read fastest, and the one checkpoints have."""

    weight: NamedArray
    bias: NamedArray | None = None

    def __call__(self, x: NamedArray) -> NamedArray:
        """Multiplies in the weight's type and always sums in float32: a bfloat16 result is 20 times slower on CPU."""
        In = self.weight.axes[-1]
        y = hax.dot(x.astype(self.weight.dtype), self.weight, axis=In, preferred_element_type=jnp.float32)
        return y if self.bias is None else y + self.bias

    def of_expert(self, number: jax.Array) -> Linear:
        """One of the matrices of a weight [expert, out, in]."""
        _, *axes = self.weight.axes
        matrix = lax.dynamic_index_in_dim(self.weight.array, number, keepdims=False)
        return Linear(hax.named(cache.from_bits(matrix), axes))

    def of_each(self, numbers: NamedArray) -> Linear:
        """A copy of the matrix for each number."""
        return Linear(self.weight.take("expert", numbers))
