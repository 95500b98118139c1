"""A feed-forward part made of many experts, of which each token uses a few.

The work is pairs of a token and one of its experts, sorted by expert. `lax.ragged_dot` would be the shortest
way to write it, but outside TPUs it multiplies every token with every expert under a mask: on an H200 it took
two to seven times as long as one batched product of all. Which function is fastest depends on the device and
the number of pairs; the backend chooses.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from levserve.model.backend import ExpertChoice, ExpertLayer
from levserve.model.config import Routing, Scoring

MIN_BLOCK, MAX_BLOCK = 2, 64
"""Pairs of one expert computed together on a CPU: a single one misses the fast path of matrix products."""
FEW_TOKENS = 256
"""Up to this many tokens a GPU is limited by reading the weights, not by multiplying."""


def choose_experts(
    scores: jax.Array, count: int, routing: Routing, correction: jax.Array | None = None
) -> ExpertChoice:
    """The likeliest experts by the router's scores [token, expert] and its correction [expert]."""
    is_softmax = routing.scoring is Scoring.SOFTMAX
    all_weights = jax.nn.softmax(scores, axis=-1) if is_softmax else jax.nn.sigmoid(scores)
    ranks = all_weights if correction is None else all_weights + correction[None]
    if routing.num_groups > 1:
        ranks = _keep_best_groups(ranks, routing)
    weights, experts = lax.top_k(ranks, count)
    if correction is not None:
        weights = jnp.take_along_axis(all_weights, experts, axis=-1)
    if routing.renormalises:
        weights = weights / weights.sum(-1, keepdims=True)
    return ExpertChoice(experts, weights if routing.scale == 1.0 else weights * routing.scale)


def _keep_best_groups(ranks: jax.Array, routing: Routing) -> jax.Array:
    """The ranks [token, expert], with minus infinity for experts outside the token's best groups."""
    grouped = ranks.reshape(len(ranks), routing.num_groups, -1)
    best = lax.top_k(grouped, routing.group_best)[0].sum(-1)
    _, chosen = lax.top_k(best, routing.groups_per_token)
    groups = jnp.arange(routing.num_groups, dtype=jnp.int32)[None, :, None]
    is_chosen = (chosen[:, None] == groups).any(-1)
    return jnp.where(is_chosen[..., None], grouped, -jnp.inf).reshape(ranks.shape)


def are_few(num_pairs: int, num_experts: int) -> bool:
    """Whether a GPU should gather a matrix for each pair: so few of them hardly ever share an expert."""
    return 3 * num_pairs <= num_experts


class _Sorted(NamedTuple):
    """Pairs sorted by expert, padding last. Expert e has the pairs `order[ends[e] - counts[e] : ends[e]]`."""

    order: jax.Array
    counts: jax.Array
    ends: jax.Array


def _sort(choice: ExpertChoice, is_real: jax.Array, num_experts: int) -> _Sorted:
    expert_of = jnp.where(is_real[:, None], choice.experts, num_experts).reshape(-1)
    counts = jnp.zeros(num_experts, jnp.int32).at[expert_of].add(1, mode="drop")
    return _Sorted(jnp.argsort(expert_of), counts, jnp.cumsum(counts))


def mix_in_blocks(
    x: jax.Array, choice: ExpertChoice, is_real: jax.Array, experts: ExpertLayer, num_experts: int
) -> jax.Array:
    """Computes one expert after another, a few of its pairs at a time.

    Reads only the chosen experts and multiplies little more than the pairs; for devices on which a loop costs
    nothing.
    """
    num_tokens, per_token = choice.experts.shape
    num_pairs, weights = choice.experts.size, choice.weights.reshape(-1)
    size = MIN_BLOCK
    while size < min(MAX_BLOCK, num_pairs // num_experts):
        size *= 2
    order, counts, ends = _sort(choice, is_real, num_experts)
    blocks = -(-counts // size)
    block_ends = jnp.cumsum(blocks)

    def add_block(index: jax.Array, total: jax.Array) -> jax.Array:
        number = jnp.searchsorted(block_ends, index, side="right").astype(jnp.int32)
        first = ends[number] - counts[number] + (index - block_ends[number] + blocks[number]) * size
        at = first + jnp.arange(size, dtype=jnp.int32)
        pairs = order[jnp.minimum(at, num_pairs - 1)]
        tokens = pairs // per_token
        result = experts.one(number, x[tokens]) * weights[pairs][:, None]
        return total.at[jnp.where(at < ends[number], tokens, num_tokens)].add(result, mode="drop")

    return lax.fori_loop(
        jnp.int32(0), block_ends[-1].astype(jnp.int32), add_block, jnp.zeros(x.shape, jnp.float32)
    )


def mix_gathered(x: jax.Array, choice: ExpertChoice, experts: ExpertLayer) -> jax.Array:
    """Computes every pair with a copy of its expert's matrices: for a few pairs and many experts."""
    results = experts.chosen(choice.experts.reshape(-1), jnp.repeat(x, choice.experts.shape[1], axis=0))
    return (results.reshape(*choice.experts.shape, -1) * choice.weights[..., None]).sum(1)


def mix_in_slots(
    x: jax.Array, choice: ExpertChoice, is_real: jax.Array, experts: ExpertLayer, num_experts: int
) -> jax.Array:
    """Computes all experts in one batched product, each with slots for twice the mean number of pairs.

    An expert with more pairs makes another round necessary. If there are few tokens, each has a slot with
    every expert, so that one round is always enough.
    """
    num_tokens, per_token = choice.experts.shape
    num_pairs, weights = choice.experts.size, choice.weights.reshape(-1)
    slots = num_tokens if num_tokens <= FEW_TOKENS else min(num_tokens, -(-2 * num_pairs // num_experts))
    order, counts, ends = _sort(choice, is_real, num_experts)

    def add_round(number: jax.Array | int, total: jax.Array) -> jax.Array:
        # [expert, slot]
        at = (ends - counts + number * slots)[:, None] + jnp.arange(slots, dtype=jnp.int32)[None]
        pairs = order[jnp.minimum(at, num_pairs - 1)]
        tokens = pairs // per_token
        results = experts.every(x[tokens]) * weights[pairs][..., None]
        return total.at[jnp.where(at < ends[:, None], tokens, num_tokens)].add(results, mode="drop")

    zeros = jnp.zeros(x.shape, jnp.float32)
    if slots == num_tokens:
        return add_round(0, zeros)
    return lax.fori_loop(jnp.int32(0), (-(-counts.max() // slots)).astype(jnp.int32), add_round, zeros)
