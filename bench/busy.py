#!/usr/bin/env python3
"""Measures what is left of the speed on a CPU while other processes keep every core busy.

    python bench/busy.py
    python bench/busy.py --streams 1 8 --others 1 2 --model path/to/checkpoint
    python bench/busy.py --shape smollm2-135m --looks 1000

The engine runs in this process, without HTTP, by turns alone and beside processes that only count, so many for
each core. A fair share of the machine is 1 / (1 + that many). Threads that wait for each other get less if a
waiting one keeps its core, because the one that it waits for cannot run. With `--shape` it runs decode steps of
random weights instead, without a model file. `--looks` varies how long threads wait before they sleep.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))

import decode
import jax.numpy as jnp
from constrained import ask, measure
from speculate import running

from levserve.device.programs import Shape
from levserve.engine.engine import Engine
from levserve.jit import waiting
from levserve.jit.target import detect_target
from levserve.model.rules import Mode
from levserve.models.build import Loaded
from levserve.text.chat import render_chat

COUNT = "while True: pass"
PROMPT = "Tell me a story about a lighthouse keeper and a whale."


def main() -> None:
    options, flags = _parser().parse_known_args()
    decode.set_looks(options.looks)
    kept = ["--compile-cache", "false"] if options.looks is not None else []
    if options.shape:
        return compare(
            Steps(options.shape, max(options.streams), options.tokens).measure, options, options.shape
        )
    with running(0, [*flags, *kept]) as (engine, loaded):
        name = " ".join([loaded.model.name, *flags])
        compare(lambda streams: measure_streams(engine, loaded, streams, options.tokens), options, name)


def compare(measure: Callable[[int], float], options: argparse.Namespace, name: str) -> None:
    """Prints the rates of so many streams, alone and beside busy processes."""
    num_cores = len(os.sched_getaffinity(0))
    print(f"{name}, {num_cores} cores, looks {waiting.LOOKS[detect_target().arch]}", flush=True)
    for streams, others in itertools.product(options.streams, options.others):
        alone: list[float] = []
        beside: list[float] = []
        measure(streams)
        for _ in range(options.repeats):
            alone.append(measure(streams))
            with busy_processes(others * num_cores):
                beside.append(measure(streams))
        quiet, busy = statistics.median(alone), statistics.median(beside)
        print(
            f"{streams:3d} streams  alone {quiet:7.1f} tok/s, beside {others} on each core {busy:7.1f}  "
            f"x {busy / quiet:.2f}, a fair share is {1 / (1 + others):.2f}",
            flush=True,
        )


def measure_streams(engine: Engine, loaded: Loaded, streams: int, tokens: int) -> float:
    prompt = tuple(render_chat(loaded.model.tokenizer, [{"role": "user", "content": PROMPT}]))
    requests = [ask(prompt, tokens, 0.0, seed) for seed in range(streams)]
    return measure(engine, loaded, requests, range(streams)).tokens_per_second


class Steps:
    """Decode steps of a model with random weights in int8, without the engine."""

    def __init__(self, shape: str, max_rows: int, num_steps: int) -> None:
        rows = [str(count) for count in sorted({1, max_rows})]
        flags = ["--shape", shape, "--quantize", "int8", "--rows", *rows, "--repeats", str(num_steps)]
        self._options = decode._parser().parse_args(flags)
        config = decode.SHAPES[shape]
        self._runner, self._sizes = decode.build(config, jnp.dtype(jnp.bfloat16), "cpu", self._options)
        self._rows = 0

    def measure(self, rows: int) -> float:
        """Tokens a second over all steps, slow ones too."""
        if rows != self._rows:
            self._runner.programs.compile_only([Shape(max(2, rows), Mode.GREEDY)])
            self._rows = rows
        seconds = decode.time_rounds(self._runner, self._sizes, rows, self._options)
        return rows * len(seconds) / sum(seconds)


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", COUNT]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.epilog = "any other flag is the server's: --model FILE --quantize none"
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument(
        "--others", type=int, nargs="+", default=[1], help="busy processes for each core (default: 1)"
    )
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--shape", choices=decode.SHAPES, help="decode steps of random weights in this shape")
    parser.add_argument("--looks", type=int, help="as bench/decode.py's")
    parser.add_argument("--repeats", type=int, default=5)
    return parser


if __name__ == "__main__":
    main()
