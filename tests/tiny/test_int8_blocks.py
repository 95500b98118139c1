"""Int8 matrices with a scale for every 32 inputs: as exact as the file, and the same by XLA and kernels."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import quants
from hypothesis import strategies as st

from levserve.errors import ConfigError
from levserve.jit.target import Target
from levserve.model.backend import Backend
from levserve.model.cpu import linear
from levserve.model.cpu.backend import CpuBackend
from levserve.model.cpu.host_blocks import round_blocks
from levserve.model.decoder import Decoder
from levserve.model.int8_blocks import (
    BLOCK,
    SCALE_FACTOR,
    SECOND_TERM,
    STEPS,
    multiply_blocks,
    unscaled_rotation,
)
from levserve.model.int8_packing import SIGNED_ORDER, UNSIGNED_ORDER, BlockOrder
from levserve.model.quantize import NARROW, Quantization, choose_quantization
from levserve.model.xla import XLA_ON_CPU
from levserve.models.matrices import choose_narrow
from levserve.settings.parse import parse_settings
from levserve.weights.checkpoint import load_arrays, read_config
from tests.conftest import GOLDEN
from tests.engines import running_engine
from tests.targets import on_each_target, with_examples
from tests.tiny.test_decoder import run_in_chunks
from tests.tiny.test_gguf import metadata_of, tensors_of, write_gguf

FLOAT32 = jnp.dtype(jnp.float32)
ORDERS = {"signed": SIGNED_ORDER, "unsigned": UNSIGNED_ORDER}
by_kernel = functools.partial(jax.jit, static_argnames=("target", "in_two_terms"))(linear.multiply)
by_xla = functools.partial(jax.jit, static_argnames="in_two_terms")(multiply_blocks)


def matrix_of(kind: Kind | None, shape: tuple[int, int] = (64, 96), seed: int = 0) -> np.ndarray:
    """A random matrix as it is after being stored in this kind."""
    matrix = (np.random.default_rng(seed).standard_normal(shape) * 0.05).astype(np.float32)
    return matrix if kind is None else quants.dequantize(quants.quantize(matrix, kind), kind)


def numbers_of(integers: np.ndarray, scales: np.ndarray, *, is_rotated: bool) -> np.ndarray:
    """The values that `round_blocks` kept, in float64."""
    blocks = integers.reshape(*scales.shape, BLOCK) * (scales.astype(np.float64) / SCALE_FACTOR)[..., None]
    blocks = blocks @ unscaled_rotation().astype(np.float64) / BLOCK if is_rotated else blocks
    return blocks.reshape(integers.shape)


@pytest.mark.parametrize(
    ("kind", "is_rotated", "most"),
    [
        (Kind.Q4_0, True, 3e-4),  # scales have eleven bits
        (Kind.Q4_1, True, 3e-3),  # and the sum of a block is rounded
        (Kind.Q8_0, False, 0.0),
        (Kind.Q8_0, True, 7e-3),
        (None, True, 7e-3),
        (None, False, 7e-3),
    ],
)
def test_a_file_is_kept_as_it_is_or_to_half_a_step_of_the_largest_number(
    kind: Kind | None, is_rotated: bool, most: float
) -> None:
    matrix = matrix_of(kind)
    integers, scales = round_blocks(matrix, is_rotated=is_rotated)
    assert integers.dtype == np.int8 and scales.dtype == np.float16 and scales.shape == (64, 3)
    lost = numbers_of(integers, scales, is_rotated=is_rotated) - matrix
    assert np.sqrt((lost**2).mean()) <= most * matrix.std()


def test_blocks_of_zeros_and_of_one_number_are_kept() -> None:
    matrix = np.zeros((2, 64), np.float32)
    matrix[1, :32], matrix[1, 40] = 0.25, -3e-3
    kept = numbers_of(*round_blocks(matrix, is_rotated=True), is_rotated=True)
    np.testing.assert_allclose(kept, matrix, rtol=1e-3, atol=2e-5)
    with pytest.raises(ValueError, match="too large for int8 with block scales"):
        round_blocks(np.full((1, 32), 1e9, np.float32), is_rotated=True)


@with_examples(
    12,
    st.sampled_from(list(ORDERS.values())),
    st.sampled_from([(64, 32), (32, 96), (160, 96)]),  # two kernels: one is compiled for each size of a row
    st.booleans(),
    st.sampled_from([1, 2, 7, 17, 40]),
    st.integers(0, 2**32 - 1),
    st.floats(-30, 30),
)
def test_a_kernels_product_is_xlas_but_for_a_number_that_is_rounded_otherwise(
    target: Target,
    order: BlockOrder,
    shape: tuple[int, int],
    in_two_terms: bool,
    rows: int,
    seed: int,
    power: float,
) -> None:
    integers, scales = round_blocks(matrix_of(Kind.Q4_0, shape, seed % 100), is_rotated=not in_two_terms)
    x = np.random.default_rng(seed).standard_normal((rows, shape[1])).astype(np.float32) * np.float32(
        2**power
    )
    got = np.asarray(multiply_packed(integers, scales, x, order, target, in_two_terms))
    wanted = np.asarray(by_xla(integers, scales, x, in_two_terms=in_two_terms))
    largest = np.abs(x.reshape(-1, BLOCK) @ unscaled_rotation()).max() / BLOCK
    step = np.abs(x).max() / STEPS / SECOND_TERM if in_two_terms else largest / STEPS
    most = step * 127 * float(scales.max()) / SCALE_FACTOR
    np.testing.assert_allclose(got, wanted, rtol=2e-6, atol=2 * most)
    alone = multiply_packed(integers, scales, x[-1:], order, target, in_two_terms)
    np.testing.assert_array_equal(np.asarray(alone)[0], got[-1], "a row beside others and alone")


def multiply_packed(
    integers: np.ndarray,
    scales: np.ndarray,
    x: np.ndarray,
    order: BlockOrder,
    target: Target,
    in_two_terms: bool = False,
) -> jax.Array:
    packed = order.pack(integers).view(np.uint8 if order.offset else np.int8)
    return by_kernel(packed, order.pack_scales(scales), x, target=target, in_two_terms=in_two_terms)


def test_two_terms_lose_almost_nothing() -> None:
    matrix = matrix_of(Kind.Q8_0)
    x = np.random.default_rng(1).standard_normal((5, 96)).astype(np.float32)
    x[:, 7] = 40.0
    wanted = x.astype(np.float64) @ matrix.T.astype(np.float64)
    for in_two_terms, most in ((True, 1e-4), (False, 1e-2)):
        integers, scales = round_blocks(matrix, is_rotated=not in_two_terms)
        lost = np.asarray(by_xla(integers, scales, x, in_two_terms=in_two_terms)) - wanted
        assert np.sqrt((lost**2).mean()) < most * wanted.std()


@on_each_target
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_spoils_its_own_row_alone(bad: float, order: BlockOrder, target: Target) -> None:
    integers, scales = round_blocks(matrix_of(None), is_rotated=True)
    x = np.ones((5, 96), np.float32)
    x[3, 7] = bad
    got = np.asarray(multiply_packed(integers, scales, x, order, target))
    assert not np.isfinite(got[3]).any() and np.isfinite(np.delete(got, 3, axis=0)).all()


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_numbers_of_neighbouring_outputs_lie_together(order: BlockOrder) -> None:
    rng = np.random.default_rng(0)
    matrix, scales = rng.integers(-127, 128, (64, 64), dtype=np.int8), rng.random((64, 2)).astype(np.float16)
    packed = order.pack(matrix).reshape(64 // order.outs, 16, order.outs, 4)
    packed_scales = order.pack_scales(scales).reshape(64 // order.outs, 2, order.outs)
    for out, size in np.ndindex(64, 64):
        group, lane = divmod(out, order.outs)
        assert packed[group, size // 4, lane, size % 4] == (int(matrix[out, size]) + order.offset) % 256
        assert packed_scales[group, size // 32, lane] == scales[out, size // 32]


@pytest.mark.parametrize("flags", [(), ("--kernels", "xla"), ("--tensor-parallel", "2")], ids=str)
def test_a_model_in_blocks_is_served_close_to_its_reference(flags: tuple[str, ...]) -> None:
    with running_engine(GOLDEN / "llama", "--quantize", "int8-blocks", *flags) as running:
        difference = running.golden_difference(GOLDEN / "llama")
    assert 0 < difference < 0.15, "of a random model, whose logits are large"


@pytest.mark.parametrize("backend", [XLA_ON_CPU, CpuBackend(has_products=True)], ids=["xla", "llvm"])
def test_a_file_of_four_bits_is_scored_closer_in_blocks_than_in_rows(
    backend: Backend, tmp_path: Path
) -> None:
    """Measured: 0.10 and 0.15, with a random model whose rows have only two or four blocks."""
    tensors = tensors_of("llama")
    for name, (tensor, _) in tensors.items():
        if tensor.ndim == 2:
            tensors[name] = (quants.quantize(tensor.astype(np.float32), Kind.Q4_0), Kind.Q4_0)
    path = write_gguf(tmp_path / "model.gguf", metadata_of("llama"), tensors)
    config, tokens = read_config(path), list(range(3, 35))

    def score(quantization: Quantization | None) -> np.ndarray:
        arrays = load_arrays(path, config, FLOAT32, report=print, quantization=quantization)
        model = Decoder.from_arrays(config, arrays, backend=backend, quantization=quantization)
        return run_in_chunks(model, tokens, 8, 4)

    ways = [choose_quantization(NARROW["int8"], backend, FLOAT32, in_blocks=way) for way in (False, True)]
    exact, in_rows, in_blocks = (score(way) for way in (None, *ways))
    lost_in_rows, lost_in_blocks = (np.abs(each - exact).mean() for each in (in_rows, in_blocks))
    assert 0 < lost_in_blocks < 0.8 * lost_in_rows, (lost_in_blocks, lost_in_rows)


def test_blocks_are_for_cpus() -> None:
    settings = parse_settings(["--quantize", "int8-blocks"], {})
    with pytest.raises(ConfigError, match="--quantize int8-blocks is for CPUs, and this is a gpu"):
        choose_narrow(settings, "gpu", GOLDEN / "llama", read_config(GOLDEN / "llama"))
