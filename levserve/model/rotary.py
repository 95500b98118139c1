"""Rotary position embedding, in the half-split order of Hugging Face checkpoints."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from levserve.model.config import DynamicScaling, LinearScaling, Llama3Scaling, LongScaling, Rope, YarnScaling


def inverse_frequencies(rope: Rope) -> np.ndarray:
    """The angle per position of each pair of head dimensions, as float32 [size / 2]."""
    half = rope.size // 2
    theta = rope.theta
    if isinstance(rope.scaling, DynamicScaling):
        theta = rope.scaling.stretch(theta, rope.size)
    frequencies = theta ** -(np.arange(half, dtype=np.float64) / half)
    match rope.scaling:
        case Llama3Scaling():
            frequencies = _stretch(frequencies, rope.scaling)
        case LinearScaling(factor):
            frequencies = frequencies / factor
        case LongScaling():
            frequencies = frequencies / np.asarray(rope.scaling.factors)
        case YarnScaling():
            frequencies = _blend(frequencies, rope, rope.scaling)
    return frequencies.astype(np.float32)


class Angles(NamedTuple):
    """Cosines and sines of a chunk's positions, [row, chunk, 1, size / 2]; every layer uses the same."""

    cos: jax.Array
    sin: jax.Array


def angles_at(positions: jax.Array, rope: Rope) -> Angles:
    # In float32: bfloat16 cannot tell 257 from 256.
    angles = positions.astype(jnp.float32)[..., None, None] * inverse_frequencies(rope)[None, None, None]
    length = rope.scaling.attention_factor if isinstance(rope.scaling, LongScaling | YarnScaling) else 1.0
    return Angles(jnp.cos(angles) * length, jnp.sin(angles) * length)


def rotate(x: jax.Array, angles: Angles) -> jax.Array:
    """Rotates float32 x [row, chunk, heads, head_dim] by its position; dimensions beyond the angles stay."""
    half = angles.cos.shape[-1]
    low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    rotated = [low * angles.cos - high * angles.sin, high * angles.cos + low * angles.sin]
    return jnp.concatenate([*rotated, rest] if rest.shape[-1] else rotated, axis=-1)


def _stretch(frequencies: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    """Llama 3.1: long wavelengths slow down by `factor`, short ones stay, those between are blended."""
    wavelengths = 2 * math.pi / frequencies
    rotations = scaling.original_max_position / wavelengths
    blend = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies


def _blend(frequencies: np.ndarray, rope: Rope, scaling: YarnScaling) -> np.ndarray:
    """YaRN: pairs from `low` to `high` are blended from their own frequency to the slowed one."""

    def pair_rotating(times: float) -> float:
        wavelength = scaling.original_max_position / times
        return rope.size * math.log(wavelength / (2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_rotating(scaling.beta_fast), pair_rotating(scaling.beta_slow)
    if scaling.truncates:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.size - 1)
    width = max(high - low, 0.001)
    slowed = np.clip((np.arange(len(frequencies)) - low) / width, 0.0, 1.0)
    return (1 - slowed) * frequencies + slowed * frequencies / scaling.factor
