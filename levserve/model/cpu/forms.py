"""The forms that a matrix can have on a CPU, and the product for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import jax
import jax.numpy as jnp

from levserve.jit.target import Target
from levserve.model import int4_blocks
from levserve.model.cpu.block_products import block_product_for
from levserve.model.cpu.nibble_products import nibble_product_for
from levserve.model.cpu.products import Product, product_for
from levserve.model.cpu.widened_matrices import WidenedBytes, WidenedMatrix, WidenedNibbles

AnyProduct: TypeAlias = Product | WidenedMatrix
"""What is widened has no product without tiles."""
MATRICES = ("qkv", "out", "gate_up", "down")
"""The matrices of a layer, in the order in which activations are multiplied with them."""


@dataclass(frozen=True)
class Form:
    """How a matrix is stored, whatever its size."""

    dtype: jnp.dtype
    """bfloat16; int8 or uint8, for instructions that take a signed or an unsigned matrix; or uint16 and
    int16, for four bits and eight that are widened."""
    has_blocks: bool = False
    """Whether each block of inputs has a scale."""
    has_four_bits: bool = False
    has_middles: bool = False
    """See `int4_blocks`."""

    @staticmethod
    def of(weight: jax.Array, scale: jax.Array | None) -> Form:
        if scale is None or scale.ndim == 1:
            return Form(weight.dtype)
        if weight.dtype == jnp.int16:
            return Form(weight.dtype, True)
        shapes = (len(weight), weight.shape[1] * weight.dtype.itemsize), scale.shape
        if not int4_blocks.is_packed(*shapes):
            return Form(weight.dtype, True)
        return Form(weight.dtype, True, True, int4_blocks.are_middles(*shapes))

    @property
    def is_widened(self) -> bool:
        """Whether only products by matrix units can read it."""
        return self.dtype in (jnp.uint16, jnp.int16)

    def product(self, size: int, target: Target, *, in_two_terms: bool = False) -> AnyProduct:
        """The product with matrices of this form that have `size` inputs.

        Activations have two int8 terms with four bits that are not widened; with int8 in blocks that are not
        they have two if `in_two_terms`, and otherwise one.
        """
        if not self.has_blocks:
            return product_for(self.dtype, size, target)
        if self.is_widened:
            kept = self.has_four_bits
            return WidenedNibbles(size, target, self.has_middles) if kept else WidenedBytes(size, target)
        is_signed = self.dtype == jnp.int8
        if not self.has_four_bits:
            return block_product_for(size, target, is_signed=is_signed, in_two_terms=in_two_terms)
        return nibble_product_for(size, target, is_signed=is_signed, has_middles=self.has_middles)


def forms_of(layers: Sequence[Mapping[str, jax.Array]]) -> tuple[tuple[str, Form], ...]:
    """The forms that each matrix has in any of these layers: a file may store some with more bits."""
    found = (
        (name, Form.of(layer[name], layer.get(f"{name}_scale"))) for name in MATRICES for layer in layers
    )
    return tuple(dict.fromkeys(found))
