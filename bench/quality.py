#!/usr/bin/env python3
"""Measures what number formats cost in quality: perplexity, and how far log-probabilities move from those of
float32.

    python bench/quality.py
    python bench/quality.py --model path/to/checkpoint --text path/to/text --formats fp8 fp8-kv
    python bench/quality.py --formats int8 int8-blocks --llama /opt/llama/bin/python

The text is bench/quality.txt, written for this purpose, so no model has seen it; it must stay as it is
for figures to be comparable. The reference is the checkpoint's own weights computed in float32: what a
quantized file has lost already is not measured here. Each format is computed as the server would on this
device; fp8 matrices, which the server does not support on a CPU, as it would on a GPU. `--llama`
measures llama.cpp with the same GGUF file in the same way, with the llama-cpp-python of that
interpreter.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from levserve.model import cache
from levserve.model.config import ModelConfig
from levserve.model.decoder import Decoder
from levserve.model.feed_forward import CHUNK, ROW
from levserve.model.quantize import (
    FP8_NAME,
    IN_BLOCKS,
    IN_FOUR_BITS,
    NARROW,
    choose_quantization,
    keep_in_fp8,
    widens_blocks,
)
from levserve.model.select import choose_backend
from levserve.settings.parse import parse_settings
from levserve.text.tokenizer import load_tokenizer
from levserve.weights.checkpoint import find_four_bit_matrices, load_arrays, read_config
from levserve.weights.source import find_source

TEXT = Path(__file__).parent / "quality.txt"
CHUNK_TOKENS, PAGE_SIZE = 128, 32


class Format(NamedTuple):
    """The settings of the same names."""

    quantize: str = "none"
    kv_dtype: str = "auto"
    dtype: str = "bfloat16"


FORMATS = {
    "bfloat16": Format(),
    "fp8-kv": Format(kv_dtype="fp8"),
    "int8-kv": Format(kv_dtype="int8"),
    "int8": Format("int8"),
    "int8-blocks": Format("int8-blocks"),
    "int4": Format("int4"),
    "int4-blocks": Format("int4-blocks"),
    "fp8": Format("fp8"),
    "int8+fp8-kv": Format("int8", "fp8"),
    "int8+int8-kv": Format("int8", "int8"),
    "fp8+fp8-kv": Format("fp8", "fp8"),
}


@dataclass(frozen=True, slots=True)
class Quality:
    kind: str
    perplexity: float
    above_float32: float
    """How much higher perplexity is, as a share."""
    mean_difference: float
    """Mean absolute difference of the log-probability of each token of the text."""
    largest_difference: float
    same_first: float
    """Share of positions where the likeliest token is the same as in float32."""


@dataclass(frozen=True, slots=True)
class Scores:
    logprobs: NDArray[np.float32]
    """The log-probability of each token of the text after the first."""
    likeliest: NDArray[np.int32]


def main() -> None:
    options = _parser().parse_args()
    platform = jax.default_backend()
    files = find_source(parse_settings(["--model", options.model], {}), lambda _: None)
    text = options.text.read_text()
    config = read_config(files.path, files.config_file)
    tokens = load_tokenizer(files.tokenizer or files.path).encode(text)[: options.tokens]
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    print(
        f"{files.name} on {platform}, jax {jax.__version__}: {len(tokens)} tokens of {options.text.name} (sha256 {digest})\n"
    )
    reference = score(files.path, config, tokens, Format(dtype="float32"))
    rows = [compare("float32", reference, reference)]
    _show(rows[0])
    for name in options.formats:
        rows.append(compare(name, score(files.path, config, tokens, FORMATS[name]), reference))
        _show(rows[-1])
    if options.llama:
        rows.append(compare("llama.cpp", score_with_llama(options.llama, files.path, tokens), reference))
        _show(rows[-1])
    if options.json:
        options.json.write_text(
            json.dumps(
                {
                    "model": files.name,
                    "platform": platform,
                    "tokens": len(tokens),
                    "text_sha256": digest,
                    "rows": [asdict(row) for row in rows],
                },
                indent=1,
            )
            + "\n"
        )


def score(path: Path, config: ModelConfig, tokens: list[int], number_format: Format) -> Scores:
    """The scores of the text, computed as the server would with these settings."""
    platform, dtype, narrow = (
        jax.default_backend(),
        jnp.dtype(number_format.dtype),
        NARROW.get(number_format.quantize),
    )
    began = time.monotonic()
    # As the server does.
    jax.config.update("jax_default_matmul_precision", "highest" if dtype == jnp.float32 else None)
    kv_dtype = cache.kv_dtype(number_format.kv_dtype, dtype)
    kept = keep_in_fp8(config, dtype) if number_format.quantize == FP8_NAME else None
    is_packed = kept is not None
    backend, _ = choose_backend(
        platform, config, quantized=narrow, dtype=dtype, kv_dtype=kv_dtype, is_packed=is_packed
    )
    quantization = kept or choose_quantization(
        narrow,
        backend,
        dtype,
        in_blocks=number_format.quantize in IN_BLOCKS,
        four_bits=find_four_bit_matrices(path, config) if number_format.quantize in IN_FOUR_BITS else None,
        widens_blocks=widens_blocks(number_format.quantize, backend),
    )
    arrays = load_arrays(path, config, dtype, report=lambda _: None, quantization=quantization)
    model = Decoder.from_arrays(config, arrays, backend=backend, quantization=quantization)
    scores = score_text(model, config, tokens, kv_dtype)
    print(f"{number_format} took {time.monotonic() - began:.0f} s", file=sys.stderr)
    return scores


def score_with_llama(python: str, path: Path, tokens: list[int]) -> Scores:
    """llama.cpp's scores of the same tokens with the same GGUF file."""
    command = [python, str(Path(__file__).with_name("llama_scores.py"))]
    request = json.dumps({"model": str(path), "tokens": tokens})
    answer = json.loads(
        subprocess.run(command, input=request, stdout=subprocess.PIPE, text=True, check=True).stdout
    )
    return Scores(np.asarray(answer["logprobs"], np.float32), np.asarray(answer["likeliest"], np.int32))


