"""Runs a kernel whose programs share the sums of a product."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from levserve.model.gpu.packed_plan import PackedTiling


def add_splits(
    kernel: Callable[..., None],
    arrays: Sequence[jax.Array],
    shape: tuple[int, int],
    grid: tuple[int, int],
    tiling: PackedTiling,
    *,
    interpret: bool,
    name: str,
) -> jax.Array:
    """float32 [row, out] of this shape, the sum of what the kernel's splits write.

    Each program gets references to whole arrays; the last dimension of its grid is the split.
    """
    out = jax.ShapeDtypeStruct((tiling.splits, *shape), jnp.float32)
    parts = pl.pallas_call(
        kernel,
        grid=(*grid, tiling.splits),
        in_specs=[pl.BlockSpec(array.shape, functools.partial(_whole, array.ndim)) for array in arrays],
        out_specs=pl.BlockSpec(out.shape, functools.partial(_whole, 3)),
        out_shape=out,
        compiler_params=plgpu.CompilerParams(num_warps=tiling.num_warps, num_stages=tiling.num_stages),
        interpret=interpret,
        name=name,
    )(*arrays)
    # One by one: XLA would compile a sum over an axis to a separate kernel.
    return functools.reduce(jnp.add, (parts[number] for number in range(tiling.splits)))


def _whole(num_dims: int, *program: jax.Array) -> tuple[int, ...]:
    return (0,) * num_dims
