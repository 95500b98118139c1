"""The CPU's sampling kernel against XLA's sampling, row by row and in mixed company."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levserve.jit.target import Target
from levserve.model.cpu.draw import draw_rows
from levserve.model.rules import FREE, MAX_EDITS, POISONED, Drawn, Masks, Memory, Mode, Rules
from levserve.model.sampler import sample
from levserve.model.xla import XLA_ON_CPU
from tests.targets import HOST, on_each_target

ROWS, LONGEST = 64, 40
NAN_ROW = 9
Given = tuple[jax.Array, jax.Array, Rules, Memory, Masks]


def make_given(vocab: int, seed: int = 0) -> Given:
    """Rows with different rules: about half of the rows have each of them, in random combinations."""
    rng = np.random.default_rng(seed)

    def some(value: object, otherwise: object, dtype: type) -> jax.Array:
        """A value for about half of the rows."""
        return jnp.asarray(np.where(rng.random(ROWS) < 0.5, value, otherwise), dtype)

    floats, ints = jnp.float32, jnp.int32
    rules = Rules(
        temperature=some(rng.uniform(0.3, 2.0, ROWS), rng.choice([0.0, 1.0], ROWS), floats),
        top_k=some(rng.integers(1, vocab + 20, ROWS), 0, ints),
        top_p=some(rng.choice([0.0, 0.1, 0.9, 0.999], ROWS), 1.0, floats),
        min_p=some(rng.uniform(0, 0.3, ROWS), 0.0, floats),
        presence=some(0.7, 0.0, floats),
        frequency=some(-0.4, 0.0, floats),
        repetition=some(1.3, 1.0, floats),
        prompt_len=jnp.asarray(rng.integers(0, 20, ROWS), ints),
        num_edits=some(rng.integers(1, 5, ROWS), 0, ints),
        logprobs=jnp.asarray(rng.integers(0, 3, ROWS), ints),
        is_constrained=jnp.zeros(ROWS, ints),
        seed=jnp.asarray(rng.integers(0, 2**32, (ROWS, 2), dtype=np.uint32)),
    )
    memory = Memory(
        jnp.asarray(rng.integers(0, vocab, (ROWS, LONGEST)), ints),
        jnp.asarray(rng.integers(0, vocab, (ROWS, MAX_EDITS)), ints),
        jnp.asarray(rng.choice([-1e30, -2.0, 5.0], (ROWS, MAX_EDITS)), floats),
        jnp.asarray(rng.choice([5, 2**31 - 1], (ROWS, MAX_EDITS)), ints),
    )
    positions = jnp.asarray(rng.integers(1, LONGEST, ROWS), ints)
    words = rng.integers(0, 2**32, (ROWS, -(-vocab // 32)), dtype=np.uint32)
    words[::7] = 0
    at = some(positions, positions + 1, ints)
    masks = Masks(jnp.asarray(words), at, some(np.arange(ROWS), FREE, ints))
    logits = rng.standard_normal((ROWS, vocab)) * 3
    logits[5, ::3], logits[NAN_ROW, 7], logits[13] = -np.inf, np.nan, np.round(logits[13])
    return jnp.asarray(logits, floats), positions, rules, memory, masks


@cache
def expected(vocab: int) -> Drawn:
    """What XLA samples."""
    way = jax.jit(sample, static_argnums=(5, 6))
    return jax.tree.map(np.array, way(*make_given(vocab), Mode.FULL, XLA_ON_CPU))


def draw(target: Target, given: Given, num_used: int = ROWS) -> Drawn:
    return jax.tree.map(np.asarray, draw_rows(*given, jnp.full(1, num_used, jnp.int32), target=target))


def check(got: Drawn, wanted: Drawn, wants: np.ndarray) -> None:
    np.testing.assert_array_equal(got.tokens, wanted.tokens)
    told = (wants != 0) & (wanted.tokens != POISONED)
    assert told.sum() > 10
    np.testing.assert_allclose(got.logprobs[told], wanted.logprobs[told], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got.top_logprobs[told], wanted.top_logprobs[told], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(got.top_ids[told], wanted.top_ids[told])


@on_each_target
@pytest.mark.parametrize("vocab", [301, 384])  # neither a multiple of vectors, nor one chunk
def test_rows_of_all_rules_draw_what_they_draw_by_xla(vocab: int, target: Target) -> None:
    given = make_given(vocab)
    wanted = expected(vocab)
    check(draw(target, given), wanted, np.asarray(given[2].logprobs))
    assert wanted.tokens[NAN_ROW] == POISONED
    assert (wanted.tokens == POISONED).sum() > 2, "a NaN, and masks that allow nothing"


def test_a_row_draws_the_same_in_any_company() -> None:
    given = make_given(301)
    backwards = jax.tree.map(lambda array: array[::-1], given[:4])
    masks = given[4]._replace(slots=given[4].slots[::-1])
    together, turned = draw(HOST, given), draw(HOST, (*backwards, masks))
    for array, other in zip(together, turned, strict=True):
        np.testing.assert_array_equal(array, other[::-1])


def test_rows_that_are_not_used_are_left_out() -> None:
    given = make_given(301)
    some, every = draw(HOST, given, num_used=9), draw(HOST, given)
    np.testing.assert_array_equal(some.tokens[:9], every.tokens[:9])
    np.testing.assert_array_equal(some.logprobs[:9], every.logprobs[:9])
