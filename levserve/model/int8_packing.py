"""The order in which an x86 CPU wants the numbers of an int8 matrix.

One of its instructions adds to each of sixteen sums the products of four unsigned bytes with four signed ones. So the numbers
of many outputs lie together, four of each, and a word of four activations meets them all: no sum is spread over several lanes
that would have to be added up in the end. The matrix has the unsigned bytes; the `OFFSET` that makes them so, times all of a
row's activations, is what the sums begin below zero with.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

OUTS, WORD = 32, 4
"""Outputs that lie together, and numbers of each."""
OFFSET = 128
STEPS = 127.0
SMALLEST = 1e-20
"""In place of a scale of nothing."""


def is_packable(out: int, size: int) -> bool:
    return out % OUTS == 0 and size % (4 * WORD) == 0


def pack(matrix: NDArray[np.generic]) -> NDArray[np.uint8]:
    """int8 [out, in], of which the result has the shape, and nothing more of its order."""
    out, size = matrix.shape
    words = matrix.view(np.uint32).reshape(out // OUTS, OUTS, size // WORD)
    return (
        (words.transpose(0, 2, 1) ^ np.uint32(OFFSET * 0x01010101)).reshape(out, size // WORD).view(np.uint8)
    )
