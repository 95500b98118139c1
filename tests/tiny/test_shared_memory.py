"""Tilings fit into a card's shared memory, and on an H200 they are those that were measured."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levserve.model.backend import ExpertMatrix, ExpertRule
from levserve.model.cache import FP8
from levserve.model.config import Activation, Routing
from levserve.model.gpu.expert_memory import bytes_needed
from levserve.model.gpu.expert_plan import BY_SHARE, FEW, NIBBLES_BY_SHARE, NIBBLES_FEW, Plan, choose_plan
from levserve.model.gpu.paged_attention import LOG2_E, choose_block, paged_attention
from levserve.model.gpu.shared_memory import H200_BYTES, SMALLEST_BYTES, shared_memory
from levserve.model.packed import Code, Scheme
from levserve.model.xla import XLA_ON_CPU
from tests.l4 import named
from tests.packed_matrices import random_matrix

RULE = ExpertRule(64, 8, Routing(), is_gated=True, activation=Activation.SILU)
TOKENS = {4: FEW, 48: BY_SHARE[6], 64: BY_SHARE[24], 200: BY_SHARE[48], 2048: BY_SHARE[math.inf]}
BFLOAT16 = jnp.dtype(jnp.bfloat16)


def plan_of(num_tokens: int) -> Plan:
    shapes = (RULE.num_experts, 2048, 2048), (RULE.num_experts, 2048, 1024)
    plan = choose_plan(
        num_tokens, RULE, *(jax.ShapeDtypeStruct(shape, BFLOAT16) for shape in shapes), BFLOAT16
    )
    assert plan is not None
    return plan


def packed_plan_of(num_tokens: int) -> Plan:
    rule = ExpertRule(4, 2, Routing(), is_gated=True, activation=Activation.SILU)
    plan = choose_plan(num_tokens, rule, *packed_pair(), BFLOAT16)
    assert plan is not None
    return plan


def packed_pair() -> tuple[ExpertMatrix, ExpertMatrix]:
    scheme = Scheme(Code.UINT4, 128, has_zeros=True, scale=jnp.dtype(jnp.float16))
    return random_matrix(scheme, (4, 512, 256)), random_matrix(scheme, (4, 256, 256))


def with_card(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """A card that says itself what its programs may have."""
    card = SimpleNamespace(device_kind="NVIDIA", shared_memory_per_block_optin=num_bytes)
    monkeypatch.setattr(jax, "devices", lambda: [card])


@pytest.mark.parametrize(
    ("kind", "num_bytes"),
    [("NVIDIA H200", H200_BYTES), ("NVIDIA GH200 480GB", H200_BYTES), ("NVIDIA L4", SMALLEST_BYTES)],
)
def test_a_card_known_by_name_has_at_least_what_the_smallest_has(kind: str, num_bytes: int) -> None:
    with named(kind):
        assert shared_memory() == num_bytes


def test_a_card_says_how_much_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    with_card(monkeypatch, 163 << 10)
    assert shared_memory() == 163 << 10
    with named("NVIDIA"):  # a mesh of such cards names them too
        assert shared_memory() == 163 << 10


@pytest.mark.parametrize("num_tokens", TOKENS)
def test_experts_on_an_h200_are_tiled_as_measured(num_tokens: int) -> None:
    with named("NVIDIA H200"):
        plan = plan_of(num_tokens)
    assert (plan.gate_up, plan.down) == (TOKENS[num_tokens].gate_up, TOKENS[num_tokens].down)


@pytest.mark.parametrize(
    ("num_tokens", "measured"),
    [
        (4, NIBBLES_FEW),
        (40, NIBBLES_BY_SHARE[24]),
        (90, NIBBLES_BY_SHARE[48]),
        (400, NIBBLES_BY_SHARE[math.inf]),
    ],
)
def test_packed_experts_on_an_h200_have_all_their_stages(num_tokens: int, measured: Plan) -> None:
    with named("NVIDIA H200"):
        plan = packed_plan_of(num_tokens)
    for tiling, wanted in ((plan.gate_up, measured.gate_up), (plan.down, measured.down)):
        assert (tiling.columns, tiling.num_stages) == (wanted.columns, wanted.num_stages)


@pytest.mark.parametrize("num_tokens", TOKENS)
def test_experts_on_an_l4_are_tiled_the_same_with_fewer_stages(num_tokens: int) -> None:
    measured = TOKENS[num_tokens]
    with named("NVIDIA L4"):
        plan = plan_of(num_tokens)
    for tiles, width, tiling, wanted in (
        (2, 2048, plan.gate_up, measured.gate_up),
        (1, 1024, plan.down, measured.down),
    ):
        matrix = jax.ShapeDtypeStruct((RULE.num_experts, 2048, width), BFLOAT16)
        of_tile = {"tiles": tiles, "columns": tiling.columns, "num_pairs": plan.size}
        step = bytes_needed(matrix, depth=tiling.depth, **of_tile).step
        assert (tiling.num_stages - 1) * step <= SMALLEST_BYTES
        assert (tiling.columns, tiling.depth) == (wanted.columns, wanted.depth)
        is_reduced = tiling.num_stages < wanted.num_stages
        assert is_reduced == ((wanted.num_stages - 1) * step > SMALLEST_BYTES)


def test_where_not_even_two_stages_fit_a_step_is_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    with_card(monkeypatch, 40_000)
    plan = plan_of(2048)
    assert (plan.gate_up.num_stages, plan.gate_up.depth) == (2, 32)
    packed = packed_plan_of(400)
    assert packed.gate_up.depth < NIBBLES_BY_SHARE[math.inf].gate_up.depth


@pytest.mark.parametrize(
    ("size", "group", "dtype", "on_h200", "on_l4"),
    [
        (64, 1, jnp.bfloat16, (64, 64, 4, 3), (64, 64, 4, 3)),
        (64, 8, jnp.bfloat16, (16, 64, 4, 3), (16, 64, 4, 3)),
        (128, 4, jnp.bfloat16, (16, 64, 4, 3), (16, 64, 4, 3)),
        (128, 8, jnp.bfloat16, (16, 64, 4, 3), (16, 64, 4, 3)),
        (128, 16, jnp.bfloat16, (16, 64, 4, 3), (16, 64, 4, 2)),
        (128, 32, jnp.bfloat16, (16, 64, 4, 3), (8, 64, 4, 2)),
        (256, 2, jnp.bfloat16, (32, 32, 8, 2), (32, 32, 8, 2)),
        (256, 8, jnp.bfloat16, (16, 32, 8, 2), (16, 16, 8, 2)),
        (256, 16, jnp.bfloat16, (16, 32, 8, 2), (8, 16, 8, 2)),
        (128, 16, FP8, (16, 64, 4, 3), (16, 64, 4, 3)),
        (256, 2, FP8, (32, 64, 4, 3), (32, 64, 4, 2)),
        (256, 16, FP8, (16, 64, 4, 3), (8, 32, 4, 2)),
        (64, 32, jnp.float32, (16, 64, 4, 3), (8, 64, 4, 2)),
        (128, 16, jnp.float32, (16, 32, 8, 2), (8, 32, 8, 2)),
        (256, 8, jnp.float32, (16, 16, 8, 2), (4, 16, 8, 2)),
    ],
)
def test_attention_of_prompts_is_as_measured_on_an_h200_and_fits_into_an_l4(
    size: int, group: int, dtype: Any, on_h200: tuple[int, ...], on_l4: tuple[int, ...]
) -> None:
    """Queries, keys, warps and stages of a program."""
    found = []
    for kind in ("NVIDIA H200", "NVIDIA L4"):
        with named(kind):
            queries, tiling = choose_block((8, 64, 2, group, size), jnp.dtype(dtype))
        found.append((queries, *tiling))
    assert found == [on_h200, on_l4]


@pytest.mark.parametrize(("group", "queries"), [(33, 4), (48, 4), (64, 4), (128, 2), (256, 1)])
def test_many_query_heads_of_one_key_are_taken_with_few_queries(group: int, queries: int) -> None:
    with named("NVIDIA H200"):
        assert choose_block((8, 64, 1, group, 128), BFLOAT16)[0] == queries


@pytest.mark.parametrize(("group", "size"), [(48, 16), (9, 256)])
def test_attention_in_reduced_tiles_gives_the_same(
    group: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    rows, chunk, width = 2, 16, 3
    table = rng.permutation(rows * width).reshape(rows, width).astype(np.int32)
    pool = jnp.asarray(rng.standard_normal((rows * width, 2, 1, 16, size), dtype=np.float32))
    q = rng.standard_normal((rows, chunk, 1, group, size), dtype=np.float32) * np.float32(size**-0.5)
    positions = np.asarray([[5], [24]], np.int32) + np.arange(chunk, dtype=np.int32)
    wanted = jax.jit(XLA_ON_CPU.mix_values)(q, pool, table, positions)
    with_card(monkeypatch, SMALLEST_BYTES)
    got = paged_attention(q * np.float32(LOG2_E), pool, table, positions, interpret=True)
    np.testing.assert_allclose(got, wanted, atol=1e-5, rtol=1e-5)
