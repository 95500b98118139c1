"""Computes the figures of a load from its requests; `load.py --help` defines each."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from load_options import Settings
from prompts import read_dataset

PERCENTS = {"p50": 50, "p90": 90, "p95": 95, "p99": 99, "max": 100}


@dataclass(frozen=True, slots=True)
class Row:
    """One request. `late_seconds` is how long its arrival waited because all connections were busy."""

    index: int
    sent_seconds: float  # since the run began
    late_seconds: float
    request_seconds: float
    failure: str | None = None
    message: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    ttft_seconds: float = 0.0
    tokens_per_gap: float = 1.0
    gaps_seconds: Sequence[float] = ()

    @property
    def itl_seconds(self) -> float:
        """Mean time between tokens after the first delta; 0 if there was only one delta."""
        return sum(self.gaps_seconds) / (len(self.gaps_seconds) * self.tokens_per_gap or 1)


class Done(Protocol):
    """The results of a load that has run."""

    rows: list[Row]
    is_interrupted: bool
    cpu_seconds: float


def tokens_per_gap(completion_tokens: int, chars: Sequence[int]) -> float:
    """Mean tokens of the deltas after the first, from the characters of each delta; --help says how."""
    num_gaps = len(chars) - 1
    after_first = completion_tokens * (1 - chars[0] / sum(chars))
    return max(num_gaps, min(after_first, completion_tokens - 1)) / (num_gaps or 1)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """The mean and nearest-rank percentiles, each of which is one of the values; empty if there are none."""
    if not values:
        return {}
    ranked = sorted(values)
    ranks = {name: ranked[math.ceil(percent * len(ranked) / 100) - 1] for name, percent in PERCENTS.items()}
    return {"mean": sum(values) / len(values), **ranks}


def summarize(load: Done, settings: Settings) -> dict[str, Any]:
    rows = load.rows
    done = [row for row in rows if row.failure is None]
    output_tokens = sum(row.completion_tokens for row in done)
    prompt_tokens = sum(row.prompt_tokens for row in done)
    ended = max((row.sent_seconds + row.request_seconds for row in rows), default=0.0)
    wall = ended - min((row.sent_seconds for row in rows), default=0.0)
    latencies = {
        "TTFT": [row.ttft_seconds for row in done] if settings.is_streamed else [],
        "inter-token": [gap / row.tokens_per_gap for row in done for gap in row.gaps_seconds],
        "delta gap": [gap for row in done for gap in row.gaps_seconds],
        "request": [row.request_seconds for row in done],
    }
    return {
        "requests": len(rows),
        "failures": sum(row.failure is not None for row in rows),
        "failures_by_kind": dict(Counter(row.failure for row in rows if row.failure)),
        "wall_seconds": wall,
        "requests_per_second": len(done) / (wall or 1),
        **count_good(done, settings, wall),
        "output_tokens_per_second": output_tokens / (wall or 1),
        "prompt_tokens_per_second": prompt_tokens / (wall or 1),
        "output_tokens": output_tokens,
        "prompt_tokens": prompt_tokens,
        **count_deltas(done, settings, output_tokens),
        "latency_ms": {
            name: percentiles([1e3 * seconds for seconds in values]) for name, values in latencies.items()
        },
        "notes": find_notes(load, settings, wall),
    }


def count_good(done: Sequence[Row], settings: Settings, wall_seconds: float) -> dict[str, Any]:
    if not settings.has_goodput:
        return {}
    num_good = sum(is_good(row, settings) for row in done)
    return {"good_requests": num_good, "goodput_per_second": num_good / (wall_seconds or 1)}


def is_good(row: Row, settings: Settings) -> bool:
    limits = (
        (row.ttft_seconds, settings.goodput_ttft_ms),
        (row.itl_seconds, settings.goodput_itl_ms),
        (row.request_seconds, settings.goodput_request_ms),
    )
    return all(limit_ms is None or 1e3 * seconds <= limit_ms for seconds, limit_ms in limits)


def count_deltas(done: Sequence[Row], settings: Settings, output_tokens: int) -> dict[str, Any]:
    if not settings.is_streamed:
        return {}
    num_deltas = sum(len(row.gaps_seconds) + 1 for row in done)
    return {"tokens_per_delta": output_tokens / (num_deltas or 1)}


def find_notes(load: Done, settings: Settings, wall_seconds: float) -> list[str]:
    """Returns what a reader must know before trusting the numbers."""
    counts = Counter(row.failure for row in load.rows)
    firsts = {row.failure: row.message for row in reversed(load.rows)}
    notes = [f"failed {count} x {kind}, the first: {firsts[kind]}" for kind, count in counts.items() if kind]
    if load.is_interrupted:
        notes.append(f"interrupted when {len(load.rows)} of {settings.requests} requests had ended")
    if late := [row.late_seconds for row in load.rows if row.late_seconds > 0]:
        notes.append(
            f"not an open loop: {len(late)} arrivals found all {settings.concurrency} connections busy and waited, one of them "
            f"{max(late):.3f} s; raise --concurrency"
        )
    if settings.dataset and len(read_dataset(settings.dataset)) < settings.requests * settings.batch:
        notes.append(
            f"the dataset has {len(read_dataset(settings.dataset))} prompts, so some were asked more than once; a prefix "
            "cache knows those"
        )
    if wall_seconds > 0.5 and load.cpu_seconds > 0.7 * wall_seconds:  # Python threads share one core
        notes.append(
            f"this program kept {load.cpu_seconds / wall_seconds:.0%} of a core busy: the server may be faster than this"
        )
    return notes
