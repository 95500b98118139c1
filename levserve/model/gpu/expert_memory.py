"""What a program of the experts' kernels needs of the shared memory of a card older than Hopper.

Triton asks for exactly this for bfloat16 and float32, and for packed matrices for this or less, as compiled
for an L4 and an A100. When the sum is done, its result changes places in the same memory; no tiling has one
that needs more than any card has.
"""

from __future__ import annotations

from typing import NamedTuple

from levserve.model.backend import ExpertMatrix
from levserve.model.packed import PackedMatrix

SCALES_BYTES = 1024
"""Scales of a step change places between threads through shared memory; 512 bytes were the most."""


class Needed(NamedTuple):
    step: int
    """Bytes of the tiles that one step reads."""
    other: int


def bytes_needed(matrix: ExpertMatrix, *, tiles: int, columns: int, depth: int, num_pairs: int) -> Needed:
    """For a product of a step's rows of `num_pairs` pairs with `tiles` tiles of the matrix, which are two if
    there is a gate. `depth` is in elements of the stored matrix."""
    elements = tiles * columns * depth
    if not isinstance(matrix, PackedMatrix):
        return Needed((elements + num_pairs * depth) * matrix.dtype.itemsize, 0)
    scheme = matrix.scheme
    widened = 2 * (2 if scheme.code.is_nibble else 1)  # bytes of the bfloat16 that a stored byte stands for
    # With zero points, widened nibbles go through shared memory to the threads that multiply them.
    moved = columns * depth * widened if scheme.has_zeros and scheme.code.is_nibble else 0
    return Needed(elements + num_pairs * depth * widened, SCALES_BYTES + moved)
