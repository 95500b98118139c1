"""Matrices in eight bits: close to what they stand for, and served as any other model is."""

from __future__ import annotations

import json
from pathlib import Path

import haliax as hax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from levserve.engine.startup import serves_int8
from levserve.errors import ConfigError, StartupError
from levserve.model import quantize
from levserve.model.quantize import QuantizedLinear, quantize_arrays
from levserve.options import parse_settings
from levserve.weights.load import load_arrays, read_config
from tests.conftest import GOLDEN
from tests.engines import ask, running_engine

pytestmark = pytest.mark.tiny

Out, In, Row = Axis("out", 24), Axis("in", 96), Axis("row", 3)
LLAMA = read_config(GOLDEN / "llama")


def quantized(matrix: np.ndarray) -> QuantizedLinear:
    named = dict(quantize_arrays(LLAMA, [("layers.0.out", matrix)], np.dtype(np.float32)))
    return QuantizedLinear(
        hax.named(jnp.asarray(named["layers.0.out"]), (Out, In)), None, hax.named(jnp.asarray(named["layers.0.out_scale"]), Out)
    )


@pytest.mark.parametrize("few_rows", [0, 3])
def test_activations_lose_next_to_nothing_and_weights_half_a_step(few_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever factor of the product the matrix is."""
    monkeypatch.setattr(quantize, "FEW_ROWS", few_rows)
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal((24, 96), dtype=np.float32) * np.logspace(-3, 3, 24, dtype=np.float32)[:, None]
    x = rng.standard_normal((3, 96), dtype=np.float32) * np.asarray([[1e-4], [1.0], [1e4]], np.float32)
    linear = quantized(matrix)
    assert linear.weight.dtype == jnp.int8 and linear.scale is not None
    kept = np.asarray(linear.weight.array, np.float64) * np.asarray(linear.scale.array)[:, None]
    assert (np.abs(kept - matrix) <= np.asarray(linear.scale.array)[:, None] * 0.5001).all()
    got = np.asarray(linear(hax.named(jnp.asarray(x), (Row, In))).rearrange((Row, Out)).array)
    exact = x.astype(np.float64) @ kept.T
    size = np.abs(x).astype(np.float64) @ np.abs(kept).T
    assert (np.abs(got - exact) / size).max() < 1e-4, "a rounding to one int8 alone would be off by 1e-3 and more"


def test_a_row_of_zeros_stays_one() -> None:
    matrix = np.zeros((24, 96), np.float32)
    assert not np.asarray(quantized(matrix)(hax.named(jnp.zeros((3, 96)), (Row, In))).array).any()


def test_an_int8_model_is_served_close_to_its_reference() -> None:
    cases = json.loads((GOLDEN / "llama" / "golden.json").read_text())["cases"]
    with running_engine(GOLDEN / "llama", "--quantize", "int8") as running:
        scored = running.run(*(ask(case["prompt"] + case["greedy"], 0, score_from=len(case["prompt"]), num_logprobs=0) for case in cases))
    differences = [
        abs(got.logprob - wanted)
        for answer, case in zip(scored, cases)
        for got, wanted in zip(answer.prompt_logprobs, case["greedy_logprobs"], strict=True)
    ]
    assert 0 < np.mean(differences) < 0.15, "of a random model, whose logits are large"


def test_what_cannot_be_quantized_is_refused_by_name() -> None:
    config = read_config(GOLDEN / "mixtral")
    with pytest.raises(StartupError, match="--quantize int8 does not take a mixture of experts"):
        load_arrays(GOLDEN / "mixtral", config, jnp.dtype(jnp.bfloat16), report=print, is_quantized=True)


@pytest.mark.parametrize(
    ("options", "platform", "is_int8"),
    [
        ((), "cpu", True),
        (("--quantize", "none"), "cpu", False),
        (("--dtype", "bfloat16"), "cpu", False),
        (("--dtype", "bfloat16", "--quantize", "int8"), "cpu", True),
        ((), "gpu", False),
    ],
)
def test_a_file_that_is_quantized_already_is_served_in_eight_bits_unless_somebody_says_otherwise(
    options: tuple[str, ...], platform: str, is_int8: bool, bundled_gguf: Path
) -> None:
    settings = parse_settings(list(options), {})
    assert serves_int8(settings, platform, bundled_gguf, LLAMA) == is_int8
    assert serves_int8(settings, platform, GOLDEN / "llama", LLAMA) == (settings.quantize == "int8")


def test_eight_bits_are_refused_where_they_cannot_be() -> None:
    with pytest.raises(ConfigError, match="--quantize int8 is for CPUs, and this is a gpu"):
        serves_int8(parse_settings(["--quantize", "int8"], {}), "gpu", GOLDEN / "llama", LLAMA)
