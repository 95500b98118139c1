"""Drafts, forks, masks and reloads on int8 matrices that two devices share: all of it in one engine.

The devices are parts of this machine's CPU (see `conftest.py`). `test_tensor_parallel.py` checks that two
devices compute what one computes; here one engine is compared with itself. The matrices are packed where
the CPU has an instruction for it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from levserve.models.describe import Description
from levserve.schedule.request import FinishReason
from tests.conftest import GOLDEN
from tests.engines import Running, ask, running_engine
from tests.pure.test_speculation import NUM_DRAFT
from tests.tiny.test_constrained_text import PROMPTS, RULE, one_at_a_time
from tests.tiny.test_speculated_text import FEW, LOOP, Switch, checked, run_without

CASES = json.loads((GOLDEN / "llama" / "golden.json").read_text())["cases"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(GOLDEN / "llama", tmp_path_factory.mktemp("served") / "llama"))


@pytest.fixture(scope="module")
def narrow(folder: Path) -> Iterator[Running]:
    flags = ("--tensor-parallel", "2", "--quantize", "int8", "--speculate", str(NUM_DRAFT))
    with running_engine(folder, *flags, "--page-size", "4", "--prefill-chunk", "16") as running:
        programs = running.loaded.runner.programs
        programs._compile(max(shape for shape in programs.all_shapes if shape.is_verify), "here")
        running.loaded.scheduler.speculation = Switch(NUM_DRAFT)
        yield running
        running.wait_idle()
        assert running.metric("kv_pages_used") == 0
        running.loaded.scheduler.check()


def test_it_says_about_what_the_model_says(narrow: Running) -> None:
    description = narrow.loaded.description
    assert isinstance(description, Description) and description.shards.count == 2
    assert {str(leaf.dtype) for leaf in narrow.loaded.runner._leaves} & {"int8", "uint8"}
    case = max(CASES, key=lambda case: len(case["prompt"]))
    (answer,) = narrow.run(ask(case["prompt"], 1, score_from=1))
    scores = [score.logprob for score in answer.prompt_logprobs]
    # int8 costs 0.08 on one device; with the parts of two devices mixed up it would be above 4.
    assert np.abs(np.array(scores) - case["prompt_logprobs"][1:]).mean() < 0.3


def test_drafts_do_not_change_its_text(narrow: Running) -> None:
    asked = [ask(LOOP, 24), ask(LOOP, 24, seed=11, **FEW), ask([*LOOP, 9], 24, num_logprobs=1)]
    with checked(narrow):
        answers = narrow.run(*asked)
    wanted = run_without(narrow, *asked)
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in wanted]


def test_choices_share_their_prompt_and_draw_as_they_would_alone(narrow: Running) -> None:
    first = ask(range(60, 69), 8, temperature=0.8, seed=1)
    forked = [
        ask(first.prompt, 8, temperature=0.8, seed=seed, shares_prompt_of=first.request_id) for seed in (2, 3)
    ]
    before = narrow.metric("prefill_tokens_total")
    _, *got = narrow.run(first, *forked)
    assert narrow.metric("prefill_tokens_total") - before == len(first.prompt)
    alone = [narrow.run(replace(request, shares_prompt_of=None))[0] for request in forked]
    assert [answer.tokens for answer in got] == [answer.tokens for answer in alone]


def test_constrained_text_is_that_of_single_masked_draws(narrow: Running) -> None:
    request = ask(PROMPTS[0], 12, constraint=RULE, temperature=1.0, seed=5)
    answer, _ = narrow.run(request, ask(LOOP, 12))
    assert answer.tokens == one_at_a_time(narrow, request)
    assert answer.finish is FinishReason.LENGTH


def test_reloaded_weights_reach_both_devices(narrow: Running, folder: Path) -> None:
    before = narrow.run(ask(CASES[0]["prompt"]))[0].tokens
    file = folder / "model.safetensors"
    weights = load_file(file)
    name = "model.layers.0.self_attn.o_proj.weight"
    save_file(weights | {name: np.ascontiguousarray(np.roll(weights[name], 3, axis=1))}, file)
    narrow.registry.reload()
    assert narrow.run(ask(CASES[0]["prompt"]))[0].tokens != before
    save_file(weights, file)
    narrow.registry.reload()
    assert narrow.run(ask(CASES[0]["prompt"]))[0].tokens == before
