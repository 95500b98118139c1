"""Checkpoints that the tools of each format wrote: read, kept in their bits and computed as the tools do.

tests/make_quantized_golden.py made them.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from levserve.model.decoder import Decoder
from levserve.model.packed import Kept
from levserve.weights.checkpoint import load_arrays, read_config, read_schemes
from tests.conftest import GOLDEN
from tests.tiny.test_decoder import run_in_chunks

FLOAT32 = jnp.dtype(jnp.float32)
QUANTIZED = GOLDEN / "quantized"
FOLDERS = sorted(path.name for path in QUANTIZED.iterdir())
DYNAMIC = ["ct-fp8-block-dynamic", "ct-fp8-channel-dynamic"]
"""Checkpoints whose tool quantizes activations as well."""


def open_model(folder: Path, *, keeps_bits: bool, rounds_rows: bool) -> Decoder:
    """Builds a model; `rounds_rows` is true only if the tool rounded activations for the golden file too."""
    config = read_config(folder)
    schemes = read_schemes(folder, config, 1)
    computed = {name: replace(scheme, rounds_rows=rounds_rows) for name, scheme in schemes.items()}
    kept, kept_so = (
        Kept(tuple(each.items()), FLOAT32) if keeps_bits else None for each in (schemes, computed)
    )
    arrays = load_arrays(folder, config, FLOAT32, report=lambda _: None, quantization=kept)
    return Decoder.from_arrays(config, arrays, quantization=kept_so)


def read_cases(name: str) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads((QUANTIZED / name / "golden.json").read_text())["cases"]
    return cases


@pytest.mark.parametrize("keeps_bits", [True, False], ids=["kept", "widened"])
@pytest.mark.parametrize("name", sorted(set(FOLDERS) - set(DYNAMIC)))
def test_a_checkpoint_computes_what_the_tool_that_wrote_it_computes(name: str, keeps_bits: bool) -> None:
    model = open_model(QUANTIZED / name, keeps_bits=keeps_bits, rounds_rows=False)
    for case in read_cases(name):
        tokens, start = case["prompt"] + case["greedy"], len(case["prompt"])
        logprobs = run_in_chunks(model, tokens, 128, 16)
        got = logprobs[np.arange(len(tokens) - 1), tokens[1:]]
        np.testing.assert_allclose(got, case["prompt_logprobs"][1:] + case["greedy_logprobs"], atol=1e-4)
        assert logprobs[start - 1 : -1].argmax(-1).tolist() == case["greedy"]


@pytest.mark.parametrize("name", DYNAMIC)
def test_activations_in_fp8_are_rounded_as_the_tool_rounds_them(name: str) -> None:
    """A value between two FP8 values may be rounded either way, as earlier sums differ in their last bits."""
    schemes = read_schemes(QUANTIZED / name, read_config(QUANTIZED / name), 1)
    assert all(scheme.rounds_rows for scheme in schemes.values())
    differences = []
    for rounds_rows in (True, False):
        model = open_model(QUANTIZED / name, keeps_bits=True, rounds_rows=rounds_rows)
        found = []
        for case in read_cases(name):
            tokens = case["prompt"] + case["greedy"]
            got = run_in_chunks(model, tokens, 128, 16)[np.arange(len(tokens) - 1), tokens[1:]]
            wanted = np.asarray(case["prompt_logprobs"][1:] + case["greedy_logprobs"])
            found.append(np.abs(got - wanted))
        differences.append(np.concatenate(found))
    rounded, exact = differences
    assert np.median(rounded) < 1e-5 and rounded.mean() < 0.01
    assert np.median(exact) > 0.05, "rounding shows"


@pytest.mark.parametrize("name", FOLDERS)
def test_every_matrix_is_kept_unless_its_inputs_are_reordered(name: str) -> None:
    config = read_config(QUANTIZED / name)
    matrices = {f"layers.{at}.{kind}" for at in range(2) for kind in ("qkv", "out", "gate_up", "down")}
    kept = read_schemes(QUANTIZED / name, config, 1)
    assert kept.keys() == (set() if name == "gptq-desc-act" else matrices)
