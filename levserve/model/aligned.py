"""Host arrays that jax can use without a copy."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

ALIGNMENT = 64  # jax's CPU backend takes over host memory aligned like this instead of copying it


def aligned_array(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> NDArray[np.generic]:
    """An uninitialised array."""
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + num_bytes].view(dtype).reshape(shape)
