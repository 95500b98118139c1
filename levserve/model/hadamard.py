"""Vectors turned by a Hadamard matrix, a block of their numbers at a time, so that none of them stands out.

A few channels of a language model's activations are many times larger than the others, and whole numbers that reach to them have
too few steps for the rest. A turn spreads each over its block. Matrices are turned by the same when they are loaded, before they
are rounded, so a product stays what it was.
"""

from __future__ import annotations

import functools
import math
from typing import TypeVar

import jax
import numpy as np
from numpy.typing import NDArray

BLOCK = 64
"""Of more nothing is gained: the largest of 64 numbers that are mixed is little larger than that of 512."""
SMALL = 64
"""Blocks in one of numpy's products: with more it would begin threads, which fight with those that it is called on."""
Array = TypeVar("Array", jax.Array, NDArray[np.float32])


def block_size(size: int) -> int:
    """Of vectors of so many numbers: a power of two that divides it."""
    return math.gcd(size, BLOCK)


def turn(x: Array) -> Array:
    """[..., size], along the last axis; done twice it gives what there was."""
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
