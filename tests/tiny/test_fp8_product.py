"""The GPU's kernel for FP8 activations and FP8 matrices, interpreted."""

from __future__ import annotations

import re
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levserve.model.gpu import fp8_dot, fp8_plan
from levserve.model.gpu.backend import GpuBackend
from levserve.model.gpu.fp8_plan import MAX_WHOLE_ROWS, Fp8Way, choose_fp8_tiling, fit_cut
from levserve.model.gpu.fp8_product import multiply_fp8
from levserve.model.gpu.packed_plan import PackedTiling
from levserve.model.packed import Code, PackedMatrix, Scheme, multiply_packed
from tests.tiny.test_packed_product import random_matrix

BFLOAT16, FLOAT32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
BLOCKS = Scheme(Code.FP8, 128, 128, rounds_rows=True)
SCHEMES = {
    "blocks": BLOCKS,
    "groups of a row": Scheme(Code.FP8, 128, scale=BFLOAT16, rounds_rows=True),
    "whole rows": Scheme(Code.FP8, rounds_rows=True),
}
SHAPE = (192, 1024)


def random_rows(count: int) -> jnp.ndarray:
    """Rows like those of activations: some rows and channels are far larger than others."""
    random = np.random.default_rng(count)
    spread = np.exp(random.normal(size=(count, 1)) + random.normal(size=(1, SHAPE[1])))
    return jnp.asarray((random.normal(size=(count, SHAPE[1])) * spread).astype(np.float32).astype(BFLOAT16))


def multiply(matrix: PackedMatrix, x: jnp.ndarray) -> np.ndarray:
    """Multiplies in one jitted program: outside one, jax would compile every operation separately."""
    backend = GpuBackend(interpret=True)
    return np.asarray(jax.jit(lambda matrix, x: backend.packed_product(matrix, BFLOAT16)(x, None))(matrix, x))


def check(got: jnp.ndarray, matrix: PackedMatrix, x: jnp.ndarray) -> None:
    plainly = jax.jit(lambda x: multiply_packed(matrix, x.astype(FLOAT32), FLOAT32))
    wanted = np.asarray(plainly(x))
    np.testing.assert_allclose(got, wanted, atol=3e-6 * np.abs(wanted).max())


@pytest.mark.parametrize("rows", [2, 40, 150])
@pytest.mark.parametrize("name", SCHEMES)
def test_the_kernel_gives_the_product_of_rounded_rows(name: str, rows: int) -> None:
    """Nothing else is rounded. Covers two groups of columns, and sums that programs share."""
    rows = min(rows, MAX_WHOLE_ROWS) if name == "whole rows" else rows
    matrix, x = random_matrix(SCHEMES[name], SHAPE), random_rows(rows)
    cut = choose_fp8_tiling(rows, SHAPE, matrix.scheme)
    assert cut is not None and cut.tiling.splits > 1
    assert cut.rounds_inside == (name != "whole rows" and rows <= 16)
    check(multiply_fp8(matrix, x, cut=cut, interpret=True), matrix, x)


