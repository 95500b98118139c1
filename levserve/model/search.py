"""Finds the largest entries of each row of an array [row, vocab], in two levels: the chunks that hold them,
and their places in those chunks."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from levserve.model.backend import Likeliest

CHUNK, SMALL_CHUNK = 256, 32
"""The most entries of a chunk when one entry of a row is searched for, and when several are."""


def likeliest(logits: jax.Array) -> Likeliest:
    """The largest entry of each row, in two levels: several times faster than one argmax on CPU."""
    chunks = chunked(logits, -jnp.inf)
    tops = chunks.max(-1)
    best = jnp.argmax(tops, axis=-1)
    tokens = best * chunks.shape[-1] + jnp.argmax(row_of(chunks, best), axis=-1)
    return Likeliest(tokens.astype(jnp.int32), tops.max(-1))


def largest(x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The largest entries of each row in descending order, and their places.

    The result is that of `lax.top_k`, which on a GPU would sort the whole row. The entries lie in the chunks
    with the largest maxima. Equal entries keep their order, and so do chunks with equal maxima. A row with
    fewer entries is filled up with -inf in the place -1.
    """
    if x.shape[1] < count:
        values, places = lax.top_k(x, x.shape[1])
        missing = ((0, 0), (0, count - x.shape[1]))
        filled = jnp.pad(places.astype(jnp.int32), missing, constant_values=-1)
        return jnp.pad(values, missing, constant_values=-jnp.inf), filled
    chunks = chunked(x, -jnp.inf, SMALL_CHUNK)
    if chunks.shape[1] <= 2 * count:
        values, places = lax.top_k(x, count)
        return values, places.astype(jnp.int32)
    chosen = jnp.sort(lax.top_k(chunks.max(-1), count)[1], axis=-1)
    near = jnp.take_along_axis(chunks, chosen[:, :, None], axis=1).reshape(x.shape[0], -1)
    values, at = lax.top_k(near, count)
    size = chunks.shape[-1]
    places = jnp.take_along_axis(chosen, at // size, axis=1) * size + at % size
    return values, places.astype(jnp.int32)


def chunked(x: jax.Array, fill: float, size: int = CHUNK) -> jax.Array:
    """[row, vocab] as [row, chunk, size]. Chunks are smaller, down to a quarter of `size`, if that lets them
    divide the vocabulary evenly.

    Otherwise the last one is padded, for which a CPU copies the whole array: a draw for 32 rows of 151,936
    tokens then takes more than three times as long.
    """
    fitting = math.gcd(size, x.shape[1])
    size = fitting if 4 * fitting >= size else size
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % size)), constant_values=fill)
    return x.reshape(x.shape[0], -1, size)


def row_of(chunks: jax.Array, index: jax.Array) -> jax.Array:
    """The chunk `index` [row] of each row."""
    return jnp.take_along_axis(chunks, index[:, None, None], axis=1, mode="promise_in_bounds")[:, 0]


def entry_of(x: jax.Array, index: jax.Array) -> jax.Array:
    """The entry `index` [row] of each row of an array [row, place]."""
    return jnp.take_along_axis(x, index[:, None], axis=1, mode="promise_in_bounds")[:, 0]
