"""Rotates vectors by a Hadamard matrix, block by block, so that no value is far larger than the others.

A few channels of a language model's activations are many times larger than the rest, and int8 with a scale
that covers them has too few steps for the rest. The rotation spreads each channel over its block. Matrices
are rotated in the same way when they are loaded, before they are rounded, so that products stay the same.
"""

from __future__ import annotations

import functools
import math
from typing import TypeVar

import jax
import numpy as np
from numpy.typing import NDArray

BLOCK = 64
"""Larger blocks gain nothing: the largest of 64 mixed values is hardly larger than the largest of 512."""
BLOCKS_PER_PRODUCT = 64
"""Blocks that numpy multiplies at a time: for more it would start threads that compete with the callers."""
Array = TypeVar("Array", jax.Array, NDArray[np.float32])


def block_size(size: int) -> int:
    """The block for vectors of this size: a power of two that divides it."""
    return math.gcd(size, BLOCK)


def rotate(x: Array) -> Array:
    """Rotates [..., size] along the last axis; a second rotation gives x back."""
    block = block_size(x.shape[-1])
    if isinstance(x, np.ndarray):
        together = math.gcd(x.size // block, BLOCKS_PER_PRODUCT)
        return (x.reshape(-1, together, block) @ rotation(block)).reshape(x.shape)
    return (x.reshape(-1, block) @ rotation(block)).reshape(x.shape)


@functools.cache
def rotation(block: int) -> NDArray[np.float32]:
    """The matrix that rotates a block: symmetric, and its own inverse."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < block:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.float32(math.sqrt(block))
