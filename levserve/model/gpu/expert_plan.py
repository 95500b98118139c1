"""How the products of experts are tiled on an NVIDIA GPU; measured on an H200 with Qwen3-30B-A3B's shape."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from levserve.model.backend import ExpertRule
from levserve.model.config import Activation
from levserve.model.gpu.gate import Gate

FEW_TOKENS = 16
"""With up to this many tokens, a tile has all of them, whatever their experts are."""
SMALLEST = 16
"""Rows, columns and depth of the smallest product a tensor core takes."""
MAX_ELEMENTS = 1 << 31
"""Elements of all experts' matrices together that a kernel's 32-bit indices can reach."""


@dataclass(frozen=True, slots=True)
class Tiling:
    columns: int
    """Columns of the result that a program computes."""
    depth: int
    """Elements of a row that are multiplied in one step."""
    num_warps: int
    num_stages: int
    is_matrix_first: bool = False
    """Whether the matrix is the left factor of the product and the tokens are the right one. In Hopper's
    larger instructions the left one has at least 64 rows, but the right one may have only 8 columns."""

    def fit(self, width: int, depth: int) -> Tiling:
        return replace(self, columns=math.gcd(self.columns, width), depth=math.gcd(self.depth, depth))


@dataclass(frozen=True, slots=True)
class Plan:
    size: int
    """Pairs of a token and an expert in a tile."""
    gate_up: Tiling
    down: Tiling
    halvings: int = 0
    """How many times a tile may be halved if at most half of it is full. All sizes must use the same
    instructions, so that a token's result does not depend on how many others have its expert."""
    rounds: bool = False
    """Whether results are rounded to the matrices' type before they are summed."""
    is_gated: bool = True
    activation: Activation = Activation.SILU
    gate_limit: float | None = None
    up_offset: float = 0.0

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of a tile and its halves, the largest first."""
        return tuple(self.size >> halving for halving in range(self.halvings + 1))

    @property
    def gate(self) -> Gate:
        return Gate(self.activation, self.is_gated, self.gate_limit, self.up_offset)


FEW = Plan(16, Tiling(64, 128, 4, 4, is_matrix_first=True), Tiling(128, 128, 4, 3))
BY_SHARE = {
    6: Plan(16, Tiling(64, 128, 4, 3, is_matrix_first=True), Tiling(256, 128, 8, 2)),
    24: Plan(32, Tiling(64, 64, 4, 5, is_matrix_first=True), Tiling(128, 128, 4, 3), halvings=1),
    48: Plan(64, Tiling(128, 64, 4, 4), Tiling(256, 64, 4, 4)),
    math.inf: Plan(128, Tiling(128, 64, 8, 4), Tiling(256, 64, 8, 4), halvings=1),
}
"""Plans by the largest mean number of pairs per expert that they serve."""
UNGATED = Tiling(128, 64, 8, 3)
"""For many pairs without a gate: two such programs fit on a processor, so that one multiplies while the other
computes activations. With one more stage only one fits, and the product takes almost 1.5 times as long in the
shape of AI-OS's English-v1."""
WIDE_BY_SHARE = {
    24: Plan(16, Tiling(32, 32, 4, 2), Tiling(32, 32, 4, 2)),
    math.inf: Plan(64, Tiling(64, 32, 4, 3), Tiling(64, 32, 4, 3)),
}
"""The same for float32."""
MANY_TOKENS = 1024
"""From this many tokens on, results of bfloat16 experts are rounded to bfloat16: besides the matrices,
they are most of what is written and read. A layer of Qwen3-30B-A3B then differs from one in float32 by
5.2e-4 of the largest value, not 1.7e-4."""


def choose_plan(num_tokens: int, rule: ExpertRule, gate_up: jax.Array, down: jax.Array) -> Plan | None:
    """How to tile the products, or None if the kernels do not serve these experts."""
    _, embed, mlp = down.shape
    if embed % SMALLEST or mlp % SMALLEST or gate_up.size >= MAX_ELEMENTS:
        return None
    if gate_up.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32) or gate_up.dtype != down.dtype:
        return None
    share = num_tokens * rule.per_token / rule.num_experts
    by_share = WIDE_BY_SHARE if gate_up.dtype == jnp.float32 else BY_SHARE
    plan = next(plan for most, plan in by_share.items() if share <= most)
    if not rule.is_gated and plan is BY_SHARE[math.inf]:
        plan = replace(plan, gate_up=UNGATED)
    if num_tokens <= FEW_TOKENS:
        plan = WIDE_BY_SHARE[24] if gate_up.dtype == jnp.float32 else FEW
    return replace(
        plan,
        gate_up=plan.gate_up.fit(mlp, embed),
        down=plan.down.fit(embed, mlp),
        rounds=num_tokens >= MANY_TOKENS and gate_up.dtype == jnp.bfloat16,
        is_gated=rule.is_gated,
        activation=rule.activation,
        gate_limit=rule.gate_limit,
        up_offset=rule.up_offset,
    )
