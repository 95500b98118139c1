"""The paged KV pool: one array per layer, [page, 2, kv_head, slot in page, head_size], keys at 0 and values
at 1. An int8 slot has its scale after its values, as the bytes of a float32.

Page tables are plain int arrays. A page number equal to the number of pages stands for "nowhere": writes to
it are dropped.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from levserve.model.config import ModelConfig

FP8 = jnp.dtype(jnp.float8_e4m3fn)
LARGEST_FP8 = 448.0
INT8 = jnp.dtype(jnp.int8)
LARGEST_INT8 = 127.0
SMALLEST_SCALE = 1e-30
"""Keeps the scale of an all-zero head from being 0, which would lead to a division by zero."""
SCALE_BYTES = 4
BIT_STORED_TYPES = {jnp.dtype(jnp.uint16): jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.uint8): FP8}
"""Number types that may be stored as their bits, by the type of the bits."""
BITS = {dtype: bits for bits, dtype in BIT_STORED_TYPES.items()}


def kv_dtype(name: str, dtype: jnp.dtype) -> jnp.dtype:
    """The type that `--kv-dtype` NAME means for a model that computes in `dtype`."""
    return {"auto": dtype, "bfloat16": jnp.dtype(jnp.bfloat16), "fp8": FP8, "int8": INT8}[name]


def page_bytes(config: ModelConfig, page_size: int, dtype: jnp.dtype) -> int:
    """Bytes of one page over all layers."""
    slot_bytes = stored_width(config.head_dim, dtype) * jnp.dtype(dtype).itemsize
    return config.num_layers * 2 * config.num_kv_heads * page_size * slot_bytes


def stored_width(head_size: int, dtype: jnp.dtype) -> int:
    """How many values of this type a slot takes: those of a head, and for int8 the bytes of its scale."""
    return head_size + SCALE_BYTES if dtype == INT8 else head_size


def make_pool(
    config: ModelConfig, num_pages: int, page_size: int, storage: jnp.dtype
) -> tuple[jax.Array, ...]:
    shape = (num_pages, 2, config.num_kv_heads, page_size, stored_width(config.head_dim, storage))
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
    """int32 [1]: number of positions, of row * chunk, before the padding at the end"""


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
    if storage == INT8:
        return _to_int8(x)
    dtype = BIT_STORED_TYPES.get(storage, storage)
    if dtype == FP8:
        x = jnp.clip(x, -LARGEST_FP8, LARGEST_FP8)  # fp8 has no infinity: a cast makes larger values NaN
    x = x.astype(dtype)
    return lax.bitcast_convert_type(x, storage) if storage in BIT_STORED_TYPES else x


def _to_int8(x: jax.Array) -> jax.Array:
    """Each head [..., head_size] rounded to int8 with its own scale, which follows its values."""
    scale = jnp.maximum(jnp.abs(x.astype(jnp.float32)).max(-1, keepdims=True), SMALLEST_SCALE) / LARGEST_INT8
    numbers = jnp.round(x.astype(jnp.float32) * (1 / scale)).astype(INT8)
    return jnp.concatenate([numbers, lax.bitcast_convert_type(scale[..., 0], INT8)], -1)


def filling(pool: jax.Array, number: float) -> NDArray[np.generic]:
    """The content of a slot of the pool whose values are all `number`."""
    width, dtype = pool.shape[-1], pool.dtype
    if dtype == INT8:
        scale = np.asarray([number / LARGEST_INT8], np.float32)
        return np.concatenate([np.full(width - SCALE_BYTES, LARGEST_INT8, INT8), scale.view(INT8)])
    return np.full(width, number, BIT_STORED_TYPES.get(dtype, dtype)).view(dtype)


def from_storage(x: jax.Array) -> jax.Array:
    """Stored keys or values in the type that `multiplied_in` names."""
    if x.dtype == jnp.uint16:  # the upper half of a float32
        return lax.bitcast_convert_type(x.astype(jnp.uint32) << 16, jnp.float32)
    if x.dtype == jnp.uint8:
        # Shifted into a float16, whose exponent bias is larger by 8: a cast takes four times as long.
        sign, rest = x.astype(jnp.uint16) & 0x80, x.astype(jnp.uint16) & 0x7F
        number = lax.bitcast_convert_type(sign << 8 | rest << 7, jnp.float16).astype(jnp.float32) * 256
        return jnp.where(rest == 0x7F, jnp.nan, number)
    if x.dtype == INT8:
        scale = lax.bitcast_convert_type(x[..., -SCALE_BYTES:], jnp.float32)
        return x[..., :-SCALE_BYTES].astype(jnp.float32) * scale[..., None]
    return x.astype(multiplied_in(x.dtype))


def multiplied_in(storage: jnp.dtype) -> jnp.dtype:
    """The type in which stored values are multiplied: float32 if they are stored as bits or int8.

    Fp8 is multiplied in float16, which can represent all of its values and to which a GPU widens it in one
    instruction.
    """
    if storage in BIT_STORED_TYPES or storage == INT8:
        return jnp.dtype(jnp.float32)
    return jnp.dtype(jnp.float16) if storage == FP8 else storage


def numbers_of(pool: jax.Array) -> jnp.dtype:
    return jnp.dtype(BIT_STORED_TYPES.get(pool.dtype, pool.dtype))


def from_bits(x: jax.Array) -> jax.Array:
    """Values that are stored as bits, in their own type; other arrays unchanged."""
    return lax.bitcast_convert_type(x, BIT_STORED_TYPES[x.dtype]) if x.dtype in BIT_STORED_TYPES else x
