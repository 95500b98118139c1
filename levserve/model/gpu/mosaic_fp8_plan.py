"""Decides where Mosaic GPU multiplies FP8 in blocks of 128 x 128, and how; measured on an H200."""

from __future__ import annotations

from levserve.model.backend import ExpertRule
from levserve.model.config import Activation
from levserve.model.gpu.fp8_plan import MAX_ROWS, WIDE
from levserve.model.gpu.hopper import is_hopper, num_processors
from levserve.model.gpu.mosaic_fp8_product import COLUMNS, DEPTH, TILE_ROWS
from levserve.model.packed import Code, PackedMatrix, Scheme

TIMES = {2: 2.0, 1: 1.05}
"""How long a tile takes, by its pieces; for each product, a larger one reads less."""
ROWS_COPIED = 8
"""TMA copies so many rows together, and their scales if these are a multiple of 16 bytes."""
MAX_WIDE_ROWS = 64
"""The most rows that Triton's kernel multiplies faster with a matrix of `WIDE` outputs."""
SMALLEST_SHARE_FP8 = 32
"""The mean number of pairs per expert from which the kernel is known to be faster than Triton's. A layer of
Qwen3-30B-A3B with 512 / 1,024 / 4,096 / 8,192 tokens takes 235 / 262 / 591 / 1,017 us, and by Triton
286 / 356 / 786 / 1,442; one of Mixtral with 1,024 / 4,096 takes 1,165 / 3,733 and 1,698 / 5,844."""


def takes_blocks(scheme: Scheme) -> bool:
    """Whether matrices that are quantized so, and their rows, have the blocks that the kernel multiplies."""
    has_blocks = (scheme.columns, scheme.rows) == (DEPTH, COLUMNS)
    return scheme.code is Code.FP8 and scheme.rounds_rows and has_blocks


def choose_pieces(num_rows: int, shape: tuple[int, int], scheme: Scheme) -> int | None:
    """How many pieces the tiles of a product with a matrix [out, in] should have; None if the kernel does not
    serve it or Triton's is faster."""
    num_columns, num_inputs = shape
    if not (is_hopper() and takes_blocks(scheme)):
        return None
    if num_rows <= (MAX_WIDE_ROWS if num_columns >= WIDE else MAX_ROWS):
        return None
    if num_rows % ROWS_COPIED or num_inputs % DEPTH:
        return None
    down = -(-num_rows // TILE_ROWS)

    def time_of(pieces: int) -> float:
        turns = -(-down * (num_columns // (pieces * COLUMNS)) // num_processors())
        return turns * TIMES[pieces]

    fitting = [pieces for pieces in TIMES if num_columns % (pieces * COLUMNS) == 0]
    return min(fitting, key=time_of, default=None)


def serves_fp8(num_tokens: int, rule: ExpertRule, gate_up: PackedMatrix, down: PackedMatrix) -> bool:
    """Whether the kernel for FP8 in blocks computes these experts, and is faster than Triton."""
    if not (rule.is_gated and rule.activation is Activation.SILU):
        return False
    if num_tokens * rule.per_token < SMALLEST_SHARE_FP8 * rule.num_experts:
        return False
    _, embed, mlp = (axis.size for axis in down.axes)
    takes_all = takes_blocks(gate_up.scheme) and takes_blocks(down.scheme)
    return takes_all and mlp % DEPTH == 0 and embed % (2 * COLUMNS) == 0
