"""The simulation of a fleet: its arithmetic by hand, and what its traffic is said to be."""

from __future__ import annotations

import random
import statistics
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from fleet_policy import POLICIES
from fleet_ring import Ring
from fleet_sim import Costs, Fleet, Replica, Request
from fleet_traffic import Talk, Traffic, make_gaps, make_talks

COSTS = Costs(
    prefill_token_seconds=0.001,
    least_prefill_seconds=0.0,
    step_seconds=0.01,
    row_seconds=0.001,
    round_steps=4,
    prefill_tokens=100,
    patience_seconds=1.0,
    max_running=2,
    max_waiting=1,
    cache_tokens=1000,
    host_seconds=0.005,
)


def talk(number: int = 0, *prompts: int, answers: int = 1) -> Talk:
    return Talk(number, number, 0, list(prompts), [answers] * len(prompts), [], str(number).encode())


def ask(fleet: Fleet, one: Talk, turn: int = 0) -> Request:
    request = Request(one, one.prompts[turn], one.answers[turn], fleet.now)
    fleet.send(request)
    return request


def make_fleet(count: int, policy: str = "round_robin") -> Fleet:
    replicas = [Replica(place, COSTS) for place in range(count)]
    return Fleet(replicas, POLICIES[policy](count, random.Random(0)))


def test_a_lone_request_takes_what_one_can_add_up() -> None:
    fleet = make_fleet(1)
    request = ask(fleet, talk(0, 100, answers=9))
    fleet.run()
    prefill, rounds = 0.1, 2 * 4 * (0.01 + 0.001)
    assert request.first_token == pytest.approx(0.005 + prefill + 0.005)
    assert request.ended == pytest.approx(0.005 + prefill + rounds + 0.005)


def test_a_prompt_over_the_budget_is_prefilled_in_parts_between_decode_rounds() -> None:
    fleet = make_fleet(1)
    first, second = ask(fleet, talk(0, 10, answers=41)), ask(fleet, talk(1, 150))
    fleet.run()
    # 90 tokens beside the first one's prompt, 60 after its round: beside a stream no more than 1.5 x 44 ms of prompts.
    assert second.first_token == pytest.approx(0.005 + 0.1 + 0.044 + 0.06 + 0.005)
    assert first.ended > second.first_token


def test_a_second_turn_is_prefilled_from_its_last_whole_page() -> None:
    fleet = make_fleet(1)
    one = talk(0, 100, 200)
    ask(fleet, one)
    fleet.run()
    second = ask(fleet, one, 1)
    fleet.run()
    assert second.cached_tokens == 96


def test_what_was_not_used_for_longest_leaves_a_full_cache() -> None:
    replica = Replica(0, COSTS)
    for number in (1, 2, 3):
        replica.keep(number, 400)
    assert list(replica.cached) == [2, 3] and replica.num_cached == 800


def test_a_full_replica_refuses_and_a_second_one_is_tried_once() -> None:
    fleet = make_fleet(2)
    for number in range(7):
        ask(fleet, talk(number, 10))
    assert fleet.loads == [3, 3] and len(fleet.refused) == 1
    fleet.run()
    assert fleet.loads == [0, 0] and len(fleet.done) == 6


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_answers_everyone_and_uses_all(policy: str) -> None:
    fleet = make_fleet(4, policy)
    for number in range(60):
        fleet.at(number * 0.1, lambda number=number: ask(fleet, talk(number, 20)))  # type: ignore[misc]
    fleet.run()
    assert len(fleet.done) == 60 and not fleet.refused
    assert all(replica.busy_seconds for replica in fleet.replicas)


def test_a_lost_server_moves_only_its_own_keys() -> None:
    addresses = [f"10.0.0.{place}:8000" for place in range(10)]
    before, after = Ring(addresses), Ring(addresses[:-1])
    keys = [str(number).encode() for number in range(1000)]
    moved = [key for key in keys if before.walk(key, 1) != after.walk(key, 1)]
    assert all(before.walk(key, 1) == [9] for key in moved) and 40 < len(moved) < 200


def test_traffic_has_the_statistics_that_were_published() -> None:
    rng, traffic = random.Random(0), Traffic()
    talks = make_talks(traffic, rng)
    sample = [next(talks) for _ in range(4000)]
    prompts = [tokens for one in sample for tokens in one.prompts]
    answers = [tokens for one in sample for tokens in one.answers]
    assert statistics.fmean(len(one.prompts) for one in sample) == pytest.approx(2.0, rel=0.1)
    assert statistics.median(prompts) == pytest.approx(1020, rel=0.1)
    assert statistics.median(answers) == pytest.approx(129, rel=0.1)
    gaps = [next(gaps) for gaps in [make_gaps(traffic, 5.0, rng)] for _ in range(20_000)]
    assert statistics.fmean(gaps) == pytest.approx(0.2, rel=0.1)
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(2.0, rel=0.1)
