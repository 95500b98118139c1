"""levserve's metrics under vLLM's names, for dashboards and gateways made for vLLM.

`VllmMetrics` derives them from levserve's own at each scrape, so nothing is counted twice. Histograms keep
levserve's buckets, which start at 1 ms. The metrics that an endpoint picker reads are always on the
router's page; the rest are exported with --vllm-metrics.
"""

from __future__ import annotations

import time
from collections.abc import Collection

from prometheus_client import CollectorRegistry, Counter, Gauge

from levserve.observe.histogram import PageHistogram
from levserve.observe.metric_text import HistogramText, MetricText, TextSource, children_of, value_of
from levserve.observe.metrics import Metrics

# Every other reason counts as an abort.
REASONS = {"stop": "stop", "length": "length", "failed": "error", "poisoned": "error"}


class VllmMetrics:
    """Exports `metrics` a second time, if `is_exported`. The label `engine` is always 0.

    One thread renders at a time, which the lock of `metrics` ensures.
    """

    def __init__(self, metrics: Metrics, *, is_exported: bool = True) -> None:
        self.is_exported = is_exported
        self._metrics = metrics
        m = metrics
        self._of_pages: dict[str, Counter] = {
            "prefix_cache_queries": m.prompt_tokens,
            "prefix_cache_hits": m.prefix_hit_tokens,
            "gpu_prefix_cache_queries": m.prompt_tokens,  # retired in vLLM but still queried
            "gpu_prefix_cache_hits": m.prefix_hit_tokens,
            "spec_decode_num_drafts": m.drafts,
            "spec_decode_num_draft_tokens": m.draft_tokens,
            "spec_decode_num_accepted_tokens": m.accepted_tokens,
        }
        """Absent while no loaded model has a KV cache."""
        self._same: dict[str, Counter | Gauge | PageHistogram] = {
            "num_requests_running": m.running,
            "num_requests_waiting": m.waiting,
            "prompt_tokens": m.prompt_tokens,
            "generation_tokens": m.generated_tokens,
            "num_preemptions": m.preemptions,
            "time_to_first_token_seconds": m.ttft,
            "inter_token_latency_seconds": m.inter_token,
            "time_per_output_token_seconds": m.inter_token,  # retired
            "e2e_request_latency_seconds": m.request_time,
            "request_queue_time_seconds": m.queue_time,
            "request_prefill_time_seconds": m.prefill_time,
            "request_decode_time_seconds": m.decode_time,
            "request_prompt_tokens": m.request_prompt,
            "request_generation_tokens": m.request_generated,
            "request_max_num_generation_tokens": m.request_max,
            "iteration_tokens_total": m.round_tokens,
        }
        self._since = time.time()
        self._model: tuple[str, ...] = ()
        metrics.aliases = self

    def render(self, names: Collection[str] | None = None) -> str:
        """The text of all metrics, or of those with these names."""
        models = list(children_of(self._metrics.model_info))
        if not models:
            return ""  # still loading
        model = max(models, key=lambda values: values[1] != "")  # one that has pages, if there is one
        if model != self._model:
            self._model = model
            self._name_model(*model)
        texts = self._texts
        if self._metrics.has_pages:
            texts = self._all_texts
            total = value_of(self._metrics.kv_pages_total)
            used = value_of(self._metrics.kv_pages_used) / total if total else 0.0
            for gauge in self._usage:
                gauge.set(used)
        if names is None:
            self._count_successes()
            names = texts
        return "".join([texts[name].render() for name in names if name in texts])

    def _name_model(self, name: str, page_size: str, num_pages: str) -> None:
        labels = {"model_name": name, "engine": "0"}
        self._texts = {alias: _renamed(metric, alias, labels) for alias, metric in self._same.items()}
        page_texts = {alias: _renamed(metric, alias, labels) for alias, metric in self._of_pages.items()}
        registry = CollectorRegistry()  # of the metrics that exist only here
        self._successes = Counter(
            "request_success", "Finished sequences, by reason.", ("finished_reason",), registry=registry
        )
        self._texts["request_success"] = _renamed(self._successes, "request_success", labels)
        # The inference gateway complains at each scrape if this metric is absent.
        text = "Unix time of the last change; labels name adapters, which levserve does not have."
        adapters = Gauge("lora_requests_info", text, registry=registry)
        adapters.set(self._since)
        none = {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}
        self._texts["lora_requests_info"] = _renamed(adapters, "lora_requests_info", none)
        self._usage = []
        for alias in ("kv_cache_usage_perc", "gpu_cache_usage_perc"):  # the second is retired
            gauge = Gauge(alias, "Share of the KV pages held by sequences, 0 to 1.", registry=registry)
            self._usage.append(gauge)
            page_texts[alias] = _renamed(gauge, alias, labels)
        info = Gauge("cache_config_info", "Always 1; labels describe the KV cache.", registry=registry)
        info.set(1)
        cache = labels | {"block_size": page_size, "num_gpu_blocks": num_pages}
        page_texts["cache_config_info"] = _renamed(info, "cache_config_info", cache)
        self._all_texts = self._texts | page_texts

    def _count_successes(self) -> None:
        counts = dict.fromkeys(("stop", "length", "abort", "error"), 0.0)
        for (reason,), child in children_of(self._metrics.finished).items():
            counts[REASONS.get(reason, "abort")] += value_of(child)
        for reason, count in counts.items():
            counter = self._successes.labels(reason)
            counter.inc(count - value_of(counter))


def _renamed(metric: Counter | Gauge | PageHistogram, name: str, labels: dict[str, str]) -> TextSource:
    if isinstance(metric, PageHistogram):
        return HistogramText(metric, f"vllm:{name}", labels)
    return MetricText(metric, f"vllm:{name}", labels)
