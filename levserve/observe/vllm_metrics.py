"""levserve's metrics under vLLM's names, for dashboards and gateways made for vLLM.

`VllmMetrics` is a collector that derives them from levserve's own at each scrape, so nothing is counted
twice. Histograms keep levserve's buckets, which start at 1 ms.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from levserve.observe.metrics import Metrics

# Every other reason of ours is an abort there.
REASONS = {"stop": "stop", "length": "length", "failed": "error", "poisoned": "error"}


class VllmMetrics(Collector):
    """Exports `metrics` a second time. The label `engine` is always 0."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        m = metrics
        self._of_pages: dict[str, MetricWrapperBase] = {
            "prefix_cache_queries": m.prompt_tokens,
            "prefix_cache_hits": m.prefix_hit_tokens,
            "gpu_prefix_cache_queries": m.prompt_tokens,  # retired in vLLM but still queried
            "gpu_prefix_cache_hits": m.prefix_hit_tokens,
            "spec_decode_num_drafts": m.drafts,
            "spec_decode_num_draft_tokens": m.draft_tokens,
            "spec_decode_num_accepted_tokens": m.accepted_tokens,
        }
        """Absent while no loaded model has a KV cache."""
        self._same: dict[str, MetricWrapperBase] = {
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
        metrics.registry.register(self)

    def describe(self) -> list[Metric]:
        return []  # without this the registry would call `collect` before the model is known

    def collect(self) -> Iterator[Metric]:
        (info,) = self._metrics.model_info.collect()
        if not info.samples:
            return  # still loading
        model = max(info.samples, key=lambda sample: sample.labels["page_size"] != "").labels
        labels = {"model_name": model["model"], "engine": "0"}
        for name, metric in self._same.items():
            yield _renamed(metric, name, labels)
        yield self._successes(labels)
        if self._metrics.has_pages:
            yield from self._pages(labels, model)

    def _pages(self, labels: dict[str, str], model: dict[str, str]) -> Iterator[Metric]:
        for name, metric in self._of_pages.items():
            yield _renamed(metric, name, labels)
        used = _value(self._metrics.kv_pages_used) / _value(self._metrics.kv_pages_total)
        for name in ("kv_cache_usage_perc", "gpu_cache_usage_perc"):  # the second is retired
            yield _gauge(name, "Share of the KV pages held by sequences, 0 to 1.", labels, used)
        cache = {**labels, "block_size": model["page_size"], "num_gpu_blocks": model["pages"]}
        yield _gauge("cache_config_info", "Always 1; labels describe the KV cache.", cache, 1)

    def _successes(self, labels: dict[str, str]) -> Metric:
        counts = dict.fromkeys(("stop", "length", "abort", "error"), 0.0)
        (finished,) = self._metrics.finished.collect()
        for sample in finished.samples:
            if sample.name.endswith("_total"):
                counts[REASONS.get(sample.labels["reason"], "abort")] += sample.value
        names = [*labels, "finished_reason"]
        family = CounterMetricFamily("vllm:request_success", "Finished sequences, by reason.", labels=names)
        for reason, count in counts.items():
            family.add_metric([*labels.values(), reason], count)
        return family


def _renamed(metric: MetricWrapperBase, name: str, labels: dict[str, str]) -> Metric:
    (family,) = metric.collect()
    renamed = Metric(f"vllm:{name}", family.documentation, family.type)
    for sample in family.samples:
        suffix = sample.name.removeprefix(family.name)
        renamed.add_sample(f"vllm:{name}{suffix}", {**labels, **sample.labels}, sample.value)
    return renamed


def _gauge(name: str, text: str, labels: dict[str, str], value: float) -> Metric:
    family = GaugeMetricFamily(f"vllm:{name}", text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _value(metric: MetricWrapperBase) -> float:
    (family,) = metric.collect()
    return family.samples[0].value
