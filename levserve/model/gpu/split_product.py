"""What kernels have in common whose programs share the sums of a product, each over some of the inputs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from levserve.model.gpu.packed_plan import PackedTiling

Loaded = TypeVar("Loaded")
Total = TypeVar("Total")


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


def sum_pieces(
    load: Callable[[jax.Array], Loaded],
    add: Callable[[jax.Array, Loaded, Total], Total],
    nothing: Total,
    *,
    width: int,
    piece: int,
    depth: int,
    split: jax.Array | int = 0,
    splits: int = 1,
) -> Total:
    """The sum over this split of the `width`, a piece at a time and `depth` in each step, from `nothing` on.

    `add(first, loaded, total)` adds the piece that begins at `first`. What `load` has read for it, such as
    its scales, was read one step ahead, because Triton itself reads only the operands of products so early.
    """
    num_steps = width // depth // splits

    def firsts_of(index: jax.Array) -> list[jax.Array]:
        first = (split * num_steps + index) * depth
        return [first + number * piece for number in range(depth // piece)]

    def load_step(index: jax.Array) -> tuple[Loaded, ...]:
        return tuple(map(load, firsts_of(index)))

    def step(index: jax.Array, carry: tuple[Total, tuple[Loaded, ...]]) -> tuple[Total, tuple[Loaded, ...]]:
        total, loaded = carry
        following = load_step(jnp.minimum(index + 1, num_steps - 1))
        for first, each in zip(firsts_of(index), loaded, strict=True):
            total = add(first, each, total)
        return total, following

    return lax.fori_loop(0, num_steps, step, (nothing, load_step(jnp.int32(0))))[0]


def _whole(num_dims: int, *program: jax.Array) -> tuple[int, ...]:
    return (0,) * num_dims
