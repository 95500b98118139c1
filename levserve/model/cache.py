"""The paged KV pool: one array per layer, [page, 2, kv_head, slot in page, head_size], keys at 0 and values at 1.

Page tables are plain int arrays. A page number equal to the number of pages stands for "nowhere": writes to it are dropped.
"""

from __future__ import annotations

from typing import NamedTuple

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


class Place(NamedTuple):
    """Where a chunk of each row lives; worked out once and used by every layer."""

    table: jax.Array
    """int32 [row, page]"""
    positions: jax.Array
    """int32 [row, chunk]; negative for padding"""
    pages: jax.Array
    """int32 [row * chunk]: the page each position is written to, or "nowhere" for padding"""
    offsets: jax.Array
    """int32 [row * chunk]: its slot in that page"""


def place(table: jax.Array, positions: jax.Array, pool: jax.Array) -> Place:
    num_pages, _, _, page_size, _ = pool.shape
    is_padding = positions < 0
    pages = jnp.take_along_axis(table, jnp.where(is_padding, 0, positions // page_size), axis=1, mode="clip")
    return Place(table, positions, jnp.where(is_padding, num_pages, pages).reshape(-1), (positions % page_size).reshape(-1))


def write(pool: jax.Array, keys: jax.Array, values: jax.Array, place: Place) -> jax.Array:
    """Puts a layer's keys and values [row, chunk, kv_head, head_size] in their place: one scatter, in place when donated."""
    entries = jnp.stack([keys, values], axis=2).reshape(-1, 2, *keys.shape[2:])  # [row * chunk, 2, kv_head, head_size]
    at = pool.at[place.pages, :, :, place.offsets]
    return at.set(to_storage(entries, pool.dtype), mode="drop", wrap_negative_indices=False)


def to_storage(x: jax.Array, storage: jnp.dtype) -> jax.Array:
    if storage == jnp.uint16:
        return lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
    return x.astype(storage)


def from_storage(x: jax.Array) -> jax.Array:
    """Stored keys or values as numbers: bits as float32, of which those of a bfloat16 are the upper half; others as they are."""
    if x.dtype == jnp.uint16:
        return lax.bitcast_convert_type(x.astype(jnp.uint32) << 16, jnp.float32)
    return x


def from_bits(x: jax.Array) -> jax.Array:
    """What was stored as the bits of bfloat16, as bfloat16; others as they are."""
    return lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x
