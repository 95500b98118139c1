"""Makes the requests of a load: which prompts, in which body, at what time."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import dataclass
from typing import Any

from load_options import Settings
from prompts import WORDS, Prompt, make_up, pick, plain, read_dataset, spread_length


@dataclass(frozen=True, slots=True)
class Job:
    index: int
    body: bytes
    output_tokens: int
    arrival_seconds: float | None  # None: as soon as a stream is free


def make_jobs(settings: Settings, model: str, first_index: int = 0) -> list[Job]:
    """The jobs of one step. A sweep numbers jobs through, so that no step repeats an earlier one's
    prompts."""
    indexes = range(first_index, first_index + settings.requests)
    if settings.rate is None:
        return [make_job(settings, model, index) for index in indexes]
    clock, rate = random.Random(f"{settings.seed} arrivals"), settings.rate
    arrivals = itertools.accumulate(clock.expovariate(rate) for _ in indexes)
    return [make_job(settings, model, index, arrival) for index, arrival in zip(indexes, arrivals)]


def make_job(settings: Settings, model: str, index: int, arrival_seconds: float | None = None) -> Job:
    rng = random.Random(f"{settings.seed} {index}")
    first_number = index * settings.batch
    prompts = [draw_prompt(settings, rng, first_number + place) for place in range(settings.batch)]
    drawn_length = spread_length(settings.output_tokens, settings.output_spread, rng)
    output_tokens = prompts[0].output_tokens or drawn_length
    body = {
        **({"model": model} if model else {}),
        **ask(settings, prompts),
        "max_tokens": output_tokens,
        "temperature": settings.temperature,
    }
    if settings.is_streamed:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if settings.has_fixed_length:
        body["ignore_eos"] = True
    return Job(index, json.dumps(body).encode(), output_tokens, arrival_seconds)


def draw_prompt(settings: Settings, rng: random.Random, number: int) -> Prompt:
    if settings.prompt is not None:
        return plain(settings.prompt)
    if settings.dataset:
        return pick(read_dataset(settings.dataset), settings.seed, number)
    shared = random.Random(f"{settings.seed} shared").choices(WORDS, k=settings.shared_prefix)
    return make_up(rng, spread_length(settings.prompt_tokens, settings.prompt_spread, rng), shared)


def ask(settings: Settings, prompts: list[Prompt]) -> dict[str, Any]:
    """The fields that hold the prompts, as the endpoint names them."""
    if settings.endpoint == "generate":
        return {"prompts": [prompt.text for prompt in prompts]}
    if settings.endpoint == "chat":
        return {"messages": prompts[0].as_chat()}
    texts = [prompt.text for prompt in prompts]
    return {"prompt": texts if settings.batch > 1 else texts[0]}
