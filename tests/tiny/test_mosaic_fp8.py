"""FP8 in blocks by Mosaic GPU: interpreted, lowered without a GPU, and where it is chosen."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from jax.experimental.pallas import mosaic_gpu as plgpu

from levserve.model.backend import ExpertChoice, ExpertRule
from levserve.model.config import Activation, Routing
from levserve.model.fp8_rows import Fp8Rows, round_rows
from levserve.model.gpu import backend, fp8_activations, mosaic_fp8_plan
from levserve.model.gpu import hopper as hopper_gpus
from levserve.model.gpu.backend import ExpertKernels, GpuBackend
from levserve.model.gpu.expert_blocks import Blocks
from levserve.model.gpu.gate import Gate
from levserve.model.gpu.hopper import PROCESSORS, num_processors
from levserve.model.gpu.mosaic_experts import mix_fp8_blocks
from levserve.model.gpu.mosaic_fp8_plan import choose_pieces, serves_fp8
from levserve.model.gpu.mosaic_fp8_product import NUM_SLOTS, multiply_experts, multiply_in_blocks
from levserve.model.packed import Code, PackedMatrix, Scheme

BLOCKS = Scheme(Code.FP8, 128, 128, rounds_rows=True)
WHOLE_ROWS = Scheme(Code.FP8, rounds_rows=True)
FLOAT32, BFLOAT16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)
GATE = Gate(Activation.SILU, is_gated=True, limit=None, up_offset=0.0)
RULE = ExpertRule(128, 8, Routing(), is_gated=True, activation=Activation.SILU)
DENSE = {"qkv": (6144, 4096), "out": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
"""Llama-3.1-8B's matrices."""


def random_matrix(*shape: int) -> PackedMatrix:
    random = np.random.default_rng(sum(shape))
    arrays = {}
    for end, (of_part, dtype) in BLOCKS.array_shapes(shape).items():
        numbers = random.standard_normal(of_part) * 50 if not end else random.random(of_part) + 0.1
        arrays[end] = jnp.asarray(numbers / (1 if not end else 800), jnp.float32).astype(dtype)
    return PackedMatrix.from_arrays(arrays, BLOCKS, tuple(map(Axis, "eoi"[-len(shape) :], shape)))


def shape_of_matrix(*shape: int, scheme: Scheme = BLOCKS) -> PackedMatrix:
    """A matrix without numbers, to trace with."""
    arrays: Any = {end: jax.ShapeDtypeStruct(*part) for end, part in scheme.array_shapes(shape).items()}
    return PackedMatrix.from_arrays(arrays, scheme, tuple(map(Axis, "eoi"[-len(shape) :], shape)))


@pytest.mark.mosaic
@pytest.mark.parametrize(("pieces", "num_columns"), [(1, 384), (2, 512)])
def test_the_kernel_gives_the_product_of_rounded_rows(pieces: int, num_columns: int) -> None:
    """Two programs have several tiles each, and the last rows do not fill one."""
    matrix = random_matrix(num_columns, 384)
    random = np.random.default_rng(pieces)
    rows = random.standard_normal((200, 384)) * np.exp(random.standard_normal((200, 1)))
    x = round_rows(jnp.asarray(rows, jnp.float32), 128)
    got = multiply_in_blocks(
        matrix, x, dtype=FLOAT32, pieces=pieces, num_programs=2, interpret=plgpu.InterpretGPUParams()
    )
    wanted = np.asarray(x.widen(), np.float64) @ np.asarray(matrix.widen(FLOAT32).array, np.float64).T
    np.testing.assert_allclose(got, wanted, atol=1e-6 * np.abs(wanted).max())


