#!/usr/bin/env python3
"""Simulates a fleet of levserves behind a router, with policies side by side; or checks the simulation against a real run.

    python bench/replicas.py --json run.json && python bench/fleet.py --check run.json
    python bench/fleet.py --replicas 1000 --load 0.7
    python bench/fleet.py --replicas 1000 --load 0.7 --hot 0.02 --lost 0.1

A replica's costs are measured ones: by `bench/replicas.py` for a check, and an H200's with a model of 8B parameters otherwise
(docs/pages/benchmarks.md). The traffic has published statistics (bench/fleet_traffic.py). Standard library only.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from fleet_policy import POLICIES, hash_by
from fleet_ring import Ring
from fleet_sim import Costs, Fleet, Replica, Request
from fleet_traffic import Talk, Traffic, make_gaps, make_talks
from table import align

H200 = Costs(
    prefill_token_seconds=1 / 49_400,
    step_seconds=0.0041,
    row_seconds=29e-6,
    max_running=256,
    max_waiting=256,
    cache_tokens=500_000,
)
"""llama-8b in bfloat16, of bench/gpu.md: 5.9 ms a step of 64 rows, 11.5 of 256, prefill of 49,400 tokens a second."""
TOLERANCE = 0.15


class Outcome(NamedTuple):
    per_second: float
    cached: float
    ttft: list[float]
    seconds: list[float]
    refused: float
    busiest: float


def main() -> int:
    options = _parser().parse_args()
    return check(json.loads(Path(options.check).read_text())) if options.check else compare(options)


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
    """Requests a second of one replica that finds nothing in its cache, in steady state; found by a mean request."""
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

    def begin() -> None:
        talk = next(talks)
        is_hot = rng.random() < options.hot
        talk.key = b"hot" if is_hot else str(talk.number).encode()
        send(talk)
        if fleet.now < options.seconds:
            fleet.at(fleet.now + next(gaps), begin)

    def send(talk: Talk) -> None:
        fleet.send(Request(talk, talk.prompts[talk.turn], talk.answers[talk.turn], fleet.now))

    def on_end(request: Request) -> None:
        talk = request.talk
        talk.turn += 1
        if talk.turn < len(talk.prompts):
            fleet.at(fleet.now + talk.thinking[talk.turn - 1], lambda: send(talk))

    fleet.on_end = on_end
    fleet.at(0.0, begin)
    if options.lost:
        fleet.at(options.seconds / 2, lambda: lose(fleet, options.lost))
    fleet.run(until=options.seconds)
    late = [request for request in fleet.done if request.sent >= options.seconds / 3]
    return summarize(late, fleet, options.seconds * 2 / 3)


def lose(fleet: Fleet, share: float) -> None:
    """The first replicas are gone: whoever is sent there goes to the next one, and their caches are cold."""
    gone = round(share * len(fleet.replicas))
    before = fleet.choose

    def choose(request: Request, now: float, loads: list[int]) -> int:
        place = before(request, now, loads)
        while place < gone:
            place = random.Random(request.talk.number).randrange(gone, len(loads))
        return place

    fleet.choose = choose


def summarize(requests: Sequence[Request], fleet: Fleet, seconds: float) -> Outcome:
    ttft = sorted(request.first_token - request.sent for request in requests)
    whole = sorted(request.ended - request.sent for request in requests)
    prompts = sum(request.prompt_tokens for request in requests)
    busy = [replica.busy_seconds for replica in fleet.replicas]
    return Outcome(
        len(requests) / seconds,
        sum(request.cached_tokens for request in requests) / prompts,
        ttft,
        whole,
        len(fleet.refused) / (len(fleet.done) + len(fleet.refused)),
        max(busy) / statistics.fmean(busy),
    )


def check(run: dict[str, Any]) -> int:
    """Simulates the talks of a real run and compares: the worst difference must be within 15 %."""
    costs = Costs(**run["costs"])
    rows, worst = [], 0.0
    for name, real in run["policies"].items():
        outcome = repeat(run, costs, name)
        pairs = {
            "requests/s": (real["per_second"], outcome.per_second),
            "cached": (real["cached"], outcome.cached),
            "first token, mean s": (real["ttft"], statistics.fmean(outcome.ttft)),
            "whole answer, mean s": (real["seconds"], statistics.fmean(outcome.seconds)),
        }
        for what, (measured, simulated) in pairs.items():
            difference = simulated / measured - 1
            worst = max(worst, abs(difference))
            rows.append([name, what, f"{measured:.3f}", f"{simulated:.3f}", f"{difference:+.1%}"])
    head = ["policy", "", "measured", "simulated", "difference"]
    print(align([head, ["---", "---", "---:", "---:", "---:"], *rows]))
    print(f"worst difference {worst:.1%}, {'within' if worst <= TOLERANCE else 'not within'} {TOLERANCE:.0%}")
    return 0 if worst <= TOLERANCE else 1


def repeat(run: dict[str, Any], costs: Costs, name: str) -> Outcome:
    """The talks of a real run, each turn sent when the one before was answered and thought about."""
    replicas = [Replica(place, costs) for place in range(len(run["addresses"]))]
    if name == "hash":
        choose = hash_by(Ring(run["addresses"]))
    else:
        choose = POLICIES[name](len(replicas), random.Random(0))
    fleet = Fleet(replicas, choose)

    def send(talk: Talk) -> None:
        fleet.send(Request(talk, talk.prompts[talk.turn], talk.answers[talk.turn], fleet.now))

    def on_end(request: Request) -> None:
        talk = request.talk
        talk.turn += 1
        if talk.turn < len(talk.prompts):
            fleet.at(fleet.now + talk.thinking[talk.turn - 1], lambda: send(talk))

    fleet.on_end = on_end
    for one in run["policies"][name]["talks"]:
        talk = Talk(
            one["number"],
            0,
            run["system_tokens"],
            one["prompts"],
            one["answers"],
            one["thinking"],
            one["key"].encode(),
        )
        fleet.at(one["begins"], lambda talk=talk: send(talk))  # type: ignore[misc]
    fleet.run()
    return summarize(fleet.done, fleet, max(request.ended for request in fleet.done))


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
