"""How products with matrices of four and eight bits are tiled for the kernel of `fragment_kernel`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import jax.numpy as jnp

from levserve.model.lanes import WORDS, unit_of
from levserve.model.packed import Code, Scheme

MAX_ROWS = 256
"""The most rows that the kernel multiplies; for more, XLA widens the matrix once for all of them."""
FEW_ROWS = 16
"""With up to this many rows, each warp reads `x` by itself, and several warps of a program share a sum."""
SOME_ROWS = 32
"""With up to this many rows, each warp multiplies by itself; with more, on Hopper, four do it together."""
RING_ROWS = 64
"""With up to this many rows, and four-bit codes in groups of at least `LONG_GROUP`, two groups of four warps
share `x` and copy codes ahead to shared memory."""
WARP_GROUP = 4
MOST_TILES, MOST_WIDE_TILES = 8, 16
"""The most tiles of rows that a program multiplies: by single warps, and by four warps together."""
FEW_PROGRAMS, LEAN_PROGRAMS, PROGRAMS = 900, 528, 264
"""The most programs there are when they share sums: seven, four and two for each processor of an H200.
Four run at once on a processor if a thread has at most `LEAN_REGISTERS`, but only one with two groups of
warps."""
LEAN_REGISTERS = 128
LONG_GROUP = 128
"""In groups of at least this many inputs, a unit of four-bit codes has one scale for each output: then a
thread needs no more than `LEAN_REGISTERS` for up to `FEW_ROWS` rows, and there are few scales to copy
ahead."""
MAX_SPLITS = 8
SMALLEST = 32
"""Outputs of the smallest program."""


@dataclass(frozen=True, slots=True)
class FragmentTiling:
    m_tiles: int
    """Tiles of 16 outputs that a warp computes."""
    n_tiles: int
    """Tiles of eight rows of `x`."""
    warps_m: int
    """Warps side by side."""
    warps_k: int
    """Warps of a program that share the sums of the same outputs."""
    splits: int
    """Programs that share the sums of the same outputs."""
    is_staged: bool
    """Whether a program's warps read `x` from memory that they share; only if none share a sum."""
    is_wide: bool = False
    """Whether four warps multiply together, by the kernel of `wide_kernel`; only if `x` is staged."""
    has_ring: bool = False
    """Whether they use the kernel of `ring_kernel`; only for four bits, if no unit has several groups."""
    max_registers: int | None = None
    """Registers of a thread, limited so that more programs run at once on a processor; None: no limit."""

    @property
    def columns(self) -> int:
        """Outputs of a program."""
        return 16 * self.m_tiles * self.warps_m

    @property
    def rows(self) -> int:
        return 8 * self.n_tiles

    @property
    def num_warps(self) -> int:
        return self.warps_m * self.warps_k


@dataclass(frozen=True, slots=True)
class Problem:
    rows: int
    columns: int
    inputs: int
    scheme: Scheme

    @property
    def numbers_per_word(self) -> int:
        return 8 if self.scheme.code.is_nibble else 4

    @property
    def unit(self) -> int:
        """Inputs of an output that four threads load at once."""
        return 4 * WORDS * self.numbers_per_word


def takes(shape: tuple[int, ...], scheme: Scheme) -> bool:
    """Whether the kernel multiplies with a matrix [out, in] of this shape, if its codes are in lanes."""
    if len(shape) != 2 or scheme.rows > 1 or scheme.scale not in (jnp.float16, jnp.bfloat16, jnp.float32):
        return False
    num_columns, num_inputs = shape
    unit = unit_of(scheme.code.is_nibble)
    group = scheme.columns or unit
    has_whole_words = group % unit == 0 or (unit % group == 0 and group % (unit // WORDS) == 0)
    has_form = scheme.code is Code.UINT4 or (
        scheme.code is Code.INT8 and not (scheme.has_zeros or scheme.zero)
    )
    has_sums = scheme.columns is not None or not scheme.has_offsets
    return (
        has_form and has_sums and has_whole_words and num_inputs % unit == 0 and num_columns % SMALLEST == 0
    )


def choose_fragments(
    num_rows: int, shape: tuple[int, int], scheme: Scheme, *, is_hopper: bool
) -> FragmentTiling | None:
    """How to tile the product with a matrix [out, in] of this shape; None if the kernel does not serve it.

    Each was the fastest of several on an H200, for the matrices of an 8B model.
    """
    if num_rows > MAX_ROWS or not scheme.in_lanes:
        return None
    n_tiles = -(-num_rows // 8)
    is_long = scheme.code.is_nibble and (scheme.columns or 0) >= LONG_GROUP
    if n_tiles == 1:
        tiling = FragmentTiling(2, 1, 1, 4, 1, is_staged=False)
    elif num_rows <= FEW_ROWS:
        if is_long:
            tiling = FragmentTiling(2, n_tiles, 1, 4, 1, is_staged=False, max_registers=LEAN_REGISTERS)
        else:
            tiling = FragmentTiling(4, n_tiles, 1, 4, 1, is_staged=False)
    elif num_rows <= SOME_ROWS or not is_hopper:
        tiling = FragmentTiling(2, min(MOST_TILES, n_tiles), 4, 1, 1, is_staged=True)
    elif num_rows <= RING_ROWS and is_long:
        tiling = FragmentTiling(2, n_tiles, 2 * WARP_GROUP, 1, 1, is_staged=True, is_wide=True, has_ring=True)
    else:
        num_programs = -(-n_tiles // MOST_WIDE_TILES)
        n_tiles = -(-n_tiles // num_programs)
        tiling = FragmentTiling(2, n_tiles, 4, 1, 1, is_staged=True, is_wide=True)
    return fit_fragments(tiling, num_rows, shape, scheme)


def fit_fragments(
    tiling: FragmentTiling, num_rows: int, shape: tuple[int, int], scheme: Scheme, splits: int | None = None
) -> FragmentTiling | None:
    """The tiling for this matrix, with enough splits to keep a GPU busy unless `splits` is given."""
    if not takes(shape, scheme):
        return None
    num_columns, num_inputs = shape
    while num_columns % tiling.columns:
        if tiling.is_wide and tiling.warps_m == WARP_GROUP:
            tiling = replace(tiling, is_wide=False, has_ring=False, n_tiles=min(MOST_TILES, tiling.n_tiles))
        elif tiling.warps_m > 1:
            tiling = replace(tiling, warps_m=tiling.warps_m // 2)
        else:
            tiling = replace(tiling, m_tiles=tiling.m_tiles // 2)
    units = num_inputs // unit_of(scheme.code.is_nibble)
    if splits is None:
        programs = num_columns // tiling.columns * -(-num_rows // tiling.rows)
        most, splits = _most_programs(tiling), 1
        while 2 * programs * splits <= most and splits < MAX_SPLITS and units % (2 * splits) == 0:
            splits *= 2
    return replace(tiling, splits=math.gcd(splits, units))


def _most_programs(tiling: FragmentTiling) -> int:
    """The most programs there are when they share sums."""
    if not tiling.is_staged:
        return LEAN_PROGRAMS if tiling.max_registers else FEW_PROGRAMS
    return PROGRAMS // 2 if tiling.warps_m > WARP_GROUP else PROGRAMS
