"""The GPU's kernel in PTX for matrices of four and eight bits, run here instruction by instruction."""

from __future__ import annotations

import logging
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from levserve.model.gpu import backend as gpu
from levserve.model.gpu.fragment_plan import MAX_ROWS, FragmentTiling, Problem, choose_fragments, takes
from levserve.model.gpu.fragment_product import runs_here, write_kernel
from levserve.model.gpu.ring_kernel import in_parts
from levserve.model.gpu.wide_kernel import in_fragments
from levserve.model.lanes import from_lanes, to_lanes
from levserve.model.packed import OFFSET, SCALE, ZERO, Code, PackedMatrix, Scheme
from tests import ptx

BFLOAT16, FLOAT16, FLOAT32 = (jnp.dtype(each) for each in (jnp.bfloat16, jnp.float16, jnp.float32))
AWQ = Scheme(Code.UINT4, 128, has_zeros=True, scale=FLOAT16, in_lanes=True)
SCHEMES = {
    "awq": AWQ,
    "awq in groups of 64": Scheme(Code.UINT4, 64, has_zeros=True, scale=BFLOAT16, in_lanes=True),
    "gptq in groups of 256": Scheme(Code.UINT4, 256, zero=8, scale=FLOAT16, in_lanes=True),
    "four bits by row": Scheme(Code.UINT4, zero=8, in_lanes=True),
    "four bits in float32, with offsets": Scheme(
        Code.UINT4, 128, has_offsets=True, scale=FLOAT32, in_lanes=True
    ),
    "q4_0": Scheme(Code.UINT4, 32, zero=8, scale=FLOAT16, in_lanes=True),
    "q4_k": Scheme(Code.UINT4, 32, has_offsets=True, scale=FLOAT16, in_lanes=True),
    "q8_0": Scheme(Code.INT8, 32, scale=FLOAT16, in_lanes=True),
    "q6_k": Scheme(Code.INT8, 16, scale=FLOAT16, in_lanes=True),
    "q5_k": Scheme(Code.INT8, 32, has_offsets=True, scale=FLOAT16, in_lanes=True),
    "q4_k joined to q6_k": Scheme(Code.INT8, 16, has_offsets=True, scale=FLOAT16, in_lanes=True),
    "int8 in groups of 128": Scheme(Code.INT8, 128, scale=BFLOAT16, in_lanes=True),
    "int8 by row": Scheme(Code.INT8, in_lanes=True),
}
FEW = FragmentTiling(2, 1, 1, 2, 2, is_staged=False)
STAGED = FragmentTiling(2, 2, 4, 1, 1, is_staged=True)
WIDE = FragmentTiling(2, 2, 4, 1, 1, is_staged=True, is_wide=True)
RING = replace(WIDE, has_ring=True)

# Outside jit, jax would compile every operation separately.
widen_matrix = jax.jit(lambda matrix, dtype: matrix.widen(dtype).array, static_argnums=1)
put_in_fragments = jax.jit(in_fragments, static_argnums=1)
put_in_parts = jax.jit(in_parts, static_argnums=(1, 2))


def random_parts(scheme: Scheme, shape: tuple[int, int]) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    shapes = scheme.array_shapes(shape)
    blocks, dtype = shapes[SCALE]
    codes = random.integers(0, 256, shapes[""][0]).astype(np.uint8).view(scheme.code.dtype)
    parts = {"": codes, SCALE: random.uniform(0.5, 1.5, blocks).astype(dtype)}
    if scheme.has_zeros:
        parts[ZERO] = random.integers(0, 17, blocks).astype(np.uint8)
    if scheme.has_offsets:
        parts[OFFSET] = random.normal(size=blocks).astype(dtype)
    return parts


def check_product(scheme: Scheme, rows: int, tiling: FragmentTiling, shape: tuple[int, int]) -> None:
    """Checks that nothing but x is rounded; x has all rows that the kernel is given, including padding."""
    parts, x = random_parts(scheme, shape), random_rows(rows, tiling, shape)
    wanted = x.astype(np.float64) @ widen(parts, scheme, shape, FLOAT32).T
    np.testing.assert_allclose(
        run_kernel(parts, scheme, x, tiling, shape), wanted, atol=2e-6 * np.abs(wanted).max()
    )


