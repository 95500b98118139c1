"""Evens out the channels of activations before matrices are rounded to int8, using only the model's weights.

A few channels of a language model's activations are many times larger than the rest. The rotation before a
product spreads them (`hadamard`), and their rounding error with them. So each channel is divided by about the
square root of its size and the matching column of the matrix is multiplied by it, which minimises the error
of both sides together. Norms and the rows of `up` absorb the division, which is free except at the head.

Channel sizes are measured on a few tokens, spread evenly over the vocabulary, that pass through the
feed-forward parts of the layers. Attention is left out: among tokens that are not a text it would mislead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray

from levserve.model.config import ModelConfig
from levserve.model.matrix_rows import Array, MatrixRows, as_rows

NUM_TOKENS = 64
NUM_ROWS = 512
"""Rows of a matrix that are sampled to measure its columns."""
NUMBERS_PER_READ, NUMBERS_TOGETHER = 1 << 15, 1 << 17
"""How many values could be read in the time of one separate read; and the most values read at once."""
STEPS_PER_OCTAVE = 4
"""Scales are powers of the fourth root of two, so that the last bits of a sum do not affect them."""
SMALLEST_CHANNEL = 1e-3
"""The smallest size of a channel, as a share of the mean."""
LARGEST_EXPONENT = 80.0
"""The largest exponent of e in the activation, which is 0 from there on."""
KNOWN_FIELDS = frozenset(
    "vocab_size hidden_size intermediate_size num_layers num_heads num_kv_heads head_dim norm_eps rope_theta "
    "max_position tied_head rope_scaling local_rope_theta rotary_size embed_scale logit_scale head_bias "
    "qkv_bias out_bias qk_norm qk_norm_spans_heads windows attention_scale attention_softcap has_sinks "
    "logit_softcap".split()
)
"""The fields of a config that may have any value: no norm and no feed-forward part depends on them."""
BALANCE = "head_balance"
"""The array that hidden states are multiplied by before the head."""

Arrays = Iterator[tuple[str, NDArray[np.generic]]]
Matrices = Iterator[tuple[str, "NDArray[np.generic] | MatrixRows | Balanced"]]


@dataclass(frozen=True, slots=True)
class Balanced:
    """A matrix to be rounded, with its columns multiplied and perhaps its rows divided."""

    rows: MatrixRows
    columns: Array
    """[in]"""
    tokens: Array | None = None
    """[token, in]: activations to multiply with the matrix as it is in `rows`."""
    take: Callable[[Array], Array | None] = lambda products: None
    """Takes these products [token, out] and gives the divisors of the rows, [out]; None: there are none."""


def can_balance(config: ModelConfig) -> bool:
    """Whether the model has the only feed-forward parts supported here: gated by SiLU, after a plain norm."""
    others = (each for each in fields(config) if each.name not in KNOWN_FIELDS)
    return all(getattr(config, each.name) == each.default for each in others)


def balance_arrays(config: ModelConfig, arrays: Matrices) -> Matrices:
    """The arrays of `parameter_shapes`, layer by layer, with rescaled channels but the same products.

    The last one is the head, even if the model's head shares the embedding's matrix. The factors of a matrix
    depend on the products with the matrices before it: each must be used before the next is taken.
    """
    states, embed = _States(), None
    norms: dict[str, Array] = {}
    for name, array in arrays:
        assert not isinstance(array, Balanced)
        kind = name.rsplit(".", 1)[-1]
        if name == "embed":
            embed = as_rows(array)
            tokens = np.linspace(0, config.vocab_size - 1, NUM_TOKENS).astype(np.int64)
            states.x = _read_each(embed, tokens.tolist()) * np.float32(config.embed_scale)
            yield name, array
        elif kind in ("input_norm", "mlp_norm", "final_norm"):
            assert isinstance(array, np.ndarray)
            norms[kind] = np.asarray(array, np.float32)
            if kind == "final_norm":
                yield name, array
        elif kind in ("qkv", "gate_up"):
            norm = "input_norm" if kind == "qkv" else "mlp_norm"
            given, rows = _normalize(config, states.x, norms[norm]), as_rows(array)
            scale = _channel_scale(given, rows)
            yield name.replace(kind, norm), norms[norm] / scale
            if kind == "qkv":
                yield name, Balanced(rows, scale)
            else:
                yield name, Balanced(rows, scale, given, states.take_gate_up)
        elif kind == "down":
            yield name, Balanced(as_rows(array), states.down_scale, states.activated, states.take_down)
        elif name == "head":
            embed = as_rows(array)
        else:
            yield name, array
    assert embed is not None
    scale = _channel_scale(_normalize(config, states.x, norms["final_norm"]), embed)
    yield BALANCE, 1 / scale
    yield "head", Balanced(embed, scale)


def leave_unbalanced(config: ModelConfig, arrays: Matrices) -> Matrices:
    """The same arrays unchanged, in any order: programs compiled for balanced arrays take them too."""
    yield from arrays
    yield BALANCE, np.ones(config.hidden_size, np.float32)


@dataclass(slots=True)
class _States:
    """The activations of the tokens before the next layer, and within its feed-forward part."""

    x: Array = field(default_factory=lambda: np.empty((0, 0), np.float32))
    activated: Array = field(default_factory=lambda: np.empty((0, 0), np.float32))
    down_scale: Array = field(default_factory=lambda: np.empty(0, np.float32))

    def take_gate_up(self, products: Array) -> Array:
        self.activated = _activate(products)
        self.down_scale = _channel_scale(self.activated)
        return np.concatenate([np.ones_like(self.down_scale), self.down_scale])

    def take_down(self, products: Array) -> None:
        self.x = self.x + products


def _normalize(config: ModelConfig, x: Array, weight: Array) -> Array:
    mean = np.mean(x * x, axis=1, keepdims=True, dtype=np.float32)
    return np.asarray(x / np.sqrt(mean + np.float32(config.norm_eps)) * weight, np.float32)


def _activate(gate_up: Array) -> Array:
    gate, up = np.split(gate_up, 2, axis=1)
    return np.asarray(gate * up / (np.exp(np.minimum(-gate, np.float32(LARGEST_EXPONENT))) + 1), np.float32)


def _channel_scale(x: Array, matrix: MatrixRows | None = None) -> Array:
    """What columns of a matrix are multiplied by, and activations like x [token, channel] divided by."""
    sizes = np.abs(x).mean(0, dtype=np.float64)
    sizes = sizes + SMALLEST_CHANNEL * sizes.mean()
    if matrix is not None:
        columns = np.sqrt(np.square(_read_some(matrix)).mean(0, dtype=np.float64))
        sizes = sizes / (columns + SMALLEST_CHANNEL * columns.mean()) if columns.any() else columns
    if not sizes.any():  # the matrix is zero, or what it meets is, as in a pruned layer
        return np.ones(len(sizes), np.float32)
    steps = np.rint(np.log2(sizes / sizes.mean()) * (STEPS_PER_OCTAVE / 2))
    return np.asarray(2.0 ** (steps / STEPS_PER_OCTAVE), np.float32)


def _read_some(matrix: MatrixRows) -> Array:
    """About `NUM_ROWS` rows, evenly spaced."""
    num_rows, size = matrix.shape
    step = max(1, num_rows // NUM_ROWS)
    if step * size > NUMBERS_PER_READ:
        return _read_each(matrix, range(0, num_rows, step))
    together = step * max(1, NUMBERS_TOGETHER // (step * size))
    parts = (matrix.read(start, min(start + together, num_rows)) for start in range(0, num_rows, together))
    return np.concatenate([part[::step] for part in parts])


def _read_each(matrix: MatrixRows, places: Iterable[int]) -> Array:
    return np.concatenate([matrix.read(place, place + 1) for place in places])
