"""Matrices as int8 for CPUs: weights with one scale per output row, made once at load; activations as two int8 terms.

A row of activations is split into its rounding to int8 and 254 times what the rounding left, and both go through one integer
product, stacked as two rows. So the weights are read once, the result is as good as with exact activations, and one row
becomes two, which the CPU's matrix product wants.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray
from jax import lax
from numpy.typing import NDArray

from levserve.model.config import ModelConfig
from levserve.model.linear import Linear

STEPS = 127.0
FINE_STEPS = 254.0
"""Steps of the second term in one step of the first: what rounding leaves is at most half a step, so it fits an int8."""
SMALLEST = 1e-20
"""In place of a scale of nothing."""
ROWS_TOGETHER = 1024
FEW_ROWS = 32 if platform.machine() in ("aarch64", "arm64") else 0
"""Up to so many rows the matrix is the first factor of a product: 25 to 40 % faster on ARM; x86 reads it at memory speed anyway."""


QUANTIZED = ("qkv", "out", "gate_up", "down", "head")


class QuantizedLinear(Linear):
    """The same matrix [out, in], as small numbers and a scale for each row."""

    scale: NamedArray | None = None

    def __call__(self, x: NamedArray) -> NamedArray:
        assert self.scale is not None
        Out, In = self.weight.axes
        others = tuple(axis for axis in x.axes if axis.name != In.name)
        sizes = [axis.size for axis in others]
        if math.prod(sizes) <= FEW_ROWS:
            columns = x.rearrange((In, *others)).array.reshape(In.size, -1)
            y = hax.named(_multiply_columns(self.weight.array, columns).reshape(Out.size, *sizes), (Out, *others))
        else:
            rows = x.rearrange((*others, In)).array.reshape(-1, In.size)
            y = hax.named(_multiply_rows(rows, self.weight.array).reshape(*sizes, Out.size), (*others, Out))
        y = y * self.scale
        return y if self.bias is None else y + self.bias


def _multiply_columns(weight: jax.Array, columns: jax.Array) -> jax.Array:
    """The matrix is the first factor, so it is read as it lies; as the second one it would be packed anew for every product."""
    coarse, fine, scale = _terms(columns, axis=0)
    terms = jnp.concatenate([coarse, fine], axis=1).astype(jnp.int8)
    product = lax.dot(weight, terms, preferred_element_type=jnp.int32).astype(jnp.float32)
    first, second = jnp.split(product, 2, axis=1)
    return (first + second / FINE_STEPS) * scale


def _multiply_rows(rows: jax.Array, weight: jax.Array) -> jax.Array:
    coarse, fine, scale = _terms(rows, axis=1)
    terms = jnp.concatenate([coarse, fine]).astype(jnp.int8)
    product = jnp.einsum("rk,ok->ro", terms, weight, preferred_element_type=jnp.int32).astype(jnp.float32)
    first, second = jnp.split(product, 2)
    return (first + second / FINE_STEPS) * scale


def _terms(x: jax.Array, axis: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Small whole numbers: x is (coarse + fine / FINE_STEPS) * scale."""
    scale = jnp.maximum(jnp.abs(x).max(axis, keepdims=True), SMALLEST) / STEPS
    scaled = x / scale
    coarse = jnp.round(scaled)
    return coarse, jnp.round((scaled - coarse) * FINE_STEPS), scale


def quantize_arrays(
    config: ModelConfig, arrays: Iterable[tuple[str, NDArray[np.generic]]], dtype: np.dtype[np.generic]
) -> Iterator[tuple[str, NDArray[np.generic]]]:
    """Float32 arrays of a model as they come: matrices small and with their scales, embeddings in `dtype`, the rest as it was.

    A head that shares the embedding's matrix becomes one of its own.
    """
    with ThreadPoolExecutor(2, thread_name_prefix="levserve-quantize") as pool:
        for name, array in arrays:
            is_head = name == "embed" and config.tied_head
            if name.rsplit(".", 1)[-1] in QUANTIZED or is_head:
                weight, scale = _quantize_rows(array, pool)
                target = "head" if is_head else name
                yield target, weight
                yield f"{target}_scale", scale
            if name in ("embed", "positions"):
                yield name, array.astype(dtype)
            elif name.rsplit(".", 1)[-1] not in QUANTIZED:
                yield name, array


def _quantize_rows(matrix: NDArray[np.generic], pool: ThreadPoolExecutor) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """int8 [out, in] and float32 [out]."""
    small = np.empty(matrix.shape, np.int8)
    scale = np.empty(len(matrix), np.float32)

    def work(start: int) -> None:
        rows = np.asarray(matrix[start : start + ROWS_TOGETHER], np.float32)
        largest = np.maximum(np.maximum(rows.max(1), -rows.min(1)), SMALLEST)
        scale[start : start + ROWS_TOGETHER] = largest / STEPS
        scaled = rows * (STEPS / largest)[:, None]
        small[start : start + ROWS_TOGETHER] = np.rint(scaled, out=scaled)

    for _ in pool.map(work, range(0, len(matrix), ROWS_TOGETHER)):
        pass
    return small, scale
