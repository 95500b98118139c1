"""Checkpoints that the tools of each format wrote: read, kept in their bits and computed as the tools do.

tests/make_quantized_golden.py made them.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

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


def open_model(folder: Path, *, keeps_bits: bool) -> Decoder:
    """Activations are not rounded, as they were not for the golden files: test_fp8_rows.py is about that."""
    config = read_config(folder)
    schemes = read_schemes(folder, config, 1)
    exact = {name: replace(scheme, rounds_rows=False) for name, scheme in schemes.items()}
    kept, computed = (Kept(tuple(each.items()), FLOAT32) if keeps_bits else None for each in (schemes, exact))
    arrays = load_arrays(folder, config, FLOAT32, report=lambda _: None, quantization=kept)
    return Decoder.from_arrays(config, arrays, quantization=computed)


@pytest.mark.parametrize("keeps_bits", [True, False], ids=["kept", "widened"])
@pytest.mark.parametrize("name", FOLDERS)
def test_a_checkpoint_computes_what_the_tool_that_wrote_it_computes(name: str, keeps_bits: bool) -> None:
    model = open_model(QUANTIZED / name, keeps_bits=keeps_bits)
    for case in json.loads((QUANTIZED / name / "golden.json").read_text())["cases"]:
        tokens, start = case["prompt"] + case["greedy"], len(case["prompt"])
        logprobs = run_in_chunks(model, tokens, 128, 16)
        got = logprobs[np.arange(len(tokens) - 1), tokens[1:]]
        np.testing.assert_allclose(got, case["prompt_logprobs"][1:] + case["greedy_logprobs"], atol=1e-4)
        assert logprobs[start - 1 : -1].argmax(-1).tolist() == case["greedy"]


@pytest.mark.parametrize("name", FOLDERS)
def test_every_matrix_is_kept_unless_its_inputs_are_reordered(name: str) -> None:
    config = read_config(QUANTIZED / name)
    matrices = {f"layers.{at}.{kind}" for at in range(2) for kind in ("qkv", "out", "gate_up", "down")}
    kept = read_schemes(QUANTIZED / name, config, 1)
    assert kept.keys() == (set() if name == "gptq-desc-act" else matrices)
