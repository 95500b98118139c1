"""Experts: every way to compute them gives what a plain loop over tokens gives."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levserve.model import experts
from levserve.model.backend import ExpertChoice
from levserve.model.config import Routing, Scoring

EMBED = 6
Mix = Callable[..., jax.Array]


class Scalings:
    """Experts that are one matrix each."""

    def __init__(self, count: int) -> None:
        self.matrices = jnp.asarray(
            np.random.default_rng(count).standard_normal((count, EMBED, EMBED), np.float32)
        )

    def one(self, number: jax.Array, tokens: jax.Array) -> jax.Array:
        return tokens @ self.matrices[number]

    def chosen(self, numbers: jax.Array, tokens: jax.Array) -> jax.Array:
        return jnp.einsum("td,tde->te", tokens, self.matrices[numbers])

    def every(self, tokens: jax.Array) -> jax.Array:
        return jnp.einsum("xsd,xde->xse", tokens, self.matrices)


def plainly(x: np.ndarray, choice: ExpertChoice, is_real: np.ndarray, matrices: np.ndarray) -> np.ndarray:
    total = np.zeros(x.shape)
    for token in np.flatnonzero(is_real):
        for number, weight in zip(np.asarray(choice.experts)[token], np.asarray(choice.weights)[token]):
            total[token] += weight * (x[token] @ matrices[number])
    return total


@pytest.mark.parametrize("mix", [experts.mix_in_blocks, experts.mix_in_slots, experts.mix_gathered])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "per_token"), [(1, 4, 2), (3, 16, 4), (40, 4, 2), (300, 8, 2)]
)
@pytest.mark.parametrize("bias", [0.0, 9.0])
def test_every_way_gives_the_sum_of_the_chosen_experts(
    mix: Mix, num_tokens: int, num_experts: int, per_token: int, bias: float
) -> None:
    rng = np.random.default_rng(num_tokens)
    x = rng.standard_normal((num_tokens, EMBED), np.float32)
    scores = rng.standard_normal((num_tokens, num_experts), np.float32)
    scores[:, 1] += bias  # with it all tokens choose one of them, and slots for twice the mean are not enough
    is_real = np.ones(num_tokens, bool) if mix is experts.mix_gathered else rng.random(num_tokens) < 0.7
    stack = Scalings(num_experts)
    rest = () if mix is experts.mix_gathered else (num_experts,)

    @jax.jit
    def run(x: jax.Array, scores: jax.Array, is_real: jax.Array) -> tuple[jax.Array, ExpertChoice]:
        choice = experts.choose_experts(scores, per_token, Routing())
        given = () if mix is experts.mix_gathered else (is_real,)
        return mix(x, choice, *given, stack, *rest), choice

    got, choice = run(x, scores, is_real)
    np.testing.assert_allclose(got, plainly(x, choice, is_real, np.asarray(stack.matrices)), atol=1e-5)


def test_only_the_chosen_experts_are_computed_in_blocks() -> None:
    class Counting(Scalings):
        def one(self, number: jax.Array, tokens: jax.Array) -> jax.Array:
            jax.debug.callback(lambda number: seen.append(int(number)), number)
            return super().one(number, tokens)

    seen: list[int] = []
    choice = ExpertChoice(
        jnp.asarray([[7, 2], [2, 5], [0, 1]], jnp.int32), jnp.full((3, 2), 0.5, jnp.float32)
    )
    experts.mix_in_blocks(
        jnp.ones((3, EMBED), jnp.float32), choice, jnp.asarray([True, True, False]), Counting(64), 64
    )
    jax.effects_barrier()
    assert sorted(seen) == [2, 5, 7]


def test_weights_sum_to_one_only_where_the_model_says_so() -> None:
    scores = jnp.asarray([[2.0, 1.0, 0.0, -1.0]], jnp.float32)
    plain, scaled = (
        experts.choose_experts(scores, 2, Routing(renormalises)) for renormalises in (False, True)
    )
    np.testing.assert_allclose(plain.weights, jax.nn.softmax(scores)[:, :2], rtol=1e-6)
    np.testing.assert_allclose(scaled.weights.sum(), 1.0, rtol=1e-6)
    assert plain.experts.tolist() == scaled.experts.tolist() == [[0, 1]]


def test_a_token_chooses_from_its_best_groups_by_corrected_weights_and_mixes_by_plain_ones() -> None:
    rng = np.random.default_rng(3)
    scores, correction = rng.standard_normal((50, 12)), 0.3 * rng.standard_normal(12)
    routing = Routing(True, Scoring.SIGMOID, True, num_groups=4, groups_per_token=2, group_best=2, scale=1.8)
    choose = jax.jit(lambda scores, correction: experts.choose_experts(scores, 3, routing, correction))
    got = jax.tree.map(np.asarray, choose(scores.astype(np.float32), correction.astype(np.float32)))
    for token in range(50):
        weights = 1 / (1 + np.exp(-scores[token]))
        ranks = weights + correction
        groups = np.argsort([-np.sort(ranks[at : at + 3])[-2:].sum() for at in (0, 3, 6, 9)])[:2]
        allowed = [expert for expert in range(12) if expert // 3 in groups]
        wanted = sorted(allowed, key=lambda expert: -ranks[expert])[:3]
        assert got.experts[token].tolist() == wanted
        chosen = weights[wanted]
        np.testing.assert_allclose(got.weights[token], 1.8 * chosen / chosen.sum(), rtol=1e-5)
