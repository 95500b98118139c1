"""What XLA makes of a mixture of experts for an H200: our kernels, in one graph, and no copy of a matrix.

One layer's experts of Qwen3-30B-A3B's shape; compiled, not run (see `h200.py`).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from levserve.model.backend import ExpertRule
from levserve.model.config import Activation, Routing
from levserve.model.gpu.expert_choice import choose_experts
from levserve.model.gpu.expert_plan import choose_plan
from levserve.model.gpu.grouped_experts import mix_grouped
from tests.h200 import HOLDERS, inside
from tests.h200_programs import Compiled, compile_on_the_card, placed
from tests.hlo import PASSED_ON, instructions

pytestmark = [
    pytest.mark.h200,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]

NUM_EXPERTS, PER_TOKEN, EMBED, MLP = 128, 8, 2048, 768
RULE = ExpertRule(NUM_EXPERTS, PER_TOKEN, Routing(), is_gated=True, activation=Activation.SILU)
TOKENS = [8, 64, 256, 4096]


@functools.cache
def compile_there(num_tokens: int) -> Compiled:
    def mix(
        x: jax.Array, scores: jax.Array, is_real: jax.Array, gate_up: jax.Array, down: jax.Array
    ) -> jax.Array:
        plan = choose_plan(num_tokens, RULE, gate_up, down, jnp.dtype(jnp.bfloat16))
        assert plan is not None
        return mix_grouped(x, choose_experts(scores, is_real, RULE), gate_up, down, plan=plan)

    bfloat16 = jnp.bfloat16
    given = [
        placed(jax.ShapeDtypeStruct(shape, dtype))
        for shape, dtype in (
            ((num_tokens, EMBED), bfloat16),
            ((num_tokens, NUM_EXPERTS), jnp.float32),
            ((num_tokens,), jnp.bool_),
            ((NUM_EXPERTS, 2 * MLP, EMBED), bfloat16),
            ((NUM_EXPERTS, EMBED, MLP), bfloat16),
        )
    ]
    return compile_on_the_card(lambda: jax.jit(mix).trace(*given).lower())


@pytest.mark.parametrize("num_tokens", TOKENS)
def test_experts_are_one_graph_of_five_kernels(num_tokens: int) -> None:
    thunks = compile_there(num_tokens).thunks
    assert [thunk.kind for thunk in thunks if thunk.depth == 0] == ["kCommandBuffer"]
    names = [thunk.name for thunk in inside(thunks, 0) if thunk.kind not in HOLDERS]
    ours = ["choose_experts", *(["tile_pairs"] if num_tokens > 16 else []), "experts_up", "experts_down"]
    assert [name for name in names if name in ours] == ours
    assert len(names) == len(ours) + 2, (
        "the sum, and once for all layers the tokens that are real as integers"
    )


@pytest.mark.parametrize("num_tokens", TOKENS)
def test_matrices_of_experts_are_read_as_they_lie(num_tokens: int) -> None:
    shapes = (NUM_EXPERTS, 2 * MLP, EMBED), (NUM_EXPERTS, EMBED, MLP)
    every = instructions(compile_there(num_tokens).text)
    made = [each for each in every if each.operation not in PASSED_ON]
    assert len(made) >= 4, "the text was understood"
    assert [each.text for each in made if any(map(each.holds, shapes))] == []


@pytest.mark.parametrize("num_tokens", TOKENS)
def test_the_memory_in_between_is_what_the_pairs_give(num_tokens: int) -> None:
    result_bytes = 2 if num_tokens >= 1024 else 4
    of_each = PER_TOKEN * (2 * MLP + result_bytes * EMBED)
    assert compile_there(num_tokens).temp_bytes <= num_tokens * of_each + (1 << 20)
