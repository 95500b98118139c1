"""Attention of each row's queries over the row's pages, in plain XLA operations.

It walks the page tables in blocks with a running softmax and stops after the last block that any row needs.
So a batch pays for its longest row, not for the model's maximum length, and one compiled program serves every
context length.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from levserve.model.cache import BIT_STORED_TYPES, from_bits, from_storage, multiplied_in

FEW_QUERIES = 16
"""Up to this many queries per row, all of the time goes into reading keys and values."""
FEW_BLOCK_TOKENS = 64
"""Tokens of each row per block for few queries: contexts are in effect rounded up to a multiple of it."""
BLOCK_TOKENS = 256
"""The same for many queries, where the running softmax takes the time: fewer, larger steps."""
MASKED = -1e30
LOWEST = -1e20
"""Where the running maximum starts: so far above a masked score that the score's weight is zero."""


def attend_in_blocks(
    q: jax.Array,
    pool: jax.Array,
    table: jax.Array,
    positions: jax.Array,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    on_cpu: bool,
) -> jax.Array:
    """Mixes the values that each query may see: those up to its position, within the window if there is one.

    q [row, chunk, kv_head, group, head_size] float32, scaled; pool as in `cache`; table [row, page];
    positions [row, chunk], negative for padding. Scores are limited by `softcap`. `sinks` [query head] are
    scores without a key or value. The result is float32 of q's shape.
    """
    rows, chunk, kv_heads, group, size = q.shape
    queries = chunk * group
    page_size = pool.shape[3]
    has_few_queries = queries <= FEW_QUERIES
    block_tokens = FEW_BLOCK_TOKENS if has_few_queries else BLOCK_TOKENS
    block = min(max(block_tokens // page_size, 1), table.shape[1])  # pages
    width = block * page_size
    # Padded, because XLA shifts a slice back if it would reach beyond the end.
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % block)), mode="edge")
    tiles = pool.reshape(-1, page_size * pool.shape[4])  # [page * 2 * kv_head, slot * stored head]
    read, dtype = _reader(pool.dtype, on_cpu=on_cpu, is_bfloat16=has_few_queries and queries > 1)

    q = q.transpose(0, 2, 1, 3, 4).reshape(rows, kv_heads, queries, size).astype(dtype)
    last_visible = jnp.repeat(positions, group, axis=1)[:, None, :, None]  # [row, 1, query, 1]

    def gather(pages: jax.Array, half: int) -> jax.Array:
        """Keys or values of pages [row, block], as [row, kv_head, token, head_size], which needs no copy."""
        first_tiles = ((pages * 2 + half) * kv_heads)[:, None]
        numbers = first_tiles + jnp.arange(kv_heads, dtype=jnp.int32)[None, :, None]
        stored = tiles.at[numbers].get(mode="promise_in_bounds", wrap_negative_indices=False)
        if stored.dtype not in BIT_STORED_TYPES:
            # The barrier makes XLA copy whole tiles; copying row by row takes twice as long.
            stored = lax.optimization_barrier(stored)
        return read(stored.reshape(rows, kv_heads, width, pool.shape[4]))

    def mix_block(
        index: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        mixed, top, total = carry
        pages = lax.dynamic_slice_in_dim(table, index * block, block, axis=1)
        scores = jnp.einsum("rkmd,rktd->rkmt", q, gather(pages, 0), preferred_element_type=jnp.float32)
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        at = index * width + jnp.arange(width, dtype=jnp.int32)[None, None, None]
        is_visible = at <= last_visible
        if window is not None:
            is_visible &= at > last_visible - window
        scores = jnp.where(is_visible, scores, MASKED)
        new_top = jnp.maximum(top, scores.max(-1))
        shrink = jnp.exp(top - new_top)
        weights = jnp.exp(scores - new_top[..., None])
        new = jnp.einsum(
            "rkmt,rktd->rkmd", weights.astype(dtype), gather(pages, 1), preferred_element_type=jnp.float32
        )
        return mixed * shrink[..., None] + new, new_top, total * shrink + weights.sum(-1)

    top, total = jnp.float32(LOWEST), jnp.float32(0.0)
    if sinks is not None:
        top, total = sinks.reshape(1, kv_heads, 1, group), jnp.float32(1.0)
        top = jnp.broadcast_to(top, (rows, kv_heads, chunk, group)).reshape(rows, kv_heads, queries)
    start = (
        jnp.zeros((rows, kv_heads, queries, size), jnp.float32),
        jnp.broadcast_to(top, (rows, kv_heads, queries)),
        jnp.full((rows, kv_heads, queries), total),
    )
    num_blocks = jnp.maximum(positions.max(), 0) // width + 1
    mixed, _, total = lax.fori_loop(jnp.int32(0), num_blocks.astype(jnp.int32), mix_block, start)
    mixed = mixed / jnp.maximum(total, 1e-30)[..., None]  # a padding query sees nothing and gets zeros
    return mixed.reshape(rows, kv_heads, chunk, group, size).transpose(0, 2, 1, 3, 4)


def _reader(
    storage: jnp.dtype, *, on_cpu: bool, is_bfloat16: bool
) -> tuple[Callable[[jax.Array], jax.Array], jnp.dtype]:
    """The function that converts stored keys and values for a product, and the type they are multiplied in.

    On a CPU a few queries are multiplied in bfloat16, which halves what is read. One query alone has no fast
    bfloat16 product there, and for many queries the faster float32 product outweighs the cost of widening.
    """
    if BIT_STORED_TYPES.get(storage, storage) != jnp.bfloat16 or not on_cpu:
        return from_storage, multiplied_in(storage)
    if is_bfloat16:
        return from_bits, jnp.dtype(jnp.bfloat16)
    return lambda x: from_storage(x).astype(jnp.float32), jnp.dtype(jnp.float32)
