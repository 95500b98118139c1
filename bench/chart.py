"""Draws what `compare.py` measured, from the document it writes, and the steps of `load.py`.

It also runs by itself: python bench/chart.py compare.json chart.png
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from load_report import Step, describe

OURS = ("#1f5fa8", "#6aa5df")
THEIRS = ("#8c8c8c", "#b0a18f", "#c9c9c9", "#a9b7a0")


def draw_comparison(document: Mapping[str, Any], path: Path) -> None:
    """Draws a panel per metric: a bar per contestant, with a whisker from its lowest to its highest value."""
    metrics = {
        key: metric
        for key, metric in document["metrics"].items()
        if any(key in of for of in document["medians"].values())
    }
    names, columns = list(document["medians"]), 4
    rows = -(-len(metrics) // columns)
    size = (3.6 * columns, rows * (0.8 + 0.34 * len(names)))
    figure, panels = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for panel, (key, metric) in zip(panels.flat, metrics.items()):
        for place, name in enumerate(names):
            values = document["values"][name].get(key)
            if not values:
                continue
            median = document["medians"][name][key]
            error = [[median - min(values)], [max(values) - median]]
            panel.barh(
                place,
                median,
                color=_color(name, names),
                xerr=error,
                error_kw={"ecolor": "#333333", "elinewidth": 1},
            )
            color = "white" if name.startswith("levserve") else "black"
            panel.text(
                0,
                place,
                f" {median:{',.0f' if median >= 100 else '.3g'}}",
                va="center",
                fontsize=8,
                color=color,
            )
        better = "more is better" if metric["more_is_better"] else "less is better"
        panel.set_title(f"{metric['title']}\n{metric['unit']}, {better}".replace("\n, ", "\n"), fontsize=9)
        panel.set_yticks(range(len(names)), names, fontsize=8)
        panel.invert_yaxis()
        panel.tick_params(axis="x", labelsize=7)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in list(panels.flat)[len(metrics) :]:
        panel.set_visible(False)
    figure.suptitle(f"{_where(document)}, medians of {document['repetitions']}", fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_growth(document: Mapping[str, Any], path: Path) -> None:
    """Draws cost against context above, and against concurrency below."""
    figure, panels = plt.subplots(2, 2, figsize=(9, 6.4), layout="constrained")
    asked = (
        ("ttft_at_context", "time to first token, ms", "tokens in the prompt"),
        ("inter_token_at_context", "ms between tokens, one stream", "tokens in the prompt"),
        ("tokens_per_second_at_streams", "output tokens a second, all streams", "streams at a time"),
        ("inter_token_at_streams", "ms between tokens of a stream", "streams at a time"),
    )
    names = list(document["medians"])
    for panel, (prefix, title, label) in zip(panels.flat, asked):
        ticks: set[int] = set()
        for name, medians in document["medians"].items():
            points = sorted(
                (int(key.rpartition("_")[2]), value)
                for key, value in medians.items()
                if key.startswith(prefix)
            )
            panel.plot(*zip(*points), marker="o", color=_color(name, names), label=name) if points else None
            ticks |= {at for at, _ in points}
        panel.set_xscale("log", base=2)
        panel.set_xticks(sorted(ticks), map(str, sorted(ticks)))
        panel.set_ylim(bottom=0)
        panel.set_title(title, fontsize=10)
        panel.set_xlabel(label, fontsize=9)
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    panels.flat[0].legend(fontsize=9)
    figure.suptitle(_where(document), fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_sweep(steps: Sequence[Step], model: str, path: Path) -> None:
    """Draws throughput and the three latencies of `load.py` against each step's streams or arrivals."""
    settings = steps[0].settings
    is_open = settings.rate is not None
    places = [step.settings.rate if is_open else step.settings.concurrency for step in steps]
    figure, panels = plt.subplots(2, 2, figsize=(9, 6.4), layout="constrained")
    first, *others = panels.flat
    first.plot(
        places, [step.summary["output_tokens_per_second"] for step in steps], marker="o", color=OURS[0]
    )
    first.set_title("output tokens a second", fontsize=10)
    for panel, name in zip(others, ("TTFT", "inter-token", "request")):
        for rank, color in zip(("mean", "p95"), OURS):
            values = [step.summary["latency_ms"][name].get(rank, float("nan")) for step in steps]
            panel.plot(places, values, marker="o", color=color, label=rank)
        panel.set_title(f"{name}, ms", fontsize=10)
    others[-1].legend(fontsize=9)
    for panel in panels.flat:
        panel.set_xticks(places, [f"{place:g}" for place in places])
        panel.set_ylim(bottom=0)
        panel.set_xlabel("arrivals a second" if is_open else "requests at a time", fontsize=9)
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(describe(settings, model), fontsize=9, wrap=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _where(document: Mapping[str, Any]) -> str:
    machine = document["machine"]
    return f"{document['model']} on {machine['cores']} cores of {machine['cpu']}"


def _color(name: str, names: list[str]) -> str:
    ours = [other for other in names if other.startswith("levserve")]
    theirs = [other for other in names if other not in ours]
    return OURS[ours.index(name) % len(OURS)] if name in ours else THEIRS[theirs.index(name) % len(THEIRS)]


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text())
    (draw_comparison if given["ratios"] else draw_growth)(given, Path(sys.argv[2]))
