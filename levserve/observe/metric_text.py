"""Writes metrics in Prometheus' text format, at a cost that allows a scrape every 50 ms.

Routers read queue lengths that often. `generate_latest` of prometheus_client builds an object for every line,
which takes 8 ms of CPU time for this server's page. Here each metric keeps its last text and writes it anew
only if one of its values has changed. The result is the same, byte for byte. One thread renders at a time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol

from prometheus_client import Counter, Gauge
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from levserve.observe.histogram import PageHistogram, write_number

KEPT_SECONDS = 1.0
"""How long text is kept: reading the process's memory and descriptors takes longer than all the rest, and
routers do not ask for them."""


class TextSource(Protocol):
    """Something that has lines on the page."""

    def render(self) -> str: ...


class MetricText:
    """The text of one counter or gauge, with or without labels."""

    def __init__(
        self, metric: Counter | Gauge, name: str = "", labels: Mapping[str, str] | None = None
    ) -> None:
        """`name` and `labels` are an alias's: another name, and labels besides the metric's own."""
        self._metric = metric
        self._labels = dict(labels or {})
        self._name = (name or metric._name) + ("_total" if metric._type == "counter" else "")
        self._head = head_lines(self._name, metric._documentation, metric._type)
        self._beginnings: dict[tuple[str, ...], str] = {}
        self._keys: list[tuple[str, ...]] = []
        self._values: list[float] | None = None
        self._text = ""

    def render(self) -> str:
        keys, values = self._read()
        if values != self._values or keys != self._keys:
            self._keys, self._values = keys, values
            lines = [self._line(key, value) for key, value in zip(keys, values, strict=True)]
            self._text = self._head + "".join(lines)
        return self._text

    def _read(self) -> tuple[list[tuple[str, ...]], list[float]]:
        if not self._metric._labelnames:
            return [()], [value_of(self._metric)]
        children = children_of(self._metric)
        return list(children), [value_of(child) for child in children.values()]

    def _line(self, key: tuple[str, ...], value: float) -> str:
        beginning = self._beginnings.get(key)
        if beginning is None:
            labels = self._labels | dict(zip(self._metric._labelnames, key, strict=True))
            beginning = self._beginnings[key] = begin_line(self._name, labels)
        return f"{beginning}{write_number(value)}\n"


class HistogramText:
    """The text of a histogram, or of an alias of one."""

    def __init__(
        self, metric: PageHistogram, name: str = "", labels: Mapping[str, str] | None = None
    ) -> None:
        self._metric = metric
        name, labels = name or metric._name, dict(labels or {})
        begun = [begin_line(f"{name}_bucket", labels | {"le": bound}) for bound in metric.bounds()]
        begun += [begin_line(f"{name}_count", labels), begin_line(f"{name}_sum", labels)]
        head = head_lines(name, metric._documentation, "histogram")
        lines = [line.replace("%", "%%") + "%s\n" for line in begun]
        self._template = head.replace("%", "%%") + "".join(lines)
        self._numbers: tuple[str, ...] = ()
        self._text = ""

    def render(self) -> str:
        numbers = self._metric.numbers()
        if numbers is not self._numbers:
            self._text = self._template % numbers
            self._numbers = numbers
        return self._text


class CollectorText:
    """The text of anything else that a registry can hold."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._written = -KEPT_SECONDS
        self._text = ""

    def render(self) -> str:
        now = time.monotonic()
        if now - self._written >= KEPT_SECONDS:
            self._text = generate_latest(self._collector).decode()
            self._written = now
        return self._text


def text_of(collector: Collector) -> TextSource:
    if isinstance(collector, PageHistogram):
        return HistogramText(collector)
    if isinstance(collector, (Counter, Gauge)):
        return MetricText(collector)
    return CollectorText(collector)


def head_lines(name: str, documentation: str, kind: str) -> str:
    documentation = documentation.replace("\\", r"\\").replace("\n", r"\n")
    return f"# HELP {name} {documentation}\n# TYPE {name} {kind}\n"


def begin_line(name: str, labels: Mapping[str, str]) -> str:
    """A sample's line up to its value, its labels sorted and escaped."""
    if not labels:
        return f"{name} "
    escaped = [f'{key}="{_escape(value)}"' for key, value in sorted(labels.items())]
    return f"{name}{{{','.join(escaped)}}} "


def children_of(metric: Counter | Gauge) -> dict[tuple[str, ...], Counter | Gauge]:
    """The metric for each combination of labels; a copy, because other threads add to them."""
    children: dict[Any, Any] = metric._metrics.copy()
    return children


def value_of(metric: Counter | Gauge) -> float:
    if "_child_samples" in metric.__dict__:  # a gauge whose value comes from a function
        (sample,) = metric._child_samples()
        return float(sample.value)
    return float(metric._value._value)  # without its lock: reading a float is atomic


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
