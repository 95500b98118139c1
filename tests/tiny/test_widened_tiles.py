"""Matrices of four bits, and of eight, that are widened to bfloat16 in products by matrix units (AMX).

CPUs without such units run the same kernels with plain instructions instead.
"""

from __future__ import annotations

import functools
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from levserve.errors import ConfigError, StartupError
from levserve.jit.target import Target
from levserve.jit.xla_call import write_kernel
from levserve.model.backend import Backend
from levserve.model.cpu import host_middles, linear
from levserve.model.cpu.backend import CpuBackend, fit_target
from levserve.model.cpu.widened_matrices import WidenedNibbles
from levserve.model.cpu.widened_tiles import MANY_BLOCKS
from levserve.model.decoder import Decoder
from levserve.model.int4_blocks import CENTER, FourBits
from levserve.model.int8_blocks import BLOCK, LARGEST_SCALE, SCALE_FACTOR, SMALLEST_SCALE
from levserve.model.int8_packing import (
    OUTS,
    STEPS,
    UNIT_BYTES,
    UNSIGNED_ORDER,
    WIDENED_BYTES,
    WIDENED_NIBBLES,
)
from levserve.model.quantize import (
    BLOCKS_NAME,
    FOUR_BITS_NAME,
    NARROW,
    WIDENED_NAME,
    choose_quantization,
    quantized_bytes,
    widens_blocks,
)
from levserve.model.xla import XLA_ON_CPU
from levserve.models.matrices import choose_format
from levserve.settings.parse import parse_settings
from levserve.weights.checkpoint import find_four_bit_matrices, load_arrays, read_config
from tests.conftest import GOLDEN
from tests.targets import HOST, NAMED, on_each_target, with_examples
from tests.tiny.test_cpu_tiles import sum_as_tiles_do
from tests.tiny.test_decoder import run_in_chunks
from tests.tiny.test_gguf_kept import quantized_file
from tests.tiny.test_int4_blocks import MIXED, TOKENS, random_matrix

FLOAT32 = jnp.dtype(jnp.float32)
PACKING = CpuBackend(has_products=True, packs_int8=True)
KINDS = ["four bits", "four bits with middles", "eight bits"]
MOSTLY_EIGHT_BITS = dict.fromkeys(("attn_q.weight", "ffn_gate.weight", "ffn_down.weight"), Kind.Q8_0)
SHAPES = [(64, 2 * BLOCK), (32, (MANY_BLOCKS + 2) * BLOCK), (96, MANY_BLOCKS * BLOCK)]


def kinds_for(target: Target) -> list[str]:
    """Eight bits need conversions of float16, which every CPU with matrix units has."""
    return KINDS if target.has("f16c") or target.has("neon") else KINDS[:2]


@dataclass(frozen=True)
class EightBits:
    """A matrix in int8, with a scale and a middle for each block."""

    integers: np.ndarray
    scales: np.ndarray
    middles: np.ndarray