def random_rows(rows: int, tiling: FragmentTiling, shape: tuple[int, int]) -> np.ndarray:
    padded = -(-rows // tiling.rows) * tiling.rows if tiling.is_staged else rows
    return np.random.default_rng(1).normal(size=(padded, shape[1])).astype(BFLOAT16)


def run_kernel(
    parts: dict[str, np.ndarray],
    scheme: Scheme,
    x: np.ndarray,
    tiling: FragmentTiling,
    shape: tuple[int, int],
    left_out: str = "",
) -> np.ndarray:
    out = np.full((tiling.splits, len(x), shape[0]), np.nan, np.float32)
    given = [parts[end] for end in ("", SCALE, ZERO, OFFSET) if end in parts]
    grid = (-(-len(x) // tiling.rows), shape[0] // tiling.columns, tiling.splits)
    kernel = write_kernel(Problem(len(x), *shape, scheme), tiling)
    kernel = kernel._replace(text=re.sub(left_out, "", kernel.text)) if left_out else kernel
    if tiling.has_ring:
        x = np.asarray(put_in_parts(x, scheme.code.is_nibble, tiling.rows))
    elif tiling.is_wide:
        x = np.asarray(put_in_fragments(x, scheme.code.is_nibble))
    ptx.run(kernel, [x, *given], out, grid, tiling.num_warps)
    return out.sum(0)


def widen(
    parts: dict[str, np.ndarray], scheme: Scheme, shape: tuple[int, int], dtype: jnp.dtype
) -> np.ndarray:
    axes = (Axis("out", shape[0]), Axis("in", shape[1]))
    matrix = PackedMatrix.from_arrays({end: jnp.asarray(part) for end, part in parts.items()}, scheme, axes)
    return np.asarray(widen_matrix(matrix, dtype), np.float64)


def round_scales(parts: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Scales and offsets rounded to bfloat16."""
    return {
        end: part.astype(BFLOAT16).astype(part.dtype) if end in (SCALE, OFFSET) else part
        for end, part in parts.items()
    }


def check_wide(scheme: Scheme, rows: int, tiling: FragmentTiling, shape: tuple[int, int]) -> None:
    """Weights are rounded to bfloat16 with their scales, unless a whole row shares one: so the error is
    about that of a widened matrix."""
    parts, x = random_parts(scheme, shape), random_rows(rows, tiling, shape)
    found = run_kernel(parts, scheme, x, tiling, shape)
    if scheme.columns is None:
        numbers = widen(parts, scheme, shape, FLOAT32)
    else:
        numbers = widen(round_scales(parts), scheme, shape, FLOAT32).astype(BFLOAT16).astype(np.float64)
    wanted = x.astype(np.float64) @ numbers.T
    np.testing.assert_allclose(found, wanted, atol=2e-6 * np.abs(wanted).max())
    exact = x.astype(np.float64) @ widen(parts, scheme, shape, FLOAT32).T
    of_widened = x.astype(np.float64) @ widen(parts, scheme, shape, BFLOAT16).T
    assert np.linalg.norm(found - exact) < 1.6 * np.linalg.norm(of_widened - exact)


@pytest.mark.parametrize("name", SCHEMES)
def test_the_kernel_gives_the_product_of_the_numbers(name: str) -> None:
    """With warps and programs that share sums."""
    check_product(SCHEMES[name], 2, FEW, (32, 512))


@pytest.mark.parametrize(
    ("name", "rows", "tiling", "num_inputs"),
    [
        ("awq", 16, STAGED, 512),
        ("q4_k", 30, FragmentTiling(2, 4, 4, 1, 2, is_staged=True), 512),
        ("q8_0", 16, STAGED, 256),
        ("q6_k", 24, FragmentTiling(2, 3, 4, 1, 1, is_staged=True), 256),
        ("awq", 13, FragmentTiling(4, 2, 2, 1, 1, is_staged=False), 128),
        ("awq", 16, FragmentTiling(2, 2, 1, 4, 1, is_staged=False, max_registers=128), 640),
        ("awq", 5, FragmentTiling(4, 1, 2, 4, 1, is_staged=False), 384),
    ],
)
def test_it_does_for_every_way_of_cutting_it(
    name: str, rows: int, tiling: FragmentTiling, num_inputs: int
) -> None:
    """From shared memory, with tiles of several sizes, rows that fill no tile, and warps without inputs."""
    check_product(SCHEMES[name], rows, tiling, (128, num_inputs))


@pytest.mark.parametrize("name", SCHEMES)
def test_the_kernel_of_many_rows_gives_the_product_of_the_numbers(name: str) -> None:
    check_wide(SCHEMES[name], 16, WIDE, (128, 512))


@pytest.mark.parametrize(
    ("name", "rows", "tiling", "num_inputs"),
    [
        ("awq", 37, replace(WIDE, n_tiles=5), 128),
        ("q4_k", 16, replace(WIDE, splits=2), 512),
        ("q8_0", 16, replace(WIDE, n_tiles=1), 64),
        ("q6_k", 40, replace(WIDE, n_tiles=3, splits=2), 384),
        ("awq", 128, replace(WIDE, n_tiles=16), 384),
        ("q4_0", 8, replace(WIDE, n_tiles=1, warps_m=8), 256),
    ],
)
def test_so_does_every_way_of_cutting_it(
    name: str, rows: int, tiling: FragmentTiling, num_inputs: int
) -> None:
    """With tiles of several sizes, rows that fill no tile, a single step, and programs that share sums."""
    check_wide(SCHEMES[name], rows, tiling, (tiling.columns, num_inputs))


@pytest.mark.parametrize(
    ("name", "rows", "tiling", "num_inputs"),
    [
        ("awq", 40, replace(RING, n_tiles=5), 1280),
        ("awq", 64, replace(RING, n_tiles=8, warps_m=8), 768),
        ("awq", 8, replace(RING, n_tiles=1, warps_m=8, splits=2), 256),
        ("awq", 30, replace(RING, splits=2), 1280),
        ("gptq in groups of 256", 16, RING, 1536),
        ("four bits by row", 16, RING, 512),
        ("four bits in float32, with offsets", 16, RING, 256),
    ],
)
def test_and_the_kernel_that_copies_codes_ahead(
    name: str, rows: int, tiling: FragmentTiling, num_inputs: int
) -> None:
    """With more and fewer units than it copies ahead, two groups of warps, and several tiles of rows."""
    check_wide(SCHEMES[name], rows, tiling, (tiling.columns, num_inputs))


@pytest.mark.parametrize(
    ("left_out", "noticed"),
    [
        (r"WAIT_\d+: mbarrier\.try_wait[^;]*; @!p_\d+ bra WAIT_\d+;", "copied"),
        (r"@p_\d+ mbarrier\.arrive\.shared::cta\.b64 [^;]*;", "wait for one another"),
        (r"wgmma\.fence\.sync\.aligned;", "a fence"),
    ],
)
def test_if_it_did_not_wait_for_rows_that_would_be_noticed(left_out: str, noticed: str) -> None:
    """The kernel waits for parts of `x` to arrive, and for all warps to finish with those it overwrites."""
    shape = (128, 1024)
    x, parts = random_rows(16, RING, shape), random_parts(AWQ, shape)
    with pytest.raises(AssertionError, match=noticed):
        run_kernel(parts, AWQ, x, RING, shape, left_out)


def test_nor_would_its_numbers_be_right_if_it_did_not_wait_for_codes() -> None:
    shape = (128, 1024)
    x, parts = random_rows(16, RING, shape), random_parts(AWQ, shape)
    right = run_kernel(parts, AWQ, x, RING, shape)
    wrong = run_kernel(parts, AWQ, x, RING, shape, r"cp\.async\.wait_group \d+;")
    assert not np.allclose(wrong, right)


def test_rows_in_parts_have_eight_inputs_of_each_row_after_another() -> None:
    rows = np.arange(8 * 256, dtype=np.float32).reshape(8, 256)
    tiles = np.asarray(put_in_parts(rows, True, 4)).reshape(2, 32, 4, 8)
    np.testing.assert_array_equal(tiles.swapaxes(1, 2).reshape(8, 256), put_in_fragments(rows, True))


@pytest.mark.parametrize("is_nibble", [False, True])
def test_rows_in_fragments_have_the_inputs_of_each_instruction_side_by_side(is_nibble: bool) -> None:
    """Each of four threads has a word's inputs one after another: two pairs for each instruction."""
    row = np.asarray(put_in_fragments(np.arange(256, dtype=np.float32)[None], is_nibble))[0]
    instructions = row.reshape(-1, 16).astype(int)
    assert sorted(row) == list(range(256))
    per_word = 8 if is_nibble else 4
    for number, inputs in enumerate(instructions):
        word, half = divmod(number, per_word // 4)
        for thread in range(4):
            first = (4 * word + thread) * per_word + 4 * half
            low, high = inputs[2 * thread : 2 * thread + 2], inputs[8 + 2 * thread : 10 + 2 * thread]
            assert [*low, *high] == list(range(first, first + 4))


@pytest.mark.parametrize("is_nibble", [False, True])
def test_codes_in_lanes_can_be_put_back_in_order(is_nibble: bool) -> None:
    codes = np.random.default_rng(0).integers(0, 16 if is_nibble else 256, (3, 2, 256)).astype(np.uint8)
    lanes = np.empty((3, 2, 128 if is_nibble else 256), np.uint8)
    to_lanes(codes, is_nibble, lanes)
    np.testing.assert_array_equal(jax.jit(from_lanes, static_argnums=1)(lanes, is_nibble), codes)
    assert is_nibble or not np.array_equal(lanes, codes)


def test_the_plan_keeps_a_card_busy_and_leaves_many_rows_to_xla() -> None:
    few, some, more, many = (plan(rows, (4096, 4096)) for rows in (2, 16, 32, 64))
    assert [each.splits for each in (few, some, more, many)] == [4, 4, 8, 8]
    assert [each.is_staged for each in (few, some, more, many)] == [False, False, True, True]
    assert [each.is_wide for each in (few, some, more, many)] == [False, False, False, True]
    assert plan(2, (28672, 4096)).splits == 1, "there are enough programs"
    assert choose_fragments(MAX_ROWS + 1, (4096, 4096), AWQ, is_hopper=True) is None


def test_programs_for_up_to_16_rows_of_four_bits_in_long_groups_have_few_registers() -> None:
    lean = plan(16, (4096, 14336))
    assert lean.max_registers == 128 and lean.splits * 4096 // lean.columns == 4 * 128
    assert plan(8, (4096, 4096)).max_registers is None and plan(17, (4096, 4096)).max_registers is None
    for name in ("q4_k", "q8_0"):
        tiling = choose_fragments(16, (4096, 4096), SCHEMES[name], is_hopper=True)
        assert tiling is not None and tiling.max_registers is None


def test_up_to_64_rows_of_four_bits_in_long_groups_have_codes_copied_ahead() -> None:
    shapes = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
    tilings = [plan(64, shape) for shape in shapes]
    assert all(each.has_ring and each.warps_m == 8 for each in tilings)
    assert [each.splits for each in tilings] == [4, 8, 1, 8], "one program for each processor"
    assert plan(33, (4096, 4096)).has_ring and not plan(32, (4096, 4096)).has_ring
    assert not plan(65, (4096, 4096)).has_ring
    narrow = plan(64, (4096 + 128, 4096))
    assert narrow.has_ring and narrow.warps_m == 4
    assert not plan(64, (4096 + 64, 4096)).has_ring
    for name in ("awq in groups of 64", "four bits by row", "q4_k", "int8 in groups of 128"):
        tiling = choose_fragments(64, (4096, 4096), SCHEMES[name], is_hopper=True)
        assert tiling is not None and tiling.is_wide and not tiling.has_ring


def test_rows_are_shared_out_evenly_among_programs_of_four_warps() -> None:
    assert [plan(rows, (4096, 4096)).rows for rows in (33, 128, 129, 256)] == [40, 128, 72, 128]


@pytest.mark.parametrize(("num_outputs", "is_hopper"), [(4096, False), (4096 + 64, True)])
def test_four_warps_multiply_together_only_on_hopper_and_if_all_have_outputs(
    num_outputs: int, is_hopper: bool
) -> None:
    tiling = plan(256, (num_outputs, 4096), is_hopper=is_hopper)
    assert not tiling.is_wide and tiling.is_staged and tiling.rows == 64
    assert num_outputs % tiling.columns == 0


def plan(rows: int, shape: tuple[int, int], *, is_hopper: bool = True) -> FragmentTiling:
    tiling = choose_fragments(rows, shape, AWQ, is_hopper=is_hopper)
    assert tiling is not None
    return tiling


@pytest.mark.parametrize(
    ("shape", "scheme"),
    [
        ((48, 256), AWQ),
        ((64, 192), AWQ),
        ((8, 64, 256), AWQ),
        ((64, 256), Scheme(Code.UINT4, 16, zero=8)),
        ((64, 256), Scheme(Code.INT8, 32, zero=1)),
        ((64, 256), Scheme(Code.INT8, has_offsets=True)),
        ((64, 256), Scheme(Code.E2M1, 32, scale=jnp.dtype(jnp.uint8))),
        ((64, 256), Scheme(Code.FP8, 128, 128)),
    ],
)
def test_what_the_kernel_cannot_multiply_with_is_left_as_it_is(
    shape: tuple[int, ...], scheme: Scheme, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "runs_here", lambda: True)
    assert not takes(shape, scheme)
    stored = scheme.as_stored()
    # Triton's kernel has no offsets, so there is none for such a matrix.
    assert gpu.GpuBackend().arrange(stored, shape, BFLOAT16) == (None if scheme.has_offsets else stored)


def test_matrices_are_kept_in_lanes_only_where_the_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, stored = gpu.GpuBackend(), AWQ.as_stored()
    monkeypatch.setattr(gpu, "runs_here", lambda: True)
    assert backend.arrange(stored, (64, 256), BFLOAT16) == AWQ
    assert backend.arrange(stored, (64, 256), FLOAT32) == stored, "it multiplies in bfloat16"
    monkeypatch.setattr(gpu, "runs_here", lambda: False)
    assert backend.arrange(stored, (64, 256), BFLOAT16) == stored


def test_an_xla_that_does_not_take_the_kernel_is_noticed_at_the_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """XLA compiles for a CPU here, which has no such call."""
    runs_here.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert not runs_here()
        assert not runs_here()
    (record,) = caplog.records
    assert "cannot be used here (" in record.message
