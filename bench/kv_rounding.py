#!/usr/bin/env python3
"""Measures what storing keys and values in fewer bits would cost in quality, before kernels for it exist.

    python bench/kv_rounding.py
    python bench/kv_rounding.py --ways int8 fp8-scaled --model path/to/checkpoint

Keys and values are rounded before they are written to a cache in float32, which gives the results of a
kernel that reads the rounded ones. The text, the model and the columns are those of bench/quality.py;
all else is float32.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import jax
import jax.numpy as jnp
from quality import TEXT, Format, _show, compare, score, score_text
from rounding import make_parser

from levserve.model import cache
from levserve.model.decoder import Decoder
from levserve.model.hadamard import rotation
from levserve.model.xla import XLA_ON_CPU
from levserve.settings.parse import parse_settings
from levserve.text.tokenizer import load_tokenizer
from levserve.weights.checkpoint import load_arrays, read_config
from levserve.weights.source import find_source

PAGE_TOKENS = 32
Round = Callable[[jax.Array], jax.Array]
"""Rounds keys or values [row, chunk, kv_head, head_size]; takes and returns float32."""
Write = Callable[[jax.Array, jax.Array, jax.Array, cache.Place], jax.Array]
"""As `cache.write`."""


def cast(dtype: jnp.dtype) -> Round:
    return lambda x: cache.from_storage(cache.to_storage(x, dtype)).astype(jnp.float32)


def scaled(largest: float, round_numbers: Round) -> Round:
    """Rounds with a scale for each token and head, by which its largest value becomes `largest`."""

    def apply(x: jax.Array) -> jax.Array:
        scale = jnp.maximum(jnp.abs(x).max(-1, keepdims=True), cache.SMALLEST_SCALE) / largest
        return round_numbers(x / scale) * scale

    return apply


def by_page(apply: Round) -> Round:
    """Rounds with a scale for each page and head: the tokens of a page are rounded as one long head."""

    def apply_to_pages(x: jax.Array) -> jax.Array:
        rows, _, heads, size = x.shape
        pages = x.reshape(rows, -1, PAGE_TOKENS, heads, size).swapaxes(2, 3)
        rounded = apply(pages.reshape(rows, -1, heads, PAGE_TOKENS * size)).reshape(pages.shape)
        return rounded.swapaxes(2, 3).reshape(x.shape)

    return apply_to_pages


def rotated(apply: Round) -> Round:
    def apply_to_rotated(x: jax.Array) -> jax.Array:
        turn = rotation(x.shape[-1])
        return apply(x @ turn) @ turn.T

    return apply_to_rotated


INT8, INT4 = scaled(127, jnp.round), scaled(7, jnp.round)
WAYS: dict[str, Round] = {
    "bfloat16": cast(jnp.dtype(jnp.bfloat16)),
    "fp8": cast(cache.FP8),
    "fp8-scaled": scaled(cache.LARGEST_FP8, cast(cache.FP8)),
    "fp8-by-page": by_page(scaled(cache.LARGEST_FP8, cast(cache.FP8))),
    "int8": INT8,
    "int8-by-page": by_page(INT8),
    "int8-rotated": rotated(INT8),
    "int4-rotated": rotated(INT4),
}


def round_before_writing(way: Round, write: Write) -> None:
    """Makes the model round keys and values this way before it writes them."""
    jax.clear_caches()  # layers that were traced with another way would be reused
    cache.write = lambda pool, keys, values, place: write(pool, way(keys), way(values), place)


def main() -> None:
    options = make_parser(__doc__, WAYS).parse_args()
    jax.config.update("jax_default_matmul_precision", "highest")
    files = find_source(parse_settings(["--model", options.model], {}), lambda _: None)
    config = read_config(files.path, files.config_file)
    tokens = load_tokenizer(files.tokenizer or files.path).encode(TEXT.read_text())[: options.tokens]
    reference = score(files.path, config, tokens, Format(dtype="float32"))
    arrays = load_arrays(files.path, config, jnp.dtype(jnp.float32), report=lambda _: None)
    model, write = Decoder.from_arrays(config, arrays, backend=XLA_ON_CPU), cache.write
    for name in options.ways:
        round_before_writing(WAYS[name], write)
        _show(compare(name, score_text(model, config, tokens, jnp.dtype(jnp.float32)), reference))


if __name__ == "__main__":
    main()