@pytest.mark.parametrize("scale", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize("rows_of_scale", [1, SHAPE[0]])
def test_many_rows_with_one_scale_each_are_multiplied_by_xla_without_widening(
    scale: jnp.dtype, rows_of_scale: int
) -> None:
    """Whether rows of the matrix have scales of their own or share one."""
    scheme = Scheme(Code.FP8, rows=rows_of_scale, scale=scale, rounds_rows=True)
    matrix, x = random_matrix(scheme, SHAPE), random_rows(MAX_WHOLE_ROWS + 1)
    assert choose_fp8_tiling(len(x), SHAPE, scheme) is None
    for summed in (FLOAT32, BFLOAT16):
        product = GpuBackend(interpret=True).packed_product(matrix, BFLOAT16, summed)
        traced = str(jax.make_jaxpr(lambda x, product=product: product(x, None))(x))
        assert re.search(rf"dot_general\[(?s:.)*?preferred_element_type={summed}", traced)
        assert f"bf16[{SHAPE[0]},{SHAPE[1]}]" not in traced and f"f32[{SHAPE[0]},{SHAPE[1]}]" not in traced
    check(multiply(matrix, x), matrix, x)


@pytest.mark.parametrize("rounds_inside", [False, True])
@pytest.mark.parametrize("depth", [64, 256])
def test_a_step_may_be_part_of_a_group_or_several(depth: int, rounds_inside: bool) -> None:
    matrix, x = random_matrix(BLOCKS, SHAPE), random_rows(5)
    way = Fp8Way(PackedTiling(16, 64, depth, 4, 3), 1, rounds_inside)
    cut = fit_cut(way, 5, SHAPE, BLOCKS, splits=2)
    assert cut is not None and cut.tiling.depth == depth
    assert cut.rounds_inside == (rounds_inside and depth == 256), "half a group does not know its largest"
    check(multiply_fp8(matrix, x, cut=cut, interpret=True), matrix, x)


def test_the_backend_rounds_activations_only_where_the_scheme_says_so() -> None:
    """Few rows are multiplied by the kernel, many by XLA."""
    left = replace(BLOCKS, rounds_rows=False)
    for rows in (2, fp8_plan.MAX_ROWS + 1):
        x, errors = random_rows(rows), []
        for scheme in (BLOCKS, left):
            matrix = random_matrix(scheme, SHAPE)
            got = multiply(matrix, x)
            widened = jax.jit(lambda matrix: matrix.widen(FLOAT32).array)(matrix)
            wanted = np.asarray(x, np.float64) @ np.asarray(widened, np.float64).T
            errors.append(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))
        rounded, unrounded = errors
        assert 0.01 < rounded < 0.05 and unrounded < 0.005


@pytest.mark.parametrize("rows", [2, 40])
def test_without_such_products_in_jax_rounded_rows_are_multiplied_by_a_widened_matrix(
    rows: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    matrix, x = random_matrix(BLOCKS, SHAPE), random_rows(rows)
    monkeypatch.setitem(sys.modules, "jax._src.pallas.triton.lowering", None)
    monkeypatch.delattr("jax._src.pallas.triton.lowering", raising=False)
    fp8_dot.has_dot_fp8.cache_clear()
    try:
        for _ in range(2):
            got = multiply(matrix, x)
    finally:
        fp8_dot.has_dot_fp8.cache_clear()
    plainly = jax.jit(lambda matrix, x: multiply_packed(matrix, x.astype(FLOAT32), FLOAT32))
    wanted = np.asarray(plainly(matrix, x))
    assert np.linalg.norm(got - wanted) < 0.003 * np.linalg.norm(wanted), "rounded once more, to bfloat16"
    assert caplog.text.count("FP8 is widened") == 1


def test_wide_matrices_share_no_sums_where_narrow_ones_do() -> None:
    """With the shapes of Llama-3.1-8B, for which the splits were measured."""
    shapes = {"qkv": (6144, 4096), "out": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
    cuts = {
        rows: [choose_fp8_tiling(rows, shape, BLOCKS) for shape in shapes.values()] for rows in (2, 64, 256)
    }
    splits = {rows: [cut.tiling.splits for cut in of_rows if cut] for rows, of_rows in cuts.items()}
    assert splits == {2: [8, 8, 2, 8], 64: [4, 8, 1, 8], 256: [1, 2, 1, 2]}


def test_a_matrix_that_tensor_cores_cannot_take_is_left_to_xla() -> None:
    assert choose_fp8_tiling(fp8_plan.MAX_ROWS + 1, SHAPE, BLOCKS) is None
    assert choose_fp8_tiling(2, (72, 1024), BLOCKS) is None, "8 columns"
    assert choose_fp8_tiling(2, (64, 1040), SCHEMES["whole rows"]) is None, "steps of 16 inputs"
