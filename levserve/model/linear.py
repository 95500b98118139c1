"""A matrix that activations are multiplied with, in the layout that CPU and GPU read fastest."""

from __future__ import annotations

from dataclasses import replace

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax import lax

from levserve.model import cache
from levserve.model.backend import Backend, Product
from levserve.model.config import ModelConfig
from levserve.model.fp8_rows import Fp8Rows
from levserve.model.norm import Norm, apply
from levserve.model.packed import PackedMatrix, multiply_packed, round_as_asked
from levserve.model.sharding import sum_over_devices


class Linear(eqx.Module):
    """A matrix [out, in], the layout that checkpoints have and that CPU and GPU products read fastest.

    One that `--quantize` made int8 has a `scale` for each output, or for each of its blocks of inputs. It is
    widened to the type `widened` for the product; None leaves the product to the backend. On a CPU a four-bit
    matrix (`int4_blocks`) has two codes in each byte. A `PackedMatrix` is as quantized checkpoints have it.

    A product is summed in float32 and stays float32, unless it `rounds`: then it comes in the weight's type,
    which halves what a GPU writes and reads back. A product with a `PackedMatrix` then comes in the type
    `widened` if there are more rows than the backend's kernels take. On a CPU a bfloat16 result is 20 times
    slower.
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
        """A kernel may skip the vectors of `x` after the first `num_used` [1], which are padding."""
        return self._finish(self._multiply(x, num_used))

    def _finish(self, y: NamedArray) -> NamedArray:
        if self.is_partial:
            y = hax.named(sum_over_devices(y.array), y.axes)
        return y if self.bias is None else y + self.bias

    def of_normed(self, x: NamedArray, norm: Norm | None, num_used: jax.Array | None = None) -> NamedArray:
        """The product with `norm(x)`; a backend may have a kernel for the norm and the rounding after it."""
        rounding = self._rounding
        if norm is not None and norm.is_plain and rounding is not None:
            matrix, backend, widened = rounding
            others, rows = self._rows_of(x, matrix.axes[-1].name)
            rounded = backend.round_normed(rows, norm.weight.array, norm.eps, matrix, widened)
            if rounded is not None:
                return self._multiply_rounded(rounded, others, num_used)
        return self(apply(norm, x), num_used)

    def of_gated(
        self, wide: NamedArray, config: ModelConfig, num_used: jax.Array | None = None
    ) -> NamedArray | None:
        """The product with the activation of `wide`, the gate and up product; None if no kernel does both."""
        if self._rounding is None:
            return None
        matrix, backend, widened = self._rounding
        others, rows = self._rows_of(wide, config.GateUp.name)
        rounded = backend.round_gated(rows, config, matrix, widened)
        return None if rounded is None else self._multiply_rounded(rounded, others, num_used)

    @property
    def _rounding(self) -> tuple[PackedMatrix, Backend, jnp.dtype] | None:
        """What a backend needs to round activations for the matrix; None if they stay as they are."""
        matrix, backend, widened = self.weight, self.backend, self.widened
        if not isinstance(matrix, PackedMatrix) or backend is None or widened is None:
            return None
        return (matrix, backend, widened) if matrix.ndim == 2 and matrix.scheme.rounds_rows else None

    def _rows_of(self, x: NamedArray, inner: str) -> tuple[tuple[Axis, ...], jax.Array]:
        others = tuple(axis for axis in x.axes if axis.name != inner)
        array = x.rearrange((*others, inner)).array
        return others, array.reshape(-1, array.shape[-1])

    def _multiply_rounded(
        self, rounded: Fp8Rows, others: tuple[Axis, ...], num_used: jax.Array | None
    ) -> NamedArray:
        y = self._packed_product(rounded, num_used)
        axes = (*others, self.weight.axes[0])
        return self._finish(hax.named(y.reshape([axis.size for axis in axes]), axes))

    def product_dtype(self, num_rows: int) -> jnp.dtype:
        """The type that holds a product of `num_rows` rows without loss."""
        whole = jnp.dtype(jnp.float32)
        if not self.rounds or self.scale is not None:
            return whole
        if not isinstance(self.weight, PackedMatrix):
            return self.weight.dtype
        if self.backend is None or self.widened is None or not self.backend.rounds_packed(num_rows):
            return whole
        return self.widened

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
        return self._multiply_rows(x, self._packed_product, num_used)

    def _packed_product(self, x: jax.Array | Fp8Rows, num_used: jax.Array | None) -> jax.Array:
        matrix, widened = self.weight, self.widened
        assert isinstance(matrix, PackedMatrix) and widened is not None
        if self.backend is None:
            return multiply_packed(matrix, x, widened)
        summed = self.product_dtype(len(x.codes if isinstance(x, Fp8Rows) else x))
        product = self.backend.packed_product(matrix, widened, summed)(x, num_used)
        return product.astype(summed).astype(jnp.float32)

    def _multiply_rows(self, x: NamedArray, product: Product, num_used: jax.Array | None) -> NamedArray:
        Out, In = self.weight.axes
        others, rows = self._rows_of(x, In.name)
        y = product(rows, num_used)
        return hax.named(y.reshape([axis.size for axis in (*others, Out)]), (*others, Out))

    def in_widened_type(self) -> Linear:
        """The same with a packed matrix widened; for products that round no activations."""
        if not isinstance(self.weight, PackedMatrix):
            return self
        assert self.widened is not None and not self.weight.scheme.rounds_rows
        return replace(self, weight=self.weight.widen(self.widened), widened=None)

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
        """A copy of an expert's matrix, and of its bias, for each expert number."""
        bias = None if self.bias is None else self.bias.take("expert", numbers)
        if isinstance(self.weight, PackedMatrix):
            return Linear(self.weight.of_each(numbers), bias, widened=self.widened)
        return Linear(self.weight.take("expert", numbers), bias)
