"""What XLA makes of Mixtral's experts for an H200: Mosaic GPU's products, by the table; compiled, not run."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from haliax import Axis

from levserve.model.backend import ExpertRule
from levserve.model.config import Activation, Routing
from levserve.model.gpu.backend import ExpertKernels, GpuBackend
from levserve.model.gpu.expert_blocks import BLOCK
from levserve.model.packed import Code, PackedMatrix, Scheme
from tests.h200 import HOLDERS, inside
from tests.h200_programs import Compiled, compile_on_the_card, placed
from tests.hlo import PASSED_ON, instructions

pytestmark = [
    pytest.mark.h200,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]

NUM_EXPERTS, PER_TOKEN, EMBED, MLP = 8, 2, 4096, 14336
RULE = ExpertRule(NUM_EXPERTS, PER_TOKEN, Routing(), is_gated=True, activation=Activation.SILU)
SMALL = ExpertRule(128, 8, Routing(), is_gated=True, activation=Activation.SILU)
"""The experts of Qwen3-30B-A3B, whose intermediate size is 768."""
FP8_BLOCKS = Scheme(Code.FP8, 128, 128, rounds_rows=True)


@functools.cache
def compile_there(num_tokens: int, kernels: ExpertKernels = ExpertKernels.AUTO) -> Compiled:
    def mix(
        x: jax.Array, scores: jax.Array, is_real: jax.Array, gate_up: jax.Array, down: jax.Array
    ) -> jax.Array:
        experts: Any = SimpleNamespace(
            rule=RULE, matrices=(gate_up, down), dtype=gate_up.dtype, biases=None, correction=None
        )
        return GpuBackend(expert_kernels=kernels).mix_experts(x, scores, is_real, experts)

    given = [
        placed(jax.ShapeDtypeStruct(shape, dtype))
        for shape, dtype in (
            ((num_tokens, EMBED), jnp.bfloat16),
            ((num_tokens, NUM_EXPERTS), jnp.float32),
            ((num_tokens,), jnp.bool_),
            ((NUM_EXPERTS, 2 * MLP, EMBED), jnp.bfloat16),
            ((NUM_EXPERTS, EMBED, MLP), jnp.bfloat16),
        )
    ]
    return compile_on_the_card(lambda: jax.jit(mix).trace(*given).lower())


def names_of(compiled: Compiled) -> list[str]:
    return [thunk.name for thunk in inside(compiled.thunks, 0) if thunk.kind not in HOLDERS]


@pytest.mark.parametrize("num_tokens", [1024, 4096])
def test_wide_experts_of_many_tokens_are_multiplied_by_mosaic(num_tokens: int) -> None:
    compiled = compile_there(num_tokens)
    assert [thunk.kind for thunk in compiled.thunks if thunk.depth == 0] == ["kCommandBuffer"]
    names, made = names_of(compiled), instructions(compiled.text)
    for name in ("choose_experts", "tile_pairs", "list_tiles", "gather_rows", "sum_results"):
        assert names.count(name) == 1
    assert len(names) == 9, "and two products, which are real tokens as integers, and zeros for the others"
    assert sum('custom_call_target="mosaic_gpu' in each.text for each in made) == 2
    shapes = (NUM_EXPERTS, 2 * MLP, EMBED), (NUM_EXPERTS, EMBED, MLP)
    copies = [each for each in made if each.operation not in PASSED_ON and any(map(each.holds, shapes))]
    assert [each.text for each in copies] == []
    slots = num_tokens * PER_TOKEN + NUM_EXPERTS * BLOCK
    assert compiled.temp_bytes <= slots * 2 * (MLP + EMBED) + (1 << 20), "results take the place of rows"


@pytest.mark.parametrize(
    ("num_tokens", "kernels"), [(256, ExpertKernels.AUTO), (1024, ExpertKernels.TRITON)], ids=str
)
def test_few_tokens_are_for_triton_and_so_are_all_if_asked(num_tokens: int, kernels: ExpertKernels) -> None:
    names = names_of(compile_there(num_tokens, kernels))
    assert "experts_up" in names and "experts_down" in names and "gather_rows" not in names


def test_of_small_experts_mosaic_makes_the_second_product_alone_and_adds_the_residual() -> None:
    num_tokens, embed, mlp = 4096, 2048, 768

    def add(
        added: jax.Array, x: jax.Array, scores: jax.Array, is_real: jax.Array, *matrices: jax.Array
    ) -> jax.Array:
        experts: Any = SimpleNamespace(
            rule=SMALL, matrices=matrices, dtype=matrices[0].dtype, biases=None, correction=None
        )
        return GpuBackend().add_experts(added, x, scores, is_real, experts)

    given = [
        placed(jax.ShapeDtypeStruct(shape, dtype))
        for shape, dtype in (
            ((num_tokens, embed), jnp.float32),
            ((num_tokens, embed), jnp.bfloat16),
            ((num_tokens, SMALL.num_experts), jnp.float32),
            ((num_tokens,), jnp.bool_),
            ((SMALL.num_experts, 2 * mlp, embed), jnp.bfloat16),
            ((SMALL.num_experts, embed, mlp), jnp.bfloat16),
        )
    ]
    compiled = compile_on_the_card(lambda: jax.jit(add).trace(*given).lower())
    assert [thunk.kind for thunk in compiled.thunks if thunk.depth == 0] == ["kCommandBuffer"]
    names = names_of(compiled)
    for name in ("choose_experts", "tile_pairs", "list_tiles", "experts_up", "sum_results"):
        assert names.count(name) == 1
    assert len(names) == 7, "and a product, and which tokens are real as integers"
    slots = num_tokens * SMALL.per_token + SMALL.num_experts * 2 * BLOCK
    assert compiled.temp_bytes <= slots * 2 * (embed + mlp) + (4 << 20)


@pytest.mark.parametrize("num_tokens", [512, 4096])
def test_fp8_experts_of_many_tokens_are_multiplied_by_mosaic_without_a_copy(num_tokens: int) -> None:
    embed, mlp = 2048, 768
    shapes = (SMALL.num_experts, 2 * mlp, embed), (SMALL.num_experts, embed, mlp)

    def mix(x: jax.Array, scores: jax.Array, is_real: jax.Array, *arrays: dict[str, jax.Array]) -> jax.Array:
        matrices = [
            PackedMatrix.from_arrays(given, FP8_BLOCKS, tuple(map(Axis, "eoi", shape)))
            for given, shape in zip(arrays, shapes, strict=True)
        ]
        experts: Any = SimpleNamespace(
            rule=SMALL, matrices=matrices, dtype=jnp.dtype(jnp.bfloat16), biases=None, correction=None
        )
        return GpuBackend().mix_experts(x, scores, is_real, experts)

    given = [
        jax.ShapeDtypeStruct((num_tokens, embed), jnp.bfloat16),
        jax.ShapeDtypeStruct((num_tokens, SMALL.num_experts), jnp.float32),
        jax.ShapeDtypeStruct((num_tokens,), jnp.bool_),
        *(
            {end: jax.ShapeDtypeStruct(*part) for end, part in FP8_BLOCKS.array_shapes(shape).items()}
            for shape in shapes
        ),
    ]
    compiled = compile_on_the_card(lambda: jax.jit(mix).trace(*jax.tree.map(placed, given)).lower())
    names, made = names_of(compiled), instructions(compiled.text)
    for name in ("choose_experts", "tile_pairs", "list_tiles", "gather_rows", "sum_results"):
        assert names.count(name) == 1
    rounded = [name for name in names if name.startswith("round_fp8")]
    assert len(rounded) == 2, "the tokens, and their hidden values"
    assert sum('custom_call_target="mosaic_gpu' in each.text for each in made) == 2
    copies = [each for each in made if each.operation not in PASSED_ON and any(map(each.holds, shapes))]
    assert [each.text for each in copies] == []
