#!/usr/bin/env python3
"""Measures what is left of the speed on a CPU while other processes keep every core busy.

    python bench/busy.py
    python bench/busy.py --streams 1 8 --others 1 2 --model path/to/checkpoint

The engine runs in this process, without HTTP, by turns alone and beside processes that only count, so many for
each core. A fair share of the machine is 1 / (1 + that many). Threads that wait for each other get less if a
waiting one keeps its core, because the one that it waits for cannot run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))

from constrained import ask, measure
from speculate import running

from levserve.engine.engine import Engine
from levserve.models.build import Loaded
from levserve.text.chat import render_chat

COUNT = "while True: pass"
PROMPT = "Tell me a story about a lighthouse keeper and a whale."


def main() -> None:
    options, flags = _parser().parse_known_args()
    num_cores = len(os.sched_getaffinity(0))
    with running(0, flags) as (engine, loaded):
        print(f"{loaded.model.name}, {num_cores} cores {' '.join(flags)}", flush=True)
        for streams in options.streams:
            for others in options.others:
                compare(engine, loaded, streams, others, num_cores, options)


def compare(
    engine: Engine,
    loaded: Loaded,
    streams: int,
    others: int,
    num_cores: int,
    options: argparse.Namespace,
) -> None:
    alone: list[float] = []
    beside: list[float] = []
    measure_once(engine, loaded, streams, options.tokens)
    for _ in range(options.repeats):
        alone.append(measure_once(engine, loaded, streams, options.tokens))
        with busy_processes(others * num_cores):
            beside.append(measure_once(engine, loaded, streams, options.tokens))
    quiet, busy = statistics.median(alone), statistics.median(beside)
    print(
        f"{streams:3d} streams  alone {quiet:7.1f} tok/s, beside {others} on each core {busy:7.1f}  "
        f"x {busy / quiet:.2f}, a fair share is {1 / (1 + others):.2f}",
        flush=True,
    )


def measure_once(engine: Engine, loaded: Loaded, streams: int, tokens: int) -> float:
    prompt = tuple(render_chat(loaded.model.tokenizer, [{"role": "user", "content": PROMPT}]))
    requests = [ask(prompt, tokens, 0.0, seed) for seed in range(streams)]
    return measure(engine, loaded, requests, range(streams)).tokens_per_second


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
    parser.add_argument("--repeats", type=int, default=5)
    return parser


if __name__ == "__main__":
    main()
