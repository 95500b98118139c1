"""What XLA makes of a mixture of experts for an H200: our kernels, in one graph, and no copy of a matrix.

One layer's experts of Qwen3-30B-A3B's shape, in bfloat16 and in the bits of a checkpoint; compiled, not run (see
`h200.py`).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from haliax import Axis

from levserve.model.backend import ExpertRule
from levserve.model.config import Activation, Routing
from levserve.model.gpu.expert_choice import choose_experts
from levserve.model.gpu.expert_plan import choose_plan
from levserve.model.gpu.grouped_experts import mix_grouped
from levserve.model.packed import Code, PackedMatrix, Scheme
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


MATRICES = (NUM_EXPERTS, 2 * MLP, EMBED), (NUM_EXPERTS, EMBED, MLP)
FLOAT16 = jnp.dtype(jnp.float16)
SCHEMES = {
    "awq": Scheme(Code.UINT4, 128, has_zeros=True, scale=FLOAT16),
    "fp8": Scheme(Code.FP8, 128, 128, rounds_rows=True),
    "q4_k": Scheme(Code.UINT4, 32, has_offsets=True, scale=FLOAT16),
    "q6_k": Scheme(Code.INT8, 16, scale=FLOAT16),
    "mxfp4": Scheme(Code.E2M1, 32, scale=jnp.dtype(jnp.uint8)),
}


@functools.cache
def compile_there(num_tokens: int, name: str = "") -> Compiled:
    """In the scheme of this name, or in bfloat16."""

    def mix(
        x: jax.Array, scores: jax.Array, is_real: jax.Array, *matrices: jax.Array | dict[str, jax.Array]
    ) -> jax.Array:
        gate_up, down = (
            PackedMatrix.from_arrays(given, SCHEMES[name], tuple(map(Axis, "eoi", shape)))
            if isinstance(given, dict)
            else given
            for given, shape in zip(matrices, MATRICES, strict=True)
        )
        plan = choose_plan(num_tokens, RULE, gate_up, down, jnp.dtype(jnp.bfloat16))
        assert plan is not None
        return mix_grouped(x, choose_experts(scores, is_real, RULE), gate_up, down, plan=plan)

    def shape_of(shape: tuple[int, ...]) -> Any:
        if not name:
            return jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        parts = SCHEMES[name].array_shapes(shape)
        return {end: jax.ShapeDtypeStruct(*part) for end, part in parts.items()}

    given = [
        jax.ShapeDtypeStruct((num_tokens, EMBED), jnp.bfloat16),
        jax.ShapeDtypeStruct((num_tokens, NUM_EXPERTS), jnp.float32),
        jax.ShapeDtypeStruct((num_tokens,), jnp.bool_),
        *map(shape_of, MATRICES),
    ]
    return compile_on_the_card(lambda: jax.jit(mix).trace(*jax.tree.map(placed, given)).lower())


def kernels_in_bfloat16(num_tokens: int) -> list[str]:
    """The names of the graph's kernels."""
    thunks = compile_there(num_tokens).thunks
    return [thunk.name for thunk in inside(thunks, 0) if thunk.kind not in HOLDERS]


@pytest.mark.parametrize("num_tokens", TOKENS)
def test_experts_are_one_graph_of_five_kernels(num_tokens: int) -> None:
    thunks = compile_there(num_tokens).thunks
    assert [thunk.kind for thunk in thunks if thunk.depth == 0] == ["kCommandBuffer"]
    names = kernels_in_bfloat16(num_tokens)
    ours = ["choose_experts", *(["tile_pairs"] if num_tokens > 16 else []), "experts_up", "experts_down"]
    assert [name for name in names if name in ours] == ours
    assert len(names) == len(ours) + 2, (
        "the sum, and once for all layers the tokens that are real as integers"
    )


@pytest.mark.parametrize("num_tokens", TOKENS)
def test_experts_in_fp8_take_one_kernel_more(num_tokens: int) -> None:
    """It rounds the tokens' values; hidden values are rounded by the product that they come from."""
    thunks = [thunk for thunk in compile_there(num_tokens, "fp8").thunks if thunk.kind not in HOLDERS]
    assert len(thunks) == len(kernels_in_bfloat16(num_tokens)) + 1
    names = [thunk.name for thunk in thunks]
    assert names.count("round_fp8") == 1 < names.index("experts_up") - names.index("choose_experts")


@pytest.mark.parametrize("num_tokens", TOKENS)
def test_matrices_of_experts_are_read_as_they_lie(num_tokens: int) -> None:
    every = instructions(compile_there(num_tokens).text)
    made = [each for each in every if each.operation not in PASSED_ON]
    assert len(made) >= 4, "the text was understood"
    assert [each.text for each in made if any(map(each.holds, MATRICES))] == []


@pytest.mark.parametrize("num_tokens", TOKENS)
def test_the_memory_in_between_is_what_the_pairs_give(num_tokens: int) -> None:
    result_bytes = 2 if num_tokens >= 1024 else 4
    of_each = PER_TOKEN * (2 * MLP + result_bytes * EMBED)
    assert compile_there(num_tokens).temp_bytes <= num_tokens * of_each + (1 << 20)


@pytest.mark.parametrize("num_tokens", [8, 64, 4096])
@pytest.mark.parametrize("name", SCHEMES)
def test_the_kernels_never_widen_packed_experts_in_memory(name: str, num_tokens: int) -> None:
    compiled = compile_there(num_tokens, name)
    names = [thunk.name for thunk in compiled.thunks]
    assert {"experts_up", "experts_down"} <= {*names}
    widened = NUM_EXPERTS * EMBED * MLP * 2
    of_rows = num_tokens * PER_TOKEN * 2 * (2 * MLP + 4 * EMBED)
    assert compiled.temp_bytes < min(widened, of_rows + (1 << 20))
