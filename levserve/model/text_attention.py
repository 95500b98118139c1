"""Attention over whole texts, in XLA: every position sees every other one that is not padding."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from levserve.model.rotary import Angles, rotate

QUERY_BLOCK = 256
"""Queries whose scores are computed together: those of a whole long text would take gigabytes."""
MASKED = -1e30


class Texts(NamedTuple):
    """What every layer must know about the texts [row, chunk] that it computes, padded on the right."""

    angles: Angles
    """Those of one row's positions, which are the same in all rows."""
    is_real: jax.Array
    """bool [row, chunk]: no padding"""
    ends: jax.Array
    """int32 [row, chunk]: at every position of a text, the position of its last token"""


def attend_to_all(qkv: jax.Array, texts: Texts, num_heads: int) -> jax.Array:
    """qkv [row, chunk, 3 * heads * size]: queries, keys, values; gives [row, chunk, heads * size]."""
    rows, chunk, width = qkv.shape
    size = width // (3 * num_heads)
    q, k, v = jnp.split(qkv.reshape(rows, chunk, 3 * num_heads, size), 3, axis=2)
    q, k = rotate(q, texts.angles) * size**-0.5, rotate(k, texts.angles)
    bias = jnp.where(texts.is_real, 0.0, MASKED)[:, None, None]  # [row, 1, 1, key]

    def attend(queries: jax.Array) -> jax.Array:
        scores = jnp.einsum("rqhd,rkhd->rhqk", queries, k) + bias
        return jnp.einsum("rhqk,rkhd->rqhd", jax.nn.softmax(scores, axis=-1), v)

    if chunk <= QUERY_BLOCK or chunk % QUERY_BLOCK:
        return attend(q).reshape(rows, chunk, -1)
    blocks = q.reshape(rows, -1, QUERY_BLOCK, num_heads, size).swapaxes(0, 1)
    return lax.map(attend, blocks).swapaxes(0, 1).reshape(rows, chunk, -1)
