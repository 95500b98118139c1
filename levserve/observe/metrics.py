"""Every Prometheus metric that levserve exports, declared once.

Dashboards depend on the names, so none is ever changed. The worker makes one `Metrics` and passes it on; a
test makes its own.
"""

from __future__ import annotations

from collections.abc import Collection
from threading import Lock
from typing import Protocol

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.registry import Collector

from levserve import __version__
from levserve.observe.health import Phase
from levserve.observe.histogram import PageHistogram
from levserve.observe.metric_text import MetricText, TextSource, text_of

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Every Prometheus reads it. Version 1.0.0, which allows other names, is for scrapers that ask for it."""

LATENCY_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 300)
ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)

PHASES = ("queued", "prefill", "decode")
OUTCOMES = ("completed", "failed")
FINISH_REASONS = ("stop", "length", "cancelled", "deadline", "poisoned", "shutdown", "failed", "stuck")
FULL = ("queue_full", "tokens_full", "threads_full", "memory_full", "sockets_full")
REFUSALS = (*FULL, "stalled", *(phase.value for phase in Phase if phase is not Phase.READY))
LATE = ("header", "body", "request", "send")
TIMES = ("startup", "background", "serving")

# Otherwise every counter has a second series, with the time it was created.
disable_created_metrics()  # type: ignore[no-untyped-call]

PICKER_NAMES = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "cache_config_info",
    "lora_requests_info",
)
"""The metrics of vLLM that the endpoint picker of Kubernetes' inference gateway reads."""


class Aliases(Protocol):
    """The same metrics under other names."""

    is_exported: bool

    def render(self, names: Collection[str] | None = None) -> str: ...


