"""Functions that Python calls while a model loads: rounding, products and decoding, against numpy's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize
from gguf.quants import quantize as quantize_blocks
from safetensors.numpy import load_file, save_file

from levserve.errors import StartupError
from levserve.jit.target import Target, detect_target
from levserve.model.balance import Balanced
from levserve.model.config import ModelConfig
from levserve.model.cpu import host_blocks, host_rows
from levserve.model.hadamard import block_size, rotate
from levserve.model.int8_blocks import BLOCK, SCALE_FACTOR
from levserve.model.int8_packing import pack
from levserve.model.matrix_rows import ArrayRows
from levserve.model.quantize import Quantization, quantize_arrays
from levserve.weights.checkpoint import _find_sources, open_tensors, read_arrays, read_config
from levserve.weights.fill import StoredRows
from levserve.weights.gguf_blocks import CODES, decode_blocks
from tests.conftest import GOLDEN

FLOAT32 = jnp.dtype(jnp.float32)
INT8 = Quantization(jnp.dtype(jnp.int8), widened=None)
LARGEST = 2**10
"""The largest of the random 16-bit values in a block."""


def numbers(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def targets() -> list[Target]:
    return [
        detect_target(),
        *(each for each in map(Target.named, ["narrow"]) if each.runs_on(detect_target())),
    ]


def round_by_numpy(rows: np.ndarray, columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rows of int8 before they are rounded, and their scales."""
    rotated = rotate(rows * columns)
    scales = np.abs(rotated).max(1) / 127
    return rotated / scales[:, None], scales


@pytest.mark.parametrize("size", [33, 24, 96, 576, 2048])
def test_rows_are_rotated_and_rounded_to_the_nearest_integer(size: int) -> None:
    """The sums of a rotation are added in another order, so a value midway between two may go either way."""
    rows, columns = numbers(0, 37, size) * np.logspace(-3, 3, 37, dtype=np.float32)[:, None], numbers(1, size)
    wanted, wanted_scales = round_by_numpy(rows, columns)
    into, before = np.empty(rows.shape, np.int8), rows.copy()
    scales = host_rows.round_rows(rows, columns, into)
    np.testing.assert_allclose(scales, wanted_scales, rtol=2e-6)
    np.testing.assert_allclose(into, wanted, atol=0.5 + 1e-3)
    assert (np.abs(into).max(1) == 127).all()
    np.testing.assert_array_equal(rows, before)


def test_a_row_of_zeros_has_a_scale() -> None:
    into = np.ones((4, 64), np.int8)
    scales = host_rows.round_rows(np.zeros((4, 64), np.float32), np.ones(64, np.float32), into)
    assert not into.any() and (scales > 0).all()


def test_all_cpus_round_to_the_same_bits() -> None:
    rows, columns = numbers(2, 16, 192), numbers(3, 192)
    results = []
    for target in targets():
        into, scales = np.empty(rows.shape, np.int8), np.empty(len(rows), np.float32)
        rounding = host_rows._rounding(block_size(192), target)
        rounding(rows, columns, into, scales, np.empty(192, np.float32), *rows.shape)
        results.append((into, scales))
    for into, scales in results:
        np.testing.assert_array_equal(into, results[0][0])
        np.testing.assert_array_equal(scales, results[0][1])


