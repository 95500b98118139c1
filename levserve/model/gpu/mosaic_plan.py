"""Decides where Mosaic GPU rather than Triton computes the experts' products; measured on an H200."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from levserve.model.backend import ExpertRule
from levserve.model.config import Activation
from levserve.model.gpu.mosaic_fp8_product import DEPTH, takes_blocks
from levserve.model.gpu.mosaic_product import COLUMNS, NUM_MULTIPLIERS
from levserve.model.packed import PackedMatrix

SMALLEST_SHARE = {4096: 256, 0: math.inf}
"""The mean number of pairs per expert from which Mosaic GPU is faster, by the least number of hidden
values of an expert. A layer of Mixtral (14,336) is 1.09 times as fast with 256 pairs and 1.11 times with
1,024; one with experts of 4,096 is as fast with 128 and 1.07 times as fast with 1,024; one of
Qwen3-30B-A3B (768) is not faster with 64 or 256."""

SMALLEST_SHARE_BELOW = 256
"""The same for the second product alone, after Triton's first, for experts of any size. With Qwen3-30B-A3B
(768), a layer's experts and residual take 770 us rather than 783 with 256 pairs, and equally long with 64 or
128; consecutive prefills of 4,096 tokens take 54.8 ms each rather than 56.3."""


SMALLEST_SHARE_FP8 = 32
"""The same for experts in FP8 with a scale for 128 x 128 values. A layer of Qwen3-30B-A3B with 512 / 1,024 /
4,096 / 8,192 tokens takes 235 / 262 / 591 / 1,017 us, and 286 / 356 / 786 / 1,442 by Triton; one of Mixtral
with 1,024 / 4,096 tokens 1,165 / 3,733 us, and 1,698 / 5,844."""


def serves_fp8(num_tokens: int, rule: ExpertRule, gate_up: PackedMatrix, down: PackedMatrix) -> bool:
    """Whether the kernel for FP8 in blocks computes these experts, and is faster than Triton."""
    if not (rule.is_gated and rule.activation is Activation.SILU):
        return False
    if num_tokens * rule.per_token < SMALLEST_SHARE_FP8 * rule.num_experts:
        return False
    _, embed, mlp = (axis.size for axis in down.axes)
    takes_all = takes_blocks(gate_up.scheme) and takes_blocks(down.scheme)
    return takes_all and mlp % DEPTH == 0 and embed % (2 * COLUMNS) == 0


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
