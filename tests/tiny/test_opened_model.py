"""`levserve.open` on a tiny model: the reference's text, the same as over HTTP, and all memory given back."""

from __future__ import annotations

import json
import math
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from tokenizers import models

import levserve
from levserve.api.model import Model
from levserve.settings.settings import Settings
from levserve.web.app import create_app
from levserve.web.watcher import Watcher
from tests.conftest import GOLDEN
from tests.engines import cache_folder, live_bytes, running_engine, without_older_objects

CASES = json.loads((GOLDEN / "llama" / "golden.json").read_text())["cases"]
SETTINGS = {"dtype": "float32", "page_size": 4, "prefill_chunk": 8, "kv_pages": 64, "max_running": 2}
"""Few program sizes, because all of them are compiled."""


@without_older_objects()
def test_a_model_opened_and_closed_five_times_leaves_nothing_behind() -> None:
    threads = set(threading.enumerate())
    before = live_bytes()
    sizes = []
    for _ in range(5):
        with levserve.open(GOLDEN / "llama", cache_dir=cache_folder(), **SETTINGS) as model:
            prompts = [case["prompt"] for case in CASES] * 3
            results = model.generate(prompts, max_tokens=24, temperature=0, ignore_eos=True)
            assert [list(result.tokens) for result in results] == [case["greedy"] for case in CASES] * 3
            stream = model.stream(CASES[0]["prompt"], max_tokens=20)
            next(stream)
        assert not [thread for thread in threading.enumerate() if thread not in threads]
        sizes.append(live_bytes())
    assert sizes == [before] * 5


def edited_llama(folder: Path, edit: Callable[[dict[str, NDArray[np.float32]]], None], **fields: int) -> Path:
    """The golden Llama with other numbers, and these fields in its configuration."""
    shutil.copytree(GOLDEN / "llama", folder)
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("kernels", ["auto", "xla"])
def test_a_vocabulary_may_have_fewer_tokens_than_requests_may_see_at_a_place(
    tmp_path: Path, kernels: str
) -> None:
    def cut(tensors: dict[str, NDArray[np.float32]]) -> None:
        name = "model.embed_tokens.weight"  # the head shares it
        tensors[name] = tensors[name][:7].copy()

    folder = edited_llama(tmp_path / "dna", cut, vocab_size=7)
    backend = tokenizers.Tokenizer(
        models.WordLevel({f"t{token}": token for token in range(7)}, unk_token="t0")
    )
    backend.save(str(folder / "tokenizer.json"))
    with levserve.open(folder, cache_dir=cache_folder(), kernels=kernels, **SETTINGS) as model:
        for sampling in ({"temperature": 0}, {"temperature": 1, "top_p": 0.9, "top_k": 50, "seed": 1}):
            (result,) = model.generate(
                [[2, 3, 4]], max_tokens=4, ignore_eos=True, logprobs=20, prompt_logprobs=20, **sampling
            )
            assert len(result.tokens) == 4 and max(result.tokens) < 7
            assert result.logprobs is not None
            for place in result.logprobs:
                assert sorted(token for token, _ in place.top) == list(range(7))
                assert math.isclose(sum(math.exp(logprob) for _, logprob in place.top), 1, rel_tol=1e-4)


def test_a_pruned_layer_is_served_in_int8(tmp_path: Path) -> None:
    def prune(tensors: dict[str, NDArray[np.float32]]) -> None:
        for name in tensors:
            if name.startswith("model.layers.1.") and tensors[name].ndim == 2:
                tensors[name] = np.zeros_like(tensors[name])

    folder = edited_llama(tmp_path / "pruned", prune)
    tokens = []
    for quantize in ("none", "int8"):
        settings = SETTINGS | {"quantize": quantize}
        with levserve.open(folder, cache_dir=cache_folder(), **settings) as model:
            (result,) = model.generate(CASES[0]["prompt"], max_tokens=1, temperature=0, ignore_eos=True)
            tokens.append(result.tokens)
    assert tokens[0] == tokens[1]


def test_texts_scores_and_embeddings_are_those_over_http() -> None:
    with running_engine(GOLDEN / "llama", "--page-size", "4", "--prefill-chunk", "16") as running:
        watcher = Watcher()
        client = create_app(running.registry, Settings(), watcher).test_client()
        model = Model(running.registry, Settings())
        try:
            fields = {"max_tokens": 12, "seed": 5, "temperature": 0.9, "n": 2, "logprobs": 2}
            body = {"model": model.name, "prompt": [case["prompt"] for case in CASES], **fields}
            reply = client.post("/v1/completions", json=body).json
            assert reply is not None
            results = model.generate([case["prompt"] for case in CASES], **fields)  # type: ignore[arg-type]
            choices = [choice for result in results for choice in result.choices]
            assert [choice.text for choice in choices] == [one["text"] for one in reply["choices"]]
            pairs = [("t17 t18", " t19"), ("t17 t18", " t300 t301")]
            scored = {"prompts": ["t17 t18"] * 2, "continuations": [" t19", " t300 t301"]}
            likelihoods = client.post("/loglikelihood", json=scored).json
            assert likelihoods is not None
            np.testing.assert_allclose(
                [one.logprob for one in model.score(pairs)], likelihoods["ll"], atol=1e-4
            )
            embedded = client.post("/v1/embeddings", json={"model": model.name, "input": "t17 t18"}).json
            assert embedded is not None
            np.testing.assert_allclose(model.embed("t17 t18")[0], embedded["data"][0]["embedding"], atol=1e-5)
        finally:
            model.close()
            watcher.stop()
