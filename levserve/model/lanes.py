"""The order in which a GPU kernel reads the codes of a matrix.

Four threads (lanes) share a row of the matrix. Each loads 16 bytes at once, four words, and the first words
of all four are multiplied together, so these hold neighbouring inputs. Within a word the even codes come
first, so that codes `2 i` and `2 i + 1` are 16 bits apart and one shift and one mask extract both.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

LANES = 4
WORDS = 4
NIBBLES, BYTES = 8, 4
"""Codes in a word."""


def unit_of(is_nibble: bool) -> int:
    """Inputs that four lanes load at once; the length of a row is a multiple of it."""
    return LANES * WORDS * (NIBBLES if is_nibble else BYTES)


def to_lanes(codes: NDArray[Any], is_nibble: bool, into: NDArray[Any]) -> None:
    """Writes codes [..., in], a byte each, in the kernel's order: nibbles as bytes [..., in / 2]."""
    *stacked, num_inputs = codes.shape
    blocks = (*stacked, num_inputs // unit_of(is_nibble))
    if is_nibble:
        parts = codes.reshape(*blocks, WORDS, LANES, 2, 2, 2)  # [..., word, lane, upper, second, odd]
        packed = parts[..., 0, :] | parts[..., 1, :] << 4
        ordered = into.reshape(*blocks, LANES, WORDS, 2, 2)  # [..., lane, word, odd, upper]
        ordered[...] = np.moveaxis(packed, (-4, -3, -2, -1), (-3, -4, -1, -2))
    else:
        parts = codes.reshape(*blocks, WORDS, LANES, 2, 2)  # [..., word, lane, upper, odd]
        ordered = into.reshape(*blocks, LANES, WORDS, 2, 2)
        ordered[...] = np.moveaxis(parts, (-4, -3, -2, -1), (-3, -4, -1, -2))


def from_lanes(codes: jax.Array, is_nibble: bool) -> jax.Array:
    """The inverse of `to_lanes`."""
    *stacked, width = codes.shape
    num_inputs = 2 * width if is_nibble else width
    parts = codes.reshape(*stacked, -1, LANES, WORDS, 2, 2)  # [..., lane, word, odd, upper]
    parts = jnp.moveaxis(parts, (-4, -3, -2, -1), (-3, -4, -1, -2))
    if is_nibble:
        parts = jnp.stack([parts & 15, parts >> 4], -2)  # [..., word, lane, upper, second, odd]
    return parts.reshape(*stacked, num_inputs)
