"""The paged KV pool: one array per layer, [page, 2, kv_head, slot in page, head_size], keys at 0 and values
at 1.

Page tables are plain int arrays. A page number equal to the number of pages stands for "nowhere": writes to
it are dropped.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from levserve.model.config import ModelConfig

FP8 = jnp.dtype(jnp.float8_e4m3fn)
LARGEST_FP8 = 448.0
NUMBERS = {jnp.dtype(jnp.uint16): jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.uint8): FP8}
"""Number types that may be stored as their bits, by the type of the bits."""
BITS = {dtype: bits for bits, dtype in NUMBERS.items()}


def kv_dtype(name: str, dtype: jnp.dtype) -> jnp.dtype:
    """The type that `--kv-dtype` NAME means for a model that computes in `dtype`."""
    return {"auto": dtype, "bfloat16": jnp.dtype(jnp.bfloat16), "fp8": FP8}[name]


def page_bytes(config: ModelConfig, page_size: int, dtype: jnp.dtype) -> int:
    """Bytes of one page over all layers."""
    return (
        config.num_layers * 2 * config.num_kv_heads * page_size * config.head_dim * jnp.dtype(dtype).itemsize
    )


def make_pool(
    config: ModelConfig, num_pages: int, page_size: int, storage: jnp.dtype
) -> tuple[jax.Array, ...]:
    shape = (num_pages, 2, config.num_kv_heads, page_size, config.head_dim)
    return tuple(jnp.zeros(shape, storage) for _ in range(config.num_layers))


class Place(NamedTuple):
    """Where the chunk of each row lies in the pool; computed once and used by every layer."""

    table: jax.Array
    """int32 [row, page]"""
    positions: jax.Array
    """int32 [row, chunk]; negative for padding"""
    pages: jax.Array
    """int32 [row * chunk]: the page each position is written to, or "nowhere" for padding"""
    offsets: jax.Array
    """int32 [row * chunk]: its slot in that page"""
    num_used: jax.Array
    """int32 [1]: positions of row * chunk before the padding at the end"""


def place(table: jax.Array, positions: jax.Array, pool: jax.Array) -> Place:
    num_pages, _, _, page_size, _ = pool.shape
    is_padding = positions < 0
    pages = jnp.take_along_axis(table, jnp.where(is_padding, 0, positions // page_size), axis=1, mode="clip")
    flat_pages, offsets = (
        jnp.where(is_padding, num_pages, pages).reshape(-1),
        (positions % page_size).reshape(-1),
    )
    return Place(table, positions, flat_pages, offsets, num_used(~is_padding))


def num_used(is_used: jax.Array) -> jax.Array:
    """int32 [1]: how many entries there are up to the last used one."""
    flat = is_used.reshape(-1)
    return jnp.max(jnp.where(flat, jnp.arange(1, flat.size + 1, dtype=jnp.int32), 0), keepdims=True)


def take_ends(x: jax.Array, ends: jax.Array) -> jax.Array:
    """One place of each row's chunk: [row, chunk, ...] becomes [row, 1, ...]."""
    return x[jnp.arange(x.shape[0]), ends][:, None]


def write(pool: jax.Array, keys: jax.Array, values: jax.Array, place: Place) -> jax.Array:
    """Writes keys and values [row, chunk, kv_head, head_size] by one scatter; in place if pool is donated."""
    # [row * chunk, 2, kv_head, head_size]
    entries = jnp.stack([keys, values], axis=2).reshape(-1, 2, *keys.shape[2:])
    at = pool.at[place.pages, :, :, place.offsets]
    return at.set(to_storage(entries, pool.dtype), mode="drop", wrap_negative_indices=False)


def to_storage(x: jax.Array, storage: jnp.dtype) -> jax.Array:
    dtype = NUMBERS.get(storage, storage)
    if dtype == FP8:
        x = jnp.clip(x, -LARGEST_FP8, LARGEST_FP8)  # fp8 has no infinity: a cast makes NaN of larger numbers
    x = x.astype(dtype)
    return lax.bitcast_convert_type(x, storage) if storage in NUMBERS else x


def from_storage(x: jax.Array) -> jax.Array:
    """Stored keys or values as numbers of the type `multiplied_in`."""
    if x.dtype == jnp.uint16:  # the upper half of a float32
        return lax.bitcast_convert_type(x.astype(jnp.uint32) << 16, jnp.float32)
    if x.dtype == jnp.uint8:
        # Moved to a float16, whose exponent is biased by 8 more: a cast takes four times as long.
        sign, rest = x.astype(jnp.uint16) & 0x80, x.astype(jnp.uint16) & 0x7F
        number = lax.bitcast_convert_type(sign << 8 | rest << 7, jnp.float16).astype(jnp.float32) * 256
        return jnp.where(rest == 0x7F, jnp.nan, number)
    return x.astype(multiplied_in(x.dtype))


def multiplied_in(storage: jnp.dtype) -> jnp.dtype:
    """The type in which stored numbers are multiplied: float32 if they are stored as bits.

    Fp8 is multiplied in float16, which holds all of its numbers and to which a GPU widens it in one
    instruction.
    """
    if storage in NUMBERS:
        return jnp.dtype(jnp.float32)
    return jnp.dtype(jnp.float16) if storage == FP8 else storage


def numbers_of(pool: jax.Array) -> jnp.dtype:
    return jnp.dtype(NUMBERS.get(pool.dtype, pool.dtype))


def from_bits(x: jax.Array) -> jax.Array:
    """Numbers stored as bits in their own type; other arrays as they are."""
    return lax.bitcast_convert_type(x, NUMBERS[x.dtype]) if x.dtype in NUMBERS else x
