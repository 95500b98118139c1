"""Prepares the heads of a prefill chunk in one Pallas kernel for NVIDIA GPUs, and writes keys and values.

Each program of the grid takes a few tokens and one key-value head: it normalizes and rotates the queries of
that head's group and its key, and writes the key and its value to the pool. XLA needs four kernels for this,
and its scatter alone takes longer than this kernel.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from levserve.model.backend import HeadNorms
from levserve.model.cache import Place, multiplied_in, to_storage
from levserve.model.gpu.paged_attention import LOG2_E, Columns
from levserve.model.rotary import Angles

TOKENS = 16
"""Tokens that a program takes, with four warps."""


class Rotation(NamedTuple):
    """Cosines and sines [head or 1, column]; only the columns before `2 * half` are rotated."""

    half: int
    cos: jax.Array
    sin: jax.Array

    @staticmethod
    def read(refs: tuple[jax.Ref, ...], columns: Columns, *at: jax.Array) -> Rotation | None:
        """Reads cosines and sines [..., angle] at a place, if the model has any."""
        if not refs:
            return None
        half, column = refs[0].shape[-1], columns.numbers[None, :]
        # Neighbouring columns have neighbouring angles, which Triton reads together; computing a remainder
        # would hide that from it.
        angle = jnp.where(column < half, column, column - half)
        if 2 * half < columns.size:
            angle = jnp.where(column < 2 * half, angle, 0)
        return Rotation(half, *(ref[(*at, angle)] for ref in refs))


@functools.partial(jax.jit, static_argnames=("kv_heads", "scale", "eps", "interpret"))
def place_heads(
    qkv: jax.Array,
    pool: jax.Array,
    place: Place,
    angles: Angles | None = None,
    norms: HeadNorms | None = None,
    *,
    kv_heads: int,
    scale: float,
    eps: float = 0.0,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The queries as `paged_attention` takes them, multiplied by `scale`, and the pool.

    qkv [row * chunk, head, head_size]: queries, keys, values; pool [page, 2, kv_head, page_size, head_size],
    written in place.
    """
    num_tokens, num_heads, size = qkv.shape
    group = num_heads // kv_heads - 2
    num_pages, _, _, page_size, _ = pool.shape
    tokens = math.gcd(num_tokens, TOKENS)

    def of_tokens(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((tokens, *shape), lambda head, block: (block, *(0 for _ in shape)))

    def of_positions(angles: jax.Array) -> pl.BlockSpec:
        """Angles of fewer tokens are those of one row and serve all rows."""
        num_blocks = angles.size // angles.shape[-1] // tokens
        return pl.BlockSpec((tokens, angles.shape[-1]), lambda head, block: (block % num_blocks, 0))

    of_pool = pl.BlockSpec((num_pages, 2, None, page_size, size), lambda head, block: (0, 0, head, 0, 0))
    inputs = [
        (qkv, of_tokens(num_heads, size)),
        (pool, of_pool),
        (place.pages, of_tokens()),
        (place.offsets, of_tokens()),
    ]
    inputs += [(part.reshape(-1, part.shape[-1]), of_positions(part)) for part in angles or ()]
    inputs += [(weight, pl.BlockSpec((size,), lambda head, block: (0,))) for weight in norms or ()]
    queries = jax.ShapeDtypeStruct((num_tokens, kv_heads, group, size), multiplied_in(pool.dtype))
    pool, result = pl.pallas_call(
        functools.partial(
            _kernel,
            group=group,
            has_angles=angles is not None,
            has_norms=norms is not None,
            scale=scale * LOG2_E,
            eps=eps,
        ),
        grid=(kv_heads, num_tokens // tokens),
        in_specs=[spec for _, spec in inputs],
        out_specs=[
            of_pool,
            pl.BlockSpec((tokens, None, group, size), lambda head, block: (block, head, 0, 0)),
        ],
        out_shape=[jax.ShapeDtypeStruct(pool.shape, pool.dtype), queries],
        input_output_aliases={1: 0},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="place_heads",
    )(*(array for array, _ in inputs))
    return result.reshape(*place.positions.shape, *queries.shape[1:]), pool


def rotated(
    read: Callable[[jax.Array], jax.Array],
    columns: Columns,
    rotation: Rotation | None,
    norm_ref: jax.Ref | None,
    eps: float,
) -> jax.Array:
    """Normalizes and rotates heads [head, column] in float32; `read` loads given columns."""
    column = columns.numbers

    def weighted(column: jax.Array) -> jax.Array:
        x = read(column).astype(jnp.float32)
        return x if norm_ref is None else x * norm_ref[column][None, :]

    x = weighted(column)
    if rotation is not None:
        half = rotation.half
        is_low, is_rotated = column < half, column < 2 * half
        partner = weighted(jnp.where(is_low, column + half, jnp.where(is_rotated, column - half, column)))
        moved = x * rotation.cos + partner * jnp.where(is_low[None, :], -rotation.sin, rotation.sin)
        x = moved if 2 * half == columns.size else jnp.where(is_rotated[None, :], moved, x)
    if norm_ref is not None:  # the factor is the same for all values of a head
        unscaled = columns.masked(read(column).astype(jnp.float32))
        x = x * lax.rsqrt((unscaled * unscaled).sum(-1, keepdims=True) / columns.size + eps)
    return x


def _kernel(
    qkv_ref: jax.Ref,
    pool_ref: jax.Ref,
    page_ref: jax.Ref,
    slot_ref: jax.Ref,
    *refs: jax.Ref,
    group: int,
    has_angles: bool,
    has_norms: bool,
    scale: float,
    eps: float,
) -> None:
    angle_refs, refs = refs[: 2 * has_angles], refs[2 * has_angles :]
    norm_refs, (written_ref, q_ref) = refs[: 2 * has_norms] or (None, None), refs[2 * has_norms :]
    tokens, num_heads, size = qkv_ref.shape
    num_pages, kv_heads = pool_ref.shape[0], num_heads // (group + 2)
    columns, kv_head = Columns(size), pl.program_id(0)
    token, column = jnp.arange(tokens)[:, None], columns.numbers[None, :]
    rotation = Rotation.read(angle_refs, columns, token)

    def reader(head: jax.Array) -> Callable[[jax.Array], jax.Array]:
        return lambda column: qkv_ref[token, head, column[None, :]]

    for number in range(group):
        q = rotated(reader(kv_head * group + number), columns, rotation, norm_refs[0], eps) * scale
        q_ref[token, number, column] = q.astype(q_ref.dtype)
    key = rotated(reader(kv_heads * group + kv_head), columns, rotation, norm_refs[1], eps)
    value = reader(kv_heads * (group + 1) + kv_head)(columns.numbers)
    page, slot = page_ref[jnp.arange(tokens)][:, None], slot_ref[jnp.arange(tokens)][:, None]
    has_page = jnp.broadcast_to(page < num_pages, key.shape)
    for half, x in enumerate((key, value.astype(jnp.float32))):
        into = written_ref.at[page, half, slot, column]
        plgpu.store(into, to_storage(x, pool_ref.dtype), mask=has_page)
