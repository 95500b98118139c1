"""Scores over HTTP from a real engine around a tiny model: every way to ask for the same number gives it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from flask.testing import FlaskClient

from levserve.device.programs import Shape
from levserve.settings.settings import Settings
from levserve.web.app import create_app
from levserve.web.watcher import Watcher
from tests.conftest import GOLDEN
from tests.engines import Running, running_engine
from tests.waiting import COMPILE_SECONDS, wait_until

PROMPT = "t17 t30 t9 t41"


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    # The sizes of other tests, so that their programs are found.
    flags = ("--page-size", "4", "--prefill-chunk", "16", "--served-model-name", "toy")
    with running_engine(GOLDEN / "llama", *flags) as running:
        yield running


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[FlaskClient]:
    watcher = Watcher()
    yield create_app(running.registry, Settings(), watcher).test_client()
    watcher.stop()


@pytest.fixture(scope="module")
def wide_client() -> Iterator[FlaskClient]:
    """Prompts of 90 tokens and more are one chunk of 128, which is scored by tiles."""
    flags = ("--page-size", "4", "--kv-pages", "256", "--prefill-chunk", "128", "--served-model-name", "toy")
    with running_engine(GOLDEN / "llama", *flags) as running:
        programs = running.loaded.runner.programs
        programs.compile_only([Shape(128)])
        wait_until(lambda: not programs.has_cold, COMPILE_SECONDS)
        watcher = Watcher()
        client = create_app(running.registry, Settings(), watcher).test_client()
        complete(client, "t17", max_tokens=1)  # so the first run of the last program is over
        yield client
        watcher.stop()


def ask(client: FlaskClient, path: str, **body: Any) -> Any:
    reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json


def complete(client: FlaskClient, prompt: Any, **fields: Any) -> Any:
    return ask(client, "/v1/completions", **({"model": "toy", "prompt": prompt, "temperature": 0} | fields))[
        "choices"
    ][0]


@pytest.fixture(scope="module")
def generated(client: FlaskClient) -> Any:
    """A greedy answer and its own log-probabilities."""
    return complete(client, PROMPT, max_tokens=24, logprobs=2, ignore_eos=True, skip_special_tokens=False)


def test_a_generated_text_scores_as_it_was_generated(client: FlaskClient, generated: Any) -> None:
    wanted = generated["logprobs"]
    scored = complete(client, PROMPT + generated["text"], max_tokens=0, echo=True, logprobs=2)["logprobs"]
    assert scored["tokens"] == [*PROMPT.split(), *wanted["tokens"]]
    assert scored["token_logprobs"][4:] == pytest.approx(wanted["token_logprobs"], abs=1e-4)
    for found, top in zip(scored["top_logprobs"][4:], wanted["top_logprobs"], strict=True):
        assert found == pytest.approx(top, abs=1e-4)


def test_lm_evaluation_harness_would_find_it_greedy(client: FlaskClient, generated: Any) -> None:
    tokens = [int(word[1:]) for word in PROMPT.split()]
    words = {"<pad>": 0, "<s>": 1, "</s>": 2}
    continuation = [
        words[token] if token in words else int(token[1:]) for token in generated["logprobs"]["tokens"]
    ]
    scored = complete(client, [tokens + continuation], max_tokens=1, logprobs=1, echo=True, seed=1234)[
        "logprobs"
    ]
    values, tops = scored["token_logprobs"][4:-1], scored["top_logprobs"][4:-1]
    assert len(values) == 24
    assert all(value == max(top.values()) for value, top in zip(values, tops, strict=True))


def test_loglikelihood_and_prompt_logprobs_agree_with_it(client: FlaskClient, generated: Any) -> None:
    total = pytest.approx(sum(generated["logprobs"]["token_logprobs"]), abs=1e-3)
    unlikely = " t3 t3 t3"
    pairs = {
        "prompts": [PROMPT] * 3,
        "continuations": [generated["text"], unlikely, generated["text"]],
        "details": True,
    }
    told = ask(client, "/loglikelihood", **pairs)
    assert (told["ll"][0], told["ll"][2]) == (total, total)
    assert told["is_greedy"] == [True, False, True]
    assert told["ll"][1] == pytest.approx(sum(told["token_logprobs"][1])) and told["tokens"][1] == ["t3"] * 3
    shown = complete(client, PROMPT + unlikely, max_tokens=1, prompt_logprobs=1)["prompt_logprobs"]
    assert [entry["3"]["logprob"] for entry in shown[4:]] == pytest.approx(
        told["token_logprobs"][1], abs=1e-4
    )


@pytest.mark.parametrize("num_scored", [1, 2, 15, 16, 17, 32, 96, 111])
def test_a_part_of_a_chunk_scores_as_the_whole_chunk_does(wide_client: FlaskClient, num_scored: int) -> None:
    # No other case has computed this beginning, and the echo comes second, so nothing is found in the cache.
    whole = [150 + num_scored, *range(20, 131)]
    num_context = len(whole) - num_scored
    told = ask(
        wide_client,
        "/loglikelihood",
        prompts=[whole[:num_context]],
        continuations=[whole[num_context:]],
        details=True,
    )
    echo = complete(wide_client, whole, max_tokens=0, echo=True, logprobs=0)["logprobs"]["token_logprobs"]
    assert told["token_logprobs"][0] == pytest.approx(echo[num_context:], abs=1e-4)
    assert all(value < 0 for value in told["token_logprobs"][0])


def test_continuations_of_one_prompt_compute_it_once(client: FlaskClient, running: Running) -> None:
    context = " ".join(f"t{number}" for number in range(20, 85))  # two pages and a token
    before = running.metric("prefill_tokens_total")
    ask(
        client,
        "/loglikelihood",
        prompts=[context] * 8,
        continuations=[f" t{number}" for number in range(90, 98)],
    )
    assert running.metric("prefill_tokens_total") - before == 66 + 7 * 2


def test_a_text_has_one_embedding_alone_and_among_others(client: FlaskClient) -> None:
    def embed(texts: Any, **fields: Any) -> list[Any]:
        return [
            entry["embedding"]
            for entry in ask(client, "/v1/embeddings", model="toy", input=texts, **fields)["data"]
        ]

    long = " ".join(f"t{number}" for number in range(20, 60))  # more than one chunk
    together = embed([PROMPT, long, "t17"])
    for text, vector in zip((PROMPT, long, "t17"), together, strict=True):
        assert embed(text)[0] == pytest.approx(vector, abs=1e-4)
        assert sum(value * value for value in vector) == pytest.approx(1, abs=1e-4)
    assert embed("t17", pooling="last")[0] == pytest.approx(together[2], abs=1e-4)
    assert embed(long, pooling="last")[0] != pytest.approx(together[1], abs=1e-2)
