"""Kernels compile for a card whose programs have 99 KiB of shared memory; not run (see `l4.py`)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from haliax import Axis

from levserve.model.backend import ExpertChoice, ExpertRule
from levserve.model.cache import FP8, multiplied_in
from levserve.model.config import Activation, Routing
from levserve.model.gpu.expert_plan import choose_plan
from levserve.model.gpu.grouped_experts import mix_grouped
from levserve.model.gpu.paged_attention import paged_attention
from levserve.model.packed import Code, PackedMatrix, Scheme
from tests.l4 import compile_on_the_card, placed

pytestmark = [
    pytest.mark.l4,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]

RULE = ExpertRule(64, 8, Routing(), is_gated=True, activation=Activation.SILU)
EMBED, MLP = 2048, 1024


@pytest.mark.parametrize("num_tokens", [4, 48, 64, 200, 2048])
def test_experts_in_bfloat16_compile(num_tokens: int) -> None:
    """Each number of tokens has a plan of its own."""

    def mix(x: jax.Array, experts: jax.Array, weights: jax.Array, *matrices: jax.Array) -> jax.Array:
        plan = choose_plan(num_tokens, RULE, *matrices, jnp.dtype(jnp.bfloat16))
        assert plan is not None
        return mix_grouped(x, ExpertChoice(experts, weights), *matrices, plan=plan)

    text = compile_on_the_card(
        mix,
        placed(num_tokens, EMBED, dtype=jnp.bfloat16),
        placed(num_tokens, RULE.per_token, dtype=jnp.int32),
        placed(num_tokens, RULE.per_token),
        placed(RULE.num_experts, 2 * MLP, EMBED, dtype=jnp.bfloat16),
        placed(RULE.num_experts, EMBED, MLP, dtype=jnp.bfloat16),
    )
    assert "experts_up" in text and "experts_down" in text


@pytest.mark.parametrize("group", [128, None], ids=["blocks", "whole rows"])
@pytest.mark.parametrize("num_tokens", [4, 48, 200, 2048])
def test_experts_in_fp8_compile(num_tokens: int, group: int | None) -> None:
    scheme = Scheme(Code.FP8, group, group or 1, rounds_rows=True)
    shapes = (RULE.num_experts, 2 * MLP, EMBED), (RULE.num_experts, EMBED, MLP)
    parts = [scheme.array_shapes(shape) for shape in shapes]
    arrays = [placed(*shape, dtype=dtype) for each in parts for shape, dtype in each.values()]

    def mix(x: jax.Array, experts: jax.Array, weights: jax.Array, *arrays: jax.Array) -> jax.Array:
        axes = [[Axis(name, size) for name, size in zip("eoi", shape)] for shape in shapes]
        up, down = (
            PackedMatrix.from_arrays(dict(zip(each, given)), scheme, tuple(of_matrix))
            for each, given, of_matrix in zip(parts, (arrays[:2], arrays[2:]), axes)
        )
        plan = choose_plan(num_tokens, RULE, up, down, jnp.dtype(jnp.bfloat16))
        assert plan is not None and plan.gate_up.multiplies_fp8 and plan.down.multiplies_fp8
        return mix_grouped(x, ExpertChoice(experts, weights), up, down, plan=plan)

    text = compile_on_the_card(
        mix,
        placed(num_tokens, EMBED, dtype=jnp.bfloat16),
        placed(num_tokens, RULE.per_token, dtype=jnp.int32),
        placed(num_tokens, RULE.per_token),
        *arrays,
    )
    assert "experts_up" in text and "experts_down" in text


@pytest.mark.parametrize(
    ("size", "group", "dtype"),
    [
        (128, 8, jnp.bfloat16),
        (128, 12, jnp.bfloat16),
        (128, 16, jnp.bfloat16),
        (128, 64, jnp.bfloat16),
        (256, 8, jnp.bfloat16),
        (256, 2, FP8),
        (256, 8, FP8),
        (128, 16, jnp.float32),
        (256, 2, jnp.float32),
        (256, 8, jnp.float32),
    ],
)
def test_attention_of_prompts_compiles(size: int, group: int, dtype: Any) -> None:
    rows, chunk, kv_heads = 8, 64, 2
    storage = jnp.dtype(dtype)
    text = compile_on_the_card(
        paged_attention,
        placed(rows, chunk, kv_heads, group, size, dtype=multiplied_in(storage)),
        placed(512, 2, kv_heads, 32, size, dtype=storage),
        placed(rows, 64, dtype=jnp.int32),
        placed(rows, chunk, dtype=jnp.int32),
    )
    assert "paged_attention" in text
