"""Decides where Mosaic GPU rather than Triton computes the experts' products; measured on an H200."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from levserve.model.backend import ExpertRule
from levserve.model.config import Activation
from levserve.model.gpu.mosaic_product import COLUMNS, NUM_MULTIPLIERS

SMALLEST_SHARE = {4096: 256, 0: math.inf}
"""The mean number of pairs per expert from which Mosaic GPU is faster, by the least number of hidden
values of an expert. A layer of Mixtral (14,336) is 1.09 times as fast with 256 pairs and 1.11 times with
1,024; one with experts of 4,096 is as fast with 128 and 1.07 times as fast with 1,024; one of
Qwen3-30B-A3B (768) is not faster with 64 or 256."""

SMALLEST_SHARE_BELOW = 256
"""The same for the second product alone, after Triton's first, for experts of any size. With Qwen3-30B-A3B
(768), a layer's experts and residual take 770 us rather than 783 with 256 pairs, and equally long with 64 or
128; consecutive prefills of 4,096 tokens take 54.8 ms each rather than 56.3."""


def serves(rule: ExpertRule, gate_up: jax.Array, down: jax.Array) -> bool:
    """Whether the kernel computes these experts."""
    _, embed, mlp = down.shape
    per_tile = NUM_MULTIPLIERS * COLUMNS
    return (
        gate_up.dtype == down.dtype == jnp.bfloat16
        and rule.is_gated
        and rule.activation is Activation.SILU
        and 2 * mlp % per_tile == 0
        and embed % per_tile == 0
    )


def is_faster(num_tokens: int, rule: ExpertRule, mlp: int) -> bool:
    """Whether Mosaic GPU is faster than Triton, by the table."""
    smallest = next(share for least, share in SMALLEST_SHARE.items() if mlp >= least)
    return num_tokens * rule.per_token / rule.num_experts >= smallest


def is_faster_below(num_tokens: int, rule: ExpertRule) -> bool:
    """Whether Mosaic GPU is faster than Triton for the second product alone."""
    return num_tokens * rule.per_token / rule.num_experts >= SMALLEST_SHARE_BELOW
