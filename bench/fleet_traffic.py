"""Makes up traffic with published statistics of real traffic: conversations of several turns, called talks.

- Lengths: the median conversation of Azure's LLM inference service has a prompt of 1,020 tokens and an
  answer of 129 (Patel et al., "Splitwise", 2024). A prompt holds the talk so far; what each turn adds is
  drawn so that prompts come out near that.
- Turns: geometrically distributed with a mean of 2.0 (Zheng et al., "LMSYS-Chat-1M", 2024).
- Arrivals: gamma-distributed gaps with a coefficient of variation above 1, as in BurstGPT (Wang et al., 2024); 1 is Poisson.
- Beginnings: each talk begins with one of a few system prompts, whose popularity follows Zipf's law.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Traffic:
    turns: float = 2.0
    system_tokens: int = 340
    num_systems: int = 50
    turn_tokens: float = 300.0
    """The median number of tokens that a user's turn adds; log-normal with `spread`."""
    answer_tokens: float = 129.0
    spread: float = 0.9
    think_seconds: float = 20.0
    variation: float = 2.0
    """Coefficient of variation of the gaps between talks: their standard deviation divided by their mean."""


@dataclass(slots=True)
class Talk:
    """One conversation. `prompts` and `answers` are the tokens of each turn; a turn's prompt begins with
    the prompt and the answer of the turn before."""

    number: int
    system: int
    system_tokens: int
    prompts: list[int]
    answers: list[int]
    thinking: list[float]
    key: bytes = b""
    turn: int = 0
    repeats_answers: bool = True
    """Whether a turn's prompt contains the answer of the turn before exactly as it was generated."""


def make_talks(traffic: Traffic, rng: random.Random) -> Iterator[Talk]:
    weights = [1 / (place + 1) for place in range(traffic.num_systems)]
    number = 0
    while True:
        count = 1
        while rng.random() < 1 - 1 / traffic.turns:
            count += 1
        talk = Talk(
            number, rng.choices(range(traffic.num_systems), weights)[0], traffic.system_tokens, [], [], []
        )
        tokens = traffic.system_tokens
        for _ in range(count):
            tokens += draw(traffic.turn_tokens, traffic.spread, rng)
            talk.prompts.append(tokens)
            talk.answers.append(draw(traffic.answer_tokens, traffic.spread, rng))
            tokens += talk.answers[-1]
            talk.thinking.append(rng.expovariate(1 / traffic.think_seconds))
        yield talk
        number += 1


def make_gaps(traffic: Traffic, per_second: float, rng: random.Random) -> Iterator[float]:
    """Seconds between the beginnings of talks."""
    shape = 1 / traffic.variation**2
    while True:
        yield rng.gammavariate(shape, 1 / (per_second * shape))


def draw(median: float, spread: float, rng: random.Random) -> int:
    return max(1, min(4000, round(rng.lognormvariate(0, spread) * median)))
