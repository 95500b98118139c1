"""The GPU's kernel for matrices in their checkpoint's bits, interpreted; its assembly is run step by step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from levserve.model.gpu.backend import GpuBackend
from levserve.model.gpu.packed_plan import MAX_ROWS, PackedTiling, choose_tiling, fit
from levserve.model.gpu.packed_product import multiply_in_registers
from levserve.model.gpu.unpack import UINT4_OFFSET, assembly
from levserve.model.packed import Code, Scheme, decode
from tests.packed_matrices import random_matrix

BFLOAT16, FLOAT16, UINT8 = (jnp.dtype(each) for each in (jnp.bfloat16, jnp.float16, jnp.uint8))
SCHEMES = {
    "fp8 in blocks": Scheme(Code.FP8, 128, 128),
    "fp8 by row": Scheme(Code.FP8),
    "awq": Scheme(Code.UINT4, 128, has_zeros=True, scale=FLOAT16),
    "q4_0": Scheme(Code.UINT4, 32, zero=8, scale=FLOAT16),
    "q8_0": Scheme(Code.INT8, 32, scale=FLOAT16),
    "q6_k": Scheme(Code.INT8, 16),
    "mxfp4": Scheme(Code.E2M1, 32, scale=UINT8),
}


widen = jax.jit(lambda matrix, dtype: matrix.widen(dtype).array, static_argnums=1)
"""Jitted, because outside jit jax would compile every operation separately."""


@pytest.mark.parametrize("rows", [2, 40])
@pytest.mark.parametrize("name", SCHEMES)
def test_the_kernel_gives_the_product_of_the_numbers(name: str, rows: int) -> None:
    """Rows are rounded, and nothing else. Covers two groups of columns, and sums that programs share."""
    matrix = random_matrix(SCHEMES[name], (192, 1024))
    x = np.random.default_rng(1).normal(size=(rows, 1024)).astype(BFLOAT16)
    tiling = choose_tiling(rows, (192, 1024), matrix.scheme)
    assert tiling is not None and tiling.splits > 1
    got = multiply_in_registers(matrix, jnp.asarray(x), tiling=tiling, interpret=True)
    wanted = x.astype(np.float64) @ np.asarray(widen(matrix, jnp.dtype(jnp.float32)), np.float64).T
    np.testing.assert_allclose(got, wanted, atol=1e-6 * np.abs(wanted).max())


def test_the_backend_multiplies_few_rows_with_the_kernel_and_many_with_xla() -> None:
    matrix = random_matrix(SCHEMES["awq"], (64, 256))
    product = GpuBackend(interpret=True).packed_product(matrix, BFLOAT16)
    for rows in (2, MAX_ROWS + 1):
        x = np.random.default_rng(rows).normal(size=(rows, 256)).astype(np.float32)
        wanted = x.astype(BFLOAT16).astype(np.float64) @ np.asarray(widen(matrix, BFLOAT16), np.float64).T
        # XLA rounds the matrix; the kernel does not.
        np.testing.assert_allclose(product(jnp.asarray(x), None), wanted, atol=5e-3 * np.abs(wanted).max())
    assert choose_tiling(MAX_ROWS + 1, (64, 256), matrix.scheme) is None


def test_a_matrix_that_tensor_cores_cannot_take_is_left_to_xla() -> None:
    assert choose_tiling(2, (72, 256), SCHEMES["awq"]) is None, "8 columns"
    assert choose_tiling(2, (64, 48), SCHEMES["q4_0"]) is None, "its second numbers begin within a group"


def test_programs_share_a_sum_where_there_would_be_too_few_of_them() -> None:
    tiling = PackedTiling(16, 32, 128, 2, 4)
    few, many = (fit(tiling, 2, (columns, 4096), SCHEMES["awq"]) for columns in (4096, 1 << 15))
    assert few is not None and many is not None
    assert (few.splits, many.splits) == (4, 1)


@pytest.mark.parametrize("pack", [2, 4])
@pytest.mark.parametrize("is_second", [False, True])
@pytest.mark.parametrize("code", Code)
def test_the_assembly_makes_the_number_of_every_code(code: Code, is_second: bool, pack: int) -> None:
    if is_second and not code.is_nibble:
        return
    zero = 5 if code is Code.UINT4 else 0
    given = np.arange(256, dtype=np.uint8)
    if code is Code.FP8:
        given = given[given & 127 != 127]
        given = given[: len(given) // 4 * 4]
    numbers = np.asarray(jax.jit(decode, static_argnums=1)(given.view(code.dtype), code), np.float32)
    if code.is_nibble:
        numbers = np.split(numbers, 2)[is_second]
    zeros = np.full(2, UINT4_OFFSET + zero).astype(BFLOAT16).view(np.uint32)[0]
    got = []
    for at in range(0, len(given), pack):
        word = int.from_bytes(given[at : at + pack].tobytes(), "little")
        got += run_assembly(assembly(code, is_second, pack), pack // 2, word, int(zeros))
    np.testing.assert_array_equal(np.asarray(got, np.float32), numbers - zero)


def run_assembly(text: str, num_results: int, word: int, zeros: int) -> list[float]:
    """The values in the results of PTX that uses only the instructions below."""
    registers = {f"${number}": 0 for number in range(num_results)} | {f"${num_results}": word}
    registers |= {f"${num_results + 1 + number}": zeros for number in range(num_results)}
    body = text.removeprefix("{ .reg .b32 w, a, c, k; ").removesuffix(" }")
    for line in filter(None, map(str.strip, body.split(";"))):
        name, rest = line.split(" ", 1)
        into, *operands = (each.strip() for each in rest.split(","))
        values = [registers[each] if each in registers else int(each, 0) for each in operands]
        registers[into] = INSTRUCTIONS[name](*values) & 0xFFFFFFFF
    results = np.asarray([registers[f"${number}"] for number in range(num_results)], np.uint32)
    return [float(each) for each in results.view(ml_dtypes.bfloat16)]


def select_bytes(first: int, second: int, selector: int) -> int:
    all_bytes = (first | second << 32).to_bytes(8, "little")
    return int.from_bytes(bytes(all_bytes[selector >> 4 * number & 7] for number in range(4)), "little")


def multiply_and_add(first: int, second: int, third: int) -> int:
    x, y, z = (np.asarray([word], np.uint32).view(ml_dtypes.bfloat16) for word in (first, second, third))
    result = x.astype(np.float64) * y.astype(np.float64) + z.astype(np.float64)
    return int(result.astype(ml_dtypes.bfloat16).view(np.uint32)[0])


def combine(first: int, second: int, third: int, table: int) -> int:
    assert table == 0xEA
    return first & second | third


INSTRUCTIONS = {
    "mov.b32": lambda value: value,
    "cvt.u32.u16": lambda value: value & 0xFFFF,
    "and.b32": lambda first, second: first & second,
    "shr.b32": lambda value, count: value >> count,
    "shl.b32": lambda value, count: value << count,
    "lop3.b32": combine,
    "prmt.b32": select_bytes,
    "fma.rn.bf16x2": multiply_and_add,
}
