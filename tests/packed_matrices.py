"""Random matrices in the bits of a checkpoint."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from haliax import Axis

from levserve.model.packed import FP8, OFFSET, SCALE, ZERO, PackedMatrix, Scheme


def random_matrix(scheme: Scheme, shape: tuple[int, ...]) -> PackedMatrix:
    """Of this shape, [out, in] or [expert, out, in]."""
    random = np.random.default_rng(0)
    parts = {}
    for end, (part_shape, dtype) in scheme.array_shapes(shape).items():
        found = random.integers(0, 256, part_shape).astype(np.uint8)
        if end in (SCALE, OFFSET):
            wide = random.uniform(0.5, 1.5, part_shape) * (1 if end == SCALE else -8)
            parts[end] = random.integers(120, 128, part_shape) if dtype == np.uint8 else wide
        elif end == ZERO:
            parts[end] = found & 15
        elif dtype == FP8:
            parts[end] = np.where(found & 127 == 127, found - 1, found).astype(np.uint8).view(dtype)
        else:
            parts[end] = found.view(dtype)
        parts[end] = jnp.asarray(parts[end].astype(dtype))
    axes = tuple(Axis(name, size) for name, size in zip(("expert", "rows", "columns")[-len(shape) :], shape))
    return PackedMatrix.from_arrays(parts, scheme, axes)
