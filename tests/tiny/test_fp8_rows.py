"""Activations in FP8: which checkpoints want them, and that a model computes as those formats define it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from haliax import Axis

from levserve.model.backend import Product
from levserve.model.cache import FP8
from levserve.model.decoder import Decoder
from levserve.model.fp8_rows import round_rows
from levserve.model.linear import Linear
from levserve.model.packed import Code, Kept, PackedMatrix, Scheme
from levserve.model.xla import XlaBackend
from levserve.weights.checkpoint import load_arrays, read_config, read_schemes
from tests.conftest import GOLDEN
from tests.quantized_files import EXAMPLES, Example, fp8, quantize_folder
from tests.tiny.test_decoder import run_in_chunks

FLOAT32 = jnp.dtype(jnp.float32)
TOKEN = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token", "symmetric": True}
GROUPS = TOKEN | {"strategy": "group", "group_size": 32}


def with_activations(name: str, activations: dict[str, Any] | None) -> Example:
    """A compressed-tensors example whose configuration has this for its activations."""
    example = EXAMPLES[name]
    (group,) = example.config["config_groups"].values()
    groups = {"group_0": group | {"input_activations": activations}}
    return Example(example.config | {"config_groups": groups}, example.make)


def with_fields(name: str, **fields: Any) -> Example:
    return Example(EXAMPLES[name].config | fields, EXAMPLES[name].make)


@pytest.mark.parametrize(
    ("example", "is_rounded"),
    [
        (EXAMPLES["fp8-blocks"], True),
        (EXAMPLES["fp8-tensor"], True),
        (with_fields("fp8-blocks", activation_scheme=None), True),
        (with_fields("fp8-blocks", activation_scheme="static"), False),
        (with_fields("fp8-blocks", scale_fmt="ue8m0"), False),
        (with_activations("ct-fp8-channel", TOKEN), True),
        (with_activations("ct-fp8-blocks", GROUPS), True),
        (with_activations("ct-fp8-blocks", GROUPS | {"group_size": 16}), False),
        (with_activations("ct-fp8-channel", GROUPS), False),
        (with_activations("ct-fp8-tensor", TOKEN | {"strategy": "tensor", "dynamic": False}), False),
        (with_activations("ct-fp8-channel", None), False),
        (with_activations("ct-int8", TOKEN | {"type": "int"}), False),
    ],
)
def test_activations_are_rounded_if_the_checkpoint_wants_them_in_fp8_as_they_come(
    example: Example, is_rounded: bool, tmp_path: Path
) -> None:
    folder = quantize_folder(GOLDEN / "llama", tmp_path, example)
    schemes = read_schemes(folder, read_config(folder), 1)
    assert schemes and {scheme.rounds_rows for scheme in schemes.values()} == {is_rounded}
    assert all(("activations too" in str(scheme)) == is_rounded for scheme in schemes.values())


def test_a_last_group_that_is_smaller_leaves_activations_as_they_are(tmp_path: Path) -> None:
    """For example 128 inputs in groups of 48: the formats' own kernels do not take such a matrix either."""
    folder = quantize_folder(GOLDEN / "llama", tmp_path, fp8([32, 48]))
    schemes = read_schemes(folder, read_config(folder), 1)
    assert schemes and not any(scheme.rounds_rows for scheme in schemes.values())


