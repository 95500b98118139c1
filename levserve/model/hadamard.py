"""Rotates vectors by a Hadamard matrix, block by block, so that no number stands out.

A few channels of a language model's activations are many times larger than the others, and integers that
reach that far have too few steps for the rest. The rotation spreads each channel over its block. Matrices are
rotated alike when they are loaded, before they are rounded, so that products stay the same.
"""

from __future__ import annotations

import functools
import math
from typing import TypeVar

import jax
import numpy as np
from numpy.typing import NDArray

BLOCK = 64
"""Larger blocks gain nothing: the largest of 64 mixed numbers is little larger than the largest of 512."""
SMALL = 64
"""Blocks in one of numpy's products: with more, numpy would start threads that compete with those that call
it."""
Array = TypeVar("Array", jax.Array, NDArray[np.float32])


def block_size(size: int) -> int:
    """The block for vectors of this size: a power of two that divides it."""
    return math.gcd(size, BLOCK)


def rotate(x: Array) -> Array:
    """[..., size] along the last axis; rotating twice gives x again."""
    block = block_size(x.shape[-1])
    if isinstance(x, np.ndarray):
        return (x.reshape(-1, math.gcd(x.size // block, SMALL), block) @ _matrix(block)).reshape(x.shape)
    return (x.reshape(-1, block) @ _matrix(block)).reshape(x.shape)


@functools.cache
def _matrix(block: int) -> NDArray[np.float32]:
    """Symmetric, and its own inverse."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < block:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.float32(math.sqrt(block))
