"""The order in which x86 kernels read the numbers of an int8 matrix.

One x86 instruction adds to each of sixteen sums the products of four unsigned bytes with four signed ones. So
the numbers of many outputs lie together, four of each, and one word of four activations is multiplied with
all of them: no sum is spread over lanes that would have to be added up. The matrix holds the unsigned bytes;
sums start at minus `OFFSET` times the sum of the activations, which cancels the offset that made the bytes
unsigned.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

OUTS, WORD = 32, 4
"""Outputs that lie together, and how many numbers of each."""
OFFSET = 128
STEPS = 127.0
SMALLEST = 1e-20
"""Replaces a scale of zero."""


def is_packable(out: int, size: int) -> bool:
    return out % OUTS == 0 and size % (4 * WORD) == 0


def pack(matrix: NDArray[np.generic]) -> NDArray[np.uint8]:
    """int8 [out, in] in packed order; the result has the same shape, but not the same meaning of its axes."""
    out, size = matrix.shape
    words = matrix.view(np.uint32).reshape(out // OUTS, OUTS, size // WORD)
    return (
        (words.transpose(0, 2, 1) ^ np.uint32(OFFSET * 0x01010101)).reshape(out, size // WORD).view(np.uint8)
    )
