"""The bundled model in float32 and bfloat16 against its reference: a real GGUF file, vocabulary and text."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from levserve.device.programs import Programs, Shape
from levserve.model.rules import Mode
from tests.conftest import GOLDEN
from tests.engines import ask, running_engine

FLAGS = ("--max-seq-len", "512", "--inter-token-goal-ms", "60000")  # else chunks are a token or two
CASES = json.loads((GOLDEN / "smollm2-135m.json").read_text())["cases"]


def test_the_bundled_model_matches_its_reference_in_float32(
    bundled_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A step of all cases costs as much as one of two, which is what a server compiles first.
    monkeypatch.setattr(Programs, "first_shapes", [Shape(32), Shape(len(CASES), Mode.FULL)])
    with running_engine(bundled_gguf, "--prefill-chunk", "32", *FLAGS, rows=len(CASES)) as running:
        requests = [ask(case["prompt_tokens"], 48, num_logprobs=0) for case in CASES]
        answers = running.run(*requests)
        texts = [
            running.loaded.model.tokenizer.decode(answer.tokens, skip_special_tokens=False)
            for answer in answers
        ]
    for case, answer, text in zip(CASES, answers, texts):
        # Where the two best tokens are nearly equal, the reference itself could go either way.
        sure = 48 if case["smallest_top2_gap"] > 1e-3 else 16
        assert answer.tokens[:sure] == case["greedy"][:sure]
        np.testing.assert_allclose(
            [entry.logprob for entry in answer.logprobs[:sure]], case["greedy_logprobs"][:sure], atol=1e-3
        )
        if sure == 48:
            assert text == case["greedy_text"]


def test_the_bundled_model_in_bfloat16_says_what_the_reference_says(bundled_gguf: Path) -> None:
    """For sixteen tokens in at least seven of eight cases: there are near ties."""
    with running_engine(bundled_gguf, "--dtype", "bfloat16", "--prefill-chunk", "32", *FLAGS) as running:
        answers = running.run(*(ask(case["prompt_tokens"], 16) for case in CASES))
    agreeing = [answer.tokens == case["greedy"][:16] for case, answer in zip(CASES, answers)]
    assert sum(agreeing) >= 7, agreeing
