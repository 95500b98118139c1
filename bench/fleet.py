#!/usr/bin/env python3
"""Simulates levserves behind a router with several policies, or checks the simulation against a real run.

    python bench/replicas.py --json run.json && python bench/fleet.py --check run.json
    python bench/fleet.py --replicas 1000 --load 0.7
    python bench/fleet.py --replicas 1000 --load 0.7 --hot 0.02 --lost 0.1

A replica's costs are measured: by `bench/replicas.py` for a check, otherwise on an H200 with a model of
8B parameters (docs/pages/benchmarks.md). The traffic has published statistics (bench/fleet_traffic.py).
Needs only the standard library and this repository.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from fleet_check import check
from fleet_policy import POLICIES
from fleet_replica import Costs, Replica, Request
from fleet_run import Outcome, hold_talks, summarize
from fleet_sim import Fleet
from fleet_traffic import Traffic, make_gaps, make_talks

H200 = Costs(
    prefill_token_seconds=1 / 49_400,
    step_seconds=0.0041,
    row_seconds=29e-6,
    max_running=256,
    max_waiting=256,
    cache_tokens=500_000,
)
"""llama-8b in bfloat16, from bench/gpu.md: a step takes 5.9 ms with 64 rows and 11.5 ms with 256;
prefill computes 49,400 tokens a second."""


def main() -> int:
    options = _parser().parse_args()
    return check(options.check) if options.check else compare(options)


def compare(options: argparse.Namespace) -> int:
    talks_per_second = options.load * options.replicas * capacity(H200, Traffic()) / Traffic().turns
    print(
        f"{options.replicas} replicas, {options.load:.0%} of what they can do with no cache at all: "
        f"{talks_per_second * Traffic().turns:.0f} requests/s for {options.seconds:g} s",
        flush=True,
    )
    print(
        "| policy | cached | first token p50 / p99 / p99.9, ms | whole p99.9, s | refused | busiest by mean | took, s |"
    )
    print("|---|---|---|---|---|---|---|")
    for name in options.policies:
        began = time.perf_counter()
        cells = [name, *_shown(simulate(name, options, talks_per_second))]
        print(f"| {' | '.join(cells)} | {time.perf_counter() - began:.0f} |", flush=True)
    return 0


def capacity(costs: Costs, traffic: Traffic) -> float:
    """Requests a second of one replica in steady state without cache hits, from the mean request."""
    talks = make_talks(traffic, random.Random(1))
    sample = [next(talks) for _ in range(2000)]
    prompts = statistics.fmean(tokens for talk in sample for tokens in talk.prompts)
    answers = statistics.fmean(tokens for talk in sample for tokens in talk.answers)
    step = costs.step_seconds + costs.row_seconds * costs.max_running
    return 1 / (prompts * costs.prefill_token_seconds + answers * step / costs.max_running)


def simulate(name: str, options: argparse.Namespace, talks_per_second: float) -> Outcome:
    rng = random.Random(options.seed)
    replicas = [Replica(place, H200) for place in range(options.replicas)]
    fleet = Fleet(replicas, POLICIES[name](options.replicas, rng))
    traffic = Traffic(think_seconds=options.think)
    talks, gaps = make_talks(traffic, rng), make_gaps(traffic, talks_per_second, rng)

    send = hold_talks(fleet)

    def begin() -> None:
        talk = next(talks)
        is_hot = rng.random() < options.hot
        talk.key = b"hot" if is_hot else str(talk.number).encode()
        send(talk)
        if fleet.now < options.seconds:
            fleet.at(fleet.now + next(gaps), begin)

    fleet.at(0.0, begin)
    if options.lost:
        fleet.at(options.seconds / 2, lambda: lose(fleet, options.lost))
    fleet.run(until=options.seconds)
    late = [request for request in fleet.done if request.sent >= options.seconds / 3]
    return summarize(late, fleet, options.seconds * 2 / 3)


def lose(fleet: Fleet, share: float) -> None:
    """Removes the first replicas: each of their talks goes to a random other one, whose cache is cold."""
    gone = round(share * len(fleet.replicas))
    before = fleet.choose

    def choose(request: Request, now: float, loads: list[int]) -> int:
        place = before(request, now, loads)
        while place < gone:
            place = random.Random(request.talk.number).randrange(gone, len(loads))
        return place

    fleet.choose = choose


def _shown(outcome: Outcome) -> list[str]:
    def at(values: list[float], share: float) -> float:
        return values[min(int(share * len(values)), len(values) - 1)]

    return [
        f"{outcome.cached:.1%}",
        " / ".join(f"{at(outcome.ttft, share) * 1e3:.0f}" for share in (0.5, 0.99, 0.999)),
        f"{at(outcome.seconds, 0.999):.1f}",
        f"{outcome.refused:.2%}",
        f"{outcome.busiest:.2f}",
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", metavar="FILE", help="a run of bench/replicas.py to compare with")
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--load", type=float, default=0.7, help="share of what the replicas can do uncached")
    parser.add_argument("--seconds", type=float, default=30, help="of simulated traffic; a third warms up")
    parser.add_argument(
        "--think", type=float, default=5.0, help="mean seconds between an answer and the next turn"
    )
    parser.add_argument("--hot", type=float, default=0.0, help="share of talks that all begin alike")
    parser.add_argument(
        "--lost", type=float, default=0.0, help="share of the replicas that are gone at half time"
    )
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    sys.exit(main())