def random_widened(kind: str, seed: int, shape: tuple[int, int]) -> FourBits | EightBits:
    if kind != "eight bits":
        return random_matrix(seed, has_middles=kind == "four bits with middles", shape=shape)
    rng, blocks = np.random.default_rng(seed), (shape[0], shape[1] // BLOCK)
    # Eighths of a power of two, so that the sum has the same bits rounded once or twice.
    powers = np.exp2(rng.integers(np.log2(SMALLEST_SCALE), np.log2(LARGEST_SCALE / STEPS), blocks))
    scales, middles = (powers * rng.integers(low, high, blocks) / 8 for low, high in ((8, 16), (-64, 65)))
    integers = rng.integers(-127, 128, shape, np.int8)
    return EightBits(integers, scales.astype(np.float16), middles.astype(np.float16))


def arrange(matrix: FourBits | EightBits) -> tuple[np.ndarray, np.ndarray]:
    """The arrays of a matrix on the device."""
    if isinstance(matrix, EightBits):
        both = np.stack([matrix.scales, matrix.middles], -1).reshape(len(matrix.scales), -1)
        return WIDENED_BYTES.pack(matrix.integers).view(np.int16), WIDENED_BYTES.pack_scales(both)
    packed, scales = matrix.pack(WIDENED_NIBBLES)
    return packed.view(np.uint16), scales


def widen(matrix: FourBits | EightBits) -> np.ndarray:
    """The numbers of a matrix, rounded to bfloat16; ties are rounded up, or away from 0."""
    if isinstance(matrix, EightBits):
        scales, middles = (
            np.repeat(each.astype(np.float32), BLOCK, 1) for each in (matrix.scales, matrix.middles)
        )
        halves = (matrix.integers * scales + middles).astype(np.float16)
        bits = halves.view(np.uint16) & 0x7FFF
        subnormal = np.copysign(2.0**-15 * (1 + bits / 1024), halves)
        numbers = np.where(bits < 0x400, subnormal, halves.astype(np.float32))
        return round_up((numbers / SCALE_FACTOR).astype(np.float32))
    scales, middles = (
        np.zeros(()) if part is None else np.repeat(part.astype(np.float64) / SCALE_FACTOR, BLOCK, 1)
        for part in (matrix.scales, matrix.middles)
    )
    return round_up(((matrix.codes.astype(np.float64) - CENTER) * scales + middles).astype(np.float32))


def round_up(numbers: np.ndarray) -> np.ndarray:
    return ((numbers.view(np.uint32) + 0x8000) & 0xFFFF0000).view(np.float32)


@functools.partial(jax.jit, static_argnames="target")
def multiply(
    weight: jax.Array, scale: jax.Array, x: jax.Array, num_used: jax.Array, *, target: Target
) -> jax.Array:
    return linear.multiply(weight, scale, x, num_used, target=target)


@with_examples(
    12,
    st.sampled_from(SHAPES),
    st.integers(0, 100),
    st.sampled_from([1, 2, 15, 16, 17, 32, 33, 70]),
    st.integers(0, 3),
    st.integers(0, 2**32 - 1),
)
def test_a_product_is_that_of_the_numbers_rounded_to_bfloat16_in_one_order_for_any_number_of_rows(
    target: Target, shape: tuple[int, int], kind: int, rows: int, padding: int, seed: int
) -> None:
    kinds = kinds_for(target)
    matrix = random_widened(kinds[kind % len(kinds)], seed % 100, shape)
    x = np.random.default_rng(seed).standard_normal((rows + padding, shape[1])).astype(np.float32)
    x[rows:] = np.nan
    got = multiply(*arrange(matrix), x, np.asarray([rows], np.int32), target=target)
    rounded = np.asarray(jnp.asarray(x[:rows], jnp.bfloat16), np.float32)
    np.testing.assert_array_equal(got[:rows], sum_as_tiles_do(rounded, widen(matrix)))


def test_a_task_with_more_rows_than_stay_in_the_cache_arranges_them_again() -> None:
    """The rows of one block of rows must not be taken for those of the next."""
    shape = 2 * OUTS, 2 * BLOCK
    matrix, rows = random_matrix(3, has_middles=True, shape=shape), 10_300
    tiles = linear.tile_product_for(WidenedNibbles(shape[1], HOST, True))
    assert isinstance(tiles, linear.WidenedTiles) and tiles.block_rows < rows
    x = np.random.default_rng(3).standard_normal((rows, shape[1])).astype(np.float32)
    got = multiply(*arrange(matrix), x, np.asarray([rows], np.int32), target=HOST)
    some = np.r_[0:3, tiles.block_rows - 2 : tiles.block_rows + 3, rows - 3 : rows]
    rounded = np.asarray(jnp.asarray(x[some], jnp.bfloat16), np.float32)
    np.testing.assert_array_equal(np.asarray(got)[some], sum_as_tiles_do(rounded, widen(matrix)))


@on_each_target
def test_what_is_not_finite_spoils_its_own_row_alone(target: Target) -> None:
    x = np.ones((20, 64), np.float32)
    x[3, 7], x[17, 0] = np.nan, np.inf
    for kind in kinds_for(target)[1:]:
        matrix = random_widened(kind, 0, SHAPES[0])
        got = np.asarray(multiply(*arrange(matrix), x, np.asarray([20], np.int32), target=target))
        assert [row for row in range(20) if not np.isfinite(got[row]).all()] == [3, 17]


def test_two_blocks_share_bytes_and_two_outputs_share_words() -> None:
    matrix = random_matrix(1, has_middles=False, shape=(2 * OUTS, 4 * BLOCK))
    packed = matrix.pack(WIDENED_NIBBLES)[0].reshape(2, 2, OUTS // 2, UNIT_BYTES, 2)
    for out, block, at in ((0, 0, 0), (33, 0, 5), (62, 2, 31)):
        group, number = divmod(out, OUTS)
        both = packed[group, block // 2, number // 2, at, number % 2]
        assert both & 15 == matrix.codes[out, block * BLOCK + at]
        assert both >> 4 == matrix.codes[out, (block + 1) * BLOCK + at]


@pytest.mark.parametrize("levels", [16, 32, 255])
def test_blocks_of_a_file_of_four_five_or_eight_bits_stay_as_they_are(levels: int) -> None:
    """Those of eight bits have no offset, and their largest number is 127 steps."""
    rng, shape, blocks = np.random.default_rng(levels), (32, 4 * BLOCK), (32, 4, 1)
    steps = rng.uniform(1e-3, 2e-3, blocks).astype(np.float16).astype(np.float32)
    codes = rng.integers(0, levels, (*blocks[:2], BLOCK))
    codes[..., 0], codes[..., 1] = 0, levels - 1
    offsets = -127 * steps if levels == 255 else rng.uniform(-0.02, 0.01, blocks).astype(np.float16)
    rows = (codes * steps + offsets).astype(np.float32).reshape(shape)
    integers, scales, middles = host_middles.round_blocks(rows)
    kept, added = (np.repeat(each.astype(np.float32), BLOCK, 1) / SCALE_FACTOR for each in (scales, middles))
    assert np.abs(integers * kept + added - rows).max() < 3e-5, "a fiftieth of a step"


def test_other_blocks_are_rounded_to_127_steps() -> None:
    rows = np.random.default_rng(0).standard_normal((32, 2 * BLOCK)).astype(np.float32)
    rows[0, :BLOCK], rows[1, :BLOCK] = 0, 0.5
    integers, scales, middles = host_middles.round_blocks(rows)
    kept, added = (np.repeat(each.astype(np.float32), BLOCK, 1) / SCALE_FACTOR for each in (scales, middles))
    assert (np.abs(integers * kept + added - rows) <= 0.51 * kept).all()
    for large in (300.0, np.nan):
        rows[3, 7] = large
        with pytest.raises(ValueError, match="too large for int8 with middles"):
            host_middles.round_blocks(rows)


@pytest.mark.parametrize("widens", [True, False], ids=["widened", "rotated"])
def test_a_matrix_of_numbers_too_large_is_refused_by_name(widens: bool, tmp_path: Path) -> None:
    config = read_config(GOLDEN / "llama")
    tensors = load_file(GOLDEN / "llama" / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = 1e9
    quantization = choose_quantization(
        NARROW[BLOCKS_NAME], PACKING, FLOAT32, in_blocks=True, widens_blocks=widens
    )
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(GOLDEN / "llama" / "config.json", tmp_path)
    refusal = r"layers.1.down: .* too large for int8 .*: use --quantize int8$"
    with pytest.raises(StartupError, match=refusal):
        load_arrays(tmp_path, config, FLOAT32, report=print, quantization=quantization)


def test_code_for_matrix_units_has_their_instruction_for_bfloat16() -> None:
    product = WidenedNibbles(64, NAMED["amx"], True)
    assembly = write_kernel(linear.kernel_for(product, linear.tile_product_for(product))).assembly()
    assert "tdpbf16ps" in assembly and "vpermw" in assembly


@pytest.mark.parametrize("runs_layers", [True, False], ids=["all layers in one call", "one by one"])
def test_a_file_of_several_kinds_is_scored_as_its_numbers_say(runs_layers: bool, tmp_path: Path) -> None:
    """Measured: 0.047. With all matrices in bfloat16, computed by XLA, it is 0.038."""
    path = quantized_file(tmp_path, MIXED, Kind.Q4_1)
    config, backend = read_config(path), replace(PACKING, runs_layers=runs_layers)
    quantization = choose_quantization(
        NARROW[WIDENED_NAME],
        backend,
        FLOAT32,
        in_blocks=True,
        four_bits=find_four_bit_matrices(path, config),
        widens_blocks=True,
    )
    assert quantization is not None
    arrays = load_arrays(path, config, FLOAT32, report=print, quantization=quantization, backend=backend)
    assert quantized_bytes(config, FLOAT32, quantization) == sum(array.nbytes for array in arrays.values())
    names = {name for name, array in arrays.items() if array.dtype in (jnp.uint16, jnp.int16)}
    assert names > dict(quantization.four_bits).keys()
    assert {name for name in arrays if f"{name}_scale" in arrays} - names <= {"head"}

    def score(model: Decoder) -> np.ndarray:
        logprobs = jax.nn.log_softmax(run_in_chunks(model, TOKENS, 8, 4))
        return np.asarray(logprobs)[np.arange(len(TOKENS) - 1), TOKENS[1:]]

    plain = load_arrays(path, config, FLOAT32, report=print)
    exact = score(Decoder.from_arrays(config, plain, backend=XLA_ON_CPU))
    served = score(Decoder.from_arrays(config, arrays, backend=backend, quantization=quantization))
    assert 0 < np.abs(served - exact).mean() < 0.06


@pytest.mark.parametrize(
    ("options", "kind", "backend", "expected"),
    [
        ((), MIXED, fit_target(NAMED["amx"]), WIDENED_NAME),
        ((), MOSTLY_EIGHT_BITS, fit_target(NAMED["amx"]), "auto"),
        ((), Kind.Q4_0, fit_target(NAMED["amx"]), WIDENED_NAME),
        ((), Kind.Q4_1, fit_target(NAMED["amx"]), WIDENED_NAME),
        ((), Kind.Q8_0, fit_target(NAMED["amx"]), "auto"),
        ((), Kind.Q4_0, fit_target(NAMED["avx512"]), "auto"),
        ((), Kind.Q4_0, XLA_ON_CPU, "auto"),
        (("--dtype", "bfloat16"), Kind.Q4_0, fit_target(NAMED["amx"]), "auto"),
        (("--quantize", "int8"), Kind.Q4_0, fit_target(NAMED["amx"]), "int8"),
    ],
)
def test_a_file_of_four_bits_is_served_in_them_by_default_where_they_are_widened(
    options: tuple[str, ...], kind: Kind | dict[str, Kind], backend: Backend, expected: str, tmp_path: Path
) -> None:
    kinds, others = (kind, Kind.Q4_1) if isinstance(kind, dict) else ({}, kind)
    path, settings = quantized_file(tmp_path, kinds, others), parse_settings(list(options), {})
    config = read_config(path)
    assert choose_format(settings, backend, path, config, 1) == expected
    assert choose_format(settings, backend, path, config, 2) == settings.quantize, "shared by two devices"


def test_a_cpu_without_matrix_units_refuses_by_name() -> None:
    settings, path = parse_settings(["--quantize", WIDENED_NAME], {}), GOLDEN / "llama"
    message = r"--quantize int4 needs a CPU with matrix units \(AMX\) .*: use --quantize int4-blocks"
    for backend in (fit_target(NAMED["avx512"]), XLA_ON_CPU):
        with pytest.raises(ConfigError, match=message):
            choose_format(settings, backend, path, read_config(path), 1)


def test_int8_in_blocks_is_widened_where_the_cpu_can_but_for_the_head() -> None:
    amx, avx512 = fit_target(NAMED["amx"]), fit_target(NAMED["avx512"])
    assert widens_blocks(BLOCKS_NAME, amx) and not widens_blocks(BLOCKS_NAME, avx512)
    assert not widens_blocks("int8", amx) and not widens_blocks(FOUR_BITS_NAME, amx)
    quantization = choose_quantization(NARROW[BLOCKS_NAME], amx, FLOAT32, in_blocks=True, widens_blocks=True)
    assert quantization is not None
    assert quantization.widens("layers.0.qkv", (64, 128)) and not quantization.widens("head", (64, 128))
    assert not quantization.widens("layers.0.qkv", (64, 96)), "an odd number of blocks"


def test_other_orders_of_four_bits_are_as_they_were() -> None:
    plain = choose_quantization(NARROW["int8"], PACKING, FLOAT32)
    assert plain is not None and plain.four_bit_order((64, 128)) == UNSIGNED_ORDER
    quantization = choose_quantization(NARROW["int8"], PACKING, FLOAT32, widens_blocks=True)
    assert quantization is not None
    assert quantization.four_bit_order((64, 128)) == WIDENED_NIBBLES
    assert quantization.four_bit_order((64, 96)) == UNSIGNED_ORDER, "an odd number of blocks"
    assert quantization.four_bit_order((48, 128)) is None, "an odd number of outputs"
