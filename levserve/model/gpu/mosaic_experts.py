"""The experts of many tokens by Mosaic GPU: rows in order by expert, two products, and the weighted sum."""

from __future__ import annotations

import functools

import jax

from levserve.model.backend import ExpertChoice
from levserve.model.gpu.expert_blocks import block_pairs
from levserve.model.gpu.expert_rows import gather_rows, sum_results
from levserve.model.gpu.gate import Gate
from levserve.model.gpu.mosaic_product import NUM_PROGRAMS, multiply_blocks


@functools.partial(jax.jit, static_argnames=("gate", "num_programs", "interpret"))
def mix_blocks(
    x: jax.Array,
    choice: ExpertChoice,
    gate_up: jax.Array,
    down: jax.Array,
    *,
    gate: Gate,
    num_programs: int = NUM_PROGRAMS,
    interpret: object = None,
) -> jax.Array:
    """The weighted sum of each token's experts, float32 [token, embed]; as `mix_grouped` without biases."""
    is_interpreted = interpret is not None
    blocks = block_pairs(choice.experts, len(gate_up), interpret=is_interpreted)
    rows = gather_rows(x, blocks, len(gate_up), choice.experts.shape[1], interpret=is_interpreted)
    multiply = functools.partial(
        multiply_blocks, blocks=blocks, num_programs=num_programs, interpret=interpret
    )
    results = multiply(multiply(rows, gate_up, gate=gate), down, gate=None)
    return sum_results(results, choice.weights, blocks, interpret=is_interpreted)
