"""Matrices in the four bits of their file: its own values, and the same by XLA, kernels and whole layers."""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import strategies as st

from levserve.errors import ConfigError, StartupError
from levserve.jit.target import Target
from levserve.jit.xla_call import register
from levserve.model.backend import Backend
from levserve.model.config import ModelConfig
from levserve.model.cpu import linear
from levserve.model.cpu.nibble_products import nibble_product_for
from levserve.model.decoder import Decoder
from levserve.model.int4_blocks import CENTER, SECOND_TERM, FourBits, from_parts, multiply_nibbles, takes
from levserve.model.int8_blocks import BLOCK, SCALE_FACTOR
from levserve.model.int8_packing import SIGNED_ORDER, STEPS, UNSIGNED_ORDER, BlockOrder
from levserve.model.packed import Code, Scheme
from levserve.model.parameter_shapes import parameter_shapes
from levserve.model.quantize import (
    BLOCKS_NAME,
    FOUR_BITS_NAME,
    NARROW,
    Quantization,
    choose_quantization,
    quantized_bytes,
)
from levserve.model.xla import XLA_ON_CPU
from levserve.models.describe import describe
from levserve.models.matrices import choose_four_bits, choose_narrow
from levserve.settings.parse import parse_settings
from levserve.weights.checkpoint import (
    find_four_bit_matrices,
    load_arrays,
    read_config,
)
from levserve.weights.gguf_tensors import read_tensors
from levserve.weights.model_files import ModelFiles
from levserve.weights.quantized.packed_tensor import PackedTensor
from tests.conftest import GOLDEN
from tests.engines import ask, running_engine
from tests.targets import on_each_target, with_examples
from tests.tiny.test_decoder import run_in_chunks
from tests.tiny.test_gguf import random_blocks, write_gguf
from tests.tiny.test_gguf_kept import quantized_file

FLOAT32 = jnp.dtype(jnp.float32)
ORDERS = {"signed": SIGNED_ORDER, "unsigned": UNSIGNED_ORDER}
OUT, SIZE, ROWS = 64, 96, 19
TOKENS = list(range(3, 35))
MIXED = {"1.attn_v.weight": Kind.Q8_0, "0.ffn_down.weight": Kind.Q8_0, "1.ffn_down.weight": Kind.Q4_0}
"""The kinds of a few tensors in a file of another kind, so that layers differ in the form of a matrix."""


