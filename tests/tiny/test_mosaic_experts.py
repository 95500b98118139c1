"""Experts by Mosaic GPU, interpreted: blocks of pairs, their products, and where the kernel is chosen."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from levserve.model.backend import ExpertChoice, ExpertRule
from levserve.model.config import Activation, Routing
from levserve.model.gpu import backend
from levserve.model.gpu.backend import ExpertKernels, GpuBackend
from levserve.model.gpu.expert_blocks import BLOCK, Blocks, block_pairs, halve_tiles
from levserve.model.gpu.expert_plan import Plan, Tiling
from levserve.model.gpu.expert_tiles import tile_pairs
from levserve.model.gpu.gate import Gate
from levserve.model.gpu.mosaic_experts import mix_blocks, mix_tiles
from levserve.model.gpu.mosaic_plan import is_faster, serves

Array = np.ndarray
GATE = Gate(Activation.SILU, is_gated=True, limit=None, up_offset=0.0)
RULE = ExpertRule(8, 2, Routing(), is_gated=True, activation=Activation.SILU)


def choose(num_tokens: int, num_experts: int, per_token: int, chosen: str = "any") -> Array:
    rng = np.random.default_rng(num_tokens)
    experts = np.array([rng.permutation(num_experts)[:per_token] for _ in range(num_tokens)], np.int32)
    if chosen != "any":
        experts[:] = {"first": [0, 1], "last": [num_experts - 1, 0], "none": num_experts}[chosen]
    experts[num_tokens // 2] = num_experts  # padding
    return experts


def blocks_of(experts: Array, num_experts: int, are_halves: bool) -> Blocks:
    given = jnp.asarray(experts)
    if not are_halves:
        return block_pairs(given, num_experts, interpret=True)
    tiles = tile_pairs(given, num_experts, 2 * BLOCK, interpret=True)
    return halve_tiles(tiles, num_experts, experts.size, interpret=True)


@pytest.mark.parametrize("are_halves", [False, True], ids=["blocks", "halves of tiles"])
@pytest.mark.parametrize("chosen", ["any", "first", "last", "none"])
def test_every_block_is_in_one_tile_and_every_pair_in_its_place(chosen: str, are_halves: bool) -> None:
    num_experts = 5
    experts = choose(300, num_experts, 2, chosen)
    blocks = blocks_of(experts, num_experts, are_halves)
    counts = np.bincount(experts.reshape(-1), minlength=num_experts + 1)[:num_experts]
    used = -(-counts // BLOCK)
    np.testing.assert_array_equal(blocks.counts, [(used // 2).sum(), (used % 2).sum()])

    seen = []
    for kind, blocks_per_tile in enumerate((2, 1)):
        for tile in range(int(blocks.counts[kind])):
            first, expert = int(blocks.firsts[kind, tile]), int(blocks.experts[kind, tile])
            seen += range(first, first + blocks_per_tile)
            assert (
                np.asarray(blocks.of_blocks)[first : first + blocks_per_tile].tolist()
                == [expert] * blocks_per_tile
            )
    assert sorted(seen) == np.flatnonzero(np.asarray(blocks.of_blocks) < num_experts).tolist()

    real = np.flatnonzero(experts.reshape(-1) < num_experts)
    places = np.asarray(blocks.places)[real]
    np.testing.assert_array_equal(np.asarray(blocks.pairs)[places], real)
    np.testing.assert_array_equal(np.asarray(blocks.of_blocks)[places // BLOCK], experts.reshape(-1)[real])


@pytest.mark.mosaic
@pytest.mark.parametrize("is_second_alone", [False, True])
def test_the_kernel_gives_the_sum_of_the_chosen_experts(is_second_alone: bool) -> None:
    """With two programs, so that one has several tiles. Expert 0 has a tile of two blocks, expert 2 none."""
    num_tokens, embed, mlp = 80, 256, 128
    rng = np.random.default_rng(0)
    experts = np.full((num_tokens, 2), [[0, 1]], np.int32)
    experts[:3] = 3  # padding
    x, gate_up, down = (
        jnp.asarray(rng.standard_normal(shape) * scale, jnp.bfloat16)
        for shape, scale in (
            ((num_tokens, embed), 1),
            ((3, 2 * mlp, embed), 1 / 16),
            ((3, embed, mlp), 1 / 11),
        )
    )
    weights = rng.random((num_tokens, 2), np.float32)
    given = x, ExpertChoice(jnp.asarray(experts), jnp.asarray(weights)), gate_up, down
    added = np.zeros((num_tokens, embed), np.float32)
    if is_second_alone:
        added = rng.standard_normal(added.shape, np.float32)
        plan = Plan(2 * BLOCK, Tiling(64, 64, 4, 2), Tiling(64, 64, 4, 2), halvings=1)
        is_real = jnp.asarray(experts[:, 0] < 3)
        got = mix_tiles(
            *(*given, jnp.asarray(added), is_real),
            plan=plan,
            num_programs=2,
            interpret=plgpu.InterpretGPUParams(),
        )
        np.testing.assert_array_equal(got[:3], added[:3], "nothing is added to padding")
    else:
        got = mix_blocks(*given, gate=GATE, num_programs=2, interpret=plgpu.InterpretGPUParams())
    wide, up_matrices, down_matrices = (np.asarray(array, np.float32) for array in (x, gate_up, down))
    wanted = added.copy()
    for place, expert in enumerate((0, 1)):
        gate, up = np.split(wide @ up_matrices[expert].T, 2, axis=1)
        hidden = np.asarray(jnp.asarray(gate / (1 + np.exp(-gate)) * up, jnp.bfloat16), np.float32)
        wanted += weights[:, place, None] * (hidden @ down_matrices[expert].T)
    np.testing.assert_allclose(got[3:], wanted[3:], atol=0.01 * np.abs(wanted).max())


def test_wide_experts_with_many_tokens_are_for_mosaic() -> None:
    mixtral, many = 14336, dataclasses.replace(RULE, num_experts=128, per_token=8)
    assert is_faster(4096, RULE, mixtral) and is_faster(1024, RULE, mixtral)
    assert not is_faster(256, RULE, mixtral), "64 tokens an expert"
    assert not is_faster(4096, many, 768) and not is_faster(1 << 20, many, 768)


@pytest.mark.parametrize(
    ("kernels", "num_tokens", "mlp", "wanted"),
    [
        (ExpertKernels.AUTO, 4096, 768, "mix_tiles"),
        (ExpertKernels.AUTO, 2048, 768, "mix_grouped"),
        (ExpertKernels.AUTO, 4096, 4096, "mix_blocks"),
        (ExpertKernels.AUTO, 4096, 704, "mix_grouped"),
        (ExpertKernels.TRITON, 4096, 768, "mix_grouped"),
        (ExpertKernels.MOSAIC, 4096, 768, "mix_blocks"),
        (ExpertKernels.BOTH, 1024, 768, "mix_tiles"),
        (ExpertKernels.BOTH, 512, 768, "mix_grouped"),
    ],
)
def test_the_second_product_alone_is_for_mosaic_where_small_experts_have_many_tokens(
    kernels: ExpertKernels, num_tokens: int, mlp: int, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = dataclasses.replace(RULE, num_experts=128, per_token=8)
    called: list[str] = []

    def stand_in(name: str, x: jax.Array, *_: object, **__: object) -> jax.Array:
        called.append(name)
        return x.astype(jnp.float32)

    for name in ("mix_tiles", "mix_blocks", "mix_grouped"):
        monkeypatch.setattr(backend, name, functools.partial(stand_in, name))
    monkeypatch.setattr(backend, "is_hopper", lambda: True)

    def add(x: jax.Array, scores: jax.Array, is_real: jax.Array, *matrices: jax.Array) -> jax.Array:
        experts: Any = SimpleNamespace(
            rule=rule, matrices=matrices, dtype=matrices[0].dtype, biases=None, correction=None
        )
        return GpuBackend(expert_kernels=kernels).add_experts(x, x, scores, is_real, experts)

    embed, types = 512, (jnp.float32, jnp.float32, jnp.bool_, jnp.bfloat16, jnp.bfloat16)
    shapes = (num_tokens, embed), (num_tokens, 128), (num_tokens,), (128, 2 * mlp, embed), (128, embed, mlp)
    given = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, types, strict=True)]
    jax.eval_shape(add, *given)
    assert called == [wanted]


def test_the_kernel_serves_only_what_it_computes() -> None:
    def is_served(rule: ExpertRule, embed: int = 512, mlp: int = 384, dtype: str = "bfloat16") -> bool:
        shapes = (rule.num_experts, 2 * mlp, embed), (rule.num_experts, embed, mlp)
        gate_up, down = (jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in shapes)
        return serves(rule, gate_up, down)

    assert is_served(RULE)
    assert not is_served(RULE, dtype="float32") and not is_served(RULE, dtype="float16")
    assert not is_served(RULE, mlp=320) and not is_served(RULE, embed=384), (
        "a tile's columns would not divide it"
    )
    assert not is_served(dataclasses.replace(RULE, is_gated=False))
    assert not is_served(dataclasses.replace(RULE, activation=Activation.GELU))
