"""Every metric moves by the right amount under known traffic, as Prometheus reads the exposition."""

from __future__ import annotations

import json
import re
import socket
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from levserve.engine.engine import Engine
from levserve.models.registry import Registry
from levserve.observe.health import Phase
from levserve.observe.metrics import LATENCY_BUCKETS, Metrics
from levserve.schedule.request import FinishReason
from levserve.wire.connections import LATE_STATES
from tests.fake_server import ServerProcess
from tests.pure.test_registry import FakeLoader
from tests.waiting import wait_until

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "levserve.json"


def parse(text: str) -> dict[str, float]:
    """Each sample's value by name{label="value"}, without histogram buckets."""
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
        for phase in ("loading", "ready", "following", "draining", "failed")
    }
    assert samples['levserve_build_info{version="0.2.0"}'] == 1
    assert samples["levserve_websockets"] == 0
    assert samples["process_open_fds"] > 5 and samples["process_resident_memory_bytes"] > 1e6


PACKAGE = Path(__file__).parents[2] / "levserve"
ALERTS = PACKAGE.parent / "docs" / "pages" / "how-to" / "alerts.md"
COUNTED = re.compile(r"\b_?metrics\.(\w+)\.labels\((.+?)\)\.inc\(")
QUOTED = re.compile(r'"(\w+)"')


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """The values of the label of each counter on a fresh page."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for family in text_string_to_metric_families(Metrics().render().decode()):
        if family.type == "counter" and family.name.startswith("levserve_"):
            for sample in family.samples:
                assert sample.value == 0
                found[family.name.removeprefix("levserve_")].update(sample.labels.values())
    return found


def test_counters_begin_with_0_for_every_value_that_is_counted(exported: dict[str, set[str]]) -> None:
    """increase() counts from the first value that Prometheus has seen: a series that begins with 1 loses it."""
    used: defaultdict[str, set[str]] = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        for name, values in COUNTED.findall(path.read_text()):
            used[name].update(QUOTED.findall(values))
    assert {"refused", "rounds", "model_loads", "batch_requests"} <= used.keys()
    used["rounds"].remove("score")  # begins when a model that has it is loaded
    for name, literals in used.items():
        assert literals <= exported[name], name
    assert exported["finished"] == set(FinishReason)
    assert exported["connections_cut"] == {*LATE_STATES.values(), "request", "send"}
    assert exported["reloads"] == {"done", "refused"}


def test_the_alerts_page_explains_every_reason_of_a_refusal(exported: dict[str, set[str]]) -> None:
    _, _, table = ALERTS.read_text().partition("has a `reason`:")
    rows = re.findall(r"^\| (`.+?) \|", table.partition("##")[0], re.MULTILINE)
    assert exported["refused"] == {reason for row in rows for reason in re.findall(r"`(\w+)`", row)}
    assert exported["refused"] > set(Phase) - {Phase.READY}


def test_the_alert_about_a_device_that_hangs_asks_for_what_exists_and_not_during_a_start() -> None:
    (query,) = re.findall(r"```promql\n(.+?)```", ALERTS.read_text(), re.DOTALL)
    page = parse(Metrics().render().decode())
    assert set(re.findall(r"levserve_\w+", query)) - {"levserve_phase"} <= page.keys()
    (phases,) = re.findall(r'levserve_phase{phase=~"([a-z|]+)"}', query)
    assert set(phases.split("|")) == set(Phase) - {Phase.LOADING, Phase.FAILED}


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
    assert sorted(cut) == [0, 0, 0, 1]


def test_vllms_names_are_there_if_they_are_wanted(server: ServerProcess) -> None:
    assert sum(name.startswith("vllm:") for name in scrape(server)) > 30
    assert scrape(server)['vllm:num_requests_waiting{engine="0",model_name="toy"}'] == 0
    with ServerProcess().wait_ready() as other:
        assert not any(name.startswith("vllm:") for name in scrape(other))


PICKER = {
    "vllm:num_requests_running": {"model_name", "engine"},
    "vllm:num_requests_waiting": {"model_name", "engine"},
    "vllm:kv_cache_usage_perc": {"model_name", "engine"},
    "vllm:cache_config_info": {"model_name", "engine", "block_size", "num_gpu_blocks"},
    "vllm:lora_requests_info": {"max_lora", "running_lora_adapters", "waiting_lora_adapters"},
}


def read_router_page(text: str) -> dict[str, set[str]]:
    """The label names of each sample."""
    return {
        sample.name: set(sample.labels)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


ROUTER = "/metrics/router"
SCRAPE = b"GET /metrics/router HTTP/1.1\r\nHost: x\r\n\r\n"


def test_a_router_finds_on_its_page_what_an_endpoint_picker_reads(server: ServerProcess) -> None:
    first, second = server.ask("GET", ROUTER), server.ask("GET", ROUTER)
    assert PICKER.items() <= read_router_page(first.body.decode()).items()
    for page in (first, server.ask("GET", "/metrics")):
        assert page.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert len(first.headers["x-request-id"]) == 16
    assert first.headers["x-request-id"] != second.headers["x-request-id"]
    assert int(first.headers["content-length"]) == len(first.body) < 2000


def test_a_router_sees_a_queue_at_once_and_is_counted(server: ServerProcess) -> None:
    before = scrape(server)[f'levserve_requests_total{{route="{ROUTER}",status="200"}}']
    with server.connect() as router:
        router.send("GET", ROUTER)
        assert parse(router.receive().body.decode())['levserve_phase{phase="ready"}'] == 1
        router.send("GET", ROUTER, **{"X-Request-Id": "mine"})  # makes it take the usual path
        assert router.receive().headers["x-request-id"] == "mine"
        router.send("GET", ROUTER + "?x")
        assert router.receive().status == 200
        router.send("POST", ROUTER, {})
        assert router.receive().status == 405
    assert scrape(server)[f'levserve_requests_total{{route="{ROUTER}",status="200"}}'] == before + 3


def test_many_scrapes_sent_at_once_are_all_answered(server: ServerProcess) -> None:
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as router:
        router.settimeout(20)
        last = SCRAPE.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        router.sendall(SCRAPE * 30 + last)
        answers = b"".join(iter(lambda: router.recv(65536), b""))
    assert answers.count(b"HTTP/1.1 200 OK") == 31
    assert server.ask("GET", "/healthz").status == 200


def test_a_scrape_in_pieces_with_a_body_or_malformed_is_answered_as_any_other_request(
    server: ServerProcess,
) -> None:
    first, rest = SCRAPE[:20], SCRAPE[20:]
    with_body = SCRAPE.replace(b"\r\n\r\n", b"\r\nContent-Length: 2\r\n\r\n")
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as router:
        router.settimeout(20)
        # The main loop answers a scrape in one piece, a thread the others; the connection stays usable.
        for pieces in ([SCRAPE], [first, rest], [with_body, b"{}"], [SCRAPE]):
            for piece in pieces:
                router.sendall(piece)
                time.sleep(0.02)
            assert read_answer(router).startswith(b"HTTP/1.1 200 OK")
        router.sendall(SCRAPE.replace(b"Host: x", b"Host: x\nY: z"))
        assert read_answer(router).startswith(b"HTTP/1.1 400 Bad Request")


def read_answer(client: socket.socket) -> bytes:
    """One whole answer, read up to its Content-Length."""
    with client.makefile("rb") as file:
        lines = list(iter(file.readline, b"\r\n"))
        length = next(int(line.split()[1]) for line in lines if line.lower().startswith(b"content-length"))
        return b"".join(lines) + file.read(length)


@pytest.mark.parametrize("is_open", [True, False])
def test_the_routers_page_needs_a_key_where_metrics_need_one(is_open: bool) -> None:
    flags = ("--open-metrics", str(is_open).lower())
    with ServerProcess(*flags, environ={"LEVSERVE_API_KEY": "secret"}).wait_ready() as server:
        assert server.ask("GET", ROUTER).status == (200 if is_open else 401)
        reply = server.ask("GET", ROUTER, Authorization="Bearer secret")
        assert PICKER.items() <= read_router_page(reply.body.decode()).items()


class TestText:
    """Our own rendering of the page against prometheus_client's, the slower reference."""

    @pytest.fixture
    def metrics(self) -> Metrics:
        metrics = Metrics()
        metrics.registry.unregister(metrics.process)  # its values change by themselves
        return metrics

    @staticmethod
    def assert_same(metrics: Metrics) -> None:
        assert metrics.render().decode() == generate_latest(metrics.registry).decode()

    def test_it_is_the_same_at_the_start(self, metrics: Metrics) -> None:
        self.assert_same(metrics)

    @pytest.mark.parametrize("amount", [0.0, 0.25, 1e-9, 7.0, 123456.7, 999999.0, 1e6, 1234567.0, 3e21])
    def test_it_is_the_same_for_any_number(self, metrics: Metrics, amount: float) -> None:
        metrics.render()
        metrics.prompt_tokens.inc(amount)
        metrics.running.set(amount)
        metrics.ttft.observe(amount)
        metrics.ttft.observe_rows(amount, 3)
        self.assert_same(metrics)
        metrics.running.set(-1 - amount)
        metrics.waiting.set(float("nan"))
        metrics.kv_pages_used.set(float("inf"))
        self.assert_same(metrics)

    def test_it_is_the_same_with_labels_that_must_be_escaped(self, metrics: Metrics) -> None:
        metrics.model_info.labels('a "quoted" \\ name\n%s %', "", "").set(1)
        metrics.requests.labels("/v1/ws", 503).inc()
        self.assert_same(metrics)

    def test_it_is_the_same_when_metrics_and_labels_come_and_go(self, metrics: Metrics) -> None:
        metrics.note_kinds(has_pages=False, has_texts=True)
        metrics.model_info.labels("first", "16", "4").set(1)
        self.assert_same(metrics)
        metrics.model_info.clear()
        metrics.model_info.labels("second", "16", "4").set(1)
        metrics.note_kinds(has_pages=True, has_texts=False)
        Gauge("of_a_stranger", "Somebody else's.", registry=metrics.registry).set_function(lambda: 5)
        self.assert_same(metrics)


def test_models_are_counted_as_they_come_and_go() -> None:
    metrics, loader = Metrics(), FakeLoader()
    registry = Registry(Engine(max_inflight=1, metrics=metrics))
    registry.set_loader(loader, budget=100)
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
    """A new metric family must be read by a test, here or where what it counts is tested."""
    source = "".join(path.read_text() for path in Path(__file__).parents[1].glob("*/test_*.py"))
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
