"""A matrix that activations are multiplied with, in the layout that CPU and GPU read fastest."""

from __future__ import annotations

from collections.abc import Callable

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
    has_kernel: bool = eqx.field(static=True, default=False)
    """Whether `cpu_linear` multiplies, if it can."""

    def __call__(self, x: NamedArray, num_used: jax.Array | None = None) -> NamedArray:
        """Where there is a kernel only the first `num_used` [1] of the vectors in `x`, the rest being padding."""
        y = self._multiply(x, num_used)
        return y if self.bias is None else y + self.bias

    def _multiply(self, x: NamedArray, num_used: jax.Array | None) -> NamedArray:
        In = self.weight.axes[-1]
        if self.is_servable and self.weight.dtype == jnp.bfloat16:
            from levserve.model.cpu.linear import multiply

            return self._multiply_rows(x, lambda rows: multiply(self.weight.array, None, rows, num_used))
        product = hax.dot(
            x.astype(self.weight.dtype), self.weight, axis=In, preferred_element_type=self.product_dtype
        )
        return product.astype(jnp.float32)

    @property
    def product_dtype(self) -> jnp.dtype:
        """What loses nothing of the product."""
        return self.weight.dtype if self.rounds else jnp.dtype(jnp.float32)

    @property
    def is_servable(self) -> bool:
        """By a kernel: not those of experts, of which each row may have its own."""
        if not self.has_kernel or self.weight.ndim != 2:
            return False
        from levserve.model.cpu.linear import refuse_unservable  # and LLVM with it, which others do without

        return refuse_unservable(*self.weight.array.shape) is None

    def _multiply_rows(self, x: NamedArray, multiply: Callable[[jax.Array], jax.Array]) -> NamedArray:
        """By a function of [row, in] to [row, out]."""
        Out, In = self.weight.axes
        others = tuple(axis for axis in x.axes if axis.name != In.name)
        product = multiply(x.rearrange((*others, In)).array.reshape(-1, In.size))
        return hax.named(product.reshape([axis.size for axis in (*others, Out)]), (*others, Out))

    def of_expert(self, number: jax.Array) -> Linear:
        """One of the matrices of a weight [expert, out, in]."""
        _, *axes = self.weight.axes
        matrix = lax.dynamic_index_in_dim(self.weight.array, number, keepdims=False)
        return Linear(hax.named(cache.from_bits(matrix), axes))

    def of_each(self, numbers: NamedArray) -> Linear:
        """A copy of the matrix for each number."""
        return Linear(self.weight.take("expert", numbers))
