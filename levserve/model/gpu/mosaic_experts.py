"""The experts of many tokens by Mosaic GPU: rows sorted by expert, two products, and the weighted sum.

Triton may compute the first product instead, which then also sorts the rows.
"""

from __future__ import annotations

import functools

import jax

from levserve.model.backend import ExpertChoice
from levserve.model.fp8_rows import Fp8Rows
from levserve.model.gpu.expert_blocks import block_pairs, halve_tiles
from levserve.model.gpu.expert_plan import Plan
from levserve.model.gpu.expert_rows import gather_rows, sum_results
from levserve.model.gpu.expert_tiles import tile_pairs
from levserve.model.gpu.gate import Gate
from levserve.model.gpu.grouped_experts import hidden_in_tiles
from levserve.model.gpu.mosaic_fp8_product import multiply_experts
from levserve.model.gpu.mosaic_product import multiply_blocks
from levserve.model.gpu.round_fp8 import round_in_groups
from levserve.model.packed import PackedMatrix


@functools.partial(jax.jit, static_argnames=("gate", "num_programs", "interpret"))
def mix_blocks(
    x: jax.Array,
    choice: ExpertChoice,
    gate_up: jax.Array,
    down: jax.Array,
    *,
    gate: Gate,
    num_programs: int | None = None,
    interpret: object = None,
) -> jax.Array:
    """The weighted sum of each token's experts, float32 [token, embed]; like `mix_grouped` without biases."""
    is_interpreted = interpret is not None
    blocks = block_pairs(choice.experts, len(gate_up), interpret=is_interpreted)
    rows = gather_rows(x, blocks, len(gate_up), choice.experts.shape[1], interpret=is_interpreted)
    multiply = functools.partial(
        multiply_blocks, blocks=blocks, num_programs=num_programs, interpret=interpret
    )
    results = multiply(multiply(rows, gate_up, gate=gate), down, gate=None)
    return sum_results(results, choice.weights, blocks, interpret=is_interpreted)


@functools.partial(jax.jit, static_argnames=("gate", "num_programs", "interpret"))
def mix_fp8_blocks(
    x: jax.Array,
    choice: ExpertChoice,
    gate_up: PackedMatrix,
    down: PackedMatrix,
    *,
    gate: Gate,
    num_programs: int | None = None,
    interpret: object = None,
) -> jax.Array:
    """The same with experts in FP8, whose rows are rounded to FP8 too; see `mosaic_fp8_product`."""
    is_interpreted = interpret is not None
    num_experts, per_token = gate_up.axes[0].size, choice.experts.shape[1]
    blocks = block_pairs(choice.experts, num_experts, interpret=is_interpreted)
    codes, largest = round_in_groups(x, gate_up.scheme.columns, interpret=is_interpreted)
    rows = gather_rows(codes, blocks, num_experts, per_token, interpret=is_interpreted)
    tokens = blocks.pairs[: len(rows)] // per_token
    gathered = Fp8Rows(rows, largest.at[:, tokens].get(mode="clip"))
    multiply = functools.partial(
        multiply_experts, blocks=blocks, num_programs=num_programs, interpret=interpret
    )
    hidden = multiply(gate_up, gathered, gate=gate)
    rounded = round_in_groups(hidden, down.scheme.columns, interpret=is_interpreted)
    results = multiply(down, rounded, gate=None)
    return sum_results(results, choice.weights, blocks, interpret=is_interpreted)


@functools.partial(jax.jit, static_argnames=("plan", "num_programs", "interpret"))
def mix_tiles(
    x: jax.Array,
    choice: ExpertChoice,
    gate_up: jax.Array,
    down: jax.Array,
    added: jax.Array,
    is_real: jax.Array,
    *,
    plan: Plan,
    num_programs: int | None = None,
    interpret: object = None,
) -> jax.Array:
    """`added` [token, embed] plus the weighted sum of each token's experts, float32. Triton computes the
    first product and Mosaic GPU the second."""
    is_interpreted = interpret is not None
    num_experts, num_pairs = len(gate_up), choice.experts.size
    tiles = tile_pairs(choice.experts, num_experts, plan.size, interpret=is_interpreted)
    blocks = halve_tiles(tiles, num_experts, num_pairs, interpret=is_interpreted)
    hidden = hidden_in_tiles(x, tiles, gate_up, num_pairs, plan=plan, interpret=is_interpreted)
    results = multiply_blocks(
        hidden, down, blocks=blocks, gate=None, num_programs=num_programs, interpret=interpret
    )
    return sum_results(results, choice.weights, blocks, (added, is_real), interpret=is_interpreted)
