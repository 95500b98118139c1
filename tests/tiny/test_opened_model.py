"""`levserve.open` on a tiny model: the reference's text, the same as over HTTP, and all memory given back."""

from __future__ import annotations

import json
import threading

import numpy as np

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
