"""Chooses the experts of each token by the router's scores, in one Pallas kernel for NVIDIA GPUs.

XLA needs four kernels: the softmax, the largest scores, the sum of their weights, and the experts of padding.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from levserve.model.backend import ExpertChoice, ExpertRule
from levserve.model.config import Routing
from levserve.model.gpu.paged_attention import power_of_two

TOKENS = 4
"""Tokens per program, each with one warp."""
LOWEST = -3e38
"""Below every score, but above the minus infinity of experts that are chosen already."""


def is_plain(routing: Routing) -> bool:
    """Whether the kernel supports this routing."""
    return routing == Routing(renormalises=routing.renormalises)


@functools.partial(jax.jit, static_argnames=("rule", "interpret"))
def choose_experts(
    scores: jax.Array, is_real: jax.Array, rule: ExpertRule, *, interpret: bool = False
) -> ExpertChoice:
    """The likeliest experts by scores [token, expert]; of equal scores, the first. A token that is not
    real, by `is_real` [token], gets the number of experts in place of an expert."""
    num_tokens = len(scores)
    whole = (num_tokens, rule.per_token)
    experts, weights = pl.pallas_call(
        functools.partial(_kernel, rule=rule),
        grid=(-(-num_tokens // TOKENS),),
        in_specs=[
            pl.BlockSpec(scores.shape, lambda block: (0, 0)),
            pl.BlockSpec((num_tokens,), lambda block: (0,)),
        ],
        out_specs=[pl.BlockSpec(whole, lambda block: (0, 0))] * 2,
        out_shape=[jax.ShapeDtypeStruct(whole, jnp.int32), jax.ShapeDtypeStruct(whole, jnp.float32)],
        compiler_params=plgpu.CompilerParams(num_warps=TOKENS, num_stages=1),
        interpret=interpret,
        name="choose_experts",
    )(scores, is_real.astype(jnp.int32))
    return ExpertChoice(experts, weights)


def _kernel(
    score_ref: jax.Ref, real_ref: jax.Ref, expert_ref: jax.Ref, weight_ref: jax.Ref, *, rule: ExpertRule
) -> None:
    num_tokens, num_experts = score_ref.shape
    tokens = pl.program_id(0) * TOKENS + jnp.arange(TOKENS, dtype=jnp.int32)
    is_there = tokens < num_tokens
    is_real = plgpu.load(real_ref.at[tokens], mask=is_there, other=0) == 1
    number = lax.broadcasted_iota(jnp.int32, (TOKENS, power_of_two(num_experts)), 1)
    mask = is_there[:, None] & (number < num_experts)
    left = plgpu.load(score_ref.at[tokens[:, None], number], mask=mask, other=-jnp.inf)
    # A token has no expert twice, even if its scores are NaN; then its weights are too.
    poison = 0.0 * jnp.where(mask, left, 0.0).sum(1)
    left = jnp.where(left == left, left, LOWEST)
    top = left.max(1)
    total = jnp.exp(left - top[:, None]).sum(1)
    experts, weights = [], []
    for _ in range(rule.per_token):
        largest = left.max(1)
        expert = jnp.where(left == largest[:, None], number, num_experts - 1).min(1)
        left = jnp.where(number == expert[:, None], -jnp.inf, left)
        experts.append(jnp.where(is_real, expert, num_experts))
        weights.append(jnp.exp(largest - top))
    if rule.routing.renormalises:
        total = functools.reduce(jnp.add, weights)
    for place, (expert, weight) in enumerate(zip(experts, weights, strict=True)):
        plgpu.store(expert_ref.at[tokens, place], expert, mask=is_there)
        plgpu.store(weight_ref.at[tokens, place], weight / total + poison, mask=is_there)
