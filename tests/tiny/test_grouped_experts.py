"""The GPU's kernels for experts, interpreted, give what a plain loop over tokens gives."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levserve.model import experts as plain
from levserve.model.backend import Backend, ExpertChoice, ExpertRule
from levserve.model.config import Activation, ModelConfig, Routing, Scoring
from levserve.model.decoder import Decoder
from levserve.model.gpu import expert_tiles
from levserve.model.gpu.backend import GpuBackend
from levserve.model.gpu.expert_choice import choose_experts
from levserve.model.gpu.expert_plan import Plan, Tiling, choose_plan
from levserve.model.gpu.expert_tiles import tile_pairs
from levserve.model.gpu.grouped_experts import mix_grouped
from levserve.model.parameter_shapes import parameter_shapes
from levserve.model.xla import XlaBackend

EMBED, MLP = 64, 32
Array = np.ndarray


def rule_of(num_experts: int, per_token: int, *, renormalises: bool = True) -> ExpertRule:
    return ExpertRule(
        num_experts, per_token, Routing(renormalises), is_gated=True, activation=Activation.SILU
    )


def plainly(x: Array, choice: ExpertChoice, is_real: Array, gate_up: Array, down: Array) -> Array:
    total = np.zeros(x.shape)
    for token in np.flatnonzero(is_real):
        for number, weight in zip(np.asarray(choice.experts)[token], np.asarray(choice.weights)[token]):
            gate, up = np.split(gate_up[number] @ x[token], 2)
            total[token] += weight * (down[number] @ (gate / (1 + np.exp(-gate)) * up))
    return total


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "per_token", "size"),
    [(2, 16, 4, 16), (16, 6, 3, 16), (17, 8, 2, 16), (70, 5, 2, 32)],
)
@pytest.mark.parametrize("bias", [0.0, 20.0])
@pytest.mark.parametrize("is_matrix_first", [False, True])
def test_the_kernels_give_the_sum_of_the_chosen_experts(
    num_tokens: int, num_experts: int, per_token: int, size: int, bias: float, is_matrix_first: bool
) -> None:
    rng = np.random.default_rng(num_tokens)
    x = rng.standard_normal((num_tokens, EMBED), np.float32)
    scores = rng.standard_normal((num_tokens, num_experts), np.float32)
    scores[:, 1] += bias  # with it all tokens choose this expert, and none the last one
    scores[:, -1] -= bias
    is_real = rng.random(num_tokens) < 0.7
    gate_up = rng.standard_normal((num_experts, 2 * MLP, EMBED), np.float32) / 8
    down = rng.standard_normal((num_experts, EMBED, MLP), np.float32) / 6
    tiling = Tiling(16, 32, 4, 2, is_matrix_first)
    choice = choose_experts(scores, is_real, rule_of(num_experts, per_token), interpret=True)
    got = mix_grouped(
        *(x, choice, gate_up, down),
        plan=Plan(size, tiling, tiling, halvings=1 if size > 16 else 0),
        interpret=True,
    )
    wanted = plainly(x, choice, is_real, gate_up, down)
    np.testing.assert_allclose(np.asarray(got)[is_real], wanted[is_real], atol=1e-5)


@pytest.mark.parametrize("activation", [Activation.GELU, Activation.GELU_TANH])
def test_experts_without_a_gate_have_their_own_activation(activation: Activation) -> None:
    rng = np.random.default_rng(0)
    x, up, down = (
        rng.standard_normal(shape, np.float32) for shape in ((24, EMBED), (4, MLP, EMBED), (4, EMBED, MLP))
    )
    rule = ExpertRule(4, 1, Routing(), is_gated=False, activation=activation)
    choice = choose_experts(rng.standard_normal((24, 4), np.float32), np.ones(24, bool), rule, interpret=True)
    plan = choose_plan(24, rule, jnp.asarray(up), jnp.asarray(down), jnp.dtype(jnp.float32))
    assert plan is not None
    got = mix_grouped(x, choice, up, down, plan=plan, interpret=True)
    chosen = np.asarray(choice.experts)[:, 0]
    hidden = np.einsum("ti,tmi->tm", x, up[chosen])
    hidden = np.asarray(jax.jit(jax.nn.gelu, static_argnums=1)(hidden, activation is Activation.GELU_TANH))
    wanted = np.einsum("tm,tem->te", hidden, down[chosen])
    np.testing.assert_allclose(got, wanted, atol=2e-5 * float(np.abs(wanted).max()))


ELABORATE = {
    "mlp_bias": True,
    "router_bias": True,
    "activation": Activation.GELU_QUICK,
    "gate_limit": 0.5,
    "up_offset": 1.0,
    "shared_size": 48,
    "has_shared_gate": True,
    "routing": Routing(True, Scoring.SIGMOID, True, num_groups=4, groups_per_token=2, scale=1.5),
}
"""Options of experts that some families have."""


@pytest.mark.parametrize(("rows", "extras"), [(3, {}), (20, {}), (3, ELABORATE), (20, ELABORATE)])
def test_the_backend_with_kernels_mixes_as_the_one_without(rows: int, extras: dict[str, Any]) -> None:
    """With three rows, each pair of token and expert reads matrices of its own."""
    config = ModelConfig(
        *(384, EMBED, MLP, 1, 4, 2, 16, 1e-5, 1e4, 128, False), num_experts=40, experts_per_token=4, **extras
    )
    rng = np.random.default_rng(rows)
    arrays = {
        name: jnp.asarray(rng.standard_normal(shape).astype(np.float32) / 8)
        for name, shape in parameter_shapes(config).items()
    }
    x = hax.named(jnp.asarray(rng.standard_normal((rows, 1, EMBED)), jnp.float32), ("row", "chunk", "embed"))
    is_real = np.arange(rows)[:, None] != 1

    @functools.partial(jax.jit, static_argnums=1)
    def mix(arrays: dict[str, jax.Array], backend: Backend) -> jax.Array:
        return (
            Decoder.from_arrays(config, arrays, backend=backend).layers[0].mlp(x, jnp.asarray(is_real)).array
        )

    kernels, xla = (mix(arrays, backend) for backend in (GpuBackend(interpret=True), XlaBackend("gpu")))
    seen = is_real[:, 0]
    np.testing.assert_allclose(np.asarray(kernels)[seen], np.asarray(xla)[seen], atol=1e-4)
    assert extras or not np.asarray(kernels)[1].any(), "padding gives zeros"


@pytest.mark.parametrize("renormalises", [False, True])
@pytest.mark.parametrize(("num_tokens", "num_experts", "per_token"), [(5, 60, 4), (9, 128, 8)])
def test_experts_are_chosen_as_by_xla_and_none_for_padding(
    num_tokens: int, num_experts: int, per_token: int, renormalises: bool
) -> None:
    rng = np.random.default_rng(num_experts)
    scores = rng.integers(-3, 4, (num_tokens, num_experts)).astype(np.float32)  # many are equal
    is_real = np.arange(num_tokens) != 2
    rule = rule_of(num_experts, per_token, renormalises=renormalises)
    got = choose_experts(scores, is_real, rule, interpret=True)
    wanted = jax.jit(lambda scores: plain.choose_experts(scores, per_token, Routing(renormalises)))(scores)
    np.testing.assert_array_equal(got.experts, np.where(is_real[:, None], wanted.experts, num_experts))
    np.testing.assert_allclose(got.weights, wanted.weights, rtol=1e-5)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_a_token_with_scores_that_are_not_finite_has_no_expert_twice_and_no_finite_weight(
    wrong: float,
) -> None:
    """Otherwise it would have a slot in a tile that is never filled."""
    scores = np.random.default_rng(0).standard_normal((40, 8)).astype(np.float32)
    good = choose_experts(scores, np.ones(40, bool), rule_of(8, 3), interpret=True)
    scores[5], scores[6, 2] = np.nan, wrong
    found = choose_experts(scores, np.ones(40, bool), rule_of(8, 3), interpret=True)
    assert all(len(set(row)) == 3 for row in np.asarray(found.experts).tolist())
    assert not np.isfinite(np.asarray(found.weights)[5:7]).any()
    others = [*range(5), *range(7, 40)]
    np.testing.assert_array_equal(np.asarray(found.weights)[others], np.asarray(good.weights)[others])


@pytest.mark.parametrize(
    ("chosen", "pairs_per_step"), [("any", 1024), ("any", 32), ("first", 32), ("last", 1024), ("none", 1024)]
)
def test_every_pair_is_in_one_tile_of_its_expert(
    chosen: str, pairs_per_step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_tiles, "PAIRS_PER_STEP", pairs_per_step)
    num_tokens, per_token, num_experts, size = 61, 3, 7, 16
    rng = np.random.default_rng(0)
    experts = np.array([rng.permutation(num_experts)[:per_token] for _ in range(num_tokens)], np.int32)
    experts[rng.random(num_tokens) < 0.2] = num_experts
    if chosen != "any":
        experts[:] = {"first": [0, 1, 2], "last": [6, 4, 5], "none": num_experts}[chosen]
    tiles = tile_pairs(jnp.asarray(experts), num_experts, size, interpret=True)
    found = []
    for pairs, expert in zip(np.asarray(tiles.pairs), np.asarray(tiles.experts)):
        inside = pairs[pairs < experts.size] if expert < num_experts else pairs[:0]
        assert (experts.reshape(-1)[inside] == expert).all() and inside.tolist() == sorted(inside)
        found += inside.tolist()
    assert sorted(found) == np.flatnonzero(experts.reshape(-1) < num_experts).tolist()


def plan_of(
    rule: ExpertRule, num_tokens: int = 300, embed: int = 64, mlp: int = 48, dtype: str = "bfloat16"
) -> Plan | None:
    shapes = (rule.num_experts, 2 * mlp, embed), (rule.num_experts, embed, mlp)
    gate_up, down = (jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in shapes)
    return choose_plan(num_tokens, rule, gate_up, down, gate_up.dtype)


@pytest.mark.parametrize(("embed", "mlp"), [(64, 48), (96, 80), (2048, 768), (4096, 14336)])
def test_the_cuts_of_every_plan_divide_the_matrices(embed: int, mlp: int) -> None:
    for num_tokens in (2, 17, 64, 100, 300, 5000):
        plan = plan_of(rule_of(8, 2), num_tokens, embed, mlp)
        assert plan is not None
        assert mlp % plan.gate_up.columns == 0 and embed % plan.gate_up.depth == 0
        assert embed % plan.down.columns == 0 and mlp % plan.down.depth == 0


def test_kernels_are_planned_only_for_experts_that_they_compute() -> None:
    rule = rule_of(8, 2)
    assert plan_of(rule) is not None and plan_of(rule, dtype="float32") is not None
    assert plan_of(rule, mlp=40) is None, "no tensor core takes a depth of 8"
    plan = plan_of(dataclasses.replace(rule, is_gated=False, activation=Activation.GELU))
    assert plan is not None and (plan.is_gated, plan.activation) == (False, Activation.GELU)
    assert plan.gate_up.num_stages == 3, "two programs share a processor"
    assert plan_of(rule_of(256, 8), embed=7168, mlp=2048) is None, "positions do not fit 32 bits"
    assert plan_of(rule, dtype="int8") is None
