#!/usr/bin/env python3
"""Measures what rounding matrices and activations would cost in quality, before kernels for it exist.

    python bench/rounding.py
    python bench/rounding.py --ways int8 groups --model path/to/checkpoint
    python bench/rounding.py --ways int8 --kinds qkv --sides matrices

Products are computed in float32 from values that were rounded first, which gives the results of integer
kernels. The text, the model and the columns are those of bench/quality.py; keys and values are in
bfloat16.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import jax
import jax.numpy as jnp
from quality import TEXT, Format, _show, compare, score, score_text

from levserve.model.backend import Product
from levserve.model.decoder import Decoder
from levserve.model.fp8_rows import round_rows
from levserve.model.hadamard import rotation
from levserve.model.quantize import QUANTIZED, is_quantized
from levserve.model.xla import XlaBackend
from levserve.settings.parse import parse_settings
from levserve.text.tokenizer import load_tokenizer
from levserve.weights.checkpoint import load_arrays, read_config
from levserve.weights.source import find_source

EXACT = 0
"""As a number of bits: nothing is rounded."""
WHOLE_ROW = 0
"""As the size of a group: one scale for all values of a row."""
SIDES = ("matrices", "activations")


@dataclass(frozen=True)
class Rounding:
    """Rounds to `bits` bits, with one scale for each group of values."""

    bits: int
    group: int = WHOLE_ROW

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.bits == EXACT:
            return x
        groups = x.reshape(*x.shape[:-1], -1, self.group or x.shape[-1])
        scale = jnp.maximum(jnp.abs(groups).max(-1, keepdims=True), 1e-20) / (2 ** (self.bits - 1) - 1)
        rounded: jax.Array = jnp.round(groups / scale) * scale
        return rounded.reshape(x.shape)


@dataclass(frozen=True)
class Fp8:
    """Rounds to FP8, with one scale for each block of rows and columns."""

    columns: int
    rows: int = 1

    def __call__(self, x: jax.Array) -> jax.Array:
        blocks = x.reshape(-1, self.rows, x.shape[-1] // self.columns, self.columns).swapaxes(1, 2)
        rounded = round_rows(blocks.reshape(-1, self.rows * self.columns), None).widen()
        return rounded.reshape(blocks.shape).swapaxes(1, 2).reshape(x.shape)


@dataclass(frozen=True)
class Way:
    """A way to multiply: both sides are rotated in blocks, then rounded."""

    block: int
    """1: no rotation."""
    weights: Rounding | Fp8
    activations: Rounding | Fp8
    head: Rounding | None = None
    """For the head's activations; None: the same as for the others."""
    has_exact_head: bool = False
    """Whether the head's matrix is left as it is."""


WAYS = {
    "int8": Way(64, Rounding(8), Rounding(8)),
    "groups": Way(64, Rounding(8, 64), Rounding(8, 64)),
    "file": Way(1, Rounding(EXACT), Rounding(8, 32)),
    "file+int16": Way(1, Rounding(EXACT), Rounding(16, 32)),
    "exact64": Way(64, Rounding(EXACT), Rounding(8, 64)),
    "exact32": Way(32, Rounding(EXACT), Rounding(8, 32)),
    "exact32+head": Way(32, Rounding(EXACT), Rounding(8, 32), Rounding(16, 32)),
    "fp8-weights": Way(1, Fp8(64, 64), Rounding(EXACT), has_exact_head=True),
    "fp8-blocks": Way(1, Fp8(64, 64), Fp8(64), Rounding(EXACT), has_exact_head=True),
}
"""The last two are FP8 checkpoints, whose blocks are 128 x 128 where that divides the matrices."""


@dataclass(frozen=True)
class Simulated(XlaBackend):
    """Rounds activations before each product; the matrices that it gets are rounded already."""

    way: Way = field(default=WAYS["int8"])
    vocab_size: int = 0
    rounded_shapes: frozenset[tuple[int, ...]] = frozenset()
    """The shapes of the matrices whose activations are rounded."""

    def product(self, weight: jax.Array, scale: jax.Array | None, *, in_two_terms: bool = False) -> Product:
        way = self.way
        is_head = len(weight) == self.vocab_size
        round_activations = (is_head and way.head) or way.activations
        if weight.shape not in self.rounded_shapes:
            round_activations = Rounding(EXACT)

        def multiply(x: jax.Array, num_used: jax.Array | None) -> jax.Array:
            return round_activations(_rotate(x, way.block)) @ weight.T

        return multiply


def main() -> None:
    parser = make_parser(__doc__, WAYS)
    parser.add_argument(
        "--kinds", choices=QUANTIZED, nargs="+", default=QUANTIZED, help="of matrices that are rounded"
    )
    parser.add_argument("--sides", choices=SIDES, nargs="+", default=SIDES, help="of products, the same")
    options = parser.parse_args()
    jax.config.update("jax_default_matmul_precision", "highest")
    files = find_source(parse_settings(["--model", options.model], {}), lambda _: None)
    config = read_config(files.path, files.config_file)
    tokens = load_tokenizer(files.tokenizer or files.path).encode(TEXT.read_text())[: options.tokens]
    reference = score(files.path, config, tokens, Format(dtype="float32"))
    arrays = load_arrays(files.path, config, jnp.dtype(jnp.float32), report=lambda _: None)
    if config.tied_head:  # the head is rounded and the embedding is not
        config, arrays["head"] = replace(config, tied_head=False), arrays["embed"]
    matrices, activations = (options.kinds if side in options.sides else () for side in SIDES)
    shapes = frozenset(array.shape for name, array in arrays.items() if _kind(name) in activations)
    for name in options.ways:
        way = WAYS[name]
        rounded = {
            key: _make_matrix(way, array, is_rounded=_kind(key) in matrices)
            if _is_rotated(way, key)
            else array
            for key, array in arrays.items()
        }
        backend = Simulated(way=way, vocab_size=config.vocab_size, rounded_shapes=shapes)
        model = Decoder.from_arrays(config, rounded, backend=backend)
        _show(compare(name, score_text(model, config, tokens, jnp.dtype(jnp.bfloat16)), reference))


def _kind(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def _is_rotated(way: Way, name: str) -> bool:
    return is_quantized(name) and not (way.has_exact_head and name == "head")


def _make_matrix(way: Way, matrix: jax.Array, *, is_rounded: bool) -> jax.Array:
    rotated = _rotate(matrix, way.block)
    return way.weights(rotated) if is_rounded else rotated


def _rotate(x: jax.Array, block: int) -> jax.Array:
    return (x.reshape(-1, block) @ rotation(block)).reshape(x.shape)


def make_parser(description: str | None, ways: Collection[str]) -> argparse.ArgumentParser:
    """The options of this benchmark and of `kv_rounding.py`, whose ways differ."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="smollm2-135m", help="as levserve's --model (default: the bundled one)"
    )
    parser.add_argument("--tokens", type=int, default=4096, help="of the text, at most (default: 4096)")
    parser.add_argument(
        "--ways", choices=ways, nargs="+", default=list(ways), metavar="WAY", help=" ".join(ways)
    )
    return parser


if __name__ == "__main__":
    main()