class Metrics:
    """The metrics of one server, written by the device thread and the HTTP threads."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.aliases: Aliases | None = None
        self._texts: dict[Collector, TextSource] = {}
        self._rendering = Lock()
        # The usual process_ metrics: memory, descriptors, CPU time.
        self.process = ProcessCollector(registry=self.registry)
        self.requests = self._counter(
            "requests", "Requests answered, by route and HTTP status.", ("route", "status")
        )
        self.finished = self._counter(
            "finished", "Finished sequences, by reason.", ("reason",), FINISH_REASONS
        )
        self.refused = self._counter(
            "refused", "Requests refused before any work was done, by reason.", ("reason",), REFUSALS
        )
        self.cut = self._counter(
            "connections_cut",
            "Connections closed because the client was too slow, by what was late.",
            ("reason",),
            LATE,
        )
        self.disconnects = self._counter(
            "disconnects", "Requests whose client disconnected, by phase.", ("phase",), PHASES
        )
        self.deadlines = self._counter(
            "deadlines", "Sequences that hit their deadline, by phase.", ("phase",), PHASES
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of admitted sequences.")
        self.prefix_hit_tokens = self._counter(
            "prefix_hit_tokens", "Prompt tokens found in the prefix cache."
        )
        self.prefill_tokens = self._counter(
            "prefill_tokens", "Tokens computed by prefill, including recomputed ones."
        )
        self.generated_tokens = self._counter("generated_tokens", "Tokens delivered to streams.")
        self.drafts = self._counter("drafts", "Drafts that were verified.")
        self.draft_tokens = self._counter("draft_tokens", "Tokens in verified drafts.")
        self.accepted_tokens = self._counter(
            "draft_accepted_tokens", "Tokens in verified drafts that were accepted."
        )
        self.constrained = self._counter("constrained_sequences", "Sequences with a constraint.")
        self.misfits = self._counter(
            "constraint_misfits",
            "Sampled tokens that the constraint rejected and that were sampled again under a mask.",
        )
        self.forced_tokens = self._counter(
            "constraint_forced_tokens",
            "Tokens that were the constraint's only choice and were not sampled.",
        )
        self.grammar_compiles = self._counter("grammar_compiles", "Grammars and schemas that were compiled.")
        self.grammar_seconds = self._counter("grammar_compile_seconds", "Seconds spent compiling grammars.")
        self.grammar_hits = self._counter("grammar_cache_hits", "Grammars found in the grammar cache.")
        self.preemptions = self._counter(
            "preemptions", "Sequences that lost their pages and were recomputed."
        )
        self.preempted_tokens = self._counter(
            "preempted_tokens", "Computed tokens that were lost to preemption."
        )
        self.batch_requests = self._counter(
            "batch_requests", "Requests of batches that have ended, by outcome.", ("outcome",), OUTCOMES
        )
        self.reloads = self._counter(
            "reloads", "Weight reloads, by outcome.", ("outcome",), ("done", "refused")
        )
        self.model_loads = self._counter(
            "model_loads", "Models loaded after startup, by outcome.", ("outcome",), ("done", "failed")
        )
        self.model_unloads = self._counter("model_unloads", "Models unloaded, to make room or on request.")
        self.rounds = self._counter(
            "rounds", "Device rounds run, by kind.", ("kind",), ("prefill", "decode", "verify")
        )
        self.compiles = self._counter(
            "compiles",
            "Programs compiled or loaded from disk; each one while serving made a request wait.",
            ("when",),
            TIMES,
        )
        self.compile_seconds = self._counter(
            "compile_seconds", "Seconds spent compiling or loading programs.", ("when",), TIMES
        )
        self.compile_cache_hits = self._counter("compile_cache_hits", "Programs found in the compile cache.")
        self.compile_cache_misses = self._counter(
            "compile_cache_misses", "Programs compiled because the cache did not have them."
        )

        self.models_loaded = self._gauge("models_loaded", "Loaded models.")
        self.running = self._gauge("requests_running", "Running sequences.")
        self.waiting = self._gauge("requests_waiting", "Sequences waiting to run.")
        self.kv_pages_used = self._gauge("kv_pages_used", "KV pages held by sequences.")
        self.kv_pages_cached = self._gauge("kv_pages_cached", "KV pages kept only as prefix cache.")
        self.kv_pages_total = self._gauge("kv_pages_total", "KV pages in the pool.")
        self.batches = self._gauge("batches", "Batches that are kept, by status.", ("status",))
        self.websockets = self._gauge("websockets", "Open WebSockets.")
        self.heartbeat_age = self._gauge(
            "device_heartbeat_age_seconds", "Seconds since the device thread's last heartbeat."
        )
        self.phase = self._gauge("phase", "1 for the server's current phase.", ("phase",))
        build_info = self._gauge("build_info", "Always 1; the version is a label.", ("version",))
        build_info.labels(__version__).set(1)
        self.model_info = self._gauge(
            "model_info", "Always 1; the model and its KV cache are labels.", ("model", "page_size", "pages")
        )

        self.ttft = self._histogram(
            "ttft_seconds", "Seconds from admission to the first token.", LATENCY_BUCKETS
        )
        self.inter_token = self._histogram(
            "inter_token_seconds", "Mean seconds between a sequence's tokens in a round.", LATENCY_BUCKETS
        )
        self.queue_time = self._histogram(
            "queue_seconds", "Seconds from admission to the first prefill.", LATENCY_BUCKETS
        )
        self.prefill_time = self._histogram(
            "prefill_seconds", "Seconds from the first prefill to the first token.", LATENCY_BUCKETS
        )
        self.decode_time = self._histogram(
            "decode_seconds", "Seconds from the first token to the last.", LATENCY_BUCKETS
        )
        self.request_time = self._histogram(
            "request_seconds", "Seconds from admission to the last token.", LATENCY_BUCKETS
        )
        self.round_time = self._histogram(
            "round_seconds", "Seconds from the end of one round to the end of the next.", LATENCY_BUCKETS
        )
        self.batch_rows = self._histogram(
            "batch_rows", "Sequences decoded together in one round.", ROW_BUCKETS
        )
        self.round_tokens = self._histogram(
            "round_tokens", "Prompt and answer tokens computed in one round.", TOKEN_BUCKETS
        )
        self.request_prompt = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a finished sequence.", TOKEN_BUCKETS
        )
        self.request_generated = self._histogram(
            "request_generated_tokens", "Generated tokens of a finished sequence.", TOKEN_BUCKETS
        )
        self.request_max = self._histogram(
            "request_max_tokens", "max_tokens of a finished sequence.", TOKEN_BUCKETS
        )

        self._router_texts = [MetricText(self.running), MetricText(self.waiting), MetricText(self.phase)]

        self.has_pages = True
        """Whether the metrics that only models with a KV cache have are exported."""
        self._of_pages: tuple[Collector, ...] = (
            self.prefix_hit_tokens,
            self.prefill_tokens,
            self.drafts,
            self.draft_tokens,
            self.accepted_tokens,
            self.kv_pages_used,
            self.kv_pages_cached,
            self.kv_pages_total,
        )

    def note_kinds(self, *, has_pages: bool, has_texts: bool) -> None:
        """Exports what the loaded kinds of model have; without a KV cache its metrics are absent, not 0."""
        if has_texts:
            self.rounds.labels("score")
        if has_pages == self.has_pages:
            return
        self.has_pages = has_pages
        for metric in self._of_pages:
            if has_pages:
                self.registry.register(metric)
            else:
                self.registry.unregister(metric)
        for kind in ("prefill", "verify"):
            if has_pages:
                self.rounds.labels(kind)
            else:
                self.rounds.remove(kind)

    def note_grammar(self, seconds: float | None) -> None:
        """Counts a grammar that took `seconds` to compile, or for None one that had been compiled before."""
        if seconds is None:
            self.grammar_hits.inc()
            return
        self.grammar_compiles.inc()
        self.grammar_seconds.inc(seconds)

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        with self._rendering:
            collectors = list(self.registry._collector_to_names)
            self._texts = {one: self._texts.get(one) or text_of(one) for one in collectors}
            lines = [text.render() for text in self._texts.values()]
            if self.aliases is not None and self.aliases.is_exported:
                lines.append(self.aliases.render())
            return "".join(lines).encode()

    def render_for_router(self) -> bytes:
        """The gauges by which a router chooses a server: a small page, to be read many times a second."""
        with self._rendering:
            lines = [text.render() for text in self._router_texts]
            if self.aliases is not None:
                lines.append(self.aliases.render(PICKER_NAMES))
            return "".join(lines).encode()

    def _counter(
        self, name: str, text: str, labels: tuple[str, ...] = (), values: tuple[str, ...] = ()
    ) -> Counter:
        """Exports the label's `values` with 0 from the start, because increase() needs the 0 before the 1."""
        counter = Counter(f"levserve_{name}", text, labels, registry=self.registry)
        for value in values:
            counter.labels(value)
        return counter

    def _gauge(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
        return Gauge(f"levserve_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> PageHistogram:
        return PageHistogram(f"levserve_{name}", text, buckets=buckets, registry=self.registry)
