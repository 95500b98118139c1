"""The bundled model in float32 and bfloat16 against its reference: a real GGUF file, vocabulary and text."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levserve.model import cache
from levserve.model.decoder import Decoder
from levserve.model.feed_forward import CHUNK, ROW
from levserve.model.select import choose_backend
from levserve.text.tokenizer import load_tokenizer
from levserve.weights.checkpoint import load_arrays, read_config
from tests.conftest import GOLDEN
from tests.engines import ask, running_engine

FLAGS = ("--max-seq-len", "512", "--inter-token-goal-ms", "60000")  # else chunks are a token or two
CASES = json.loads((GOLDEN / "smollm2-135m.json").read_text())["cases"]
FLOAT32 = jnp.dtype(jnp.float32)
CHUNK_SIZE, PAGE_SIZE, NUM_PAGES = 64, 16, 16


@pytest.fixture(scope="module")
def model(bundled_gguf: Path) -> Decoder:
    config = read_config(bundled_gguf)
    backend, _ = choose_backend("cpu", config, dtype=FLOAT32, kv_dtype=FLOAT32)
    arrays = load_arrays(bundled_gguf, config, FLOAT32, report=lambda _: None, backend=backend)
    return Decoder.from_arrays(config, arrays, backend=backend)


def logprobs_of(model: Decoder, tokens: list[int]) -> np.ndarray:
    """Log-probabilities [token, vocab] after every token.

    The model is called as it is, not compiled as one program, which would take most of a minute: what is
    compiled is a layer, once for all of them.
    """
    table = jnp.arange(NUM_PAGES, dtype=jnp.int32)[None]
    pools = cache.make_pool(model.config, NUM_PAGES, PAGE_SIZE, FLOAT32)
    found = []
    for start in range(0, len(tokens), CHUNK_SIZE):
        part = tokens[start : start + CHUNK_SIZE]
        padding = CHUNK_SIZE - len(part)
        positions = jnp.asarray([[*range(start, start + len(part)), *[-1] * padding]], jnp.int32)
        hidden, pools = model(jnp.asarray([part + [0] * padding], jnp.int32), pools, table, positions)
        logits = model.logits(hidden[ROW, 0].rename({CHUNK: ROW}))
        found.append(np.asarray(jax.nn.log_softmax(logits))[: len(part)])
    return np.concatenate(found)


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_the_bundled_model_matches_its_reference_in_float32(
    case: dict[str, list[int]], model: Decoder
) -> None:
    prompt, greedy = case["prompt_tokens"], case["greedy"]
    logprobs = logprobs_of(model, prompt + greedy)
    # Where the two best tokens are nearly equal, the reference itself could go either way.
    sure = len(prompt) + (48 if case["smallest_top2_gap"] > 1e-3 else 16)
    assert logprobs[len(prompt) - 1 : sure - 1].argmax(-1).tolist() == (prompt + greedy)[len(prompt) : sure]
    got = logprobs[np.arange(sure - 1), (prompt + greedy)[1:sure]]
    wanted = case["prompt_logprobs"][1:] + case["greedy_logprobs"]
    np.testing.assert_allclose(got, wanted[: sure - 1], atol=1e-3)


def test_the_tokens_of_the_reference_are_its_text(bundled_gguf: Path) -> None:
    tokenizer = load_tokenizer(bundled_gguf)
    texts = [tokenizer.decode(case["greedy"], skip_special_tokens=False) for case in CASES]
    assert texts == [case["greedy_text"] for case in CASES]


def test_the_bundled_model_in_bfloat16_says_what_the_reference_says(bundled_gguf: Path) -> None:
    """For sixteen tokens in at least seven of eight cases: there are near ties."""
    with running_engine(bundled_gguf, "--dtype", "bfloat16", "--prefill-chunk", "32", *FLAGS) as running:
        answers = running.run(*(ask(case["prompt_tokens"], 16) for case in CASES))
    agreeing = [answer.tokens == case["greedy"][:16] for case, answer in zip(CASES, answers)]
    assert sum(agreeing) >= 7, agreeing
