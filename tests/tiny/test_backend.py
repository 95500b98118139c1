"""The backend: chosen by what it can serve and what the operator says; all backends give the same answers."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levserve.jit.target import Target
from levserve.model import cache
from levserve.model.backend import AttentionShape, HeadNorms
from levserve.model.config import ModelConfig, Rope
from levserve.model.cpu.backend import CpuBackend, CpuTextBackend, fit_target
from levserve.model.decoder import Decoder
from levserve.model.gpu.backend import GpuBackend
from levserve.model.rotary import angles_at
from levserve.model.select import choose_backend, choose_text_backend
from levserve.model.xla import XLA_ON_CPU, XlaBackend
from levserve.weights.checkpoint import load_arrays, read_config
from tests.conftest import FAMILIES, GOLDEN
from tests.tiny.test_decoder import check, load, run_in_chunks

CONFIG = ModelConfig(100, 64, 64, 1, 2, 1, 64, 1e-5, 1e4, 128, True)
INT8 = jnp.dtype(jnp.int8)
FLOAT32 = jnp.dtype(jnp.float32)


@pytest.mark.parametrize(
    ("platform", "head_dim", "kind", "word"),
    [
        ("cpu", 64, CpuBackend, ""),
        ("cpu", 72, XlaBackend, "a head size of 72"),
        ("tpu", 64, XlaBackend, "no kernels for a tpu"),
        ("gpu", 64, GpuBackend, "NVIDIA"),
        ("gpu", 80, GpuBackend, "NVIDIA"),
        ("gpu", 512, XlaBackend, "a head size of 512"),
    ],
)
def test_a_backend_is_chosen_by_what_it_can_serve(
    platform: str, head_dim: int, kind: type, word: str
) -> None:
    config = replace(CONFIG, head_dim=head_dim)
    backend, reason = choose_backend(platform, config)
    assert type(backend) is kind and backend.platform == platform and word in reason
    plain, reason = choose_backend(platform, config, kernels="xla")
    assert plain == XlaBackend(platform) and "--kernels xla" in reason


def test_for_whole_texts_a_cpu_has_only_its_kernel_that_samples() -> None:
    backend = choose_text_backend("cpu", CONFIG)
    assert isinstance(backend, CpuTextBackend) and backend.samples_rows
    assert backend.describe() == "an LLVM kernel for sampling"
    assert choose_text_backend("cpu", CONFIG, kernels="xla") == XlaBackend("cpu")


@pytest.mark.parametrize(
    ("features", "has_products", "packs_int8"),
    [
        ("+avx512vnni,+amx-bf16,+amx-tile", True, True),
        ("+avx2,+avx512vnni", True, True),
        ("+avx2,+avxvnni", True, True),
        ("+neon,+dotprod", True, False),
        ("+avx2", False, False),
    ],
)
def test_a_cpu_does_what_its_instructions_are_best_at(
    features: str, has_products: bool, packs_int8: bool
) -> None:
    target = Target("x86_64-unknown-linux-gnu", "x86-64", features, 32)
    backend = fit_target(target)
    assert (backend.has_products, backend.packs_int8) == (has_products, packs_int8)


@pytest.mark.parametrize(
    ("chunk", "window", "has_norms"), [(1, None, True), (1, 9, False), (16, None, False), (16, 9, True)]
)
def test_every_backend_attends_alike(chunk: int, window: int | None, has_norms: bool) -> None:
    """Covers norms or sinks, rotation, scale, soft cap and the write to the pool; padding is written nowhere.

    One token and a chunk each run with and without a window, and with norms and with sinks, but not in all
    combinations: a program of four backends takes over a second to compile.
    """
    has_sinks = not has_norms
    rng = np.random.default_rng(chunk)
    rows, kv_heads, group, size, page_size = 3, 2, 3, 32, 16
    table = rng.permutation(12).reshape(rows, 4).astype(np.int32)
    starts = np.array([0, 20, 41])
    positions = starts[:, None] + np.arange(chunk)
    if chunk > 1:
        positions[1, -5:] = -1
    pool = rng.standard_normal((12, 2, kv_heads, page_size, size), np.float32)
    qkv = rng.standard_normal((rows * chunk, kv_heads * (group + 2), size), np.float32)
    weights = rng.uniform(0.5, 1.5, (2, size)).astype(np.float32)
    norms = HeadNorms(*weights) if has_norms else None
    shape = AttentionShape(kv_heads, 0.25, 1e-5, window, 3.0)
    sinks = rng.uniform(-2, 3, kv_heads * group).astype(np.float32) if has_sinks else None
    ends = np.array([chunk - 1, chunk - 6, 3], np.int32) if chunk > 1 else None
    backends = XLA_ON_CPU, CpuBackend(), GpuBackend(interpret=True), XlaBackend("gpu")

    @jax.jit  # one program: outside jit, jax would compile every operation separately
    def attend(*arrays: Any) -> list[tuple[jax.Array, jax.Array, jax.Array | None]]:
        qkv, pool, table, positions, norms, sinks, ends = arrays
        place = cache.place(table, positions, pool)
        angles = angles_at(place.positions, Rope(size, 1e4, None))
        made = []
        for backend in backends:
            given = qkv, pool, place, angles, norms
            mixed, written = backend.attend(*given, None, shape, sinks)
            at_ends = None
            if ends is not None and backend is not XLA_ON_CPU:
                at_ends, _ = backend.attend(*given, ends, shape, sinks)
            made.append((mixed, written, at_ends))
        return made

    made = attend(qkv, pool, table, positions.astype(np.int32), norms, sinks, ends)
    (wanted, wanted_pool, _), *others = jax.tree.map(np.asarray, made)
    is_given = positions >= 0
    assert wanted.shape == (rows, chunk, kv_heads * group * size)
    for got, written, at_ends in others:
        np.testing.assert_allclose(got[is_given], wanted[is_given], atol=1e-4)
        np.testing.assert_allclose(written, wanted_pool, atol=1e-5)
        if ends is not None:
            np.testing.assert_allclose(at_ends[:, 0], wanted[np.arange(rows), ends], atol=1e-4)


def case_of_some_length(cases: list[dict[str, Any]]) -> dict[str, Any]:
    return min(cases, key=lambda case: abs(len(case["prompt"]) - 17))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_matches_its_reference_by_xla(family: str) -> None:
    model, cases = load(family)
    case = case_of_some_length(cases)
    check(case, run_in_chunks(model, case["prompt"] + case["greedy"], 128, 16))


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "qwen3", "gpt-oss", "deepseek3"])
def test_a_family_matches_its_reference_by_the_kernels_of_a_cpu(family: str) -> None:
    """Covers soft caps, windows, norms of heads, sinks, and values of another size than keys.

    The engine's tests go through all families.
    """
    config = read_config(GOLDEN / family)
    auto, _ = choose_backend("cpu", config, dtype=FLOAT32, kv_dtype=FLOAT32)
    assert isinstance(auto, CpuBackend)
    arrays = load_arrays(GOLDEN / family, config, FLOAT32, report=lambda _: None, backend=auto)
    case = case_of_some_length(json.loads((GOLDEN / family / "golden.json").read_text())["cases"])
    model = Decoder.from_arrays(config, arrays, backend=auto)
    check(case, run_in_chunks(model, case["prompt"] + case["greedy"], 128, 16))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cpu_has_kernels_for_every_family(family: str) -> None:
    auto, _ = choose_backend("cpu", read_config(GOLDEN / family), dtype=FLOAT32, kv_dtype=FLOAT32)
    assert isinstance(auto, CpuBackend)


def test_a_model_of_a_golden_family_runs_its_layers_at_once_only_in_types_that_the_kernel_multiplies() -> (
    None
):
    config = read_config(GOLDEN / "llama")
    backend = CpuBackend(has_products=True)
    bfloat16 = jnp.dtype(jnp.bfloat16)
    assert backend.layers_unsupported_reason(config, bfloat16, bfloat16) is None
    assert "float32" in (backend.layers_unsupported_reason(config, FLOAT32, bfloat16) or "")
    assert CpuBackend().layers_unsupported_reason(config, bfloat16, bfloat16) is not None


@pytest.mark.parametrize("size", [576, 100])
def test_a_mean_is_the_same_to_the_last_bit_however_many_rows_there_are(size: int) -> None:
    """Otherwise an activation could be rounded to another integer beside seven others than alone."""
    x = np.random.default_rng(size).standard_normal((32, size), np.float32)
    mean = jax.jit(XLA_ON_CPU.mean)
    one_by_one, *others = (
        np.concatenate([mean(x[at : at + rows]) for at in range(0, len(x), rows)]) for rows in (1, 2, 8, 32)
    )
    np.testing.assert_allclose(one_by_one, x.mean(1, dtype=np.float64)[:, None], atol=1e-6)
    for other in others:
        np.testing.assert_array_equal(other, one_by_one)
