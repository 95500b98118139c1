#!/usr/bin/env python3
"""Measures what formats of quantized checkpoints cost in quality, and what serving them unchanged adds.

    python bench/packed_quality.py
    python bench/packed_quality.py --schemes w4 mxfp4 --model path/to/checkpoint

The matrices of the layers are rounded to the nearest values of a format, without calibration; tools that
calibrate, such as GPTQ and AWQ, do better. Embedding and head stay as they are. Each scheme has two
rows. "rounded" compares the rounded weights with the checkpoint's own, both in float32, and is what the
format costs. "served" compares the same bits in bfloat16, as `--quantize keep` serves them, with the
rounded weights in float32, and is what the server adds. The text and the columns are those of
bench/quality.py.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis
from numpy.typing import NDArray
from quality import TEXT, Format, Scores, _show, compare, score, score_text
from schemes import SCHEMES, find_schemes

from levserve.model.cache import LARGEST_FP8
from levserve.model.config import ModelConfig
from levserve.model.decoder import Decoder
from levserve.model.packed import SCALE, ZERO, Code, Kept, PackedMatrix, Scheme, pack_nibbles
from levserve.model.select import choose_backend
from levserve.settings.parse import parse_settings
from levserve.text.tokenizer import load_tokenizer
from levserve.weights.checkpoint import load_arrays, read_config
from levserve.weights.source import find_source

BFLOAT16, FLOAT32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
MEASURED = [name for name in SCHEMES if name not in ("q4_k", "q6_k")]
"""K-quants round their scales as well, by rules of their own."""
E2M1_SIZES = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
Array = NDArray[Any]


def main() -> None:
    options = _parser().parse_args()
    files = find_source(parse_settings(["--model", options.model], {}), lambda _: None)
    config = read_config(files.path, files.config_file)
    tokens = load_tokenizer(files.tokenizer or files.path).encode(TEXT.read_text())[: options.tokens]
    plain = score(files.path, config, tokens, Format(dtype="float32"))
    arrays = load_arrays(files.path, config, FLOAT32, report=lambda _: None)
    for name in options.schemes:
        schemes = {each: scheme.as_stored() for each, scheme in find_schemes(name, config).items()}
        kept = keep(arrays, schemes)
        rounded = arrays | {each: widen(kept, each, scheme) for each, scheme in schemes.items()}
        exact = score_arrays(config, tokens, rounded, FLOAT32, None)
        _show(compare(f"{name} rounded", exact, plain))
        narrow = {each: jnp.asarray(array, BFLOAT16) for each, array in arrays.items() if each not in schemes}
        served = score_arrays(config, tokens, narrow | kept, BFLOAT16, Kept(tuple(schemes.items()), BFLOAT16))
        _show(compare(f"{name} served", served, exact))


def score_arrays(
    config: ModelConfig, tokens: list[int], arrays: dict[str, jax.Array], dtype: jnp.dtype, kept: Kept | None
) -> Scores:
    jax.config.update("jax_default_matmul_precision", "highest" if dtype == FLOAT32 else None)
    backend, _ = choose_backend(
        jax.default_backend(), config, dtype=dtype, kv_dtype=dtype, is_packed=kept is not None
    )
    model = Decoder.from_arrays(config, arrays, backend=backend, quantization=kept)
    return score_text(model, config, tokens, dtype)


def keep(arrays: dict[str, jax.Array], schemes: dict[str, Scheme]) -> dict[str, jax.Array]:
    """Rounds the matrices that have a scheme; returns the arrays that store them."""
    kept = {}
    for name, scheme in schemes.items():
        for end, part in round_matrix(np.asarray(arrays[name], np.float32), scheme).items():
            kept[name + end] = jnp.asarray(part)
    return kept


def widen(kept: dict[str, jax.Array], name: str, scheme: Scheme) -> jax.Array:
    codes = kept[name]
    num_inputs = codes.shape[-1] * (2 if scheme.code.is_nibble else 1)
    axes = (*(Axis(f"axis{at}", size) for at, size in enumerate(codes.shape[:-1])), Axis("in", num_inputs))
    numbers: jax.Array = PackedMatrix.from_arrays(kept, scheme, axes, name).widen(FLOAT32).array
    return numbers


def round_matrix(matrix: Array, scheme: Scheme) -> dict[str, Array]:
    """Rounds a matrix [out, in]; returns the arrays that store it, by the ends of their names."""
    num_rows, num_inputs = matrix.shape
    rows, columns = scheme.rows, scheme.columns or num_inputs
    padded = np.pad(matrix, ((0, -num_rows % rows), (0, -num_inputs % columns)))
    blocks = padded.reshape(len(padded) // rows, rows, -1, columns).swapaxes(
        1, 2
    )  # [block, group, row, column]
    flat = blocks.reshape(*blocks.shape[:2], -1)
    scale, zero = find_steps(flat, scheme)
    wide = np.ldexp(np.float32(1), scale.astype(np.int32) - 127) if scale.dtype == np.uint8 else scale
    scaled = flat / np.where(wide == 0, 1, wide.astype(np.float32))[..., None]
    codes = encode(scaled, zero[..., None], scheme.code)
    codes = codes.reshape(blocks.shape).swapaxes(1, 2).reshape(padded.shape)[:num_rows, :num_inputs]
    if scheme.code.is_nibble:
        packed = np.empty((num_rows, num_inputs // 2), np.uint8)
        pack_nibbles(np.ascontiguousarray(codes), packed)
        codes = packed
    parts = {"": codes, SCALE: np.ascontiguousarray(scale.T)}
    return parts | ({ZERO: np.ascontiguousarray(zero.T.astype(np.uint8))} if scheme.has_zeros else {})


def find_steps(flat: Array, scheme: Scheme) -> tuple[Array, Array]:
    """The scale and the zero point of each block [..., number]."""
    low, high = np.minimum(flat.min(-1), 0), np.maximum(flat.max(-1), 0)
    largest = np.maximum(high, -low)
    zero = np.full(largest.shape, scheme.zero, np.float32)
    if scheme.code is Code.E2M1:  # a block's largest power of two becomes that of 6, as in OCP's MX
        return (np.floor(np.log2(largest)).astype(np.int32) - 2 + 127).astype(np.uint8), zero
    if scheme.has_zeros:
        scale = ((high - low) / 15).astype(scheme.scale)
        return scale, np.clip(np.round(-low / scale.astype(np.float32)), 0, 15)
    if scheme.code is Code.UINT4:  # the largest number becomes -8 steps, as in GGUF
        return (np.where(high > -low, high, low) / -8).astype(scheme.scale), zero
    steps = LARGEST_FP8 if scheme.code is Code.FP8 else 127
    return (largest / steps).astype(scheme.scale), zero


def encode(scaled: Array, zero: Array, code: Code) -> Array:
    """The nearest codes of values that are given in steps of their blocks."""
    if code is Code.E2M1:
        sizes = np.abs(np.abs(scaled)[..., None] - E2M1_SIZES).argmin(-1)
        codes: Array = (sizes + 8 * (scaled < 0)).astype(np.uint8)
        return codes
    if code is Code.UINT4:
        return np.clip(np.round(scaled) + zero, 0, 15).astype(np.uint8)
    if code is Code.INT8:
        return np.clip(np.round(scaled), -127, 127).astype(np.int8)
    return np.clip(scaled, -LARGEST_FP8, LARGEST_FP8).astype(code.dtype)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="smollm2-135m", help="as levserve's --model (default: the bundled one)"
    )
    parser.add_argument("--tokens", type=int, default=4096, help="of the text, at most (default: 4096)")
    parser.add_argument(
        "--schemes",
        choices=MEASURED,
        nargs="+",
        default=MEASURED,
        metavar="SCHEME",
        help=" ".join(MEASURED),
    )
    return parser


if __name__ == "__main__":
    main()
