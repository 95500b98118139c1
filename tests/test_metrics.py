"""Every metric moves by the right amount: tables of known traffic, read from the exposition as Prometheus reads it."""

from __future__ import annotations

import json
import random
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from levserve.device.compile_events import COMPILER_THREAD
from levserve.engine.engine import Engine
from levserve.models.registry import Registry
from levserve.observe.metrics import LATENCY_BUCKETS, Metrics
from levserve.observe.vllm_metrics import VllmMetrics
from levserve.schedule.request import FinishReason
from tests.conftest import GOLDEN
from tests.engines import Running, ask, read, running_engine
from tests.fake_server import ServerProcess
from tests.test_registry import FakeLoader
from tests.waiting import wait_until

DASHBOARD = Path(__file__).parent.parent / "deploy" / "grafana" / "levserve.json"
PROMPT = [100 + number for number in range(9)]
FLAGS = ("--page-size", "4", "--kv-pages", "16", "--max-seq-len", "64", "--prefill-chunk", "16")


def parse(text: str) -> dict[str, float]:
    """Each sample of ours as name{label="value"}, without the process's own and without buckets."""
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            if "le" not in sample.labels:
                samples[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return samples


def families_of(text: str) -> set[str]:
    return {
        family.name
        for family in text_string_to_metric_families(text)
        if not family.name.startswith(("process_", "vllm:"))
    }


def counted(metrics: Metrics) -> dict[str, float]:
    """What a table can say exactly: counts and tokens, but no seconds and no gauges."""
    samples = parse(metrics.render().decode())
    exact = re.compile(r"levserve_\w+(_total|_count|tokens_sum|rows_sum)($|{)")
    return {name: value for name, value in samples.items() if exact.match(name)}


class Gate:
    """Lets the device thread read a round's results only so often."""

    def __init__(self, running: Running) -> None:
        self._reads = threading.Semaphore(0)
        self._is_open = True
        self._read = running.loaded.runner.read_chunks  # with which every read begins
        running.loaded.runner.read_chunks = self  # type: ignore[assignment, method-assign]

    def __call__(self, in_flight: Any) -> Any:
        while not self._is_open and not self._reads.acquire(timeout=0.05):
            pass
        return self._read(in_flight)

    @contextmanager
    def closed(self, reads: int) -> Iterator[None]:
        """Lets through so many reads, and the others at the end."""
        self._reads = threading.Semaphore(reads)
        self._is_open = False
        try:
            yield
        finally:
            self._is_open = True


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with running_engine(GOLDEN / "llama", *FLAGS, rows=2) as running:
        VllmMetrics(running.engine.metrics)
        wait_until(lambda: running.loaded.runner.programs.is_complete)
        yield running


@pytest.fixture(scope="module")
def gate(running: Running) -> Gate:
    return Gate(running)


ONE_ANSWER = {  # a prompt of 9 tokens and 5 that follow: one round for the prompt and the first, four for the others
    "levserve_prompt_tokens_total": 9,
    "levserve_prefill_tokens_total": 9,
    "levserve_generated_tokens_total": 5,
    'levserve_rounds_total{kind="prefill"}': 1,
    'levserve_rounds_total{kind="decode"}': 4,
    'levserve_finished_total{reason="length"}': 1,
    "levserve_queue_seconds_count": 1,
    "levserve_prefill_seconds_count": 1,
    "levserve_ttft_seconds_count": 1,
    "levserve_inter_token_seconds_count": 4,
    "levserve_decode_seconds_count": 1,
    "levserve_request_seconds_count": 1,
    "levserve_round_seconds_count": 5,
    "levserve_batch_rows_count": 4,
    "levserve_batch_rows_sum": 4,
    "levserve_round_tokens_count": 5,
    "levserve_round_tokens_sum": 13,
    "levserve_request_prompt_tokens_count": 1,
    "levserve_request_prompt_tokens_sum": 9,
    "levserve_request_generated_tokens_count": 1,
    "levserve_request_generated_tokens_sum": 5,
    "levserve_request_max_tokens_count": 1,
    "levserve_request_max_tokens_sum": 5,
}
SAME_AGAIN = ONE_ANSWER | {  # two pages of four are found, the ninth token is computed
    "levserve_prefix_hit_tokens_total": 8,
    "levserve_prefill_tokens_total": 1,
    "levserve_round_tokens_sum": 5,
}
PROMPT_ALONE = {
    "levserve_prompt_tokens_total": 3,
    "levserve_prefill_tokens_total": 3,
    'levserve_rounds_total{kind="prefill"}': 1,
    'levserve_finished_total{reason="length"}': 1,
    "levserve_queue_seconds_count": 1,
    "levserve_request_seconds_count": 1,
    "levserve_round_seconds_count": 1,
    "levserve_round_tokens_count": 1,
    "levserve_round_tokens_sum": 3,
    "levserve_request_prompt_tokens_count": 1,
    "levserve_request_prompt_tokens_sum": 3,
    "levserve_request_generated_tokens_count": 1,
    "levserve_request_max_tokens_count": 1,
}
OVERDUE = {  # ended in the queue, before it cost anything
    "levserve_prompt_tokens_total": 3,
    'levserve_finished_total{reason="deadline"}': 1,
    'levserve_deadlines_total{phase="queued"}': 1,
    "levserve_request_seconds_count": 1,
    "levserve_request_prompt_tokens_count": 1,
    "levserve_request_prompt_tokens_sum": 3,
    "levserve_request_generated_tokens_count": 1,
    "levserve_request_max_tokens_count": 1,
    "levserve_request_max_tokens_sum": 5,
}


@pytest.mark.tiny
class TestEngine:
    @pytest.mark.parametrize(
        "request_of, expected",
        [
            (lambda: ask(PROMPT, 5), ONE_ANSWER),
            (lambda: ask(PROMPT, 5), SAME_AGAIN),
            (lambda: ask([7, 8, 9], 0), PROMPT_ALONE),
            (lambda: ask([7, 8, 9], 5, deadline=0.0), OVERDUE),
        ],
        ids=["one answer", "the same again", "a prompt alone", "one that is overdue"],
    )
    def test_a_request_moves_what_it_should_and_nothing_else(
        self, running: Running, request_of: Any, expected: dict[str, float]
    ) -> None:
        running.wait_idle()
        before = counted(running.engine.metrics)
        running.run(request_of())
        running.wait_idle()
        after = counted(running.engine.metrics)
        assert {
            name: value - before.get(name, 0) for name, value in after.items() if value != before.get(name, 0)
        } == expected

    def test_a_stop_seen_by_the_reader_is_no_cancel(self, running: Running, gate: Gate) -> None:
        before = running.metric("finished_total", reason="cancelled")
        with gate.closed(reads=3):
            stream = running.submit(ask(PROMPT, 40))
            stream.get(60)
            stream.close(0, finish=FinishReason.STOP)
        read(stream)
        assert running.metric("finished_total", reason="cancelled") == before
        assert running.metric("finished_total", reason="stop") >= 1

    def test_sequences_that_run_and_wait_and_their_pages_are_seen(self, running: Running, gate: Gate) -> None:
        running.wait_idle()
        finished = running.metric("finished_total", reason="cancelled")
        with gate.closed(reads=4):
            stream = running.submit(*(ask([number, 8, 9], 40) for number in (30, 31, 32)))
            wait_until(
                lambda: running.metric("requests_running") == 2 and running.metric("requests_waiting") == 1
            )
            assert (
                2 <= running.metric("kv_pages_used") <= 4
            )  # one each for three tokens, and one for those to come
            wait_until(lambda: running.metric("device_heartbeat_age_seconds") > 0.2)
            stream.close()
        read(stream, 3)
        running.wait_idle()
        assert running.metric("finished_total", reason="cancelled") == finished + 3
        assert (running.metric("kv_pages_used"), running.metric("kv_pages_total")) == (0, 16)
        assert running.metric("kv_pages_cached") > 0
        wait_until(lambda: running.metric("device_heartbeat_age_seconds") < 2)

    def test_a_deadline_is_told_with_how_far_the_sequence_was(self, running: Running, gate: Gate) -> None:
        with gate.closed(reads=2):
            deadline = time.monotonic() + 1
            stream = running.submit(ask([40, 41, 42], 40, deadline=deadline))
            stream.get(60)
            wait_until(lambda: time.monotonic() > deadline)
        read(stream)
        assert running.metric("deadlines_total", phase="decode") == 1

    def test_preemptions_are_counted_with_what_they_cost(self, running: Running) -> None:
        running.wait_idle()
        first, second = running.run(ask([50, 51, 52], 40), ask([60, 61, 62], 40))  # 11 pages each, of 16
        assert len(first.tokens) == len(second.tokens) == 40
        assert running.metric("preemptions_total") == 1
        assert 16 < running.metric("preempted_tokens_total") < 43

    def test_compiles_are_counted_wherever_they_happen(self, running: Running) -> None:
        assert (
            running.metric("compiles_total", when="startup") >= 3
            and running.metric("compile_seconds_total", when="startup") > 0
        )
        assert running.metric("compiles_total", when="serving") == 0
        programs = running.loaded.runner.programs
        before = running.metric("compiles_total", when="background")
        assert before == len(programs.all_shapes) - len(programs.first_shapes)
        hits, misses = (
            running.metric("compile_cache_hits_total"),
            running.metric("compile_cache_misses_total"),
        )
        factor = random.random()

        def work() -> None:
            jax.jit(lambda x: x * factor).lower(jax.ShapeDtypeStruct((3,), jnp.float32)).compile()

        thread = threading.Thread(target=work, name=COMPILER_THREAD)
        thread.start()
        thread.join()
        work()
        for when, count in (("background", before + 1), ("serving", 1)):
            assert (
                running.metric("compiles_total", when=when) == count
                and running.metric("compile_seconds_total", when=when) > 0
            )
        assert running.metric("compile_cache_misses_total") == misses + 1
        assert running.metric("compile_cache_hits_total") == hits + 1

    def test_vllms_names_tell_the_same(self, running: Running) -> None:
        samples = parse(running.engine.metrics.render().decode())
        own = {alias: samples[f"levserve_{name}"] for alias, name in VLLM.items()}
        seen = {alias: samples[f'vllm:{alias}{{engine="0",model_name="llama"}}'] for alias in VLLM}
        assert seen == own
        assert sum(value > 0 for value in seen.values()) > 15
        assert samples['levserve_model_info{model="llama",page_size="4",pages="16"}'] == 1
        assert samples['vllm:kv_cache_usage_perc{engine="0",model_name="llama"}'] == 0
        assert (
            samples[
                'vllm:cache_config_info{block_size="4",engine="0",model_name="llama",num_gpu_blocks="16"}'
            ]
            == 1
        )
        success = 'vllm:request_success_total{{engine="0",finished_reason="{}",model_name="llama"}}'
        reasons = {reason: samples[success.format(reason)] for reason in REASONS}
        ended = {
            reason: running.metric("finished_total", reason=reason)
            for reason in (*REASONS, "cancelled", "deadline", "failed")
        }
        assert reasons == {
            "stop": ended["stop"],
            "length": ended["length"],
            "abort": ended["cancelled"] + ended["deadline"],
            "error": ended["failed"],
        }

    def test_a_share_of_the_pages_is_told_while_they_are_held(self, running: Running, gate: Gate) -> None:
        with gate.closed(reads=0):
            stream = running.submit(ask([70, 71, 72], 40))
            wait_until(lambda: running.metric("kv_pages_used") > 0)
            share = running.metric("kv_pages_used") / 16
            assert (
                parse(running.engine.metrics.render().decode())[
                    'vllm:kv_cache_usage_perc{engine="0",model_name="llama"}'
                ]
                == share
            )
            stream.close()
        read(stream)


REASONS = ("stop", "length", "abort", "error")
VLLM = {
    "num_requests_running": "requests_running",
    "num_requests_waiting": "requests_waiting",
    "prompt_tokens_total": "prompt_tokens_total",
    "generation_tokens_total": "generated_tokens_total",
    "prefix_cache_queries_total": "prompt_tokens_total",
    "prefix_cache_hits_total": "prefix_hit_tokens_total",
    "gpu_prefix_cache_hits_total": "prefix_hit_tokens_total",
    "spec_decode_num_drafts_total": "drafts_total",
    "spec_decode_num_draft_tokens_total": "draft_tokens_total",
    "spec_decode_num_accepted_tokens_total": "draft_accepted_tokens_total",
    "num_preemptions_total": "preemptions_total",
    "time_to_first_token_seconds_sum": "ttft_seconds_sum",
    "time_to_first_token_seconds_count": "ttft_seconds_count",
    "inter_token_latency_seconds_sum": "inter_token_seconds_sum",
    "time_per_output_token_seconds_count": "inter_token_seconds_count",
    "e2e_request_latency_seconds_sum": "request_seconds_sum",
    "request_queue_time_seconds_sum": "queue_seconds_sum",
    "request_prefill_time_seconds_sum": "prefill_seconds_sum",
    "request_decode_time_seconds_sum": "decode_seconds_sum",
    "request_prompt_tokens_sum": "request_prompt_tokens_sum",
    "request_generation_tokens_sum": "request_generated_tokens_sum",
    "request_max_num_generation_tokens_sum": "request_max_tokens_sum",
    "iteration_tokens_total_count": "round_tokens_count",
}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    flags = ("--max-running", "1", "--max-waiting", "1", "--max-sockets", "0", "--vllm-metrics", "true")
    with ServerProcess(*flags).wait_ready() as process:
        yield process


def scrape(server: ServerProcess) -> dict[str, float]:
    return parse(server.ask("GET", "/metrics").body.decode())


def give_up(server: ServerProcess, prompt: str) -> None:
    client = server.start_completion(prompt, stream=True)
    if prompt == "t6":
        next(client.stream())
    client.close()
    server.wait_event("cancel")


def fill(server: ServerProcess) -> None:
    client = server.start_completion("t6", n=2)
    assert server.complete("t17").status == 429
    client.close()
    server.wait_event("cancel")


UPGRADE = {
    "Upgrade": "websocket",
    "Connection": "Upgrade",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
    "Sec-WebSocket-Version": "13",
}


@pytest.mark.parametrize(
    "act, expected",
    [
        (
            lambda server: server.complete("t17"),
            {'levserve_requests_total{route="/v1/completions",status="200"}': 1},
        ),
        (
            lambda server: server.complete(""),
            {'levserve_requests_total{route="/v1/completions",status="400"}': 1},
        ),
        (
            lambda server: give_up(server, "t4"),
            {
                'levserve_disconnects_total{phase="prefill"}': 1,
                'levserve_requests_total{route="/v1/completions",status="499"}': 1,
            },
        ),
        (
            lambda server: give_up(server, "t6"),
            {
                'levserve_disconnects_total{phase="decode"}': 1,
                'levserve_requests_total{route="/v1/completions",status="200"}': 1,
            },
        ),
        (
            fill,
            {
                'levserve_refused_total{reason="queue_full"}': 1,
                'levserve_requests_total{route="/v1/completions",status="429"}': 1,
                'levserve_disconnects_total{phase="decode"}': 1,
                'levserve_requests_total{route="/v1/completions",status="499"}': 1,
            },
        ),
        (
            lambda server: server.ask("GET", "/v1/ws", **UPGRADE),
            {
                'levserve_refused_total{reason="sockets_full"}': 1,
                'levserve_requests_total{route="/v1/ws",status="503"}': 1,
            },
        ),
    ],
    ids=["answered", "refused", "left in prefill", "left in decode", "full", "no socket"],
)
def test_what_clients_do_is_counted(server: ServerProcess, act: Any, expected: dict[str, float]) -> None:
    scrapes = 'levserve_requests_total{route="/metrics",status="200"}'
    before = scrape(server)
    act(server)

    def moved() -> dict[str, float]:
        after = {
            name: value
            for name, value in scrape(server).items()
            if re.search(r"_total($|{)", name) and name.startswith("levserve")
        }
        return {
            name: value - before.get(name, 0)
            for name, value in after.items()
            if value != before.get(name, 0) and name != scrapes
        }

    wait_until(lambda: moved() == expected or sum(moved().values()) > sum(expected.values()))
    assert moved() == expected


def test_the_phase_and_the_version_are_told(server: ServerProcess) -> None:
    samples = scrape(server)
    assert {name: value for name, value in samples.items() if "phase{" in name} == {
        f'levserve_phase{{phase="{phase}"}}': float(phase == "ready")
        for phase in ("loading", "ready", "draining", "failed")
    }
    assert samples['levserve_build_info{version="0.2.0"}'] == 1
    assert samples["levserve_websockets"] == 0
    assert samples["process_open_fds"] > 5 and samples["process_resident_memory_bytes"] > 1e6


def test_connections_that_are_cut_are_counted() -> None:
    with ServerProcess("--header-timeout", "1").wait_ready() as server:
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as late:
            late.sendall(b"GET /v1/mod")
            late.settimeout(15)
            while late.recv(1000):
                pass
        cut = [
            value
            for name, value in scrape(server).items()
            if name.startswith("levserve_connections_cut_total")
        ]
    assert cut == [1]


def test_vllms_names_are_there_if_they_are_wanted(server: ServerProcess) -> None:
    assert sum(name.startswith("vllm:") for name in scrape(server)) > 30
    assert scrape(server)['vllm:num_requests_waiting{engine="0",model_name="toy"}'] == 0
    with ServerProcess().wait_ready() as other:
        assert not any(name.startswith("vllm:") for name in scrape(other))


def test_models_are_counted_as_they_come_and_go() -> None:
    metrics, loader = Metrics(), FakeLoader()
    registry = Registry(Engine(max_inflight=1, metrics=metrics))
    registry.stock(loader, budget=100)
    for name in ("a", "b", "bad", "c"):
        with registry.borrow(name) as handle:
            assert handle.wait(20)
    registry.close()
    registry.join()
    samples = parse(metrics.render().decode())
    assert samples["levserve_models_loaded"] == 2 and samples["levserve_model_unloads_total"] == 1
    assert samples['levserve_model_loads_total{outcome="done"}'] == 3
    assert samples['levserve_model_loads_total{outcome="failed"}'] == 1


def test_no_metric_is_left_out_of_the_tables() -> None:
    """A family that is added must be read by a test, here or where what it counts is tested."""
    source = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    names = {name.removeprefix("levserve_") for name in families_of(Metrics().render().decode())}
    assert [name for name in sorted(names) if not re.search(rf'(levserve_|metric\("){name}', source)] == []


def test_latencies_are_told_from_a_millisecond_on() -> None:
    assert LATENCY_BUCKETS[0] == 0.001
    metrics = Metrics()
    metrics.queue_time.observe(0.0015)
    assert metrics.registry.get_sample_value("levserve_queue_seconds_bucket", {"le": "0.002"}) == 1
    assert metrics.registry.get_sample_value("levserve_queue_seconds_bucket", {"le": "0.001"}) == 0


@pytest.mark.parametrize("amount", [0.0, 0.001, 0.0011, 300.0, 301.0])
def test_what_rows_have_in_common_counts_as_often_as_there_are_rows(amount: float) -> None:
    one_by_one, together = Metrics(), Metrics()
    for _ in range(3):
        one_by_one.inter_token.observe(amount)
    together.inter_token.observe_rows(amount, 3)
    assert list(together.inter_token.collect()) == list(one_by_one.inter_token.collect())


def test_the_dashboard_asks_only_for_metrics_that_exist_and_for_every_kind_of_them() -> None:
    board = json.loads(DASHBOARD.read_text())
    asked = {
        name
        for panel in board["panels"]
        for target in panel["targets"]
        for name in re.findall(r"levserve_\w+", target["expr"])
    }
    metrics = Metrics()
    known = set()
    for family in text_string_to_metric_families(metrics.render().decode()):
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(
            family.type, ("",)
        )
        known |= {family.name + suffix for suffix in suffixes}
    assert asked <= known, asked - known
    families = asked | {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in asked}
    assert families_of(metrics.render().decode()) - families <= {
        "levserve_build_info",
        "levserve_model_info",
        "levserve_websockets",
    }
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
