"""The Prometheus registry: every metric levserve exports, declared once.

Names are an interface: never renamed, only added to. Made once in the worker and passed in like any collaborator; a test
makes its own. Label children are bound here, because looking one up costs four times as much as counting.
"""

from __future__ import annotations

from bisect import bisect_left

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.exposition import generate_latest

from levserve import __version__

LATENCY_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 300)
ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)

PHASES = ("queued", "prefill", "decode")
TIMES = ("startup", "background", "serving")

disable_created_metrics()  # type: ignore[no-untyped-call]  # a series more for each counter, that says when the server started


class RowHistogram(Histogram):
    """A histogram of something that many rows of a round have in common."""

    def observe_rows(self, amount: float, num_rows: int) -> None:
        """The same as to observe it so many times."""
        self._sum.inc(amount * num_rows)
        self._buckets[bisect_left(self._upper_bounds, amount)].inc(num_rows)


class Metrics:
    """Counters and gauges of one server. The device thread writes the engine's, HTTP threads the requests'."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(
            registry=self.registry
        )  # memory, descriptors and CPU seconds, under the names every exporter has
        self.requests = self._counter(
            "requests", "Requests answered, by route and HTTP status.", ("route", "status")
        )
        self.finished = self._counter("finished", "Sequences that ended, by reason.", ("reason",))
        self.refused = self._counter("refused", "Requests refused before any work, by reason.", ("reason",))
        self.cut = self._counter(
            "connections_cut",
            "Connections ended by a deadline, by what their client was late with.",
            ("reason",),
        )
        self.disconnects = self._counter(
            "disconnects", "Requests whose client left, by how far they were.", ("phase",), PHASES
        )
        self.deadlines = self._counter(
            "deadlines", "Sequences whose time ran out, by how far they were.", ("phase",), PHASES
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of admitted sequences.")
        self.prefix_hit_tokens = self._counter(
            "prefix_hit_tokens", "Prompt tokens found in the prefix cache."
        )
        self.prefill_tokens = self._counter(
            "prefill_tokens", "Tokens computed by prefill, recomputed ones included."
        )
        self.generated_tokens = self._counter("generated_tokens", "Tokens delivered to streams.")
        self.drafts = self._counter("drafts", "Drafts that were checked.")
        self.draft_tokens = self._counter("draft_tokens", "Tokens of those drafts.")
        self.accepted_tokens = self._counter(
            "draft_accepted_tokens", "Tokens of those drafts that were right."
        )
        self.preemptions = self._counter(
            "preemptions", "Sequences that gave their pages up and were recomputed."
        )
        self.preempted_tokens = self._counter("preempted_tokens", "Computed tokens lost to preemption.")
        self.reloads = self._counter("reloads", "Reloads of the weights, by outcome.", ("outcome",))
        self.model_loads = self._counter(
            "model_loads", "Models loaded after the start, by outcome.", ("outcome",)
        )
        self.model_unloads = self._counter(
            "model_unloads", "Models unloaded, to make room or because somebody asked."
        )
        self.rounds = self._counter(
            "rounds", "Device rounds run, by kind.", ("kind",), ("prefill", "decode", "verify")
        )
        self.compiles = self._counter(
            "compiles",
            "Programs compiled or loaded; any while serving made a request wait.",
            ("when",),
            TIMES,
        )
        self.compile_seconds = self._counter("compile_seconds", "Seconds spent on that.", ("when",), TIMES)
        self.compile_cache_hits = self._counter("compile_cache_hits", "Programs found on disk.")
        self.compile_cache_misses = self._counter(
            "compile_cache_misses", "Programs compiled and put on disk."
        )

        self.models_loaded = self._gauge("models_loaded", "Models that are loaded.")
        self.running = self._gauge("requests_running", "Sequences that hold a row.")
        self.waiting = self._gauge("requests_waiting", "Sequences waiting for a row.")
        self.kv_pages_used = self._gauge("kv_pages_used", "KV pages held by sequences.")
        self.kv_pages_cached = self._gauge("kv_pages_cached", "KV pages kept only for their prefix.")
        self.kv_pages_total = self._gauge("kv_pages_total", "KV pages in the pool.")
        self.websockets = self._gauge("websockets", "WebSockets that are open.")
        self.heartbeat_age = self._gauge(
            "device_heartbeat_age_seconds", "Seconds since the device thread's last sign of life."
        )
        self.phase = self._gauge("phase", "1 for the phase the server is in.", ("phase",))
        self._gauge("build_info", "Always 1; the version is a label.", ("version",)).labels(__version__).set(
            1
        )
        self.model_info = self._gauge(
            "model_info", "Always 1; the model and its KV cache are labels.", ("model", "page_size", "pages")
        )

        self.ttft = self._histogram("ttft_seconds", "From admission to the first token.", LATENCY_BUCKETS)
        gaps = "Mean time between a sequence's tokens, per round."
        self.inter_token = RowHistogram(
            "levserve_inter_token_seconds", gaps, buckets=LATENCY_BUCKETS, registry=self.registry
        )
        self.queue_time = self._histogram(
            "queue_seconds", "From admission to the first prefill.", LATENCY_BUCKETS
        )
        self.prefill_time = self._histogram(
            "prefill_seconds", "From the first prefill to the first token.", LATENCY_BUCKETS
        )
        self.decode_time = self._histogram(
            "decode_seconds", "From the first token to the last.", LATENCY_BUCKETS
        )
        self.request_time = self._histogram(
            "request_seconds", "From admission to the last token.", LATENCY_BUCKETS
        )
        self.round_time = self._histogram(
            "round_seconds", "From one round's end to the next one's.", LATENCY_BUCKETS
        )
        self.batch_rows = self._histogram(
            "batch_rows", "Sequences decoded together in one round.", ROW_BUCKETS
        )
        self.round_tokens = self._histogram(
            "round_tokens", "Tokens computed in one round, of prompts and answers.", TOKEN_BUCKETS
        )
        self.request_prompt = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a sequence that ended.", TOKEN_BUCKETS
        )
        self.request_generated = self._histogram(
            "request_generated_tokens", "Tokens a sequence got until it ended.", TOKEN_BUCKETS
        )
        self.request_max = self._histogram(
            "request_max_tokens", "Tokens that a sequence which ended could have got.", TOKEN_BUCKETS
        )

    def render(self) -> bytes:
        """The scrape, in Prometheus' text format."""
        return generate_latest(self.registry)

    def _counter(
        self, name: str, text: str, labels: tuple[str, ...] = (), values: tuple[str, ...] = ()
    ) -> Counter:
        """The one label's `values`, where they are given, are exported from the start: a rate needs the 0 before the 1."""
        counter = Counter(f"levserve_{name}", text, labels, registry=self.registry)
        for value in values:
            counter.labels(value)
        return counter

    def _gauge(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
        return Gauge(f"levserve_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"levserve_{name}", text, buckets=buckets, registry=self.registry)
