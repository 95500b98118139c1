"""How products with packed matrices are tiled on an NVIDIA GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from levserve.model.packed import Scheme

MAX_ROWS = 256
"""The most rows that the kernel multiplies; for more, XLA widens the matrix once for all of them."""
SMALLEST = 16
"""Rows, columns and depth of the smallest product a tensor core takes."""
PROGRAMS = 512
"""How many programs there should be at least: about four for each processor of an H200."""
MAX_SPLITS = 8


@dataclass(frozen=True, slots=True)
class PackedTiling:
    rows: int
    """Rows of `x` that a program multiplies."""
    columns: int
    """Columns of the result that a program computes."""
    depth: int
    """Bytes of each row of the matrix that are read in one step."""
    num_warps: int
    num_stages: int
    splits: int = 1
    """Programs that share the sum of one result; a divisor of the number of steps."""


BYTES_BY_ROWS = {
    16: PackedTiling(16, 64, 128, 2, 4),
    32: PackedTiling(32, 128, 128, 4, 4),
    64: PackedTiling(64, 128, 128, 4, 3),
    MAX_ROWS: PackedTiling(128, 64, 128, 4, 3),
}
NIBBLES_BY_ROWS = BYTES_BY_ROWS | dict.fromkeys((64, MAX_ROWS), PackedTiling(64, 128, 64, 4, 4))
"""Tilings by the most rows they serve; those for 16 and 64 rows were the fastest of a dozen on an H200."""


def choose_tiling(num_rows: int, shape: tuple[int, int], scheme: Scheme) -> PackedTiling | None:
    """How to tile the product with a matrix [out, in] of this shape; None if the kernel does not serve it."""
    if num_rows > MAX_ROWS or scheme.in_lanes or scheme.has_offsets:
        return None
    by_rows = NIBBLES_BY_ROWS if scheme.code.is_nibble else BYTES_BY_ROWS
    tiling = next(tiling for most, tiling in by_rows.items() if num_rows <= most)
    return fit(tiling, num_rows, shape, scheme)


def fit(
    tiling: PackedTiling,
    num_rows: int,
    shape: tuple[int, int],
    scheme: Scheme,
    splits: int | None = None,
    *,
    programs: int = PROGRAMS,
) -> PackedTiling | None:
    """The tiling for this matrix, with enough splits for `programs` programs unless `splits` is given."""
    num_columns, num_inputs = shape
    width = num_inputs // 2 if scheme.code.is_nibble else num_inputs
    columns, depth = math.gcd(tiling.columns, num_columns), math.gcd(tiling.depth, width)
    tiling = replace(tiling, columns=columns, depth=depth)
    if columns < SMALLEST or piece_width(depth, scheme, width) < SMALLEST:
        return None
    if splits is None:
        unsplit = num_columns // columns * -(-num_rows // tiling.rows)
        splits = 1
        while unsplit * splits < programs and splits < MAX_SPLITS and width // depth % (2 * splits) == 0:
            splits *= 2
    return replace(tiling, splits=math.gcd(splits, width // depth))


def piece_width(depth: int, scheme: Scheme, width: int) -> int:
    """How many neighbouring bytes share a group; of nibbles, their second values share one too."""
    group = math.gcd(depth, scheme.columns or depth)
    return math.gcd(group, width) if scheme.code.is_nibble else group