@pytest.mark.parametrize("is_rotated", [True, False])
def test_all_cpus_round_blocks_to_the_same_bits(is_rotated: bool) -> None:
    rows = dequantize(quantize_blocks(numbers(10, 16, 192), Kind.Q4_1), Kind.Q4_1)
    rows[:8] = numbers(11, 8, 192)
    wanted = host_blocks.round_blocks(rows, is_rotated=is_rotated)
    for target in targets():
        scales, integers = np.empty(rows.size // BLOCK, np.float32), np.empty(rows.shape, np.int8)
        host_blocks._scaling(is_rotated, target)(rows, scales, len(scales))
        np.testing.assert_array_equal(
            (scales * np.float32(SCALE_FACTOR)).astype(np.float16), wanted[1].ravel()
        )
        inverses = np.float32(SCALE_FACTOR) / wanted[1].astype(np.float32)
        host_blocks._rounding(is_rotated, target)(rows, inverses, integers, len(scales))
        np.testing.assert_array_equal(integers, wanted[0])


@pytest.mark.parametrize(
    ("num_tokens", "count", "size"), [(64, 37, 2048), (64, 8, 1104), (3, 9, 64), (64, 5, 33)]
)
def test_products_are_those_of_numpy(num_tokens: int, count: int, size: int) -> None:
    tokens, rows = numbers(4, num_tokens, size), numbers(5, count, size)
    wanted = tokens.astype(np.float64) @ rows.T.astype(np.float64)
    np.testing.assert_allclose(host_rows.multiply_rows(tokens, rows), wanted, atol=1e-3)


def test_a_matrix_is_multiplied_as_it_was_and_its_rows_are_divided_after_it_is_rounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("levserve.model.quantize.NUMBERS_PER_PIECE", 1)  # so that there are several pieces
    matrix, columns, tokens = numbers(6, 96, 64), np.exp(numbers(7, 64)), numbers(8, 64, 64)
    divisors, taken = np.exp(numbers(9, 96)), []

    def take(products: np.ndarray) -> np.ndarray:
        taken.append(products)
        return divisors

    balanced = Balanced(ArrayRows(matrix), columns, tokens, take)
    weight, scale = quantize(balanced, INT8)
    np.testing.assert_allclose(taken[0], tokens @ matrix.T, atol=1e-4)
    wanted = rotate(matrix * columns / divisors[:, None])
    assert (np.abs(weight.astype(np.float64) * scale[:, None] - wanted) <= scale[:, None] * 0.501).all()

    packed, same_scale = quantize(balanced, replace(INT8, is_packed=True))
    np.testing.assert_array_equal(packed, pack(weight))
    np.testing.assert_array_equal(same_scale, scale)


def quantize(matrix: Balanced, quantization: Quantization) -> tuple[np.ndarray, np.ndarray]:
    named = dict(quantize_arrays(small_config(), [("layers.0.down", matrix)], FLOAT32, quantization))
    return named["layers.0.down"], named["layers.0.down_scale"]


def small_config() -> ModelConfig:
    return read_config(GOLDEN / "llama")


@pytest.mark.parametrize("kind", CODES)
@pytest.mark.parametrize("num_blocks", [1, 100])
def test_blocks_are_decoded_to_the_numbers_of_the_gguf_package(kind: Kind, num_blocks: int) -> None:
    generator, (size, num_bytes) = np.random.default_rng(0), GGML_QUANT_SIZES[kind]
    blocks = generator.integers(0, 256, (num_blocks, num_bytes), np.uint8)
    for at in CODES[kind].halves:
        halves = generator.uniform(-LARGEST, LARGEST, (num_blocks, 1)).astype(np.float16)
        blocks[:, at : at + 2] = halves.view(np.uint8)
    got = decode_blocks(blocks.reshape(-1), kind)
    assert got.shape == (num_blocks, size)
    np.testing.assert_array_equal(got.reshape(-1), dequantize(blocks.reshape(1, -1), kind).reshape(-1))


def test_rows_are_read_across_the_tensors_that_fill_a_matrix() -> None:
    config = small_config()
    whole = dict(read_arrays(GOLDEN / "llama", config, FLOAT32, report=print))
    sources = _find_sources(open_tensors(GOLDEN / "llama", config, FLOAT32), config)
    for name in ("layers.0.qkv", "layers.1.gate_up", "embed"):
        rows = StoredRows(whole[name].shape, sources[name], "here")
        assert len(rows.sources) == {"layers.0.qkv": 3, "layers.1.gate_up": 2, "embed": 1}[name]
        middle = len(whole[name]) // 2
        for start, stop in ((0, len(whole[name])), (middle - 3, middle + 5), (2, 3)):
            np.testing.assert_array_equal(rows.read(start, stop), whole[name][start:stop])


def test_numbers_that_are_not_finite_are_found_while_rows_are_rounded(tmp_path: Path) -> None:
    for file in (GOLDEN / "llama").iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    (weights,) = (GOLDEN / "llama").glob("*.safetensors")
    tensors = load_file(weights)
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = tensors[name].copy()
    tensors[name][3, 5] = np.nan
    save_file(tensors, tmp_path / weights.name)
    config = read_config(tmp_path)
    with pytest.raises(StartupError, match=f"{name} is corrupt: some values are not finite"):
        list(read_arrays(tmp_path, config, FLOAT32, report=print, quantization=INT8))
