"""Products by the matrix units of x86 CPUs (AMX) equal those without them to the last bit.

CPUs without such units run the same kernels with plain instructions instead, and compile the real ones.
"""

from __future__ import annotations

import ctypes
import logging
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from levserve.jit import target as target_module
from levserve.jit.target import AMX, Target, detect_target
from levserve.jit.tiles import TileShape, config_bytes
from levserve.jit.xla_call import Kernel, register, write_kernel
from levserve.model.cpu.bfloat16_tiles import Bfloat16Tiles
from levserve.model.cpu.block_products import UnsignedBlocks
from levserve.model.cpu.linear import kernel_for, tile_product_for
from levserve.model.cpu.nibble_products import UnsignedNibbles
from levserve.model.cpu.nibble_tiles import NibbleTiles
from levserve.model.cpu.products import Bfloat16Product, PackedProduct
from levserve.model.cpu.tile_products import Int8Tiles
from levserve.model.int8_blocks import BLOCK
from levserve.model.int8_packing import pack
from tests.targets import HOST, NAMED, with_examples

ROWS = st.sampled_from([3, 4, 15, 16, 17, 32, 33, 70])


def multiply(kernel: Kernel, *arguments: Any) -> np.ndarray:
    """The product; rows beyond those in use hold anything."""
    x, weight = arguments[0], arguments[2]
    result = jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), jnp.float32)
    return np.asarray(jax.jit(jax.ffi.ffi_call(register(kernel), result))(*map(jnp.asarray, arguments)))


def both_ways(product: Any, tiles: Any, *arguments: Any) -> tuple[np.ndarray, np.ndarray]:
    """The same product without tiles and with them."""
    kernels = kernel_for(product), kernel_for(product, tiles)
    plain, tiled = (replace(kernel, name=f"{kernel.name}_{way}") for way, kernel in enumerate(kernels))
    return multiply(plain, *arguments), multiply(tiled, *arguments)


@with_examples(
    12,
    st.sampled_from([(32, 16), (96, 48), (32, 96), (160, 128)]),
    ROWS,
    st.integers(0, 3),
    st.integers(0, 2**32 - 1),
)
def test_int8_by_tiles_is_the_same_to_the_last_bit(
    target: Target, shape: tuple[int, int], rows: int, padding: int, seed: int
) -> None:
    """For any number of rows; the padding after them is left out."""
    rng = np.random.default_rng(seed)
    weight = rng.integers(-127, 128, shape, dtype=np.int8)
    x = rng.standard_normal((rows + padding, shape[1])).astype(np.float32)
    x[rows:] = np.nan
    scale, used = rng.uniform(0.5, 1, shape[0]).astype(np.float32), np.asarray([rows], np.int32)
    product = PackedProduct(shape[1], target)
    plain, tiled = both_ways(product, Int8Tiles(product), x, used, pack(weight), scale)
    np.testing.assert_array_equal(tiled[:rows], plain[:rows])


