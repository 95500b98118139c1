"""The routing policies that are compared: each chooses a replica for a request, from what it can know."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

from fleet_replica import Request
from fleet_ring import Ring
from fleet_sim import Choose

BOUND = 1.25  # times the mean load; a bounded hash passes over replicas with more
PATH = 8  # replicas that a bounded hash looks at before it takes the last of them
STALE_SECONDS = 0.05  # between the scrapes of an endpoint picker
PATIENCE = 16  # a replica keeps its talks while it has at most this many requests more than the least loaded


def round_robin(num_replicas: int, rng: random.Random) -> Choose:
    turns = itertools.cycle(range(num_replicas))

    def choose(request: Request, now: float, loads: list[int]) -> int:
        return next(turns)

    return choose


def least_conn(num_replicas: int, rng: random.Random) -> Choose:
    """One nginx, which sees every request; equally loaded replicas take turns by weight, as in nginx."""
    weights = [0] * num_replicas

    def choose(request: Request, now: float, loads: list[int]) -> int:
        least = min(loads)
        equals = [place for place, load in enumerate(loads) if load == least]
        if len(equals) == 1:
            return equals[0]
        for place in equals:
            weights[place] += 1
        best = max(equals, key=weights.__getitem__)
        weights[best] -= len(equals)
        return best

    return choose


def two_choices(num_replicas: int, rng: random.Random) -> Choose:
    """The less loaded of two random replicas: about the best choice without a view of all."""

    def choose(request: Request, now: float, loads: list[int]) -> int:
        first, second = rng.randrange(num_replicas), rng.randrange(num_replicas)
        return first if loads[first] <= loads[second] else second

    return choose


def hash_beginning(num_replicas: int, rng: random.Random) -> Choose:
    """nginx' consistent hash; a retry goes on to the next server of the ring."""
    return hash_by(Ring([f"10.0.0.1:{10_000 + place}" for place in range(num_replicas)]))


def hash_by(ring: Ring) -> Choose:
    def choose(request: Request, now: float, loads: list[int]) -> int:
        return ring.walk(request.talk.key, request.tries)[-1]

    return choose


def bounded_hash(num_replicas: int, rng: random.Random) -> Choose:
    """The same ring, but replicas with more than their share of the load are passed over."""
    ring = Ring([f"10.0.0.1:{10_000 + place}" for place in range(num_replicas)])

    def choose(request: Request, now: float, loads: list[int]) -> int:
        bound = max(4.0, BOUND * (sum(loads) + 1) / num_replicas)
        home = ring.walk(request.talk.key, 1)[0]
        if loads[home] < bound:
            return home
        path = ring.walk(request.talk.key, min(PATH, num_replicas))
        return next((place for place in path if loads[place] < bound), path[-1])

    return choose


def picker(num_replicas: int, rng: random.Random) -> Choose:
    """Like an endpoint picker: knows the last scrape's loads and the replica last chosen for each talk."""
    homes: dict[int, int] = {}
    scraped, seen = -1.0, [0] * num_replicas

    def choose(request: Request, now: float, loads: list[int]) -> int:
        nonlocal scraped, seen
        if now - scraped >= STALE_SECONDS:
            seen, scraped = loads.copy(), now
        least = min(seen)
        home = homes.get(request.talk.number)
        if home is None or request.tries > 1 or seen[home] > least + PATIENCE:
            home = rng.choice([place for place, load in enumerate(seen) if load == least])
        homes[request.talk.number] = home
        return home

    return choose


POLICIES: dict[str, Callable[[int, random.Random], Choose]] = {
    "round_robin": round_robin,
    "least_conn": least_conn,
    "two_choices": two_choices,
    "hash": hash_beginning,
    "bounded_hash": bounded_hash,
    "picker": picker,
}
