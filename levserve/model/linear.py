"""A matrix that activations are multiplied with, in the layout that CPU and GPU read fastest."""

from __future__ import annotations

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray
from jax import lax

from levserve.model import cache
from levserve.model.backend import Backend, Product
from levserve.model.packed import PackedMatrix, multiply_packed, round_as_asked
from levserve.model.sharding import sum_over_devices


class Linear(eqx.Module):
    """A matrix [out, in], the layout that checkpoints have and that CPU and GPU products read fastest.

    A matrix that `--quantize` made has a `scale` for each output, or for each of its blocks of inputs. It is
    widened to the type `widened` for the product; None leaves the product to the backend. A `PackedMatrix` is
    in the bits of its checkpoint.

    A product is summed in float32 and stays so, unless it `rounds`: then it comes in the weight's type, which
    halves what a GPU writes and reads again. On a CPU a bfloat16 result is 20 times slower.
    """

    weight: NamedArray | PackedMatrix
    bias: NamedArray | None = None
    scale: NamedArray | None = None
    backend: Backend | None = eqx.field(static=True, default=None)
    """None: XLA multiplies."""
    rounds: bool = eqx.field(static=True, default=False)
    widened: jnp.dtype | None = eqx.field(static=True, default=None)
    is_partial: bool = eqx.field(static=True, default=False)
    """Whether each of several devices has some of the inputs, so that their products are added up."""
    in_two_terms: bool = eqx.field(static=True, default=False)
    """Whether a product with scales for blocks rounds activations to two int8 terms, not to one."""

    def __call__(self, x: NamedArray, num_used: jax.Array | None = None) -> NamedArray:
        """A kernel may skip what comes after the first `num_used` [1] vectors in `x`, which is padding."""
        y = self._multiply(x, num_used)
        if self.is_partial:
            y = hax.named(sum_over_devices(y.array), y.axes)
        return y if self.bias is None else y + self.bias

    @property
    def product_dtype(self) -> jnp.dtype:
        """The type that loses nothing of the product."""
        if isinstance(self.weight, PackedMatrix) or not self.rounds or self.scale is not None:
            return jnp.dtype(jnp.float32)
        return self.weight.dtype

    def _multiply(self, x: NamedArray, num_used: jax.Array | None) -> NamedArray:
        if isinstance(self.weight, PackedMatrix):
            return self._multiply_packed(x, self.weight, num_used)
        if self.backend is not None and self.widened is None:
            scale = None if self.scale is None else self.scale.array
            product = self.backend.product(self.weight.array, scale, in_two_terms=self.in_two_terms)
            if product is not None:
                return self._multiply_rows(x, product, num_used)
        weight = self.weight if self.widened is None else self.weight.astype(self.widened)
        summed = weight.dtype if self.rounds else jnp.float32
        y = hax.dot(x.astype(weight.dtype), weight, axis=weight.axes[-1], preferred_element_type=summed)
        y = y.astype(jnp.float32)
        return y if self.scale is None else y * self.scale

    def _multiply_packed(self, x: NamedArray, matrix: PackedMatrix, num_used: jax.Array | None) -> NamedArray:
        assert self.widened is not None
        if matrix.ndim > 2:
            *_, In = matrix.axes
            rows = x.rearrange((..., In)).astype(self.widened)
            rounded = hax.named(round_as_asked(rows.array, matrix.scheme), rows.axes)
            return Linear(matrix.widen(self.widened))(rounded)
        if self.backend is not None:
            return self._multiply_rows(x, self.backend.packed_product(matrix, self.widened), num_used)
        widened = self.widened
        return self._multiply_rows(x, lambda rows, _: multiply_packed(matrix, rows, widened), num_used)

    def _multiply_rows(self, x: NamedArray, product: Product, num_used: jax.Array | None) -> NamedArray:
        Out, In = self.weight.axes
        others = tuple(axis for axis in x.axes if axis.name != In.name)
        rows = x.rearrange((*others, In)).array.reshape(-1, In.size)
        y = product(rows, num_used)
        return hax.named(y.reshape([axis.size for axis in (*others, Out)]), (*others, Out))

    def of_expert(self, number: jax.Array) -> Linear:
        """One of the matrices of a weight [expert, out, in], with its bias."""

        def take(stacked: NamedArray) -> NamedArray:
            _, *axes = stacked.axes
            found = lax.dynamic_index_in_dim(stacked.array, number, keepdims=False)
            return hax.named(cache.from_bits(found), axes)

        bias = None if self.bias is None else take(self.bias)
        if isinstance(self.weight, PackedMatrix):
            return Linear(self.weight.of_expert(number), bias, widened=self.widened)
        return Linear(take(self.weight), bias)

    def of_each(self, numbers: NamedArray) -> Linear:
        """A copy of the matrix, and of its bias, for each number."""
        bias = None if self.bias is None else self.bias.take("expert", numbers)
        if isinstance(self.weight, PackedMatrix):
            return Linear(self.weight.of_each(numbers), bias, widened=self.widened)
        return Linear(self.weight.take("expert", numbers), bias)
