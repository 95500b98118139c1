"""Newer weights in a running server: a real one around a Levanter run, asked to reload while it answers."""

from __future__ import annotations

import json
import shutil
import signal
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from levserve.model.decoder import Decoder
from levserve.weights.checkpoint import load_arrays, read_config
from tests.conftest import GOLDEN, QUICK_COMPILE
from tests.levanter_files import read_model, write_checkpoint
from tests.servers import Reply, Server, running_server
from tests.tiny.test_decoder import SHAPE, run_in_chunks
from tests.tiny.test_unloading import FLAGS

LLAMA = GOLDEN / "levanter-llama"
DOWN = "model/transformer/layers/stacked/mlp/down_proj/weight"
NORM = "model/transformer/norm/weight"
CASE = json.loads((LLAMA / "golden.json").read_text())["cases"][2]
PROMPT = CASE["prompt"]


@pytest.fixture(scope="module")
def model() -> dict[str, np.ndarray]:
    return read_model(LLAMA)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with one checkpoint, its config and tokenizer beside it."""
    folder = tmp_path_factory.mktemp("reload") / "run"
    shutil.copytree(LLAMA, folder / "step-7")
    for name in ("config.yaml", "tokenizer"):
        (folder / "step-7" / name).rename(folder / name)
    return folder


@pytest.fixture(scope="module")
def server(run: Path) -> Iterator[Server]:
    with running_server(
        "--checkpoint-path", str(run), "--admin-key", "sesame", *FLAGS, is_forked=True, **QUICK_COMPILE
    ) as server:
        yield server


@pytest.fixture(autouse=True)
def first_weights(request: pytest.FixtureRequest) -> None:
    """Every test that uses the server begins with the run's first checkpoint."""
    if "server" in request.fixturenames:
        server, run = request.getfixturevalue("server"), request.getfixturevalue("run")
        assert reload(server, checkpoint_path=str(run / "step-7")).status == 200


def reload(server: Server, *, key: str = "sesame", **body: str) -> Reply:
    return server.call("/admin/reload", body, key=key)


def complete(server: Server, prompt: list[int], max_tokens: int = 24) -> Any:
    body = {
        "model": "run",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "logprobs": 1,
        "ignore_eos": True,
    }
    reply = server.call("/v1/completions", body)
    assert reply.status == 200, reply.body
    return reply.body


def tokens_of(answer: Any) -> list[int]:
    return [int(text.strip().removeprefix("t")) for text in answer["choices"][0]["logprobs"]["tokens"]]


def newer(folder: Path, model: dict[str, np.ndarray], step: int, **changes: np.ndarray) -> Path:
    """A checkpoint with other weights: the last norm reversed, or the given ones."""
    changed = {DOWN: changes["down"]} if "down" in changes else {NORM: model[NORM][::-1].copy()}
    return write_checkpoint(folder, model | changed, step)


def test_a_checkpoint_answers_over_http_as_levanter_computes(server: Server) -> None:
    answer = complete(server, PROMPT)
    assert tokens_of(answer) == CASE["greedy"] and answer["model"] == "run"
    np.testing.assert_allclose(
        answer["choices"][0]["logprobs"]["token_logprobs"], CASE["greedy_logprobs"], atol=1e-3
    )
    assert [line for line in server.lines if "probe" in line and "mean log-probability -8.2" in line]


def test_a_newer_step_is_served_without_dropping_what_runs(
    server: Server, run: Path, model: dict[str, np.ndarray]
) -> None:
    whole = tokens_of(complete(server, PROMPT, 230))
    folder = newer(run / "step-20", model, 20)
    for _ in range(10):  # until the reload comes during the stream, which a fast device may end first
        assert reload(server, checkpoint_path=str(run / "step-7")).status == 200
        streamed, num_tokens, report = stream_across_reload(server, run)
        assert num_tokens == 230 and streamed[:3] == whole[:3]
        assert report["path"] == str(folder)  # the run's newest
        assert report["probe_tokens"] == 31 and report["max_logprob_difference"] > 0.1
        if streamed != whole:
            break
    else:
        pytest.fail("no reload fell into a stream")
    config = read_config(folder)
    decoder = Decoder.from_arrays(
        config, load_arrays(folder, config, jnp.dtype(jnp.float32), report=lambda _: None)
    )
    tokens = tokens_of(complete(server, PROMPT))
    logprobs = run_in_chunks(decoder, PROMPT + tokens, SHAPE, 16)
    assert logprobs[len(PROMPT) - 1 : -1].argmax(-1).tolist() == tokens != CASE["greedy"]
    shutil.rmtree(folder)


