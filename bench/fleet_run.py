"""Holds talks with a simulated fleet, turn after turn, and sums up what their requests saw."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fleet_replica import Request
from fleet_sim import Fleet
from fleet_traffic import Talk


class Outcome(NamedTuple):
    per_second: float
    cached: float
    ttft: list[float]
    seconds: list[float]
    refused: float
    busiest: float


def hold_talks(fleet: Fleet) -> Callable[[Talk], None]:
    """Returns a function that begins a talk now. Each later turn is sent when the one before it is
    answered and its thinking time has passed."""

    def send(talk: Talk) -> None:
        fleet.send(Request(talk, talk.prompts[talk.turn], talk.answers[talk.turn], fleet.now))

    def on_end(request: Request) -> None:
        talk = request.talk
        talk.turn += 1
        if talk.turn < len(talk.prompts):
            fleet.at(fleet.now + talk.thinking[talk.turn - 1], lambda: send(talk))

    fleet.on_end = on_end
    return send


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
