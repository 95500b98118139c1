"""One query per row over the row's pages, as a Pallas kernel for NVIDIA GPUs.

Every program of the grid is one row, one key-value head and one split of the row's pages; it walks its pages a block at a
time with a running softmax. Splits exist so that a few long rows still fill the card; their partial results are merged
afterwards. Pages are read where they lie: nothing is gathered.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

MASKED = -1e30
MIN_QUERIES = 16
"""Rows of the smallest matrix product a tensor core takes; a group of query heads is padded to it."""
NUM_PROCESSORS = 132
BLOCK_TOKENS = 128


def refuse_unservable(head_dim: int, page_size: int) -> str | None:
    """Why this kernel cannot serve a model, or None."""
    if head_dim not in (64, 128):  # 256 in float32 asked for 418 KB of an H200's 232 KB of shared memory
        return f"a head size of {head_dim} (it takes 64 and 128)"
    if page_size < 16:
        return f"pages of {page_size} tokens (it takes 16 and more)"
    return None


@functools.partial(jax.jit, static_argnames=("window", "interpret"))
def paged_attention(
    q: jax.Array, pool: jax.Array, table: jax.Array, positions: jax.Array, *, window: int | None = None, interpret: bool = False
) -> jax.Array:
    """q [row, kv_head, group, head_size] scaled; pool [page, 2, kv_head, page_size, head_size]; table [row, page]; positions
    [row], of the query, negative for padding. Gives float32 of q's shape."""
    rows, kv_heads, group, size = q.shape
    page_size = pool.shape[3]
    block = max(BLOCK_TOKENS // page_size, 1)
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % block)))
    num_blocks = table.shape[1] // block
    splits = min(max(2 * NUM_PROCESSORS // (rows * kv_heads), 1), 16, num_blocks)
    splits = 1 << (splits.bit_length() - 1)
    padded = max(MIN_QUERIES, 1 << (group - 1).bit_length())
    queries = jnp.pad(q * math.log2(math.e), ((0, 0), (0, 0), (0, padded - group), (0, 0))).astype(pool.dtype)

    kernel = functools.partial(_kernel, block=block, blocks_per_split=-(-num_blocks // splits), window=window)
    num_pages = pool.shape[0]
    whole = (num_pages, None, None, page_size, size)
    mixed, tops, totals = pl.pallas_call(
        kernel,
        grid=(rows, kv_heads, splits),
        in_specs=[
            pl.BlockSpec((None, None, padded, size), lambda r, h, s: (r, h, 0, 0)),
            pl.BlockSpec(whole, lambda r, h, s: (0, 0, h, 0, 0)),
            pl.BlockSpec(whole, lambda r, h, s: (0, 1, h, 0, 0)),
            pl.BlockSpec((None, table.shape[1]), lambda r, h, s: (r, 0)),
            pl.BlockSpec((None,), lambda r, h, s: (r,)),
        ],
        out_specs=[
            pl.BlockSpec((None, None, None, padded, size), lambda r, h, s: (s, r, h, 0, 0)),
            pl.BlockSpec((None, None, None, padded), lambda r, h, s: (s, r, h, 0)),
            pl.BlockSpec((None, None, None, padded), lambda r, h, s: (s, r, h, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((splits, rows, kv_heads, padded, size), jnp.float32),
            jax.ShapeDtypeStruct((splits, rows, kv_heads, padded), jnp.float32),
            jax.ShapeDtypeStruct((splits, rows, kv_heads, padded), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="paged_decode",
    )(queries, pool, pool, table, positions)
    top = tops.max(0)
    weights = jnp.exp2(tops - top[None])  # an empty split weighs nothing
    total = (totals * weights).sum(0)
    merged = (mixed * weights[..., None]).sum(0) / jnp.maximum(total, 1e-30)[..., None]
    return merged[:, :, :group]


def _kernel(
    q_ref: jax.Ref,
    k_ref: jax.Ref,
    v_ref: jax.Ref,
    table_ref: jax.Ref,
    position_ref: jax.Ref,
    mixed_ref: jax.Ref,
    top_ref: jax.Ref,
    total_ref: jax.Ref,
    *,
    block: int,
    blocks_per_split: int,
    window: int | None,
) -> None:
    padded, size = q_ref.shape
    page_size = k_ref.shape[1]
    width = block * page_size
    position = position_ref[...]
    q = q_ref[...]
    first = pl.program_id(2) * blocks_per_split
    end = jnp.minimum(first + blocks_per_split, position // width + 1)
    if window is not None:
        first = jnp.maximum(first, (position - window + 1) // width)

    def mix(index: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        mixed, top, total = carry
        pages = table_ref[pl.ds(index * block, block)]
        keys = k_ref[pages].reshape(width, size)
        scores = jnp.dot(q, keys.T, preferred_element_type=jnp.float32)  # [padded, width]
        at = index * width + lax.broadcasted_iota(jnp.int32, (padded, width), 1)
        is_seen = at <= position
        if window is not None:
            is_seen &= at > position - window
        scores = jnp.where(is_seen, scores, MASKED)
        new_top = jnp.maximum(top, scores.max(-1))
        shrink = jnp.exp2(top - new_top)
        weights = jnp.exp2(scores - new_top[:, None])
        values = v_ref[pages].reshape(width, size)
        mixed = mixed * shrink[:, None] + jnp.dot(weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
        return mixed, new_top, total * shrink + weights.sum(-1)

    start = (
        jnp.zeros((padded, size), jnp.float32),
        jnp.full((padded,), MASKED, jnp.float32),
        jnp.zeros((padded,), jnp.float32),
    )
    mixed, top, total = lax.fori_loop(first, end, mix, start)
    mixed_ref[...] = mixed
    top_ref[...] = top
    total_ref[...] = total