@pytest.mark.mosaic
def test_the_kernel_gives_the_sum_of_the_chosen_experts() -> None:
    """Expert 0 has a tile of two blocks, experts 1 and 2 have one of one, and expert 3 has none."""
    num_tokens, embed, mlp, num_experts, padding = 80, 256, 128, 4, 3
    gate_up, down = random_matrix(num_experts, 2 * mlp, embed), random_matrix(num_experts, embed, mlp)
    random = np.random.default_rng(0)
    x = jnp.asarray(random.standard_normal((num_tokens, embed)), jnp.bfloat16)
    weights = random.random((num_tokens, 2), np.float32)
    experts = np.full((num_tokens, 2), [[0, 1]], np.int32)
    experts[50:, 1] = 2
    experts[:padding] = num_experts
    got = mix_fp8_blocks(
        x,
        ExpertChoice(jnp.asarray(experts), jnp.asarray(weights)),
        gate_up,
        down,
        gate=GATE,
        num_programs=2,
        interpret=plgpu.InterpretGPUParams(),
    )
    up_matrices, down_matrices = (np.asarray(each.widen(FLOAT32).array) for each in (gate_up, down))
    rounded, wanted = np.asarray(round_rows(x, 128).widen()), np.zeros((num_tokens, embed))
    for expert in range(num_experts):
        gate, up = np.split(rounded @ up_matrices[expert].T, 2, axis=1)
        hidden = round_rows(jnp.asarray(gate / (1 + np.exp(-gate)) * up, jnp.bfloat16), 128)
        share = (weights * (experts == expert)).sum(1)
        wanted += share[:, None] * (np.asarray(hidden.widen()) @ down_matrices[expert].T)
    np.testing.assert_allclose(got[padding:], wanted[padding:], atol=0.01 * np.abs(wanted).max())


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
@pytest.mark.parametrize("pieces", NUM_SLOTS)
def test_the_steps_that_are_copied_ahead_fit_into_shared_memory(pieces: int, dtype: jnp.dtype) -> None:
    """Which jax looks at when it lowers a kernel, and for that it needs no GPU."""
    multiply = functools.partial(multiply_in_blocks, dtype=dtype, pieces=pieces)
    x = Fp8Rows(
        jax.ShapeDtypeStruct((512, 4096), BLOCKS.code.dtype),  # type: ignore[arg-type]
        jax.ShapeDtypeStruct((32, 512), jnp.float32),  # type: ignore[arg-type]
    )
    jax.jit(multiply).trace(shape_of_matrix(4096, 4096), x).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("gate", [GATE, None], ids=["gate and up", "down"])
def test_so_they_do_for_experts(gate: Gate | None) -> None:
    room, num_blocks = 129, 640
    numbers = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((2, room), (2, room), (2,))]
    blocks = Blocks(*numbers, *[jax.ShapeDtypeStruct((num_blocks,), jnp.int32)] * 3)  # type: ignore[arg-type]
    x = Fp8Rows(
        jax.ShapeDtypeStruct((num_blocks * 64, 2048), BLOCKS.code.dtype),  # type: ignore[arg-type]
        jax.ShapeDtypeStruct((16, num_blocks * 64), jnp.float32),  # type: ignore[arg-type]
    )
    multiply = functools.partial(multiply_experts, gate=gate)
    traced = jax.jit(multiply).trace(shape_of_matrix(128, 1536, 2048), x, blocks)
    traced.lower(lowering_platforms=("cuda",))


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (backend, mosaic_fp8_plan):
        monkeypatch.setattr(module, "is_hopper", lambda: True)


@pytest.mark.usefixtures("hopper")
def test_tiles_are_as_large_as_keeps_all_processors_busy() -> None:
    pieces = {
        rows: [choose_pieces(rows, shape, BLOCKS) for shape in DENSE.values()]
        for rows in (64, 72, 256, 264, 512, 1024, 4096)
    }
    assert pieces[64] == [None, None, None, None], "Triton's kernel is faster"
    assert pieces[72] == pieces[256] == [None, None, 2, None]
    assert pieces[264] == [2, 1, 2, 1]
    assert pieces[512] == [2, 1, 1, 1]
    assert pieces[1024] == [1, 2, 2, 2] and pieces[4096] == [2, 2, 2, 2]


@pytest.mark.usefixtures("hopper")
def test_what_the_kernel_does_not_multiply_is_left_to_others() -> None:
    assert choose_pieces(512, (384, 1024), BLOCKS) == 1, "three blocks of columns"
    assert choose_pieces(510, (512, 1024), BLOCKS) is None, "rows that TMA does not copy"
    assert choose_pieces(512, (512, 1000), BLOCKS) is None
    assert choose_pieces(512, (320, 1024), BLOCKS) is None
    for other in (WHOLE_ROWS, replace(BLOCKS, rounds_rows=False), replace(BLOCKS, rows=1)):
        assert choose_pieces(512, (512, 1024), other) is None