def stream_across_reload(server: Server, run: Path) -> tuple[list[int], int, Any]:
    """Begins a stream, reloads after its first tokens, and reads it to its end.

    Returns the tokens in its text, their number (including ends of text, which are not in the text), and
    the answer to the reload.
    """
    body = {
        "model": "run",
        "prompt": PROMPT,
        "max_tokens": 230,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as stream:
        lines = [next(stream) for _ in range(4)]
        report = reload(server, checkpoint_path=str(run)).body
        lines += stream.readlines()
    *events, usage, done = [
        line.decode().removeprefix("data: ").strip() for line in lines if line.startswith(b"data: ")
    ]
    assert done == "[DONE]"
    text = "".join(json.loads(event)["choices"][0]["text"] for event in events)
    tokens = [int(word.removeprefix("t")) for word in text.split()]
    return tokens, json.loads(usage)["usage"]["completion_tokens"], report


def test_of_several_reloads_at_once_one_is_done_and_the_others_are_told(server: Server) -> None:
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda _: reload(server), range(8)))
    assert sorted({reply.status for reply in replies}) == [200, 409]
    assert all(
        "A reload is under way" in reply.body["error"]["message"] for reply in replies if reply.status == 409
    )
    assert tokens_of(complete(server, PROMPT)) == CASE["greedy"]


def test_prompts_that_the_old_weights_computed_are_computed_again(
    server: Server, run: Path, model: dict[str, np.ndarray]
) -> None:
    def num_cached() -> int:
        return int(complete(server, PROMPT, 1)["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert num_cached() == 0 and num_cached() == 16
    assert reload(server).body["max_logprob_difference"] == 0.0  # the same weights again
    assert num_cached() == 0 and num_cached() == 16


def test_a_hugging_face_folder_takes_over_from_a_checkpoint(server: Server) -> None:
    report = reload(server, model=str(GOLDEN / "llama")).body  # the same weights, saved by another program
    assert report["path"] == str(GOLDEN / "llama") and report["max_logprob_difference"] < 1e-4
    assert tokens_of(complete(server, PROMPT)) == CASE["greedy"]


def test_what_does_not_fit_is_refused_and_the_old_weights_go_on(
    server: Server, run: Path, model: dict[str, np.ndarray], tmp_path: Path
) -> None:
    shutil.copy(run / "config.yaml", tmp_path)
    wrong = {
        "shape": newer(tmp_path / "shape", model, 1, down=model[DOWN][:, :, :-2]),
        "missing": newer(tmp_path / "missing", model, 1),
        "lost": newer(tmp_path / "lost", model, 1),
        "nan": newer(tmp_path / "nan", model, 1, down=model[DOWN] * np.nan),
        "half": newer(tmp_path / "half", model, 1),
    }
    shutil.rmtree(wrong["missing"] / DOWN)
    (wrong["lost"] / DOWN / "0.0.0").unlink()
    (wrong["half"] / "metadata.json").unlink()
    told = {
        "shape": "mlp.down_proj.weight is [64, 126], expected [64, 128]",
        "missing": "missing model.layers.0.mlp.down_proj.weight",
        "lost": "down_proj/weight: cannot read its data",
        "nan": "model.layers.0.mlp.down_proj.weight is corrupt",
        "half": "holds no complete Levanter checkpoint",
    }
    for name, folder in wrong.items():
        reply = reload(server, checkpoint_path=str(folder))
        assert (reply.status, reply.body["error"]["code"]) == (409, "reload_refused")
        message = reply.body["error"]["message"]
        assert told[name] in message and str(folder) in message and "the old weights go on serving" in message
    other = reload(server, model=str(GOLDEN / "mistral"))
    assert (
        other.status == 409 and "another model than the one that is served" in other.body["error"]["message"]
    )
    assert reload(server, checkpoint_path="/no/such/folder").status == 400
    assert reload(server, checkpoint="typo").status == 400
    assert tokens_of(complete(server, PROMPT)) == CASE["greedy"]
    assert server.metric("reloads_total", outcome="refused") == 7 and server.metric("requests_running") == 0
    assert server.call("/readyz").body == {"status": "ready", "progress": "ready"}


def test_a_signal_reloads_too(server: Server) -> None:
    before = server.metric("reloads_total", outcome="done")
    server.process.send_signal(signal.SIGUSR2)
    deadline = time.monotonic() + 60
    while server.metric("reloads_total", outcome="done") == before:
        assert time.monotonic() < deadline, "no reload came of the signal"
        time.sleep(0.05)
    assert tokens_of(complete(server, PROMPT)) == CASE["greedy"]


def test_only_an_admin_key_opens_the_admin_endpoints(server: Server) -> None:
    assert reload(server, key="wrong").status == 401
    assert server.call("/admin/reload", {}).status == 401
