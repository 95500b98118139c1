"""Shows what `load.py` measured: a table of one step, a table of all steps, and the JSON file."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from figures import PERCENTS, Row
from load_options import PATHS, Settings
from table import align

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a run that has ended, or was interrupted."""

    settings: Settings
    summary: dict[str, Any]
    rows: Sequence[Row]


def make_table(settings: Settings, model: str, summary: dict[str, Any]) -> str:
    figures = [
        f"{shorten_name(name):<16}{value:>10{'.2f' if isinstance(value, float) else ''}}"
        for name, value in summary.items()
        if isinstance(value, (int, float))
    ]
    latencies = [
        f"{name:<16}" + ("".join(f"{value:>10.2f}" for value in ranks.values()) or f"{'-':>10}")
        for name, ranks in summary["latency_ms"].items()
    ]
    header = f"\n{'ms':<16}" + "".join(f"{name:>10}" for name in ("mean", *PERCENTS))
    title = f"{describe(settings, model)}, {describe_pace(settings)}\n"
    return "\n".join([title, *figures, header, *latencies, "", *summary["notes"]]).rstrip()


def shorten_name(name: str) -> str:
    return name.replace("tokens_per_second", "tok/s").replace("_per_second", "/s").replace("_", " ")


def describe(settings: Settings, model: str) -> str:
    """What all steps have in common."""
    form = "" if settings.is_streamed or settings.endpoint == "generate" else ", whole answers"
    batch = f", {settings.batch} prompts each" if settings.batch > 1 else ""
    out = share(settings.output_tokens, settings.output_spread)
    return (
        f"{model or 'the model'} at {settings.url}: {PATHS[settings.endpoint]}{form}{batch}, {describe_prompts(settings)} in, "
        f"{out} tokens out, seed {settings.seed}"
    )


def describe_prompts(settings: Settings) -> str:
    if settings.dataset:
        return f"prompts of {Path(settings.dataset).name}"
    if settings.prompt is not None:
        return "the given prompt"
    return f"{share(settings.prompt_tokens, settings.prompt_spread)} words"


def describe_pace(settings: Settings) -> str:
    if settings.rate is not None:
        return f"{settings.rate:g} requests/s"
    return f"{settings.concurrency} at a time"


def share(length: int, spread: float) -> str:
    return f"{length} (+-{spread:.0%})" if spread else str(length)


def make_sweep_table(steps: Sequence[Step], model: str) -> str:
    """Markdown: a line for each step."""
    first = steps[0].settings
    has_goodput = first.has_goodput
    header = ["at a time" if first.rate is None else "arrivals/s", "requests/s", "output tok/s"]
    columns = [("TTFT", "mean"), ("TTFT", "p95"), ("inter-token", "mean"), ("inter-token", "p95")]
    columns += [("request", "mean"), ("request", "p95")]
    header += [f"{name} {rank}, ms" for name, rank in columns]
    header += [*(["goodput/s"] if has_goodput else []), "failed"]
    lines = [header, ["---:"] * len(header)]
    for step in steps:
        summary, latency = step.summary, step.summary["latency_ms"]
        line = [f"{step.settings.concurrency if first.rate is None else step.settings.rate:g}"]
        line += [f"{summary['requests_per_second']:.2f}", f"{summary['output_tokens_per_second']:.1f}"]
        line += [show(latency[name].get(rank)) for name, rank in columns]
        line += [f"{summary['goodput_per_second']:.2f}"] if has_goodput else []
        lines.append([*line, str(summary["failures"])])
    notes = [f"{describe_pace(step.settings)}: {note}" for step in steps for note in step.summary["notes"]]
    title = f"{describe(first, model)}, {first.requests} requests a step\n"
    return "\n".join([title, align(lines), "", *notes]).rstrip()


def show(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def make_document(
    steps: Sequence[Step], model: str, software: str | None, *, is_sweep: bool
) -> dict[str, Any]:
    """The JSON file: one step has its summary and requests at the top level; a sweep has a list of steps."""
    first = steps[0]
    shared = {
        "settings": describe_settings(first.settings),
        "model": model,
        "versions": {
            "format": FORMAT,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "server": software,
        },
        "ended": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    if not is_sweep:
        return {**shared, "summary": first.summary, "requests": [asdict(row) for row in first.rows]}
    return {**shared, "steps": [describe_step(step) for step in steps]}


def describe_step(step: Step) -> dict[str, Any]:
    return {
        "concurrency": step.settings.concurrency,
        "rate": step.settings.rate,
        "summary": step.summary,
        "requests": [asdict(row) for row in step.rows],
    }


def describe_settings(settings: Settings) -> dict[str, Any]:
    """All settings except the API key."""
    return {name: value for name, value in asdict(settings).items() if name != "api_key"}


def write_json(path: str | None, document: dict[str, Any]) -> None:
    text = json.dumps(document)
    if path == "-":
        print(text)
    elif path:
        Path(path).write_text(text + "\n", encoding="utf-8")
