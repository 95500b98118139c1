"""Finds where top-k, top-p and min-p cut off a row's logits: no token below this floor is drawn.

`find_floor` does not sort the vocabulary. The floor is usually the logit of one of the likeliest tokens; a
row for which it is not takes a search over the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from levserve.model.search import entry_of, largest

NUM_CANDIDATES = 128
"""Likeliest tokens looked at for top-k and top-p before falling back to a search over the vocabulary."""


def find_floor(scaled: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> jax.Array:
    """The lowest logit of each row that top-k, then top-p, then min-p allow. `scaled` are the logits divided
    by the temperature; a `top_k` of 0 allows every token."""
    vocab = scaled.shape[1]
    top_k = jnp.where(top_k > 0, jnp.minimum(top_k, vocab), vocab)
    candidates, _ = largest(scaled, min(NUM_CANDIDATES, vocab))
    floor = _top_k_floor(scaled, candidates, top_k)
    floor = jnp.maximum(floor, _top_p_floor(scaled, candidates, floor, top_p))
    return jnp.maximum(floor, candidates[:, 0] + jnp.log(min_p))


def sort_for_floor(scaled: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> jax.Array:
    """The same floor by sorting. A loop would keep a GPU's step from being one graph; on a CPU sorting takes
    several times as long."""
    vocab = scaled.shape[1]
    falling = -jnp.sort(-scaled, axis=-1)
    last = jnp.where(top_k > 0, jnp.minimum(top_k, vocab), vocab) - 1
    floor = entry_of(falling, last)
    sums = jnp.cumsum(jnp.where(falling >= floor[:, None], jnp.exp(falling - falling[:, :1]), 0.0), axis=-1)
    reached = jnp.argmax(sums >= (top_p * sums[:, -1])[:, None], axis=-1)
    top_p_floor = entry_of(falling, reached)
    floor = jnp.maximum(floor, jnp.where(top_p >= 1, -jnp.inf, top_p_floor))
    return jnp.maximum(floor, falling[:, 0] + jnp.log(min_p))


def _top_k_floor(scaled: jax.Array, candidates: jax.Array, top_k: jax.Array) -> jax.Array:
    """The k-th largest value of each row."""
    num = candidates.shape[1]
    near = entry_of(candidates, jnp.minimum(top_k, num) - 1)
    is_far = (top_k > num) & (top_k < scaled.shape[1])

    def search() -> jax.Array:
        return _highest_floor(scaled, lambda keep: keep.sum(-1) >= top_k[:, None])

    far = lax.cond(is_far.any(), search, lambda: near)
    return jnp.where(is_far, far, jnp.where(top_k <= num, near, -jnp.inf))


def _top_p_floor(scaled: jax.Array, candidates: jax.Array, floor: jax.Array, top_p: jax.Array) -> jax.Array:
    """The value of the last token in the smallest set that reaches top_p, among those not below `floor`."""
    top = candidates[:, :1]
    weights = jnp.where(scaled >= floor[:, None], jnp.exp(scaled - top), 0.0)
    wanted = top_p * weights.sum(-1)
    reached = jnp.cumsum(jnp.where(candidates >= floor[:, None], jnp.exp(candidates - top), 0.0), axis=-1)
    is_reached = reached >= wanted[:, None]
    first = jnp.argmax(is_reached, axis=-1)
    near = entry_of(candidates, first)
    is_far = ~entry_of(is_reached, first) & (top_p < 1)

    def search() -> jax.Array:
        return _highest_floor(
            scaled, lambda keep: jnp.where(keep, weights[:, None], 0.0).sum(-1) >= wanted[:, None]
        )

    far = lax.cond(is_far.any(), search, lambda: near)
    return jnp.where(top_p >= 1, -jnp.inf, jnp.where(is_far, far, near))


def _highest_floor(scaled: jax.Array, is_enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """The highest floor [row] that still keeps enough tokens, found by a search over the bits of a float32.

    Each step settles two bits of the floor, so that the logits are read half as often as with one bit a step.
    `is_enough` takes the tokens that several floors keep, [row, floor, vocab], and says for each floor
    whether they suffice, [row, floor].
    """
    ordered = _ordered(scaled)

    def narrow(step: jax.Array | int, floor: jax.Array) -> jax.Array:
        unit = jnp.uint32(1) << (30 - 2 * jnp.uint32(step))
        raised = floor[:, None] + unit * jnp.arange(1, 4, dtype=jnp.uint32)[None]
        return floor + unit * is_enough(ordered[:, None] >= raised[:, :, None]).sum(-1, dtype=jnp.uint32)

    floor = lax.fori_loop(0, 16, narrow, jnp.zeros(scaled.shape[0], jnp.uint32))
    return _from_ordered(jnp.maximum(floor, ordered.min(-1)))


def _ordered(x: jax.Array) -> jax.Array:
    """float32 values as uint32 values that compare in the same order."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _from_ordered(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(
        jnp.where(bits >> 31 == 1, bits & jnp.uint32((1 << 31) - 1), ~bits), jnp.float32
    )
