"""The Flask application in this process: who is let in, what operators see, what becomes of errors."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from flask.testing import FlaskClient

from levserve.config import Settings
from levserve.engine.engine import Engine
from levserve.errors import DeadlineExceeded
from levserve.metrics import Metrics
from levserve.web.app import create_app
from levserve.web.ops import STALE_SECONDS
from levserve.web.watcher import Watcher
from tests.fake_device import FakeDevice
from tests.fake_server import completion

KEY = "sk-test-0123456789"


@pytest.fixture
def engine() -> Engine:
    return Engine(max_inflight=4, metrics=Metrics())


@pytest.fixture
def watcher() -> Iterator[Watcher]:
    watcher = Watcher()
    yield watcher
    watcher.stop()


@pytest.fixture
def device(engine: Engine) -> Iterator[FakeDevice]:
    device = FakeDevice(engine)
    device.start()
    yield device
    engine.stop()
    device.join()


@pytest.fixture
def client(engine: Engine, watcher: Watcher) -> FlaskClient:
    return create_app(engine, Settings(request_timeout=0.05), watcher).test_client()


@pytest.fixture
def guarded(engine: Engine, watcher: Watcher) -> FlaskClient:
    return create_app(engine, Settings(api_key=KEY), watcher).test_client()


@pytest.mark.parametrize("path", ["/healthz", "/health", "/readyz"])
def test_probes_need_no_key(guarded: FlaskClient, device: FakeDevice, path: str) -> None:
    assert guarded.get(path).status_code == 200


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/", "/nowhere"])
@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "Basic " + KEY, KEY, "Bearer wrong", f"Bearer {KEY}x", "Bearer ké"])
def test_everything_else_needs_the_key(guarded: FlaskClient, path: str, header: str | None) -> None:
    reply = guarded.get(path, headers={} if header is None else {"Authorization": header})
    assert reply.status_code == 401
    assert reply.headers["WWW-Authenticate"] == "Bearer"
    assert reply.json is not None and reply.json["error"]["code"] == "invalid_api_key"
    assert reply.headers["x-request-id"]


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER "])
def test_the_key_lets_in(guarded: FlaskClient, device: FakeDevice, scheme: str) -> None:
    assert guarded.get("/v1/models", headers={"Authorization": f"{scheme} {KEY}"}).status_code == 200


def test_a_wrong_key_is_not_repeated_to_its_sender(guarded: FlaskClient) -> None:
    text = guarded.get("/v1/models", headers={"Authorization": "Bearer sk-wrong-9876543210"}).text
    assert "sk-***10" in text and "wrong" not in text


def test_health_is_red_when_the_device_has_failed_or_hangs(
    client: FlaskClient, engine: Engine, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert client.get("/healthz").json == {"status": "ok"}
    with monkeypatch.context() as patch:
        patch.setattr(engine, "heartbeat_age", lambda: STALE_SECONDS + 1)
        assert client.get("/healthz").status_code == 503
    assert client.get("/healthz").status_code == 200
    engine.fail()
    assert client.get("/healthz").status_code == 503
    assert client.get("/readyz").json == {"status": "failed", "progress": "starting"}


def test_a_slow_compile_while_loading_is_not_a_hang(client: FlaskClient, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "heartbeat_age", lambda: STALE_SECONDS + 1)
    assert client.get("/healthz").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_whose_time_runs_out_in_the_queue_is_504_and_not_to_be_retried(
    client: FlaskClient, device: FakeDevice, stream: bool
) -> None:
    reply = client.post("/v1/completions", json=completion("t4", stream=stream))
    assert reply.status_code == DeadlineExceeded.status
    assert reply.headers["x-should-retry"] == "false"
    assert reply.json is not None and reply.json["error"]["code"] == "deadline_exceeded"


def test_a_request_whose_time_runs_out_later_ends_with_what_it_has(client: FlaskClient, device: FakeDevice) -> None:
    reply = client.post("/v1/completions", json=completion("t6"))
    assert reply.json is not None
    assert (reply.json["choices"][0]["text"], reply.json["choices"][0]["finish_reason"]) == (" t7", "length")


def test_a_bug_is_a_500_that_names_the_request_in_the_log(
    client: FlaskClient, engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "reserve", lambda: 1 / 0)
    with caplog.at_level(logging.ERROR):
        reply = client.post("/v1/completions", json=completion("t17"), headers={"x-request-id": "unlucky"})
    assert (reply.status_code, reply.headers["x-should-retry"]) == (500, "false")
    assert reply.json is not None and "ZeroDivisionError" not in reply.text
    assert "unlucky" in caplog.text and "ZeroDivisionError" in caplog.text


def test_every_way_out_gives_the_places_back(client: FlaskClient, device: FakeDevice) -> None:
    bodies = (completion("t17"), completion("t17", stream=True), completion("t17", n=5), completion(""), completion("t4"), {}, None)
    for body in bodies * 2:
        client.post("/v1/completions", json=body).close()
    unread = client.post("/v1/completions", json=completion("t17", stream=True, n=4), buffered=False)
    unread.close()
    assert client.post("/v1/completions", json=completion("t17", n=4)).status_code == 200


def test_a_base_seed_makes_a_fixed_sequence_of_seeds(engine: Engine, device: FakeDevice, watcher: Watcher) -> None:
    def texts(seed: int) -> list[str]:
        client = create_app(engine, Settings(seed=seed), watcher).test_client()
        replies = [client.post("/v1/completions", json=completion("t17", temperature=1)).json for _ in range(8)]
        return [reply["choices"][0]["text"] for reply in replies if reply is not None]

    first = texts(1)
    assert first == texts(1)
    assert first != texts(2)
    assert len(set(first)) > 1


def test_the_front_page_and_the_metrics_can_be_read(client: FlaskClient, device: FakeDevice) -> None:
    page = client.get("/").json
    assert page is not None and "/v1/chat/completions" in page["endpoints"]
    metrics = client.get("/metrics")
    assert metrics.content_type.startswith("text/plain; version=")
    assert 'levserve_phase{phase="ready"} 1.0' in metrics.text
    assert client.get("/v1/models").json == {
        "object": "list",
        "data": [{"id": "toy", "object": "model", "created": 1700000000, "owned_by": "levserve", "max_model_len": 64}],
    }
