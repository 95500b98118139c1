#!/usr/bin/env python3
"""Measures levserve's engine alone on a model's file, as bench/llama_steps.py measures llama.cpp's:
milliseconds per decode step by number of rows, and prompt tokens per second.

    python bench/file_steps.py model.gguf --rows 1 8 --context 256 --prompt 512 --quantize int8

The file is read, quantized and stored as in the server; the time to load it is printed as well. It runs
on a CPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import decode
import jax.numpy as jnp

from levserve.device.runner import Runner
from levserve.models.describe import describe
from levserve.observe.metrics import Metrics
from levserve.settings.parse import parse_settings
from levserve.weights.source import find_source


def main() -> None:
    options, flags = _parser().parse_known_args()
    name = options.file.name
    settings = parse_settings(["--model", str(options.file), "--device", "cpu", *flags], {})
    description = describe(settings, find_source(settings, lambda _: None, with_tokenizer=False))
    config = description.config
    begun = time.perf_counter()
    arrays = description.load_arrays(lambda text: print(text, flush=True))
    loaded = time.perf_counter() - begun
    weight_bytes = sum(array.nbytes for array in arrays.values())
    print(f"{name}: loaded in {loaded:.2f} s, {weight_bytes / 1e9:.2f} GB", flush=True)
    rows = ["--rows", *map(str, options.rows), "--chunks", *([str(options.prompt)] if options.prompt else [])]
    measured = decode._parser().parse_args(
        [*rows, "--context", str(options.context), "--repeats", str(options.steps)]
    )
    sizes = decode.plan_sizes(config, description.backend, description.storage, weight_bytes, measured)
    runner = description.make_runner(arrays, sizes, Metrics())
    assert isinstance(runner, Runner)
    if options.prompt:
        rate = options.prompt / decode.measure_prefill(runner, sizes, config, options.prompt, measured)
        print(f"{name}: prompt of {options.prompt}: {rate:.0f} tokens/s", flush=True)
    for count in options.rows:
        firsts = jnp.asarray(decode.random_tokens(config, sizes.rows, count), jnp.int32)
        runner._state = runner._state._replace(last_tokens=firsts)
        step = decode.measure_decode(runner, sizes, count, measured)
        print(
            f"{name}: {count} rows, context {options.context}: {1000 * step:.2f} ms a step, "
            f"{count / step:.1f} tokens/s",
            flush=True,
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.epilog = "any other flag is the server's: --quantize int8-blocks --cache-dir FOLDER"
    parser.add_argument("file", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=512, help="0: none")
    parser.add_argument("--steps", type=int, default=16)
    return parser


if __name__ == "__main__":
    main()
