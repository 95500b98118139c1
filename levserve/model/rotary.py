"""Rotary position embedding, in the half-split order of Hugging Face checkpoints."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from levserve.model.config import Llama3Scaling, ModelConfig


def inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """One angle per position and pair of head dimensions, as float32 [head_dim / 2]."""
    half = config.head_dim // 2
    frequencies = config.rope_theta ** -(np.arange(half, dtype=np.float64) / half)
    if config.rope_scaling is not None:
        frequencies = _stretch(frequencies, config.rope_scaling)
    return frequencies.astype(np.float32)


class Angles(NamedTuple):
    """Cosines and sines of a chunk's positions, [row, chunk, 1, head_dim / 2]; worked out once and used by every layer."""

    cos: jax.Array
    sin: jax.Array


def angles_at(positions: jax.Array, config: ModelConfig) -> Angles:
    angles = positions.astype(jnp.float32)[..., None, None] * inverse_frequencies(config)[None, None, None]  # bf16 cannot tell 257 from 256
    return Angles(jnp.cos(angles), jnp.sin(angles))


def rotate(x: jax.Array, angles: Angles) -> jax.Array:
    """Turns x [row, chunk, heads, head_dim] by its position; float32 in and out."""
    low, high = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([low * angles.cos - high * angles.sin, high * angles.cos + low * angles.sin], axis=-1)


def _stretch(frequencies: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    """Llama 3.1: long wavelengths slow down by `factor`, short ones stay, those between are blended."""
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_position / wavelengths
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies
