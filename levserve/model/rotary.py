"""Rotary position embedding, in the half-split order of Hugging Face checkpoints."""

from __future__ import annotations

import math

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


def rotate(x: jax.Array, positions: jax.Array, frequencies: np.ndarray) -> jax.Array:
    """Turns x [..., heads, head_dim] by its position [...]; float32 in and out."""
    angles = positions.astype(jnp.float32)[..., None, None] * frequencies  # bf16 cannot tell position 257 from 256
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    low, high = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def _stretch(frequencies: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    """Llama 3.1: long wavelengths slow down by `factor`, short ones stay, those between are blended."""
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_position / wavelengths
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies
