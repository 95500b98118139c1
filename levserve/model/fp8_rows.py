"""Activations in FP8, for checkpoints that were made for FP8 products.

Each token has a scale for every group of inputs, or one for all inputs, which maps the largest of them to the
largest FP8 value. This is what `activation_scheme: dynamic` of DeepSeek's and Qwen's FP8 checkpoints, and
dynamic `input_activations` of compressed-tensors, mean.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from levserve.model.cache import FP8, LARGEST_FP8

SMALLEST = 1e-10
"""The least that the largest value of a group counts as, so that zeros stay zeros."""


class Fp8Rows(NamedTuple):
    codes: jax.Array
    """FP8 [row, in]."""
    largest: jax.Array
    """float32 [group, row], as kernels read it: what `LARGEST_FP8` stands for in each group."""

    def widen(self) -> jax.Array:
        """The values that the codes stand for, as float32."""
        # On a GPU XLA removes a conversion to FP8 and back, and with it the rounding.
        codes = lax.optimization_barrier(self.codes)
        groups = codes.astype(jnp.float32).reshape(*self.largest.T.shape, -1)
        return (groups * (self.largest.T / LARGEST_FP8)[..., None]).reshape(codes.shape)


def round_rows(x: jax.Array, group: int | None) -> Fp8Rows:
    """Rounds x [row, in] with a scale for every `group` inputs, which must divide `in`; None: one for all."""
    num_rows, num_inputs = x.shape
    groups = x.astype(jnp.float32).reshape(num_rows, -1, group or num_inputs)
    # `jnp.max` would need a separate operation, on a GPU a separate kernel, to compare with `SMALLEST`.
    largest = lax.reduce(jnp.abs(groups), jnp.float32(SMALLEST), lax.max, (groups.ndim - 1,))
    codes = (groups * (LARGEST_FP8 / largest)[..., None]).astype(FP8)
    return Fp8Rows(codes.reshape(x.shape), largest.T)
