"""bench/packed_quality.py rounds to the nearest value; bench/random_gguf.py writes values of given spread."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import quants

from levserve.model.packed import SCALE, Code, decode, decode_scale

BENCH = Path(__file__).parents[2] / "bench"
HALF_STEPS = {"fp8-blocks": 16, "w4": 0.5, "w4-symmetric": 1, "q4_0": 1, "q8_0": 0.5, "mxfp4": 2}
"""How far the nearest code may be, in scales: e4m3 and e2m1 have wide steps, and the largest value of four
bits is 7 where the smallest is -8."""


Import = Callable[[str], ModuleType]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Import:
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module


@pytest.mark.parametrize("name", HALF_STEPS)
def test_a_rounded_matrix_is_within_half_a_step(name: str, bench: Import) -> None:
    rounding = bench("packed_quality")
    scheme = bench("schemes").SCHEMES[name].as_stored()
    matrix = np.random.default_rng(0).normal(size=(200, 320)).astype(np.float32)
    parts = rounding.round_matrix(matrix, scheme)
    assert {end: (part.shape, part.dtype) for end, part in parts.items()} == scheme.array_shapes(matrix.shape)
    kept = {"matrix" + end: jnp.asarray(part) for end, part in parts.items()}
    widened = np.asarray(rounding.widen(kept, "matrix", scheme))
    scales = np.abs(np.asarray(decode_scale(kept["matrix" + SCALE]), np.float32).T)
    spread = np.repeat(np.repeat(scales, scheme.rows, 0)[:200], scheme.columns, 1)[:, :320]
    assert (np.abs(widened - matrix) <= (HALF_STEPS[name] + 0.01) * spread).all()
    assert len(np.unique(decode(kept["matrix"], scheme.code))) > (
        200 if scheme.code in (Code.FP8, Code.INT8) else 14
    )


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_K, Kind.Q6_K, Kind.Q8_0, Kind.BF16])
def test_random_blocks_have_the_spread(kind: Kind, bench: Import) -> None:
    random_gguf = bench("random_gguf")
    tensor = random_gguf.Tensor("any", (64, 512), kind)
    stored = random_gguf.make_numbers(tensor, np.random.default_rng(0))
    numbers = quants.dequantize(stored, kind)
    assert numbers.shape == (64, 512)
    assert numbers.std() == pytest.approx(random_gguf.SPREAD, rel=0.03)
    assert abs(numbers.mean()) < 0.2 * random_gguf.SPREAD
