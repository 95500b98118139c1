"""A feed-forward part made of many experts, of which each token uses a few.

Pairs of a token and one of its experts are sorted by expert and computed in blocks of one expert each, so a step reads the
weights of the experts that were chosen and no others, and multiplies little more than the chosen pairs. (`lax.ragged_dot`
would be the short way to say this, but outside TPUs it multiplies every token with every expert, under a mask.)
Shapes are static; how many blocks run is known on the device alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

MIN_BLOCK, MAX_BLOCK = 2, 64
"""Pairs computed together: one alone leaves the fast path of the CPU's matrix product, and many pad what few experts get."""

Expert = Callable[[jax.Array, jax.Array], jax.Array]


class Choice(NamedTuple):
    """The experts of each token and what their results weigh, both [token, experts per token]."""

    experts: jax.Array
    weights: jax.Array


def choose(scores: jax.Array, count: int, *, renormalises: bool) -> Choice:
    """The likeliest experts by the router's scores [token, expert]."""
    weights, experts = lax.top_k(jax.nn.softmax(scores, axis=-1), count)
    return Choice(experts, weights / weights.sum(-1, keepdims=True) if renormalises else weights)


def mix(x: jax.Array, choice: Choice, is_real: jax.Array, expert: Expert, num_experts: int) -> jax.Array:
    """The weighted sum of each token's experts, float32 of the shape of x [token, embed]; zeros where `is_real` is not.

    `expert(number, tokens)` computes one expert on [block, embed].
    """
    num_tokens, per_token = choice.experts.shape
    num_pairs = num_tokens * per_token
    size = _block_size(num_pairs, num_experts)
    expert_of = jnp.where(is_real[:, None], choice.experts, num_experts).reshape(-1)  # [pair]
    order = jnp.argsort(expert_of)
    counts = jnp.zeros(num_experts, jnp.int32).at[expert_of].add(1, mode="drop")
    ends = jnp.cumsum(counts)
    blocks = -(-counts // size)
    block_ends = jnp.cumsum(blocks)
    weights = choice.weights.reshape(-1)

    def add_block(index: jax.Array, total: jax.Array) -> jax.Array:
        number = jnp.searchsorted(block_ends, index, side="right").astype(jnp.int32)
        first = ends[number] - counts[number] + (index - block_ends[number] + blocks[number]) * size
        at = first + jnp.arange(size, dtype=jnp.int32)
        pairs = order[jnp.minimum(at, num_pairs - 1)]
        tokens = pairs // per_token
        result = expert(number, x[tokens]) * weights[pairs][:, None]
        return total.at[jnp.where(at < ends[number], tokens, num_tokens)].add(result, mode="drop")

    return lax.fori_loop(jnp.int32(0), block_ends[-1].astype(jnp.int32), add_block, jnp.zeros(x.shape, jnp.float32))


def _block_size(num_pairs: int, num_experts: int) -> int:
    """About what an expert gets if all are chosen alike."""
    size = MIN_BLOCK
    while size < min(MAX_BLOCK, num_pairs // num_experts):
        size *= 2
    return size
