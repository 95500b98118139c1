"""The order in which x86 kernels read the numbers of an int8 matrix.

One x86 instruction adds to each of sixteen sums the products of four unsigned bytes with four signed ones.
So the numbers of many outputs lie together, four of each, and one word of four activations is multiplied with
all of them: each sum is one lane, and lanes need not be added. The matrix holds the unsigned bytes. Sums
start at -`OFFSET` times the sum of the activations, which cancels the offset that makes the bytes unsigned.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

OUTS, WORD = 32, 4
"""Outputs that lie together, and how many consecutive numbers of each."""
OFFSET = 128


@dataclass(frozen=True, slots=True)
class BlockOrder:
    """The order of a matrix with scales for blocks of inputs, in which each lane is an output as well."""

    outs: int
    """Outputs that lie together."""
    offset: int
    """What makes the bytes unsigned, if the CPU's instruction wants that."""

    def takes(self, out: int) -> bool:
        return out % self.outs == 0

    def pack(self, matrix: NDArray[np.generic]) -> NDArray[np.uint8]:
        """int8 [out, in] in this order; the result has the same shape, but not the same meaning."""
        out, size = matrix.shape
        words = matrix.view(np.uint32).reshape(out // self.outs, self.outs, size // WORD)
        bytes_of = words.transpose(0, 2, 1) ^ np.uint32(self.offset * 0x01010101)
        return bytes_of.reshape(out, size // WORD).view(np.uint8)

    def pack_scales(self, scales: NDArray[np.float16]) -> NDArray[np.float16]:
        """Scales [out, block]: those of the outputs that lie together follow each other for each block."""
        out, blocks = scales.shape
        return scales.reshape(out // self.outs, self.outs, blocks).transpose(0, 2, 1).reshape(out, blocks)


SIGNED_ORDER = BlockOrder(outs=4, offset=0)
"""For ARM's instruction: a register has four outputs."""
UNSIGNED_ORDER = BlockOrder(outs=OUTS, offset=OFFSET)
pack = UNSIGNED_ORDER.pack
"""The order of matrices whose rows have one scale."""
STEPS = 127.0
"""The largest int8 of a quantized row: the one that its largest number becomes."""
SMALLEST = 1e-20
"""Replaces the largest number of a row of zeros."""


def is_packable(out: int, size: int) -> bool:
    return out % OUTS == 0 and size % (4 * WORD) == 0
