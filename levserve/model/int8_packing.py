"""The order in which x86 kernels read the values of an int8 matrix.

One x86 instruction adds to each of sixteen sums the products of four unsigned bytes with four signed ones.
So the values of many outputs lie together, four of each, and one word of four activations is multiplied with
all of them: each lane holds one output's sum, and lanes need not be added. The matrix holds the unsigned
bytes. Sums start at -`OFFSET` times the sum of the activations, which cancels the offset that makes the bytes
unsigned.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

OUTS, WORD = 32, 4
"""Outputs that lie together, and how many consecutive values of each."""
OFFSET = 128
UNIT_BYTES = 32
"""Bytes of an output that stay together where products widen a matrix: a block in eight bits, or two blocks
in four."""


@dataclass(frozen=True, slots=True)
class BlockOrder:
    """The order of a matrix with scales for blocks of inputs, in which each lane is an output too."""

    outs: int
    """Outputs that lie together."""
    offset: int
    """What makes the bytes unsigned; 0 if the CPU's instruction takes signed ones."""

    def takes(self, out: int) -> bool:
        return out % self.outs == 0

    def pack(self, matrix: NDArray[np.generic]) -> NDArray[np.uint8]:
        """int8 [out, in] in this order; the result has the same shape, but no longer one output per row."""
        out, size = matrix.shape
        words = matrix.view(np.uint32).reshape(out // self.outs, self.outs, size // WORD)
        bytes_of = words.transpose(0, 2, 1) ^ np.uint32(self.offset * 0x01010101)
        return bytes_of.reshape(out, size // WORD).view(np.uint8)

    def pack_scales(self, scales: NDArray[np.float16]) -> NDArray[np.float16]:
        """Scales [out, block] in this order: block by block, those of the outputs that lie together."""
        out, blocks = scales.shape
        return scales.reshape(out // self.outs, self.outs, blocks).transpose(0, 2, 1).reshape(out, blocks)


class WidenedBytesOrder(BlockOrder):
    """The order of int8 matrices that x86's matrix units multiply in bfloat16: of each 32 outputs, one block
    of inputs after another."""

    __slots__ = ()

    def pack(self, matrix: NDArray[np.generic]) -> NDArray[np.uint8]:
        out, size = matrix.shape
        units = out // self.outs, self.outs, size // UNIT_BYTES, UNIT_BYTES
        return matrix.view(np.uint8).reshape(units).transpose(0, 2, 1, 3).reshape(out, size)


class WidenedNibblesOrder(BlockOrder):
    """The order of matrices of four bits that are multiplied in the same way.

    Of each 32 outputs it has two blocks of inputs after another, and of these two outputs after another,
    whose bytes alternate.
    """

    __slots__ = ()

    def pack(self, matrix: NDArray[np.generic]) -> NDArray[np.uint8]:
        out, size = matrix.shape
        pairs = out // self.outs, self.outs // 2, 2, size // UNIT_BYTES, UNIT_BYTES
        return matrix.view(np.uint8).reshape(pairs).transpose(0, 3, 1, 4, 2).reshape(out, size)


SIGNED_ORDER = BlockOrder(outs=4, offset=0)
"""For ARM's instruction: a register holds four outputs."""
UNSIGNED_ORDER = BlockOrder(outs=OUTS, offset=OFFSET)
WIDENED_BYTES = WidenedBytesOrder(outs=OUTS, offset=0)
WIDENED_NIBBLES = WidenedNibblesOrder(outs=OUTS, offset=OFFSET)
"""What is in one of these orders is stored as int16 and uint16, by which kernels know it."""
pack = UNSIGNED_ORDER.pack
"""Packs matrices whose rows have one scale."""
STEPS = 127.0
"""The largest int8 of a quantized row: what its largest value becomes."""
SMALLEST = 1e-20
"""Replaces the largest value of a row of zeros."""


def is_packable(out: int, size: int) -> bool:
    return out % OUTS == 0 and size % (4 * WORD) == 0
