#!/usr/bin/env python3
"""Measures what drafts gain: tokens a second with and without --speculate, on prompts whose answers repeat
more or less of the prompt.

    python bench/speculate.py
    python bench/speculate.py --speculate 4 --streams 1 4 --temperature 0.7

The engine runs in this process, without HTTP, and both ways take turns on it. Rates are of the tokens
after the first, from the first to the last.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

from levserve.engine.engine import Engine
from levserve.models.build import Loaded
from levserve.models.load import load
from levserve.models.registry import Registry
from levserve.models.startup import serve
from levserve.observe.metrics import Metrics
from levserve.schedule.request import GenerationRequest, Sampling
from levserve.settings.parse import parse_settings
from levserve.text.chat import render_chat

CODE = """\
class Account:
    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance
        self.history = []

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount
        self.history.append(("deposit", amount))

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance -= amount
        self.history.append(("withdraw", amount))
"""
TEXT = (Path(__file__).parent / "quality.txt").read_text()[:1200]
PROMPTS = {
    "edit code": f"Add a docstring to every method and give the whole class back:\n\n```python\n{CODE}```",
    "summarise": f"Summarise this text in a few sentences:\n\n{TEXT}",
    "chat": "Tell me a story about a lighthouse keeper and a whale.",
}


class Run(NamedTuple):
    tokens_per_second: float
    num_tokens: int
    drafted: float
    accepted: float
    rounds: float


def main() -> None:
    options, flags = _parser().parse_known_args()
    with running(options.speculate, flags) as (engine, loaded):
        print(
            f"{loaded.model.name}, drafts of {options.speculate}, temperature {options.temperature} {' '.join(flags)}",
            flush=True,
        )
        speculation = loaded.scheduler.speculation
        for streams in options.streams:
            for name, text in PROMPTS.items():
                prompt = render_chat(loaded.model.tokenizer, [{"role": "user", "content": text}])
                plain: list[Run] = []
                drafted: list[Run] = []
                for _ in range(options.repeats + 1):
                    for runs, chosen in ((plain, None), (drafted, speculation)):
                        loaded.scheduler.speculation = chosen  # nothing is running here
                        runs.append(measure(engine, loaded, tuple(prompt), streams, options))
                show(streams, name, plain[1:], drafted[1:])  # the first ones filled the prefix cache


def measure(
    engine: Engine, loaded: Loaded, prompt: tuple[int, ...], streams: int, options: argparse.Namespace
) -> Run:
    """All streams have the same prompt; each has its own seed."""
    stops = loaded.model.tokenizer.eos_ids
    requests = [
        GenerationRequest(
            f"{time.monotonic_ns()}-{seed}",
            prompt,
            options.tokens,
            Sampling(options.temperature, seed=seed),
            stops,
        )
        for seed in range(streams)
    ]
    before = _counts(engine.metrics)
    clock = time.process_time if options.cpu_time else time.monotonic
    stream = engine.submit(requests, loaded.model)
    num_tokens, first, last = 0, 0.0, 0.0
    for _, batch in stream:
        last = clock()
        first = first or last
        num_tokens += len(batch.tokens)
    while engine.metrics.registry.get_sample_value("levserve_requests_running"):
        time.sleep(0.01)
    drafted, accepted, rounds = (after - old for after, old in zip(_counts(engine.metrics), before))
    return Run((num_tokens - streams) / max(last - first, 1e-9), num_tokens, drafted, accepted, rounds)


def show(streams: int, name: str, plain: list[Run], drafted: list[Run]) -> None:
    slow, fast = (statistics.median(run.tokens_per_second for run in runs) for runs in (plain, drafted))
    run = drafted[-1]
    right = (
        f"{run.accepted / run.drafted:4.0%} of {run.drafted:4.0f} drafted tokens right"
        if run.drafted
        else "nothing drafted"
    )
    print(
        f"{streams:2d} x {name:10s} {run.num_tokens:4d} tokens  {slow:6.1f} -> {fast:6.1f} tok/s  x {fast / slow:4.2f}  {right}, "
        f"{run.num_tokens / streams / max(run.rounds, 1):4.2f} tokens a step",
        flush=True,
    )


def _counts(metrics: Metrics) -> list[float]:
    value = metrics.registry.get_sample_value
    rounds = sum(value("levserve_rounds_total", {"kind": kind}) or 0 for kind in ("decode", "verify"))
    return [
        value("levserve_draft_tokens_total") or 0,
        value("levserve_draft_accepted_tokens_total") or 0,
        rounds,
    ]


@contextmanager
def running(num_draft: int, flags: list[str]) -> Iterator[tuple[Engine, Loaded]]:
    """Runs the engine on its device thread, with every program compiled."""
    settings = parse_settings(["--speculate", str(num_draft), *flags], {})
    settings = replace(settings, max_running=settings.max_running or 8)
    engine = Engine(max_inflight=64, metrics=Metrics())
    loaded: list[Loaded] = []

    def work() -> None:
        loaded.append(load(settings, engine.metrics, report=lambda text: print(text, file=sys.stderr)))
        serve(Registry(engine), loaded[0])

    thread = threading.Thread(target=work, name="levserve-device", daemon=True)
    thread.start()
    while thread.is_alive() and not (loaded and loaded[0].runner.programs.is_complete):
        time.sleep(0.1)
    if not thread.is_alive():
        sys.exit("the engine did not start")
    try:
        yield engine, loaded[0]
    finally:
        engine.stop()
        thread.join()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Options that are not listed here are levserve's, such as --model and --quantize.",
    )
    parser.add_argument(
        "--speculate", type=int, default=7, metavar="N", help="tokens of a draft (default: 7)"
    )
    parser.add_argument(
        "--streams", type=int, nargs="+", default=[1], help="requests that run together (default: 1)"
    )
    parser.add_argument("--tokens", type=int, default=160, help="of an answer, at most (default: 160)")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="count this process's CPU seconds, where others use the machine too",
    )
    parser.add_argument("--repeats", type=int, default=3)
    return parser


if __name__ == "__main__":
    main()
