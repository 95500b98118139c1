"""`logprobs_mode`: log-probabilities of the distribution that tokens were sampled from, against NumPy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levserve.api.model import Model
from levserve.errors import BadRequest
from levserve.model.rules import PROCESSED_LOGPROBS, RAW_LOGPROBS, Mode
from levserve.model.truncation import find_floor, sort_for_floor
from levserve.settings.settings import Settings
from tests.conftest import GOLDEN
from tests.engines import running_engine
from tests.tiny.test_decoder import load, run_in_chunks
from tests.tiny.test_sampler import VOCAB, by_all, draw, make_memory, make_rules

PROMPT = [17, 30, 9, 41]
ROWS = 6
RULES = {
    "temperature": [0.7, 1.0, 1.3, 0.0, 0.9, 0.5],
    "top_k": [0, 5, 0, 3, 0, 40],
    "top_p": [1.0, 1.0, 0.8, 0.5, 1.0, 0.9],
    "min_p": [0.0, 0.0, 0.0, 0.0, 0.2, 0.01],
}


def process(
    logits: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """The log-probabilities after temperature and truncation, by sorting."""
    if temperature == 0:
        return logits - np.logaddexp.reduce(logits)
    scaled = logits.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    order = np.argsort(-scaled, kind="stable")
    keep = np.zeros(len(scaled), bool)
    keep[order[: top_k or len(scaled)]] = True
    weights = np.where(keep, weights, 0)
    if top_p < 1:
        sums = np.cumsum(weights[order])
        keep[order[np.searchsorted(sums, top_p * sums[-1]) + 1 :]] = False
    keep &= weights >= min_p * weights.max()
    kept = np.where(keep, scaled, -np.inf)
    return kept - np.logaddexp.reduce(kept)


@by_all
def test_the_numbers_are_those_of_the_truncated_distribution(way: str) -> None:
    logits = np.random.default_rng(3).normal(0, 3, (ROWS, VOCAB)).astype(np.float32)
    rules = make_rules(ROWS, logprobs=PROCESSED_LOGPROBS, **RULES)
    positions = jnp.arange(5, 5 + ROWS, dtype=jnp.int32)
    drawn = draw(jnp.asarray(logits), positions, rules, make_memory(ROWS), Mode.FULL, way)
    assert drawn.logprobs is not None and drawn.top_ids is not None and drawn.top_logprobs is not None
    for row in range(ROWS):
        wanted = process(logits[row], *(RULES[name][row] for name in RULES))  # type: ignore[arg-type]
        token = int(drawn.tokens[row])
        assert np.isfinite(drawn.logprobs[row])
        np.testing.assert_allclose(drawn.logprobs[row], wanted[token], atol=1e-4)
        np.testing.assert_allclose(drawn.top_logprobs[row], wanted[np.asarray(drawn.top_ids[row])], atol=1e-4)


@by_all
def test_rows_that_want_the_models_own_numbers_keep_them_beside_others(way: str) -> None:
    logits = np.random.default_rng(4).normal(0, 3, (ROWS, VOCAB)).astype(np.float32)
    kinds = [RAW_LOGPROBS, PROCESSED_LOGPROBS] * 3
    positions, memory = jnp.arange(5, 5 + ROWS, dtype=jnp.int32), make_memory(ROWS)
    mixed = draw(
        jnp.asarray(logits),
        positions,
        make_rules(ROWS, logprobs=kinds, **RULES),
        memory,
        Mode.FULL,
        way,
    )
    raw = draw(
        jnp.asarray(logits),
        positions,
        make_rules(ROWS, logprobs=RAW_LOGPROBS, **RULES),
        memory,
        Mode.FULL,
        way,
    )
    np.testing.assert_array_equal(mixed.tokens, raw.tokens)
    assert mixed.logprobs is not None and raw.logprobs is not None
    np.testing.assert_array_equal(mixed.logprobs[::2], raw.logprobs[::2])


@pytest.mark.parametrize("find", [find_floor, sort_for_floor], ids=["searched", "sorted"])
def test_both_ways_find_the_floor_of_top_k_top_p_and_min_p(find: Callable[..., Any]) -> None:
    draw = np.random.default_rng(5)
    scaled = draw.normal(0, 3, (64, VOCAB)).astype(np.float32)
    scaled[:8] = np.round(scaled[:8])  # with ties
    top_k = draw.choice([0, 1, 3, 40, 200, VOCAB, 1000], 64).astype(np.int32)
    top_p = draw.choice([1.0, 0.99, 0.5, 0.01], 64).astype(np.float32)
    min_p = draw.choice([0.0, 0.1, 1.0], 64).astype(np.float32)
    floors = jax.jit(find)(*map(jnp.asarray, (scaled, top_k, top_p, min_p)))
    for row in range(8, 64):
        kept = np.isfinite(process(scaled[row], 1.0, int(top_k[row]), float(top_p[row]), float(min_p[row])))
        np.testing.assert_array_equal(scaled[row] >= floors[row], kept)
    for row in range(8):
        assert scaled[row].max() >= floors[row]


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    # The sizes of other tests, so that their programs are found.
    with running_engine(GOLDEN / "llama", "--page-size", "4", "--prefill-chunk", "16") as running:
        yield Model(running.registry, Settings())


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.6},
        {"temperature": 1.4, "top_k": 8},
        {"temperature": 0.8, "top_p": 0.7, "min_p": 0.05},
        {"temperature": 1.0, "logit_bias": {20: 3.0, 21: -50.0}},
        {"temperature": 0.0},
    ],
)
def test_generated_tokens_have_the_log_probabilities_they_were_drawn_with(
    model: Model, fields: dict[str, Any]
) -> None:
    asked: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True, "seed": 11, "logprobs": 2} | fields
    (result,) = model.generate(PROMPT, logprobs_mode="processed_logprobs", **asked)
    (raw,) = model.generate(PROMPT, **asked)
    assert raw.tokens == result.tokens
    bias = np.zeros(model.tokenizer.vocab_size)
    for token, value in fields.get("logit_bias", {}).items():
        bias[token] = value
    truncation = {name: value for name, value in fields.items() if name in ("top_k", "top_p", "min_p")}
    reference, _ = load("llama")
    logits = run_in_chunks(reference, [*PROMPT, *result.tokens], chunk=128, page_size=4)[3:-1]
    for own, token, shown, plain in zip(logits, result.tokens, result.logprobs, raw.logprobs, strict=True):
        assert shown is not None and plain is not None
        wanted = process(own + bias[: len(own)], fields["temperature"], **truncation)
        assert shown.logprob == pytest.approx(wanted[token], abs=1e-3)
        assert plain.logprob == pytest.approx(own[token], abs=1e-3)
        for other, value in shown.top:
            assert value == pytest.approx(wanted[other], abs=1e-3)


def test_a_mode_that_does_not_exist_is_refused(model: Model) -> None:
    with pytest.raises(BadRequest, match="raw_logprobs"):
        model.generate(PROMPT, logprobs=0, logprobs_mode="processed_logits")
