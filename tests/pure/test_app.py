"""The Flask application in this process: access control, what operators see, and what becomes of errors."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import msgspec
import pytest
from flask.testing import FlaskClient
from werkzeug.test import TestResponse

from levserve import __version__
from levserve.engine.engine import Engine
from levserve.engine.messages import Stop
from levserve.errors import DeadlineExceeded
from levserve.models.entry import Resident
from levserve.models.registry import Registry
from levserve.observe.health import DeviceMemory, DeviceStatus
from levserve.observe.metrics import Metrics
from levserve.settings.settings import Settings
from levserve.web.app import create_app
from levserve.web.models import Permission
from levserve.web.watcher import Watcher
from tests.fake_device import FakeDevice, serve_toy
from tests.fake_server import completion

KEY = "sk-test-0123456789"
AGE = 31.0  # seconds since the last sign of life, one more than is allowed


@pytest.fixture
def registry() -> Registry:
    return Registry(Engine(max_inflight=4, metrics=Metrics()))


@pytest.fixture
def engine(registry: Registry) -> Engine:
    return registry.engine


@pytest.fixture
def watcher() -> Iterator[Watcher]:
    watcher = Watcher()
    yield watcher
    watcher.stop()


@pytest.fixture
def device(registry: Registry) -> Iterator[FakeDevice]:
    device = FakeDevice(registry)
    device.start()
    yield device
    registry.engine.stop()
    device.join()


@pytest.fixture
def client(registry: Registry, watcher: Watcher) -> FlaskClient:
    return create_app(registry, Settings(request_timeout=0.05), watcher).test_client()


@pytest.fixture
def guarded(registry: Registry, watcher: Watcher) -> FlaskClient:
    return create_app(registry, Settings(api_key=KEY), watcher).test_client()


def test_a_limit_that_is_unknown_before_the_model_is_loaded_is_not_said_to_be_zero(
    client: FlaskClient,
) -> None:
    reply = client.post("/v1/completions", json={"model": "toy", "prompt": "t17"})
    assert reply.status_code == 503 and int(reply.headers["Retry-After"]) > 0
    assert reply.headers["x-ratelimit-limit-requests"] == "4"
    assert "x-ratelimit-limit-tokens" not in reply.headers


@pytest.mark.parametrize("path", ["/healthz", "/health", "/readyz"])
def test_probes_need_no_key(guarded: FlaskClient, device: FakeDevice, path: str) -> None:
    assert guarded.get(path).status_code == 200


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/", "/nowhere"])
@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer ", "Basic " + KEY, KEY, "Bearer wrong", f"Bearer {KEY}x", "Bearer ké"],
)
def test_everything_else_needs_the_key(guarded: FlaskClient, path: str, header: str | None) -> None:
    reply = guarded.get(path, headers={} if header is None else {"Authorization": header})
    assert reply.status_code == 401
    assert reply.headers["WWW-Authenticate"] == "Bearer"
    assert reply.json is not None and reply.json["error"]["code"] == "invalid_api_key"
    assert reply.headers["x-request-id"]


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER "])
def test_the_key_lets_in(guarded: FlaskClient, device: FakeDevice, scheme: str) -> None:
    assert guarded.get("/v1/models", headers={"Authorization": f"{scheme} {KEY}"}).status_code == 200


def test_any_of_several_keys_lets_in(registry: Registry, device: FakeDevice, watcher: Watcher) -> None:
    for settings in (
        Settings(api_key=KEY, file_keys=("second", "third")),
        Settings(file_keys=("second", "third")),
    ):
        client = create_app(registry, settings, watcher).test_client()
        for key in settings.api_keys:
            assert client.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200
        for wrong in ("", "secon", "second third", "fourth"):
            assert client.get("/v1/models", headers={"Authorization": f"Bearer {wrong}"}).status_code == 401


def test_metrics_can_be_opened_and_nothing_else(
    registry: Registry, device: FakeDevice, watcher: Watcher
) -> None:
    client = create_app(registry, Settings(api_key=KEY, open_metrics=True), watcher).test_client()
    assert client.get("/metrics").status_code == 200
    assert {client.get(path).status_code for path in ("/metrics/", "/v1/models", "/tokenizer_info", "/")} == {
        401
    }


def test_every_route_but_the_probes_is_guarded(guarded: FlaskClient) -> None:
    rules = list(guarded.application.url_map.iter_rules())
    assert len(rules) > 15
    for rule in rules:
        if rule.rule in ("/healthz", "/health", "/readyz"):
            continue
        # The pages for browsers are open; test_page.py and test_openapi.py test them.
        is_file = rule.rule in ("/static/<path:name>", "/docs", "/openapi.json")
        upgrade = {"Connection": "Upgrade", "Upgrade": "websocket"} if rule.websocket else {}
        for method in ((rule.methods or set()) | {"OPTIONS"}) - ({"GET", "HEAD"} if is_file else set()):
            reply = guarded.open(rule.rule.replace("<path:model_id>", "toy"), method=method, headers=upgrade)
            # /admin is forbidden to all, because there is no admin key.
            assert reply.status_code == (403 if rule.rule.startswith("/admin/") else 401), rule


def test_a_wrong_key_is_not_repeated_to_its_sender(guarded: FlaskClient) -> None:
    text = guarded.get("/v1/models", headers={"Authorization": "Bearer sk-wrong-9876543210"}).text
    assert "sk-***10" in text and "wrong" not in text


PAGE = "https://page.example"
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


def cors_headers(reply: TestResponse) -> dict[str, str]:
    prefix = "access-control-"
    return {
        name.lower().removeprefix(prefix): value
        for name, value in reply.headers
        if name.lower().startswith(prefix)
    }


def open_to(registry: Registry, watcher: Watcher, *origins: str) -> FlaskClient:
    return create_app(registry, Settings(api_key=KEY, cors_origins=origins), watcher).test_client()


def test_pages_of_other_sites_are_told_nothing_by_default(
    client: FlaskClient, guarded: FlaskClient, device: FakeDevice
) -> None:
    assert cors_headers(client.get("/v1/models", headers={"Origin": PAGE})) == {}
    assert cors_headers(client.options("/v1/completions", headers=PREFLIGHT)) == {}
    assert guarded.options("/v1/completions", headers=PREFLIGHT).status_code == 401


def test_a_browser_that_asks_first_needs_no_key(registry: Registry, watcher: Watcher) -> None:
    reply = open_to(registry, watcher, "https://other.example", PAGE).options(
        "/v1/chat/completions", headers=PREFLIGHT
    )
    assert (reply.status_code, reply.data) == (204, b"")
    headers = cors_headers(reply)
    assert headers.pop("expose-headers")
    assert headers == {
        "allow-origin": PAGE,
        "allow-methods": "GET, POST, DELETE, OPTIONS",
        "allow-headers": "authorization,content-type",
        "max-age": "600",
    }
    assert reply.headers["Vary"] == "Origin"


def test_a_listed_page_may_read_answers_and_errors(
    registry: Registry, device: FakeDevice, watcher: Watcher
) -> None:
    client = open_to(registry, watcher, PAGE)
    with_key = {"Authorization": f"Bearer {KEY}", "Origin": PAGE}
    replies = [
        client.get("/v1/models", headers=with_key),
        client.post("/v1/completions", json=completion("t17", stream=True), headers=with_key),
        client.post("/v1/completions", json={}, headers=with_key),
        client.get("/nowhere", headers=with_key),
        client.get("/v1/models", headers={"Origin": PAGE}),
    ]
    assert [reply.status_code for reply in replies] == [200, 200, 400, 404, 401]
    for reply in replies:
        assert cors_headers(reply)["allow-origin"] == PAGE
        assert "x-request-id" in cors_headers(reply)["expose-headers"]
        assert reply.headers["Vary"] == "Origin"


def test_another_page_is_not_named_but_the_answer_varies(
    registry: Registry, device: FakeDevice, watcher: Watcher
) -> None:
    client = open_to(registry, watcher, PAGE)
    other = PREFLIGHT | {"Origin": "https://evil.example"}
    for headers in (other, {"Origin": f"{PAGE}.evil.example"}, {}):
        reply = client.options("/v1/completions", headers=headers)
        assert cors_headers(reply) == {} and reply.headers["Vary"] == "Origin"


def test_a_star_lets_every_page_read(registry: Registry, device: FakeDevice, watcher: Watcher) -> None:
    client = open_to(registry, watcher, "*")
    assert cors_headers(client.options("/v1/models", headers=PREFLIGHT))["allow-origin"] == "*"
    assert cors_headers(client.get("/v1/models", headers={"Origin": "null"}))["allow-origin"] == "*"


def test_listed_pages_may_send_credentials_where_that_is_set(
    registry: Registry, device: FakeDevice, watcher: Watcher
) -> None:
    settings = Settings(api_key=KEY, cors_origins=(PAGE,), cors_credentials=True)
    client = create_app(registry, settings, watcher).test_client()
    for reply in (
        client.options("/v1/completions", headers=PREFLIGHT),
        client.get("/v1/models", headers={"Origin": PAGE}),
    ):
        headers = cors_headers(reply)
        assert (headers["allow-origin"], headers["allow-credentials"]) == (PAGE, "true")
    assert cors_headers(client.get("/v1/models", headers={"Origin": "https://evil.example"})) == {}
    without = open_to(registry, watcher, PAGE).get("/v1/models", headers={"Origin": PAGE})
    assert "allow-credentials" not in cors_headers(without)


def test_health_tells_what_the_server_runs_on(
    client: FlaskClient, engine: Engine, device: FakeDevice
) -> None:
    report = client.get("/health").json
    assert report is not None
    assert (report["status"], report["version"], report["device"]) == ("ok", __version__, None)
    engine.device = DeviceStatus("gpu", "NVIDIA H200", "0.11.2", DeviceMemory(100, 40))
    report = client.get("/health").json
    assert report is not None and report["jax_version"] == "0.11.2"
    assert report["device"] == {
        "platform": "gpu",
        "kind": "NVIDIA H200",
        "memory": {"total": 100, "free": 40},
    }
    engine.device = DeviceStatus("cpu", "a CPU", "0.11.2", None)
    report = client.get("/health").json
    assert (
        report is not None and 0 < report["device"]["memory"]["free"] <= report["device"]["memory"]["total"]
    )


def test_health_is_red_when_the_device_has_failed(
    client: FlaskClient, engine: Engine, device: FakeDevice
) -> None:
    assert client.get("/healthz").json == {"status": "ok"}
    engine.fail()
    assert client.get("/healthz").status_code == 503
    assert client.get("/readyz").json == {"status": "failed", "progress": "starting"}


def test_a_host_that_follows_says_whom_to_ask(client: FlaskClient, engine: Engine) -> None:
    engine.mark_following()
    for reply in (client.get("/v1/models"), client.post("/v1/completions", json=completion("hi"))):
        assert reply.status_code == 503 and reply.json is not None
        assert reply.json["error"]["message"] == "This host follows host 0; send requests to host 0."


def test_a_device_that_has_work_and_does_not_move_is_stalled_until_it_moves(
    client: FlaskClient, registry: Registry, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    age = AGE
    monkeypatch.setattr(engine, "heartbeat_age", lambda: age)
    assert client.get("/healthz").status_code == 200, "a compile while loading may take long"
    registry.publish(Resident(model=serve_toy("toy", 64)))
    assert client.get("/healthz").status_code == 200, "nobody waits for an idle device"
    engine.beat(is_busy=True)
    health, ready = client.get("/healthz"), client.get("/readyz")
    assert (health.status_code, health.json) == (503, {"status": "stalled", "heartbeat_age_seconds": AGE})
    assert (ready.status_code, ready.json) == (503, {"status": "stalled", "progress": "starting"})
    refused = client.post("/v1/completions", json=completion("t17"))
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "10")
    assert engine.metrics.registry.get_sample_value("levserve_refused_total", {"reason": "stalled"}) == 1
    engine.beat(is_busy=False)
    assert client.get("/healthz").status_code == client.get("/readyz").status_code == 200
    engine.inbox.put(Stop())
    assert client.get("/healthz").status_code == 503, "what it has not taken yet is work too"
    age = 1.0
    assert client.get("/healthz").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_whose_time_runs_out_in_the_queue_is_504_and_not_to_be_retried(
    client: FlaskClient, device: FakeDevice, stream: bool
) -> None:
    reply = client.post("/v1/completions", json=completion("t4", stream=stream))
    assert reply.status_code == DeadlineExceeded.status
    assert reply.headers["x-should-retry"] == "false"
    assert reply.json is not None and reply.json["error"]["code"] == "deadline_exceeded"


def test_a_request_whose_time_runs_out_later_ends_with_what_it_has(
    client: FlaskClient, device: FakeDevice
) -> None:
    reply = client.post("/v1/completions", json=completion("t6"))
    assert reply.json is not None
    choice = reply.json["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (" t7", "length", "deadline")


def test_a_bug_is_a_500_that_names_the_request_in_the_log(
    client: FlaskClient, engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "reserve", lambda body_bytes: 1 / 0)
    with caplog.at_level(logging.ERROR):
        reply = client.post("/v1/completions", json=completion("t17"), headers={"x-request-id": "unlucky"})
    assert (reply.status_code, reply.headers["x-should-retry"]) == (500, "false")
    assert reply.json is not None and "ZeroDivisionError" not in reply.text
    assert "unlucky" in caplog.text and "ZeroDivisionError" in caplog.text


def test_every_way_out_gives_the_places_back(client: FlaskClient, device: FakeDevice) -> None:
    bodies = (
        completion("t17"),
        completion("t17", stream=True),
        completion("t17", n=5),
        completion(""),
        completion("t4"),
        {},
        None,
    )
    for body in bodies * 2:
        client.post("/v1/completions", json=body).close()
    unread = client.post("/v1/completions", json=completion("t17", stream=True, n=4), buffered=False)
    unread.close()
    assert client.post("/v1/completions", json=completion("t17", n=4)).status_code == 200


def test_a_base_seed_makes_a_fixed_sequence_of_seeds(
    registry: Registry, device: FakeDevice, watcher: Watcher
) -> None:
    def texts(seed: int) -> list[str]:
        client = create_app(registry, Settings(seed=seed), watcher).test_client()
        replies = [
            client.post("/v1/completions", json=completion("t17", temperature=1)).json for _ in range(8)
        ]
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
        "data": [
            {
                "id": "toy",
                "object": "model",
                "created": 1700000000,
                "owned_by": "levserve",
                "max_model_len": 64,
                "root": "toy",
                "parent": None,
                "permission": [msgspec.to_builtins(Permission("modelperm-toy", 1700000000))],
                "status": "loaded",
            }
        ],
    }


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "; did you mean /v1/chat/completions?"),
        ("/v1/v1/chat/completions", "; did you mean /v1/chat/completions?"),
        ("/api/v1/embeddings", "; did you mean /v1/embeddings?"),
        ("/completion", "; did you mean /v1/completions?"),
        ("/v1/chat", "; did you mean /v1/chat/completions?"),
        ("/x/<script>", ""),
    ],
)
def test_a_path_that_does_not_exist_is_told_from_what_was_meant(
    client: FlaskClient, path: str, meant: str
) -> None:
    reply = client.post(path)
    assert reply.status_code == 404 and reply.json is not None
    assert reply.json["error"]["message"] == f"There is no path {path} here{meant}"
    assert reply.json["error"]["type"] == "invalid_request_error"