def test_four_bits_by_tiles_are_the_same_to_the_last_bit() -> None:
    """With more blocks than are widened at a time. A value that is not finite spoils only its own row."""
    product, outs, all_rows = UnsignedNibbles(6 * BLOCK, HOST, True), 64, (15, 16, 17, 40)
    rng = np.random.default_rng(outs)
    x = rng.standard_normal((max(all_rows) + 1, product.size)).astype(np.float32)
    x[3, 7], x[11, 0] = np.nan, np.inf
    weight = np.frombuffer(rng.bytes(outs * product.out_bytes), np.uint8).reshape(outs, -1)
    scales = rng.standard_normal((outs, product.out_scale_bytes // 2)).astype(np.float16)
    for rows in all_rows:
        used = np.asarray([rows], np.int32)
        plain, tiled = both_ways(product, NibbleTiles(product), x, used, weight, scales)
        np.testing.assert_array_equal(tiled[:rows], plain[:rows])
        assert [row for row in range(rows) if not np.isfinite(tiled[row]).all()] == [3, 11]


def sum_as_tiles_do(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Of every 32 inputs, adds up the even and the odd ones separately, as tiles do."""
    total = np.zeros((len(x), len(weight)), np.float32)
    for start in range(0, x.shape[1], 32):
        even, odd = np.zeros_like(total), np.zeros_like(total)
        for at in range(start, start + 32, 2):
            even += x[:, at, None] * weight[None, :, at]
            odd += x[:, at + 1, None] * weight[None, :, at + 1]
        total += even + odd
    return total


@with_examples(
    12,
    st.sampled_from([(96, 32), (32, 96), (160, 96)]),
    st.sampled_from([1, 2, 15, 16, 17, 32, 33, 70]),
    st.integers(0, 3),
    st.integers(0, 2**32 - 1),
)
def test_bfloat16_by_tiles_is_added_up_in_one_order_for_any_number_of_rows(
    target: Target, shape: tuple[int, int], rows: int, padding: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    weight = jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
    x = rng.standard_normal((rows + padding, shape[1])).astype(np.float32)
    x[rows:] = np.nan
    product = Bfloat16Product(shape[1], target)
    got = multiply(kernel_for(product, Bfloat16Tiles(product)), x, np.asarray([rows], np.int32), weight)
    rounded = np.asarray(jnp.asarray(x[:rows], jnp.bfloat16), np.float32)
    np.testing.assert_array_equal(got[:rows], sum_as_tiles_do(rounded, np.asarray(weight, np.float32)))


def test_bfloat16_that_is_not_finite_spoils_its_own_row_alone() -> None:
    product, x = Bfloat16Product(64, HOST), np.ones((20, 64), np.float32)
    x[3, 7], x[17, 0] = np.nan, np.inf
    weight = jnp.ones((32, 64), jnp.bfloat16)
    tiled = multiply(kernel_for(product, Bfloat16Tiles(product)), x, np.asarray([20], np.int32), weight)
    assert [row for row in range(20) if not np.isfinite(tiled[row]).all()] == [3, 17]


def test_what_is_not_finite_spoils_its_own_row_alone() -> None:
    product = PackedProduct(64, HOST)
    x = np.ones((20, 64), np.float32)
    x[3, 7], x[17, 0] = np.nan, np.inf
    weight, scale = pack(np.ones((32, 64), np.int8)), np.ones(32, np.float32)
    _, tiled = both_ways(product, Int8Tiles(product), x, np.asarray([20], np.int32), weight, scale)
    assert [row for row in range(20) if not np.isfinite(tiled[row]).all()] == [3, 17]


def test_code_for_a_cpu_with_matrix_units_has_their_instructions_and_no_other_code_has() -> None:
    instructions = "ldtilecfg", "tileloadd", "tilestored", "tilerelease"
    for name in ("amx", "avx512", "avx2", "neon"):
        for product, multiply in (
            (PackedProduct(64, NAMED[name]), "tdpbsud"),
            (Bfloat16Product(64, NAMED[name]), "tdpbf16ps"),
        ):
            assembly = write_kernel(kernel_for(product, tile_product_for(product, 64))).assembly()
            assert {each in assembly for each in (multiply, *instructions)} == {name == "amx"}
    nibbles = UnsignedNibbles(64, NAMED["amx"], False)
    assert "tdpbssd" in write_kernel(kernel_for(nibbles, tile_product_for(nibbles))).assembly()


def test_bfloat16_goes_by_tiles_if_they_cut_the_matrix_evenly() -> None:
    product = Bfloat16Product(64, NAMED["amx"])
    assert tile_product_for(product, 32, 96) is not None
    assert tile_product_for(product, 32, 100) is None
    assert tile_product_for(Bfloat16Product(48, NAMED["amx"]), 32) is None
    assert tile_product_for(Bfloat16Product(64, NAMED["avx512"]), 32) is None


def test_products_of_integers_go_by_tiles_where_the_cpu_has_them_and_they_gain() -> None:
    for name in ("amx", "avx512"):
        target = NAMED[name]
        products = PackedProduct(64, target), UnsignedNibbles(64, target, False)
        assert {tile_product_for(product) is not None for product in products} == {name == "amx"}
        assert tile_product_for(UnsignedBlocks(2048, target, 1)) is None


def test_tiles_are_configured_as_the_cpu_reads_it() -> None:
    config = config_bytes((TileShape(16, 64), TileShape(8, 32)))
    assert len(config) == 64 and config[0] == 1
    assert config[16:20] == b"\x40\x00\x20\x00" and config[48:50] == b"\x10\x08"
    assert sum(config) == 1 + 64 + 32 + 16 + 8, "all else is 0"


@pytest.mark.parametrize("errno", [0, 1])
def test_amx_is_used_only_if_linux_permits_it(
    errno: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[tuple[int, ...]] = []

    class Libc:
        class syscall:
            def __new__(cls, *numbers: ctypes.c_long) -> Any:
                asked.append(tuple(number.value for number in numbers))
                ctypes.set_errno(errno)
                return -1 if errno else 0

    monkeypatch.setattr(target_module.ctypes, "CDLL", lambda *_, **__: Libc)
    monkeypatch.setattr(target_module.llvm, "get_default_triple", lambda: target_module.X86)
    features = dict.fromkeys((*target_module.AVX512, *AMX), True)
    monkeypatch.setattr(target_module.llvm, "get_host_cpu_features", lambda: features)
    with caplog.at_level(logging.WARNING):
        found = detect_target.__wrapped__()
    assert asked == [(158, 0x1023, 18)]
    assert found.has_amx_int8 == found.has_amx_bf16 == (not errno) and found.has_vnni
    assert ("Operation not permitted" in caplog.text) is bool(errno)


def test_a_target_without_features_is_another_that_the_cpu_can_run() -> None:
    amx = NAMED["amx"]
    without = amx.without(*AMX)
    assert amx.has_amx_int8 and not without.has_amx_int8 and without.has_vnni
    assert without.runs_on(amx) and not amx.runs_on(without) and without.name != amx.name
