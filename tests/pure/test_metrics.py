"""Every metric moves by the right amount: tables of known traffic, read from the exposition as Prometheus reads it."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from levserve.engine.engine import Engine
from levserve.models.registry import Registry
from levserve.observe.metrics import LATENCY_BUCKETS, Metrics
from tests.fake_server import ServerProcess
from tests.pure.test_registry import FakeLoader
from tests.waiting import wait_until

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "levserve.json"


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
    """A family that is added must be read by a test, here or where what it counts is tested."""
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
