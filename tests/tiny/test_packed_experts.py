"""Experts in their checkpoint's bits: the GPU's kernels, interpreted, give what widened matrices give."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levserve.model.backend import Backend, ExpertChoice, ExpertMatrix, ExpertRule
from levserve.model.config import Activation, ModelConfig, Routing
from levserve.model.decoder import Decoder
from levserve.model.fp8_rows import round_rows
from levserve.model.gpu import backend as gpu
from levserve.model.gpu import expert_plan
from levserve.model.gpu.backend import GpuBackend
from levserve.model.gpu.expert_plan import Plan, Tiling, choose_plan
from levserve.model.gpu.grouped_experts import mix_grouped
from levserve.model.packed import OFFSET, SCALE, Code, Kept, PackedMatrix, Scheme
from levserve.model.parameter_shapes import parameter_shapes
from levserve.model.xla import XlaBackend
from tests.packed_matrices import random_matrix

BFLOAT16, FLOAT16, UINT8 = (jnp.dtype(each) for each in (jnp.bfloat16, jnp.float16, jnp.uint8))
SCHEMES = {
    "fp8 in blocks": Scheme(Code.FP8, 128, 128),
    "fp8 in blocks, activations too": Scheme(Code.FP8, 128, 128, rounds_rows=True),
    "fp8 by row": Scheme(Code.FP8),
    "fp8 by row, activations too": Scheme(Code.FP8, rounds_rows=True),
    "awq": Scheme(Code.UINT4, 64, has_zeros=True, scale=FLOAT16),
    "q4_0": Scheme(Code.UINT4, 32, zero=8, scale=FLOAT16),
    "q4_k": Scheme(Code.UINT4, 32, has_offsets=True, scale=FLOAT16),
    "q8_0": Scheme(Code.INT8, 32, scale=FLOAT16),
    "q6_k": Scheme(Code.INT8, 16, scale=FLOAT16),
    "mxfp4": Scheme(Code.E2M1, 32, scale=UINT8),
}
EXPERTS, PER_TOKEN, EMBED, MLP = 6, 2, 256, 128
RULE = ExpertRule(
    *(EXPERTS, PER_TOKEN, Routing()),
    is_gated=True,
    activation=Activation.GELU_QUICK,
    gate_limit=7.0,
    up_offset=1.0,
)


def small(scheme: Scheme, shape: tuple[int, int, int]) -> PackedMatrix:
    """Values of about 0.05, so that hidden values are of the size of one."""
    matrix = random_matrix(scheme, shape)
    factor = 0.05 / float(jnp.std(widen(matrix)))
    if matrix.scale.dtype == jnp.uint8:
        return replace(matrix, scale=(matrix.scale + round(np.log2(factor))).astype(jnp.uint8))
    scaled = [
        None if array is None else (array.astype(jnp.float32) * factor).astype(array.dtype)
        for array in (matrix.scale, matrix.offset)
    ]
    return replace(matrix, scale=scaled[0], offset=scaled[1])


widen = jax.jit(lambda matrix: matrix.widen(jnp.dtype(jnp.float32)).array)


def numbers_of(matrix: ExpertMatrix) -> np.ndarray:
    found = widen(matrix) if isinstance(matrix, PackedMatrix) else matrix
    return np.asarray(found).astype(np.float64)


def as_asked(rows: np.ndarray, matrix: ExpertMatrix) -> np.ndarray:
    rounded = jnp.asarray(rows.astype(BFLOAT16))
    if isinstance(matrix, PackedMatrix) and matrix.scheme.rounds_rows:
        rounded = round_rows(rounded[None], matrix.scheme.columns).widen()[0]
    return np.asarray(rounded).astype(np.float64)


def plainly(
    x: np.ndarray, choice: ExpertChoice, gate_up: ExpertMatrix, down: ExpertMatrix, biases: list[np.ndarray]
) -> np.ndarray:
    """A loop over tokens and their experts; rows are rounded where the kernels round them."""
    of_gate_up, of_down = numbers_of(gate_up), numbers_of(down)
    total = np.zeros(x.shape)
    for token, (numbers, weights) in enumerate(zip(np.asarray(choice.experts), np.asarray(choice.weights))):
        for number, weight in zip(numbers, weights):
            if number == EXPERTS:
                continue
            wide = as_asked(x[token], gate_up) @ of_gate_up[number].T + biases[0][number]
            gate, up = wide[:MLP].clip(None, 7.0), wide[MLP:].clip(-7.0, 7.0)
            hidden = as_asked(gate / (1 + np.exp(-1.702 * gate)) * (up + 1), down)
            total[token] += weight * (hidden @ of_down[number].T + biases[1][number])
    return total


def make_choice(num_tokens: int) -> ExpertChoice:
    """Experts by chance, with a token of padding and an expert that many tokens have."""
    rng = np.random.default_rng(num_tokens)
    experts = np.array([rng.permutation(EXPERTS)[:PER_TOKEN] for _ in range(num_tokens)], np.int32)
    experts[: num_tokens // 2] = [4, 1]
    experts[-1] = EXPERTS
    weights = rng.random(experts.shape).astype(np.float32)
    return ExpertChoice(jnp.asarray(experts), jnp.asarray(weights))


def check(num_tokens: int, gate_up: ExpertMatrix, down: ExpertMatrix, plan: Plan | None = None) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((num_tokens, EMBED)).astype(BFLOAT16)
    biases = [rng.standard_normal((EXPERTS, size)).astype(np.float32) for size in (2 * MLP, EMBED)]
    choice = make_choice(num_tokens)
    plan = plan or choose_plan(num_tokens, RULE, gate_up, down, BFLOAT16)
    assert plan is not None
    got = mix_grouped(
        *(jnp.asarray(x), choice, gate_up, down),
        (jnp.asarray(biases[0]), jnp.asarray(biases[1])),
        plan=plan,
        interpret=True,
    )
    wanted = plainly(x.astype(np.float32), choice, gate_up, down, biases)[:-1]
    # A hidden value near the middle of two bfloat16 numbers may be rounded to the other one.
    np.testing.assert_allclose(np.asarray(got)[:-1], wanted, atol=4e-3 * np.abs(wanted).max())
    assert np.abs(np.asarray(got)[:-1] - wanted).mean() < 2e-4 * np.abs(wanted).max()


@pytest.mark.parametrize(
    ("name", "num_tokens"),
    [
        *((name, 40) for name in SCHEMES),
        ("awq", 5),
        ("q4_k", 5),
        ("fp8 by row", 5),
        ("fp8 in blocks, activations too", 5),
        ("fp8 by row, activations too", 5),
    ],
)
def test_packed_experts_compute_what_their_numbers_give(name: str, num_tokens: int) -> None:
    """With up to 16 tokens a program looks for its pairs itself; for more they are in tiles."""
    scheme = SCHEMES[name]
    check(num_tokens, small(scheme, (EXPERTS, 2 * MLP, EMBED)), small(scheme, (EXPERTS, EMBED, MLP)))


def test_without_products_of_fp8_in_jax_rounded_rows_are_multiplied_by_widened_matrices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheme = SCHEMES["fp8 in blocks, activations too"]
    matrices = [small(scheme, shape) for shape in ((EXPERTS, 2 * MLP, EMBED), (EXPERTS, EMBED, MLP))]
    x = jnp.asarray(np.random.default_rng(0).standard_normal((20, EMBED)).astype(BFLOAT16))
    results = []
    for has_products in (True, False):
        monkeypatch.setattr(expert_plan, "has_dot_fp8", lambda has_products=has_products: has_products)
        plan = choose_plan(20, RULE, *matrices, BFLOAT16)
        assert plan is not None and plan.gate_up.multiplies_fp8 == plan.down.multiplies_fp8 == has_products
        got = mix_grouped(x, make_choice(20), *matrices, plan=plan, interpret=True)
        results.append(np.asarray(got)[:-1])
    assert np.linalg.norm(results[0] - results[1]) < 0.02 * np.linalg.norm(results[0])


def test_one_matrix_may_be_packed_and_the_other_not() -> None:
    packed = small(SCHEMES["q4_k"], (EXPERTS, 2 * MLP, EMBED))
    rng = np.random.default_rng(1)
    plain = jnp.asarray((rng.standard_normal((EXPERTS, EMBED, MLP)) / 20).astype(BFLOAT16))
    check(20, packed, plain)


def test_half_empty_tiles_give_the_same() -> None:
    tiling = Tiling(64, 32, 4, 2, is_matrix_first=True)
    plan = Plan(32, tiling, tiling, halvings=1, activation=RULE.activation, gate_limit=7.0, up_offset=1.0)
    scheme = SCHEMES["awq"]
    check(50, *(small(scheme, shape) for shape in ((EXPERTS, 2 * MLP, EMBED), (EXPERTS, EMBED, MLP))), plan)


@pytest.mark.parametrize(
    ("shape", "scheme", "is_taken"),
    [
        ((8, 1536, 2048), SCHEMES["q4_k"], True),
        ((32, 5760, 2880), SCHEMES["mxfp4"], True),
        ((128, 2816, 4096), SCHEMES["awq"], True),
        ((8, 1536, 2048), replace(SCHEMES["awq"], in_lanes=True), False),
        ((8, 24, 2048), SCHEMES["q4_k"], False),
        ((8, 48, 2048), SCHEMES["q4_k"], False),
        ((8, 64, 72), SCHEMES["q8_0"], False),
        ((8, 64, 48), SCHEMES["q4_0"], False),
        ((256, 1 << 16, 1 << 10), SCHEMES["q8_0"], False),
    ],
)
def test_experts_that_no_kernel_reads_are_widened(
    shape: tuple[int, int, int], scheme: Scheme, is_taken: bool
) -> None:
    found = GpuBackend().arrange(scheme, shape, BFLOAT16)
    assert found == (scheme if is_taken else None)


@pytest.mark.parametrize("rows", [3, 90])
def test_the_backend_mixes_packed_experts_as_xla_does(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows have matrices with small groups widened in memory, so no kernel sees packed ones."""
    config = ModelConfig(
        *(64, EMBED, MLP, 1, 4, 2, 64, 1e-5, 1e4, 128, False), num_experts=3, experts_per_token=2
    )
    shapes = parameter_shapes(config)
    schemes = {f"layers.0.experts_{part}": SCHEMES["q4_k"] for part in ("gate_up", "down")}
    rng = np.random.default_rng(rows)
    arrays: dict[str, jax.Array] = {}
    for name, shape in shapes.items():
        if name in schemes:
            matrix = small(schemes[name], shape)
            arrays |= {name: matrix.codes, name + SCALE: matrix.scale, name + OFFSET: matrix.offset}
        else:
            arrays[name] = jnp.asarray(rng.standard_normal(shape) / 8, BFLOAT16)
    kept = Kept(tuple(schemes.items()), BFLOAT16)
    x = hax.named(jnp.asarray(rng.standard_normal((rows, 1, EMBED)), jnp.float32), ("row", "chunk", "embed"))
    seen: list[ExpertMatrix] = []

    def mix_and_note(x: jax.Array, choice: ExpertChoice, *matrices: ExpertMatrix, **rest: Any) -> jax.Array:
        seen.extend(matrices[:2])
        return mix_grouped(x, choice, *matrices, **rest)

    def mix(backend: Backend) -> np.ndarray:
        layer = Decoder.from_arrays(config, arrays, quantization=kept, backend=backend).layers[0].mlp
        return np.asarray(jax.jit(lambda x: layer(x, jnp.ones((rows, 1), bool)).array)(x))

    monkeypatch.setattr(gpu, "mix_grouped", mix_and_note)
    got, wanted = mix(GpuBackend(interpret=True)), mix(XlaBackend("gpu"))
    np.testing.assert_allclose(got, wanted, atol=0.02 * np.abs(wanted).max())
    assert [isinstance(matrix, PackedMatrix) for matrix in seen] == [rows == 3] * 2
    widened = 2 * 3 * MLP * EMBED * 3
    assert GpuBackend().scratch_bytes(config, schemes) == widened
    for never in (SCHEMES["awq"], Scheme(Code.FP8, 32, rounds_rows=True)):
        assert GpuBackend().scratch_bytes(config, dict.fromkeys(schemes, never)) == 0


@pytest.mark.parametrize("mlp", range(16, 129, 8))
def test_matrices_are_kept_packed_only_if_the_kernels_multiply_with_them(mlp: int) -> None:
    scheme = Scheme(Code.INT8, scale=FLOAT16)
    shapes = (EXPERTS, 2 * mlp, 64), (EXPERTS, 64, mlp)
    kept = [GpuBackend().arrange(scheme, shape, BFLOAT16) is not None for shape in shapes]
    matrices = [
        random_matrix(scheme, shape) if is_kept else jax.ShapeDtypeStruct(shape, BFLOAT16)
        for shape, is_kept in zip(shapes, kept)
    ]
    plans = [choose_plan(num_tokens, RULE, *matrices, BFLOAT16) for num_tokens in (4, 20, 40, 400)]
    assert any(kept) == all(plans)
