"""Compares the simulation with a real run of bench/replicas.py that had the same talks."""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path
from typing import Any

from fleet_policy import POLICIES, hash_by
from fleet_replica import Costs, Replica
from fleet_ring import Ring
from fleet_run import Outcome, hold_talks, summarize
from fleet_sim import Fleet
from fleet_traffic import Talk
from table import align

TOLERANCE = 0.15


def check(path: str) -> int:
    """Simulates the talks of a real run and compares: the worst difference must be within 15 %."""
    run = read_run(path)
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


def read_run(path: str) -> dict[str, Any]:
    """Reads what bench/replicas.py --json wrote; exits with a message if the file is something else."""
    try:
        run: dict[str, Any] = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise SystemExit(f"{path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise SystemExit(f"{path} is not JSON; bench/replicas.py --json writes the file") from None
    if not isinstance(run, dict) or not {"addresses", "costs", "policies", "system_tokens"} <= run.keys():
        raise SystemExit(f"{path} is not a run of bench/replicas.py --json")
    return run


def repeat(run: dict[str, Any], costs: Costs, name: str) -> Outcome:
    """Simulates the talks of a real run; each begins at the time when it began there."""
    replicas = [Replica(place, costs) for place in range(len(run["addresses"]))]
    if name == "hash":
        choose = hash_by(Ring(run["addresses"]))
    else:
        choose = POLICIES[name](len(replicas), random.Random(0))
    fleet = Fleet(replicas, choose)
    send = hold_talks(fleet)
    for one in run["policies"][name]["talks"]:
        talk = Talk(
            one["number"],
            0,
            run["system_tokens"],
            one["prompts"],
            one["answers"],
            one["thinking"],
            one["key"].encode(),
            repeats_answers=False,
        )
        fleet.at(one["begins"], lambda talk=talk: send(talk))  # type: ignore[misc]
    fleet.run()
    return summarize(fleet.done, fleet, max(request.ended for request in fleet.done))