def test_it_is_for_hopper_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mosaic_fp8_plan, "is_hopper", lambda: False)
    assert choose_pieces(4096, DENSE["gate_up"], BLOCKS) is None


def watch(monkeypatch: pytest.MonkeyPatch, module: ModuleType, *names: str) -> list[str]:
    """The names of these functions as they are called; the results are zeros."""
    called: list[str] = []

    def stand_in(name: str, first: Any, second: Any, *_: object, **__: object) -> jax.Array:
        called.append(name)
        if isinstance(first, PackedMatrix):
            return jnp.zeros((len(getattr(second, "codes", second)), first.axes[0].size))
        return jnp.zeros(first.shape, jnp.float32)

    for name in names:
        monkeypatch.setattr(module, name, functools.partial(stand_in, name))
    return called


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("scheme", "num_rows", "wanted"),
    [
        (BLOCKS, 256, "multiply_fp8"),
        (BLOCKS, 264, "multiply_in_blocks"),
        (WHOLE_ROWS, 128, "multiply_fp8"),
        (WHOLE_ROWS, 129, "multiply_whole_rows"),
    ],
)
def test_products_are_computed_by_what_is_fastest_for_their_rows(
    scheme: Scheme, num_rows: int, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = "multiply_fp8", "multiply_in_blocks", "multiply_whole_rows"
    called = watch(monkeypatch, fp8_activations, *names)
    matrix = shape_of_matrix(512, 1024, scheme=scheme)

    def multiply(matrix: PackedMatrix, x: jax.Array) -> jax.Array:
        return GpuBackend().packed_product(matrix, BFLOAT16)(x, None)

    jax.eval_shape(multiply, matrix, jax.ShapeDtypeStruct((num_rows, 1024), BFLOAT16))
    assert called == [wanted]


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("num_tokens", "kernels", "wanted"),
    [
        (511, ExpertKernels.AUTO, "mix_grouped"),
        (512, ExpertKernels.AUTO, "mix_fp8_blocks"),
        (4096, ExpertKernels.TRITON, "mix_grouped"),
    ],
)
def test_experts_with_many_tokens_are_for_mosaic(
    num_tokens: int, kernels: ExpertKernels, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = watch(monkeypatch, backend, "mix_grouped", "mix_fp8_blocks")

    def mix(x: jax.Array, scores: jax.Array, is_real: jax.Array, *matrices: PackedMatrix) -> jax.Array:
        experts: Any = SimpleNamespace(
            rule=RULE, matrices=matrices, dtype=BFLOAT16, biases=None, correction=None
        )
        return GpuBackend(expert_kernels=kernels).mix_experts(x, scores, is_real, experts)

    types = (BFLOAT16, FLOAT32, jnp.bool_)
    shapes = (num_tokens, 512), (num_tokens, 128), (num_tokens,)
    given = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, types, strict=True)]
    jax.eval_shape(mix, *given, shape_of_matrix(128, 768, 512), shape_of_matrix(128, 512, 384))
    assert called == [wanted]


def test_only_gated_experts_in_blocks_that_divide_their_sizes_are_served() -> None:
    def is_served(rule: ExpertRule = RULE, embed: int = 512, mlp: int = 384, **changes: Any) -> bool:
        scheme = replace(BLOCKS, **changes)
        matrices = (
            shape_of_matrix(128, 2 * mlp, embed, scheme=scheme),
            shape_of_matrix(128, embed, mlp, scheme=scheme),
        )
        return serves_fp8(4096, rule, *matrices)

    assert is_served()
    assert not is_served(mlp=320) and not is_served(embed=384)
    assert not is_served(rounds_rows=False) and not is_served(columns=None, rows=1)
    assert not is_served(replace(RULE, is_gated=False))
    assert not is_served(replace(RULE, activation=Activation.GELU))


def test_there_is_a_program_for_each_processor_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program more than there are processors would run when the others have ended."""
    assert num_processors() == PROCESSORS, "a CPU does not say"
    pcie = SimpleNamespace(device_kind="NVIDIA H100 PCIe", core_count=114)
    monkeypatch.setattr(hopper_gpus.jax, "devices", lambda: [pcie])
    assert num_processors() == 114
    assert choose_pieces(1024, DENSE["qkv"], BLOCKS) == 2, "with 132 processors, one"
