"""The paged KV pool: one array per layer, [page, 2, kv_head, slot in page, head_size], keys at 0 and values at 1.

Page tables are plain int arrays. A page number equal to the number of pages stands for "nowhere": writes to it are dropped.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from levserve.model.config import ModelConfig


def storage_dtype(dtype: jnp.dtype, backend: str) -> jnp.dtype:
    """What the pool is stored as.

    On CPU bfloat16 is kept as its uint16 bits: jaxlib 0.10 converts the whole pool to float32 and back for every bfloat16
    scatter (100 ms for 32,768 slots against 10 us).
    """
    return jnp.dtype(jnp.uint16) if backend == "cpu" and dtype == jnp.bfloat16 else jnp.dtype(dtype)


def page_bytes(config: ModelConfig, page_size: int, dtype: jnp.dtype) -> int:
    """Bytes of one page over all layers."""
    return config.num_layers * 2 * config.num_kv_heads * page_size * config.head_dim * jnp.dtype(dtype).itemsize


def make_pool(config: ModelConfig, num_pages: int, page_size: int, storage: jnp.dtype) -> tuple[jax.Array, ...]:
    shape = (num_pages, 2, config.num_kv_heads, page_size, config.head_dim)
    return tuple(jnp.zeros(shape, storage) for _ in range(config.num_layers))


def write(pool: jax.Array, keys: jax.Array, values: jax.Array, table: jax.Array, positions: jax.Array) -> jax.Array:
    """Puts keys and values [row, chunk, kv_head, head_size] of a layer where their positions [row, chunk] say.

    A negative position is padding and is dropped. One scatter, in place when the pool is donated.
    """
    num_pages, _, _, page_size, _ = pool.shape
    index = jnp.where(positions < 0, 0, positions // page_size)
    pages = jnp.take_along_axis(table, index, axis=1, mode="clip")
    pages = jnp.where(positions < 0, num_pages, pages).reshape(-1)
    entries = jnp.stack([keys, values], axis=2).reshape(-1, 2, *keys.shape[2:])  # [row * chunk, 2, kv_head, head_size]
    return pool.at[pages, :, :, (positions % page_size).reshape(-1)].set(to_storage(entries, pool.dtype), mode="drop")


def to_storage(x: jax.Array, storage: jnp.dtype) -> jax.Array:
    if storage == jnp.uint16:
        return lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
    return x.astype(storage)


def from_storage(x: jax.Array) -> jax.Array:
    """Stored keys or values as float32; the bits of a bfloat16 are the upper half of a float32's."""
    if x.dtype == jnp.uint16:
        return lax.bitcast_convert_type(x.astype(jnp.uint32) << 16, jnp.float32)
    return x.astype(jnp.float32)
