"""How products of FP8 activations with FP8 matrices are tiled on an NVIDIA GPU."""

from __future__ import annotations

import math
from typing import NamedTuple

from levserve.model.gpu.packed_plan import PackedTiling, fit, piece_width
from levserve.model.packed import Code, Scheme

SMALLEST_DEPTH = 32
"""Inputs that one FP8 instruction multiplies."""
MAX_ROWS = 256
MAX_WHOLE_ROWS = 128
"""The same where a whole row of the matrix has one scale: XLA multiplies more rows without widening."""
WIDE = 16384
"""A matrix with this many outputs has enough programs to keep a GPU busy without sharing sums."""


class Fp8Way(NamedTuple):
    tiling: PackedTiling
    programs: int
    """How many programs there should be at least."""
    rounds_inside: bool = False
    """Whether each program rounds the activations itself."""


class Fp8Ways(NamedTuple):
    narrow: Fp8Way
    wide: Fp8Way
    """For matrices with at least `WIDE` outputs."""


BY_ROWS = {
    16: Fp8Ways(
        narrow=Fp8Way(PackedTiling(16, 64, 128, 4, 3), 512, rounds_inside=True),
        wide=Fp8Way(PackedTiling(16, 64, 256, 4, 3), 512),
    ),
    32: Fp8Ways(
        narrow=Fp8Way(PackedTiling(32, 128, 128, 8, 3), 192),
        wide=Fp8Way(PackedTiling(32, 128, 128, 4, 3), 192),
    ),
    64: Fp8Ways(
        narrow=Fp8Way(PackedTiling(64, 128, 128, 8, 3), 192),
        wide=Fp8Way(PackedTiling(64, 128, 128, 4, 3), 192),
    ),
    MAX_ROWS: Fp8Ways(
        narrow=Fp8Way(PackedTiling(64, 128, 128, 4, 4), 192),
        wide=Fp8Way(PackedTiling(64, 128, 128, 4, 4), 192),
    ),
}
"""By the most rows that they serve. Those for 16, 64 and 256 rows were the fastest of a dozen on an H200 with
Llama-3.1-8B's matrices, or within 10 % of it; those for 32 rows are like those for 64."""


class Fp8Tiling(NamedTuple):
    tiling: PackedTiling
    rounds_inside: bool


def choose_fp8_tiling(num_rows: int, shape: tuple[int, int], scheme: Scheme) -> Fp8Tiling | None:
    """How to tile the product with a matrix [out, in] of this shape; None if the kernel does not serve it."""
    if num_rows > (MAX_WHOLE_ROWS if scheme.columns is None else MAX_ROWS):
        return None
    ways = next(ways for most, ways in BY_ROWS.items() if num_rows <= most)
    return fit_cut(ways.wide if shape[0] >= WIDE else ways.narrow, num_rows, shape, scheme)


def fit_cut(
    way: Fp8Way, num_rows: int, shape: tuple[int, int], scheme: Scheme, *, splits: int | None = None
) -> Fp8Tiling | None:
    """The tiling for this matrix, with enough splits for `way.programs` programs unless `splits` is given."""
    assert scheme.code is Code.FP8 and scheme.rounds_rows
    _, num_inputs = shape
    fitted = fit(way.tiling, num_rows, shape, scheme, splits, programs=way.programs)
    if fitted is None or piece_width(fitted.depth, scheme, num_inputs) < SMALLEST_DEPTH:
        return None
    # A program that reads only part of a group cannot know its largest value.
    has_groups = scheme.columns is not None and math.gcd(fitted.depth, scheme.columns) == scheme.columns
    return Fp8Tiling(fitted, way.rounds_inside and has_groups)