@dataclass(frozen=True)
class Reference(XlaBackend):
    """Multiplies with activations rounded one token and one group after another, by the formula in the
    formats' own code: x / s with s = max|x| / 448. Does not round those of the head."""

    group: int | None = None
    num_tokens: int = 0

    def product(
        self, weight: jax.Array, scale: jax.Array | None, *, in_two_terms: bool = False
    ) -> Product | None:
        if len(weight) == self.num_tokens:
            return None

        def multiply(x: jax.Array, num_used: jax.Array | None) -> jax.Array:
            parts = []
            for part in jnp.split(x, x.shape[1] // (self.group or x.shape[1]), axis=1):
                step = jnp.maximum(jnp.abs(part).max(1, keepdims=True), 1e-12) / 448
                parts.append((part / step).astype(FP8).astype(jnp.float32) * step)
            return jnp.concatenate(parts, 1) @ weight.T

        return multiply


@pytest.mark.parametrize(
    ("example", "group"),
    [(EXAMPLES["fp8-blocks"], 32), (with_activations("ct-fp8-channel", TOKEN), None)],
    ids=["by group", "by token"],
)
def test_a_model_computes_what_the_formats_own_formula_gives(
    example: Example, group: int | None, tmp_path: Path
) -> None:
    folder = quantize_folder(GOLDEN / "llama", tmp_path, example)
    config = read_config(folder)
    tokens = json.loads((GOLDEN / "llama" / "golden.json").read_text())["cases"][2]["prompt"]
    kept = Kept(tuple(read_schemes(folder, config, 1).items()), FLOAT32)
    arrays = load_arrays(folder, config, FLOAT32, report=lambda _: None, quantization=kept)
    plain = load_arrays(folder / "plain", config, FLOAT32, report=lambda _: None)
    models = (
        Decoder.from_arrays(config, arrays, quantization=kept),
        Decoder.from_arrays(config, plain, backend=Reference(group=group, num_tokens=config.vocab_size)),
        Decoder.from_arrays(config, plain),
    )
    got, wanted, unrounded = (run_in_chunks(model, tokens, 128, 16) for model in models)
    assert np.abs(got - wanted).mean() < 1e-4
    assert np.abs(unrounded - wanted).mean() > 3e-3, "rounding shows"


@pytest.mark.parametrize("group", [128, None])
def test_the_largest_of_a_group_becomes_the_largest_fp8(group: int | None) -> None:
    x = np.random.default_rng(0).normal(size=(4, 256)).astype(np.float32)
    x[1] *= 1e-4
    x[3] = 0
    rounded = jax.jit(round_rows, static_argnums=1)(x, group)
    groups = x.reshape(4, -1, group or 256)
    np.testing.assert_array_equal(rounded.largest.T[:3], np.abs(groups).max(-1)[:3])
    codes = np.asarray(rounded.codes).view(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert (np.abs(codes.reshape(groups.shape)[:3]).max(-1) == 448).all()
    got = np.asarray(jax.jit(lambda rounded: rounded.widen())(rounded))
    assert not got[3].any(), "zeros stay zeros"
    # Half a step: of three bits of mantissa, or of the smallest values.
    allowed = np.maximum(np.abs(groups) / 16, np.abs(groups).max(-1, keepdims=True) / 448 / 1024)
    assert (np.abs(got - x) <= allowed.reshape(x.shape) * 1.001).all()


def test_experts_round_activations_as_a_matrix_of_their_own_does() -> None:
    """Both when a token's experts are computed together, and when one expert is computed after another."""
    scheme = Scheme(Code.FP8, 32, 32, rounds_rows=True)
    Expert, Out, In, Token = Axis("expert", 3), Axis("out", 64), Axis("in", 96), Axis("token", 5)
    random = np.random.default_rng(1)
    codes = jnp.asarray(random.normal(size=(3, 64, 96)).astype(np.float32)).astype(FP8)
    scale = jnp.asarray(random.uniform(0.5, 2, (3, 3, 2)).astype(np.float32))
    stacked = Linear(PackedMatrix(codes, scale, None, scheme, (Expert, Out, In)), widened=FLOAT32)
    x = jnp.asarray(random.normal(size=(5, 96)).astype(np.float32))
    together = stacked(hax.named(x, (Token, In))).rearrange((Expert, Token, Out)).array
    for number in range(Expert.size):
        alone = stacked.of_expert(jnp.int32(number))
        assert isinstance(alone.weight, PackedMatrix)
        wanted = round_rows(x, 32).widen() @ alone.weight.widen(FLOAT32).array.T
        for got in (alone(hax.named(x, (Token, In))).array, together[number]):
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-4)
        assert np.abs(x @ alone.weight.widen(FLOAT32).array.T - wanted).max() > 1e-2, "rounding shows"
