#!/usr/bin/env python3
"""Measures how much of its speed levserve keeps on a CPU while other processes keep every core busy.

    python bench/busy.py
    python bench/busy.py --streams 1 8 --others 1 2 --model path/to/checkpoint
    python bench/busy.py --shape smollm2-135m --ways yield turn sleep --repeats 20

The engine runs in this process, without HTTP, by turns alone and beside busy loops, `--others`
of them for each core. A fair share of the machine is then 1 / (1 + others). Threads that wait for each
other get less if a waiting thread keeps its core, because the thread that it waits for cannot run. With
`--shape`, decode steps with random weights are measured instead, without a model file; with `--ways` as
well, ways in which threads wait are compared by turns (see ways.py). `--looks` varies how long threads
wait before they sleep.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))

import decode
from constrained import ask, measure
from speculate import running
from ways import WAYS, Steps, kernels_in

from levserve.engine.engine import Engine
from levserve.models.build import Loaded
from levserve.text.chat import render_chat

COUNT = "while True: pass"
PROMPT = "Tell me a story about a lighthouse keeper and a whale."


def main() -> None:
    options, flags = _parser().parse_known_args()
    decode.set_looks(options.looks)
    kept = ["--compile-cache", "false"] if options.looks is not None else []
    if options.shape:
        return compare_ways(options)
    with running(0, [*flags, *kept]) as (engine, loaded):
        name = " ".join([loaded.model.name, *flags])
        compare(lambda streams: measure_streams(engine, loaded, streams, options.tokens), options, name)


def compare(measure: Callable[[int], float], options: argparse.Namespace, name: str) -> None:
    """Prints the rate for each number of streams, alone and beside busy processes."""
    num_cores = len(os.sched_getaffinity(0))
    print(f"{name}, {num_cores} cores", flush=True)
    for streams, others in itertools.product(options.streams, options.others):
        alone: list[float] = []
        beside: list[float] = []
        measure(streams)
        for _ in range(options.repeats):
            alone.append(measure(streams))
            with busy_processes(round(others * num_cores)):
                beside.append(measure(streams))
        quiet, busy = statistics.median(alone), statistics.median(beside)
        print(
            f"{streams:3d} streams  alone {quiet:7.1f} tok/s, beside {others:g} on each core {busy:7.1f}  "
            f"x {busy / quiet:.2f}, a fair share is {1 / (1 + others):.2f}",
            flush=True,
        )


def measure_streams(engine: Engine, loaded: Loaded, streams: int, tokens: int) -> float:
    prompt = tuple(render_chat(loaded.model.tokenizer, [{"role": "user", "content": PROMPT}]))
    requests = [ask(prompt, tokens, 0.0, seed) for seed in range(streams)]
    return measure(engine, loaded, requests, range(streams)).tokens_per_second


Rates = dict[tuple[int, float, str], list[float]]
"""Tokens a second in each repeat, by number of streams, number of busy processes on each core, and way."""


def compare_ways(options: argparse.Namespace) -> None:
    """Measures each way by turns, alone and beside busy processes, for as many repeats as there is time for."""
    num_cores, steps = len(os.sched_getaffinity(0)), {}
    print(f"{options.shape}, {num_cores} cores", flush=True)
    end = time.monotonic() + options.seconds
    for way in options.ways:
        with kernels_in(way):
            steps[way] = Steps(options.shape, options.streams, options.tokens)
    rates: Rates = {}
    try:
        for repeat in range(options.repeats):
            begun = time.monotonic()
            for others in sorted({0, *options.others}):
                with busy_processes(round(others * num_cores)):
                    ways = options.ways[:: -1 if repeat % 2 else 1]
                    for streams, way in itertools.product(options.streams, ways):
                        rates.setdefault((streams, others, way), []).append(steps[way].measure(streams))
            if time.monotonic() + (time.monotonic() - begun) > end:
                break
    finally:  # also after Ctrl-C
        print_rates(rates, options.ways[0])


def print_rates(rates: Rates, first: str) -> None:
    """Prints the median rate of each way, and the median and quartiles of its ratio to the first way."""
    for (streams, others, way), found in sorted(rates.items(), key=lambda item: item[0][:2]):
        rate, alone = statistics.median(found), statistics.median(rates[streams, 0, way])
        times = sorted(own / other for own, other in zip(found, rates[streams, others, first]))
        low, middle, high = (times[min(len(times) * part // 4, len(times) - 1)] for part in (1, 2, 3))
        share = f", x {rate / alone:.2f} of alone (fair: {1 / (1 + others):.2f})" if others else ""
        print(
            f"{streams:3d} streams, {others:g} on each core, {way:8} {rate:7.1f} tok/s, x {middle:.3f} of {first} "
            f"({low:.3f} to {high:.3f}, {len(found)} turns){share}",
            flush=True,
        )


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
        "--others", type=float, nargs="+", default=[1], help="busy processes for each core (default: 1)"
    )
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--shape", choices=decode.SHAPES, help="decode steps of random weights in this shape")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["default"], help="with --shape")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="with --shape: no repeat that would end later"
    )
    parser.add_argument("--looks", type=int, help="as bench/decode.py's")
    parser.add_argument("--repeats", type=int, default=5)
    return parser


if __name__ == "__main__":
    main()