def score_text(model: Decoder, config: ModelConfig, tokens: list[int], kv_dtype: jnp.dtype) -> Scores:
    """Runs the text through the model as prefill does, a chunk at a time over paged KV."""
    num_pages = -(-len(tokens) // PAGE_SIZE)
    pools = cache.make_pool(
        config,
        num_pages,
        PAGE_SIZE,
        model.backend.kv_storage(kv_dtype),
    )
    table = jnp.arange(num_pages, dtype=jnp.int32)[None]

    @jax.jit
    def run(
        model: Decoder,
        given: jax.Array,
        positions: jax.Array,
        following: jax.Array,
        pools: tuple[jax.Array, ...],
    ) -> Any:
        hidden, pools = model(given, pools, table, positions)
        logits = jax.nn.log_softmax(model.logits(hidden[ROW, 0].rename({CHUNK: ROW})))
        return (
            jnp.take_along_axis(logits, following[0][:, None], axis=1)[:, 0],
            logits.argmax(-1).astype(jnp.int32),
            pools,
        )

    parts: list[tuple[NDArray[np.float32], NDArray[np.int32]]] = []
    for start in range(0, len(tokens) - 1, CHUNK_TOKENS):
        count = min(CHUNK_TOKENS, len(tokens) - 1 - start)
        given, following = np.zeros((2, 1, CHUNK_TOKENS), np.int32)
        given[0, :count], following[0, :count] = (
            tokens[start : start + count],
            tokens[start + 1 : start + 1 + count],
        )
        positions = np.full((1, CHUNK_TOKENS), -1, np.int32)
        positions[0, :count] = np.arange(start, start + count)
        logprobs, likeliest, pools = run(model, given, positions, following, pools)
        parts.append((np.asarray(logprobs)[:count], np.asarray(likeliest)[:count]))
    return Scores(np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts]))


def compare(kind: str, scores: Scores, reference: Scores) -> Quality:
    mean, wanted = float(scores.logprobs.mean()), float(reference.logprobs.mean())
    difference = np.abs(scores.logprobs - reference.logprobs)
    same = float((scores.likeliest == reference.likeliest).mean())
    return Quality(
        kind,
        math.exp(-mean),
        math.exp(wanted - mean) - 1,
        float(difference.mean()),
        float(difference.max()),
        same,
    )


def _show(row: Quality) -> None:
    print(
        f"{row.kind:<11} perplexity {row.perplexity:8.4f}  {row.above_float32:+8.3%}  |difference| mean {row.mean_difference:.4f}  "
        f"largest {row.largest_difference:.3f}  same likeliest token {row.same_first:.1%}",
        flush=True,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="smollm2-135m", help="as levserve's --model (default: the bundled one)"
    )
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--tokens", type=int, default=4096, help="of the text, at most (default: 4096)")
    parser.add_argument(
        "--formats",
        choices=FORMATS,
        nargs="+",
        default=list(FORMATS),
        metavar="FORMAT",
        help=" ".join(FORMATS),
    )
    parser.add_argument(
        "--llama", metavar="PYTHON", help="also measure llama.cpp, with the llama-cpp-python of this Python"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    return parser


if __name__ == "__main__":
    main()
