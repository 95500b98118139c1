"""Evens out the channels of activations before matrices are rounded to int8, by numbers of the model alone.

A few channels of a language model's activations are many times larger than the rest. The rotation before a
product spreads them (`hadamard`), and their rounding error with them. So each channel is divided by about the
square root of its size, and the columns of the matrix it meets are multiplied: what both sides lose together
is least then. Norms and the rows of `up` take the division in, so that it costs nothing, but for the head's.

How large channels are is seen on a few tokens, evenly from the vocabulary, that pass through the feed-forward
parts of the layers. Attention is left out: between tokens that are no text it tells less than nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from levserve.model.config import ModelConfig

NUM_TOKENS = 64
NUM_ROWS = 512
"""Rows of a matrix that show how large its columns are."""
STEPS_PER_OCTAVE = 4
"""Scales are powers of the fourth root of two, so that the last bits of a sum do not change them."""
SMALLEST_CHANNEL = 1e-3
"""The smallest size of a channel, as a share of the mean."""
LARGEST_EXPONENT = 80.0
"""Of e in the activation, which is 0 from there on."""
KNOWN_FIELDS = frozenset(
    "vocab_size hidden_size intermediate_size num_layers num_heads num_kv_heads head_dim norm_eps rope_theta "
    "max_position tied_head rope_scaling local_rope_theta rotary_size embed_scale logit_scale head_bias "
    "qkv_bias out_bias qk_norm qk_norm_spans_heads windows attention_scale attention_softcap has_sinks "
    "logit_softcap".split()
)
"""The fields of a config that may have any value: no norm and no feed-forward part depends on them."""
BALANCE = "head_balance"
"""The array that hidden states are multiplied with before the head."""

Array = NDArray[np.float32]
Arrays = Iterator[tuple[str, NDArray[np.generic]]]


def can_balance(config: ModelConfig) -> bool:
    """Whether the model has the feed-forward parts that are known here, gated by SiLU after a plain norm."""
    others = (each for each in fields(config) if each.name not in KNOWN_FIELDS)
    return all(getattr(config, each.name) == each.default for each in others)


def balance_arrays(config: ModelConfig, arrays: Arrays) -> Arrays:
    """The float32 arrays of `parameter_shapes`, layer by layer, with other channels but the same products.

    The last one is the head, also of a model whose head shares the embedding's matrix. Matrices are changed
    in place, the embedding when the head is asked for: each array is to be used before the next.
    """
    x = embed = np.empty((0, 0), np.float32)
    activated, down_scale = x, x
    norms: dict[str, Array] = {}
    for name, array in arrays:
        matrix = np.asarray(array, np.float32)
        kind = name.rsplit(".", 1)[-1]
        if name == "embed":
            tokens = np.linspace(0, config.vocab_size - 1, NUM_TOKENS).astype(np.int64)
            x, embed = matrix[tokens] * np.float32(config.embed_scale), matrix
            yield name, array
        elif kind in ("input_norm", "mlp_norm", "final_norm"):
            norms[kind] = matrix
            if kind == "final_norm":
                yield name, array
        elif kind == "qkv":
            scale = _channel_scale(_normalize(config, x, norms["input_norm"]), matrix)
            yield name.replace(kind, "input_norm"), norms["input_norm"] / scale
            yield name, np.multiply(matrix, scale, out=matrix)
        elif kind == "gate_up":
            given = _normalize(config, x, norms["mlp_norm"])
            activated = _activate(given @ matrix.T)
            scale, down_scale = _channel_scale(given, matrix), _channel_scale(activated)
            yield name.replace(kind, "mlp_norm"), norms["mlp_norm"] / scale
            np.multiply(matrix, scale, out=matrix)
            matrix[len(matrix) // 2 :] /= down_scale[:, None]
            yield name, matrix
        elif kind == "down":
            x = x + activated @ matrix.T
            yield name, np.multiply(matrix, down_scale, out=matrix)
        elif name == "head":
            embed = matrix
        else:
            yield name, array
    scale = _channel_scale(_normalize(config, x, norms["final_norm"]), embed)
    yield BALANCE, 1 / scale
    yield "head", np.multiply(embed, scale, out=embed)


def leave_unbalanced(config: ModelConfig, arrays: Arrays) -> Arrays:
    """The same arrays in any order, as they are: programs that are compiled for the others take them too."""
    yield from arrays
    yield BALANCE, np.ones(config.hidden_size, np.float32)


def _normalize(config: ModelConfig, x: Array, weight: Array) -> Array:
    mean = np.mean(x * x, axis=1, keepdims=True, dtype=np.float32)
    return np.asarray(x / np.sqrt(mean + np.float32(config.norm_eps)) * weight, np.float32)


def _activate(gate_up: Array) -> Array:
    gate, up = np.split(gate_up, 2, axis=1)
    return np.asarray(gate * up / (np.exp(np.minimum(-gate, np.float32(LARGEST_EXPONENT))) + 1), np.float32)


def _channel_scale(x: Array, matrix: Array | None = None) -> Array:
    """What columns of a matrix are multiplied with, and activations like x [token, channel] divided by."""
    sizes = np.abs(x).mean(0, dtype=np.float64)
    sizes = sizes + SMALLEST_CHANNEL * sizes.mean()
    if matrix is not None:
        some = matrix[:: max(1, len(matrix) // NUM_ROWS)]
        columns = np.sqrt(np.square(some).mean(0, dtype=np.float64))
        sizes = sizes / (columns + SMALLEST_CHANNEL * columns.mean())
    steps = np.rint(np.log2(sizes / sizes.mean()) * (STEPS_PER_OCTAVE / 2))
    return np.asarray(2.0 ** (steps / STEPS_PER_OCTAVE), np.float32)