def random_matrix(seed: int, *, has_middles: bool, shape: tuple[int, int] = (OUT, SIZE)) -> FourBits:
    rng = np.random.default_rng(seed)
    groups = (shape[0], shape[1] // BLOCK)
    # Scales of either sign: Q4_0 has both.
    scales, middles = (
        (rng.standard_normal(groups) * size * SCALE_FACTOR).astype(np.float16) for size in (0.01, 0.02)
    )
    codes = rng.integers(0, 16, shape, dtype=np.uint8)
    return FourBits(codes, scales, middles if has_middles else None)


def numbers_of(matrix: FourBits) -> np.ndarray:
    """The values of the matrix, in float64."""
    scales, middles = (
        np.repeat(part.astype(np.float64) / SCALE_FACTOR, BLOCK, 1) if part is not None else 0.0
        for part in (matrix.scales, matrix.middles)
    )
    return (matrix.codes.astype(np.float64) - CENTER) * scales + middles


def round_activations(x: np.ndarray) -> np.ndarray:
    """The values that a product takes for x, in float64."""
    blocks = x.astype(np.float64).reshape(len(x), -1, BLOCK)
    scale = np.abs(blocks).max(2, keepdims=True) / STEPS / SECOND_TERM
    return (np.rint(blocks / scale) * scale).reshape(x.shape)


@functools.partial(jax.jit, static_argnames=("order", "has_middles", "target"))
def multiply_by_kernel(
    weight: jax.Array,
    scale: jax.Array,
    x: jax.Array,
    num_used: jax.Array,
    *,
    order: BlockOrder,
    has_middles: bool,
    target: Target,
) -> jax.Array:
    product = nibble_product_for(x.shape[1], target, is_signed=not order.offset, has_middles=has_middles)
    name = register(linear.kernel_for(product))
    result = jax.ShapeDtypeStruct((len(x), len(weight)), jnp.float32)
    return jax.ffi.ffi_call(name, result)(x, num_used, weight, scale)


by_xla = jax.jit(multiply_nibbles)


@with_examples(
    16,
    st.sampled_from([(SIGNED_ORDER, False), (UNSIGNED_ORDER, True)]),
    st.integers(1, ROWS),
    st.integers(0, 2**32 - 1),
    st.floats(-30, 30),
)
def test_a_product_is_that_of_the_numbers_in_the_file_with_rounded_activations(
    target: Target, way: tuple[BlockOrder, bool], rows: int, seed: int, power: float
) -> None:
    order, has_middles = way
    matrix = random_matrix(seed % 100, has_middles=has_middles)
    x = np.random.default_rng(seed).standard_normal((ROWS, SIZE)).astype(np.float32) * np.float32(2**power)
    x[:, 7] *= 40

    def multiply(x: np.ndarray, num_used: int) -> np.ndarray:
        arrays = *matrix.pack(order), x, np.asarray([num_used], np.int32)
        options = {"order": order, "has_middles": has_middles, "target": target}
        return np.asarray(multiply_by_kernel(*arrays, **options))

    got = multiply(x, rows)[:rows]
    exact, rounded = (each @ numbers_of(matrix).T for each in (x.astype(np.float64), round_activations(x)))
    # A value halfway between two steps may be rounded the other way.
    one_step = np.abs(x).max() / STEPS / SECOND_TERM * np.abs(numbers_of(matrix)).max()
    np.testing.assert_allclose(got, rounded[:rows], atol=2 * one_step, rtol=1e-5)
    assert np.abs(rounded - exact).max() < 1e-1 / SECOND_TERM * np.abs(exact).max()
    np.testing.assert_allclose(by_xla(*matrix.pack(None), x)[:rows], got, atol=2 * one_step, rtol=1e-5)
    alone = multiply(np.roll(x, 1 - rows, 0), 1)
    np.testing.assert_array_equal(alone[0], got[-1], "a row beside others and alone")


@on_each_target
def test_what_is_not_finite_spoils_its_own_row_alone(target: Target) -> None:
    matrix = random_matrix(0, has_middles=True)
    x = np.ones((ROWS, SIZE), np.float32)
    x[3, 7], x[5, 8], x[7, 9] = np.nan, np.inf, -np.inf
    options = {"order": UNSIGNED_ORDER, "has_middles": True, "target": target}
    got = np.asarray(
        multiply_by_kernel(*matrix.pack(UNSIGNED_ORDER), x, np.asarray([ROWS], np.int32), **options)
    )
    assert not np.isfinite(got[[3, 5, 7]]).any() and np.isfinite(np.delete(got, (3, 5, 7), axis=0)).all()


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_numbers_of_neighbouring_outputs_lie_together(order: BlockOrder) -> None:
    matrix = random_matrix(1, has_middles=True)
    assert matrix.middles is not None
    packed, scales = matrix.pack(order)
    by_place = packed.reshape(OUT // order.outs, SIZE // BLOCK, 4, order.outs, 4)
    scales_by_place = scales.reshape(OUT // order.outs, SIZE // BLOCK, 2, order.outs)
    for out, number in np.ndindex(OUT, SIZE):
        (group, lane), (block, at) = divmod(out, order.outs), divmod(number, BLOCK)
        half, (word, byte) = at // 16, divmod(at % 16, 4)
        assert by_place[group, block, word, lane, byte] >> 4 * half & 15 == matrix.codes[out, number]
        assert scales_by_place[group, block, 0, lane] == matrix.scales[out, block]
        assert scales_by_place[group, block, 1, lane] == matrix.middles[out, block]


@pytest.mark.parametrize(
    ("kind", "most"),
    [
        (Kind.Q4_0, 0.0),
        (Kind.Q4_1, 3e-4),  # middles have eleven bits
        (Kind.Q4_K, 2e-3),  # and so have scales and offsets, which are products
    ],
)
def test_a_file_of_four_bits_is_kept_as_it_is(kind: Kind, most: float, tmp_path: Path) -> None:
    blocks = random_blocks(kind, 32, 3)
    if kind is Kind.Q4_K:  # whose scales are multiplied by up to 63
        blocks.reshape(32, 3, -1)[..., :4] = np.asarray([0.01, 0.07], np.float16).view(np.uint8)
    stored = {"blk.0.attn_q.weight": (blocks, kind)}
    path = write_gguf(tmp_path / "x.gguf", {"general.architecture": "llama"}, stored)
    tensor = dict(read_tensors(path, head_dim=16))["blk.0.attn_q.weight"]
    assert isinstance(tensor, PackedTensor) and takes(tensor.scheme, tensor.shape[1])
    offsets = None if tensor.offsets is None else tensor.offsets.read(0, 32)
    kept = from_parts(tensor.scheme, tensor.codes.read(0, 32), tensor.scales.read(0, 32), None, offsets)
    assert (kept.middles is None) is (kind is Kind.Q4_0)
    wanted = tensor.read(0, 32).astype(np.float64)
    np.testing.assert_allclose(numbers_of(kept), wanted, rtol=0, atol=most * np.abs(wanted).max())


def test_groups_with_zero_points_are_kept_as_well() -> None:
    """As in AWQ and GPTQ, with a scale for more than 32 inputs."""
    rng = np.random.default_rng(0)
    codes, zeros = rng.integers(0, 16, (8, 160), dtype=np.uint8), rng.integers(0, 16, (8, 2), dtype=np.uint8)
    scales = rng.uniform(0.001, 0.01, (8, 2)).astype(np.float16)
    kept = from_parts(Scheme(Code.UINT4, 128, has_zeros=True), codes, scales, zeros, None)
    groups = np.arange(160) // 128
    wanted = (codes - zeros.astype(np.float64)[:, groups]) * scales.astype(np.float64)[:, groups]
    np.testing.assert_allclose(numbers_of(kept), wanted, atol=5e-4 * np.abs(wanted).max())
    with pytest.raises(ValueError, match="too large for four bits with block scales"):
        from_parts(Scheme(Code.UINT4, 128, zero=8), codes, np.full((8, 2), 300.0), None, None)


def quantization_of(path: Path, config: ModelConfig, backend: Backend) -> Quantization | None:
    four_bits = find_four_bit_matrices(path, config)
    return choose_quantization(NARROW[BLOCKS_NAME], backend, FLOAT32, in_blocks=True, four_bits=four_bits)


def test_a_file_of_several_kinds_is_scored_as_its_numbers_say(tmp_path: Path) -> None:
    """Measured: 0.03, nearly all of it from the matrices in int8."""
    path = quantized_file(tmp_path, MIXED, Kind.Q4_1)
    config = read_config(path)

    def score(quantization: Quantization | None) -> np.ndarray:
        arrays = load_arrays(path, config, FLOAT32, report=print, quantization=quantization)
        if quantization is not None:
            num_bytes = sum(array.nbytes for array in arrays.values())
            assert quantized_bytes(config, FLOAT32, quantization) == num_bytes
        model = Decoder.from_arrays(config, arrays, backend=XLA_ON_CPU, quantization=quantization)
        logprobs = jax.nn.log_softmax(run_in_chunks(model, TOKENS, 8, 4))
        return np.asarray(logprobs)[np.arange(len(TOKENS) - 1), TOKENS[1:]]

    exact, by_xla = score(None), score(quantization_of(path, config, XLA_ON_CPU))
    flags = "--quantize", FOUR_BITS_NAME, "--tokenizer", str(GOLDEN / "llama")
    with running_engine(path, *flags) as running:
        (answer,) = running.run(ask(TOKENS, 0, score_from=1, num_logprobs=0))
    served = np.array([token.logprob for token in answer.prompt_logprobs])
    assert 0 < np.abs(by_xla - exact).mean() < 0.05
    assert 0 < np.abs(served - exact).mean() < 0.05
    assert np.abs(served - by_xla).mean() < 0.02


def test_matrices_that_are_tensors_of_one_kind_stay_in_four_bits(tmp_path: Path) -> None:
    path = quantized_file(tmp_path, MIXED, Kind.Q4_1)
    config = read_config(path)
    found = find_four_bit_matrices(path, config)
    matrices = {name for name, shape in parameter_shapes(config).items() if len(shape) > 1} - {"embed"}
    assert matrices - found.keys() == {"layers.1.qkv", "layers.0.down"}
    assert found.keys() - matrices <= {"head"}, "of the embedding's matrix, if the head is tied to it"
    quantization = quantization_of(path, config, XLA_ON_CPU)
    assert f"{len(found)} in the four bits of their file, others in int8" in str(quantization)
    (tmp_path / "other").mkdir()
    other = quantized_file(tmp_path / "other", {}, Kind.Q8_0)
    with pytest.raises(StartupError, match="quantized differently from those being served"):
        load_arrays(other, config, FLOAT32, report=print, quantization=quantization)


def test_what_cannot_be_in_four_bits_is_refused_by_name() -> None:
    settings, path = parse_settings(["--quantize", FOUR_BITS_NAME], {}), GOLDEN / "llama"
    config = read_config(path)
    with pytest.raises(ConfigError, match="--quantize int4-blocks is for CPUs, and this is a gpu"):
        choose_narrow(settings, "gpu", path, config)
    with pytest.raises(ConfigError, match="--quantize int4-blocks: no matrix of .*llama has four bits"):
        choose_four_bits(settings.quantize, path, config, 1)
    with pytest.raises(ConfigError, match="--quantize int4-blocks serves on one device"):
        choose_four_bits(settings.quantize, path, config, 2)


def test_a_draft_model_without_four_bits_has_int8(tmp_path: Path) -> None:
    path = quantized_file(tmp_path, {}, Kind.Q4_0)
    flags = ["--model", str(path), "--draft-model", str(GOLDEN / "llama"), "--quantize", FOUR_BITS_NAME]
    files = ModelFiles("model", path, draft=ModelFiles("draft", GOLDEN / "llama"))
    served = describe(parse_settings([*flags, "--device", "cpu"], {}), files)
    assert served.draft is not None and isinstance(served.draft.quantization, Quantization)
    assert served.draft.quantization.has_blocks and not served.draft.quantization.four_bits
