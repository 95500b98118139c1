"""Channels that are balanced before int8: products stay the same, and rounding loses less of them."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from levserve.model.balance import BALANCE, Arrays, Balanced, Matrices, balance_arrays, can_balance
from levserve.model.config import Activation, ModelConfig
from levserve.model.decoder import Decoder
from levserve.model.matrix_rows import MatrixRows
from levserve.model.quantize import choose_quantization, quantize_arrays
from levserve.model.xla import XLA_ON_CPU
from levserve.weights.checkpoint import load_arrays, read_arrays, read_config
from tests.conftest import GOLDEN
from tests.tiny.test_decoder import run_in_chunks

FLOAT32 = jnp.dtype(jnp.float32)
TOKENS = [5, 9, 40, 3, 77, 21, 60, 12, 33, 50, 8, 19]
LARGE_CHANNELS, FACTOR = [3, 17], 30.0
INT8 = choose_quantization(jnp.dtype(jnp.int8), XLA_ON_CPU, FLOAT32)


def read(family: str, config: ModelConfig) -> Arrays:
    return read_arrays(GOLDEN / family, config, FLOAT32, report=lambda _: None)


def with_large_channels(arrays: Arrays) -> Arrays:
    """The norms of layers make two channels far larger than the others, and the matrices make up for it."""
    for name, array in arrays:
        kind = name.rsplit(".", 1)[-1]
        changed = np.array(array)
        if kind in ("input_norm", "mlp_norm"):
            changed[LARGE_CHANNELS] *= FACTOR
        elif kind in ("qkv", "gate_up"):
            changed[:, LARGE_CHANNELS] /= FACTOR
        yield name, changed


def on_device(arrays: Matrices) -> dict[str, jnp.ndarray]:
    return {name: jnp.asarray(multiplied(array)) for name, array in arrays}


def multiplied(array: np.ndarray | MatrixRows | Balanced) -> np.ndarray:
    """The matrix that is rounded, in float32."""
    if isinstance(array, np.ndarray):
        return array
    assert isinstance(array, Balanced)
    matrix = array.rows.read(0, array.rows.shape[0])
    divisors = None if array.tokens is None else array.take(array.tokens @ matrix.T)
    changed = matrix * array.columns
    return changed if divisors is None else changed / divisors[:, None]


def score_int8(config: ModelConfig, arrays: Arrays) -> np.ndarray:
    assert INT8 is not None
    quantized = on_device(quantize_arrays(config, arrays, FLOAT32, INT8))
    return run_in_chunks(Decoder.from_arrays(config, quantized, quantization=INT8), TOKENS, 128, 16)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_balanced_model_has_the_scores_of_the_plain_one(family: str) -> None:
    config = read_config(GOLDEN / family)
    plain = on_device(read(family, config))
    balanced = on_device(balance_arrays(config, read(family, config)))
    assert balanced.keys() == plain.keys() | {"head", BALANCE}
    changed = {name for name in plain if not np.array_equal(plain[name], balanced[name])}
    assert {"layers.1.input_norm", "layers.1.qkv", "layers.1.mlp_norm", "layers.1.down"} <= changed
    assert not {"embed", "final_norm", "layers.1.out"} & changed

    # An unused scale tells the decoder that its arrays are not the plain ones.
    balanced["unused_scale"] = jnp.zeros(1)
    wanted = run_in_chunks(Decoder.from_arrays(config, plain), TOKENS, 128, 16)
    got = run_in_chunks(Decoder.from_arrays(config, balanced), TOKENS, 128, 16)
    np.testing.assert_allclose(got, wanted, atol=2e-4)


def test_channels_that_are_far_larger_than_the_others_cost_less_of_the_scores() -> None:
    config = read_config(GOLDEN / "llama")
    exact = run_in_chunks(Decoder.from_arrays(config, on_device(read("llama", config))), TOKENS, 128, 16)
    plain = score_int8(config, with_large_channels(read("llama", config)))
    balanced = score_int8(
        replace(config, tied_head=False), balance_arrays(config, with_large_channels(read("llama", config)))
    )
    lost, still_lost = (np.abs(each - exact).mean() for each in (plain, balanced))
    assert still_lost < lost / 2


def test_a_model_is_loaded_with_balanced_channels_for_int8_alone() -> None:
    config = read_config(GOLDEN / "llama")
    blocks = choose_quantization(jnp.dtype(jnp.int8), XLA_ON_CPU, FLOAT32, in_blocks=True)
    for quantization, is_balanced in ((INT8, True), (blocks, False), (None, False)):
        arrays = load_arrays(
            GOLDEN / "llama", config, FLOAT32, report=lambda _: None, quantization=quantization
        )
        assert (BALANCE in arrays) == is_balanced


def test_layers_that_come_by_kind_are_left_as_they_are() -> None:
    """Levanter's checkpoints are read this way; the same programs serve them."""
    config = read_config(GOLDEN / "levanter-llama")
    arrays = load_arrays(GOLDEN / "levanter-llama", config, FLOAT32, report=lambda _: None, quantization=INT8)
    np.testing.assert_array_equal(arrays[BALANCE], np.ones(config.hidden_size))


def test_other_feed_forward_parts_and_norms_are_not_balanced() -> None:
    config = read_config(GOLDEN / "llama")
    assert can_balance(config) and can_balance(replace(config, qkv_bias=True, qk_norm=True, embed_scale=2.0))
    for changed in (
        replace(config, activation=Activation.GELU),
        replace(config, is_gated=False),
        replace(config, has_post_norms=True),
        replace(config, has_layer_norms=True),
        replace(config, residual_scale=0.5),
        replace(config, is_parallel=True),
        replace(config, mlp_bias=True),
    ):
        assert not can_balance(changed)
