"""Several models in one real server: tiny ones that load on first use and make room for each other."""

from __future__ import annotations

import json
import shutil
import signal
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from simple_websocket import Client

from tests.conftest import GOLDEN, QUICK_COMPILE
from tests.servers import Reply, Server, running_server
from tests.tiny.test_unloading import CASES, FLAGS


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Llama and Qwen2 by sections, and a broken model and a spare one in a folder; at most two are loaded."""
    folder = tmp_path_factory.mktemp("models")
    shutil.copytree(GOLDEN / "llama", folder / "broken")
    (folder / "broken" / "model.safetensors").write_bytes(
        (GOLDEN / "llama" / "model.safetensors").read_bytes()[:300_000]
    )
    (folder / "spare").symlink_to(GOLDEN / "llama")
    ini = folder / "serve.ini"
    ini.write_text(
        f"[server]\nadmin-key = sesame\nsse-heartbeat = 0.2\n[engine]\nmax-loaded-models = 2\n"
        f"[model]\nmodels-dir = {folder}\n[model.llama]\nmodel = {GOLDEN / 'llama'}\n[model.qwen2]\nmodel = {GOLDEN / 'qwen2'}\n"
    )
    # Compiled with this process's flags: takes half the time, and finds the programs of earlier tests.
    with running_server("--config", str(ini), *FLAGS, is_forked=True, **QUICK_COMPILE) as server:
        yield server


def admin(server: Server, method: str, path: str, body: Any = None) -> Reply:
    return server.call(f"/admin/{path}", body, method=method, key="sesame")


def ask(model: str, **fields: Any) -> dict[str, Any]:
    prompt = CASES.get(model, CASES["llama"])["prompt"]
    return {"model": model, "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True} | fields


def open_stream(server: Server, body: dict[str, Any]) -> Any:
    data = json.dumps(body | {"stream": True}).encode()
    return urllib.request.urlopen(
        urllib.request.Request(f"{server.url}/v1/completions", data, {"Content-Type": "application/json"}),
        timeout=120,
    )


def stream(server: Server, body: dict[str, Any]) -> tuple[str, list[int]]:
    """All that was received, and the tokens in it."""
    with open_stream(server, body) as response:
        text = response.read().decode()
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    words = "".join(json.loads(event)["choices"][0]["text"] for event in events).split()
    return text, [int(word.removeprefix("t")) for word in words]


def statuses(server: Server) -> dict[str, str]:
    return {one["id"]: one["status"] for one in server.call("/v1/models").body["data"]}


def test_models_load_on_first_use_and_streams_of_both_are_exact(server: Server) -> None:
    assert statuses(server) == {
        "llama": "loaded",
        "qwen2": "loadable",
        "broken": "loadable",
        "spare": "loadable",
    }
    assert server.call("/v1/models/qwen2").body["max_model_len"] is None
    running, first = stream_while_another_loads(server)
    assert first == CASES["qwen2"]["greedy"]
    assert running[:24] == CASES["llama"]["greedy"] and len(running) == 230
    names = ["llama", "qwen2"] * 6
    with ThreadPoolExecutor(len(names)) as pool:
        streamed = list(pool.map(lambda name: stream(server, ask(name))[1], names))
    assert streamed == [CASES[name]["greedy"] for name in names]
    assert statuses(server)["qwen2"] == "loaded" and server.metric("models_loaded") == 2
    assert server.metric("compiles_total", when="serving") == 0


def stream_while_another_loads(server: Server) -> tuple[list[int], list[int]]:
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(stream, server, ask("llama", max_tokens=230))
        text, first = stream(server, ask("qwen2"))
        assert text.startswith(": ping\n\n"), (
            "it took longer to load than a client waits without a sign of life"
        )
        return running.result()[1], first


def test_each_endpoint_answers_for_the_model_that_is_named(server: Server) -> None:
    for name in ("qwen2", "llama"):
        body = {"model": name, "input": [CASES[name]["prompt"]]}
        assert server.call("/v1/embeddings", body).body["model"] == name
        scores = server.call("/loglikelihood", {"model": name, "prompts": ["t5"], "continuations": [" t6"]})
        assert scores.status == 200
        assert server.call("/tokenize", {"model": name, "prompt": "t5"}).status == 200
        assert server.call("/generate", {"model": name, "prompts": ["t5"], "max_tokens": 2}).status == 200
    assert server.call("/generate", {"prompts": ["t5"], "max_tokens": 2}).status == 200


def test_an_unknown_model_is_told_what_there_is(server: Server) -> None:
    reply = server.call("/v1/completions", ask("other"))
    assert (reply.status, reply.body["error"]["code"]) == (404, "model_not_found")
    assert "'llama', 'qwen2', 'broken', 'spare'" in reply.body["error"]["message"]
    assert server.call("/v1/models/other").status == 404


def test_a_corrupt_model_is_told_and_the_others_go_on(server: Server) -> None:
    for _ in range(2):
        reply = server.call("/v1/completions", ask("broken"))
        assert (reply.status, reply.body["error"]["code"]) == (503, "model_not_loadable")
        assert (
            "broken/model.safetensors" in reply.body["error"]["message"]
            and int(reply.headers["Retry-After"]) > 0
        )
    assert "model.safetensors" in server.call("/v1/models/broken").body["error"]
    assert stream(server, ask("llama"))[1] == CASES["llama"]["greedy"]
    assert admin(server, "POST", "load/broken").status == 503


def test_what_runs_is_not_unloaded_and_what_is_idle_is(server: Server) -> None:
    assert admin(server, "POST", "load/qwen2").body["status"] == "loaded"
    with (
        open_stream(server, ask("llama", max_tokens=230)) as one,
        open_stream(server, ask("qwen2", max_tokens=230)) as other,
    ):
        assert one.readline() and other.readline()
        refused = admin(server, "POST", "unload/llama")
        assert refused.status == 409 and "requests running or waiting" in refused.body["error"]["message"]
        full = server.call("/v1/completions", ask("spare"))
        assert full.status == 503 and "no room for the model 'spare'" in full.body["error"]["message"]
        assert int(full.headers["Retry-After"]) > 0
    body = admin(server, "GET", "stats").body
    stats = {one["id"]: one for one in body["models"]}
    assert (
        stats["llama"]["kv_pages"] > 0
        and body["memory"]["models_bytes"] > 1_000_000
        and body["memory"]["process_bytes"] > 10**8
    )
    wait_until_idle(server)
    assert admin(server, "POST", "unload/qwen2").body["kv_pages"] == 0
    assert statuses(server)["qwen2"] == "loadable" and server.metric("models_loaded") == 1
    assert stream(server, ask("qwen2"))[1] == CASES["qwen2"]["greedy"]


def wait_until_idle(server: Server) -> None:
    """Waits until the requests of disconnected clients are gone too."""
    for _ in range(1000):
        if not any(one["requests"] for one in admin(server, "GET", "stats").body["models"]):
            return
    pytest.fail("somebody still holds a model")


def test_a_third_model_takes_the_place_of_the_least_recently_used(server: Server) -> None:
    wait_until_idle(server)
    for name in ("qwen2", "llama", "spare"):
        assert stream(server, ask(name))[1] == CASES.get(name, CASES["llama"])["greedy"]
    assert statuses(server) == {
        "llama": "loaded",
        "qwen2": "loadable",
        "broken": "loadable",
        "spare": "loaded",
    }
    reply = server.call("/v1/completions", ask("qwen2", timeout=0.001))
    assert (
        reply.status == 503
        and "still loading" in reply.body["error"]["message"]
        and "Retry-After" in reply.headers
    )
    assert stream(server, ask("qwen2"))[1] == CASES["qwen2"]["greedy"]
    assert any("unloaded to make room for qwen2" in line for line in server.lines)


def test_a_reload_names_the_model_when_several_are_loaded(server: Server) -> None:
    for name in ("llama", "qwen2"):
        assert admin(server, "POST", f"load/{name}").status == 200
    unclear = admin(server, "POST", "reload", {})
    assert unclear.status == 400 and unclear.body["error"]["param"] == "name"
    done = admin(server, "POST", "reload", {"name": "qwen2"})
    assert done.status == 200 and (done.body["model"], done.body["max_logprob_difference"]) == ("qwen2", 0.0)
    assert admin(server, "POST", "reload", {"name": "spare"}).status == 409
    assert stream(server, ask("qwen2"))[1] == CASES["qwen2"]["greedy"]


def test_a_signal_reloads_every_model_that_is_loaded(server: Server) -> None:
    for name in ("llama", "qwen2"):
        assert admin(server, "POST", f"load/{name}").status == 200
    before = server.metric("reloads_total", outcome="done")
    server.process.send_signal(signal.SIGUSR2)
    deadline = time.monotonic() + 60
    while server.metric("reloads_total", outcome="done") < before + 2:
        assert time.monotonic() < deadline, "not every model was loaded again"
        time.sleep(0.05)
    for name in ("llama", "qwen2"):
        assert stream(server, ask(name))[1] == CASES[name]["greedy"]


def test_the_admin_endpoints_want_their_key(server: Server) -> None:
    assert server.call("/admin/stats").status == 401
    assert server.call("/admin/unload/llama", {}).status == 401


def test_a_websocket_waits_for_its_model_and_can_be_cancelled_meanwhile(server: Server) -> None:
    wait_until_idle(server)
    assert admin(server, "POST", "unload/qwen2").status == 200
    ws = Client.connect(server.url.replace("http", "ws") + "/v1/ws")
    try:
        ws.send(json.dumps({"path": "/v1/completions", "id": "one"} | ask("qwen2")))
        ws.send(json.dumps({"cancel": "one"}))
        assert json.loads(ws.receive(timeout=60))["error"]["code"] == "request_cancelled"
        assert ws.receive(timeout=60) == "[DONE]"
        ws.send(json.dumps({"path": "/v1/completions"} | ask("qwen2")))
        frames = iter(lambda: ws.receive(timeout=60), "[DONE]")
        words = "".join(json.loads(frame)["choices"][0]["text"] for frame in frames).split()
        assert [int(word.removeprefix("t")) for word in words] == CASES["qwen2"]["greedy"]
    finally:
        ws.close()


def test_a_server_of_several_models_leaves_with_0_even_while_one_loads(server: Server) -> None:
    wait_until_idle(server)
    assert admin(server, "POST", "unload/qwen2").status == 200
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.call, "/v1/completions", ask("qwen2"))
        wait_for_status(server, "qwen2", "loading")
        assert server.end() == 0
        assert waiting.result().status in (200, 503)  # loading may have been quick


def wait_for_status(server: Server, name: str, wanted: str) -> None:
    for _ in range(1000):
        if statuses(server)[name] in (wanted, "loaded"):
            return
    pytest.fail(f"{name} is not {wanted}")


def test_a_lazy_server_is_ready_at_once_and_loads_its_model_for_the_first_request() -> None:
    flags = ("--lazy", "--model", str(GOLDEN / "llama"), *FLAGS)
    with running_server(*flags, **QUICK_COMPILE) as server:
        health = server.call("/health").body
        assert (health["status"], health["loaded_models"], health["jax_version"]) == ("ok", [], None)
        assert server.call("/readyz").status == 200 and statuses(server) == {"llama": "loadable"}
        with ThreadPoolExecutor(4) as pool:
            streamed = list(pool.map(lambda _: stream(server, ask("llama"))[1], range(4)))
        assert streamed == [CASES["llama"]["greedy"]] * 4
        assert statuses(server) == {"llama": "loaded"}
        health = server.call("/health").body
        assert health["loaded_models"] == ["llama"] and health["device"]["platform"] == "cpu"
        assert server.metric("model_loads_total", outcome="done") == 1
        assert server.call("/generate", {"prompts": ["t5"], "max_tokens": 2}).status == 200
        assert server.end() == 0


def test_a_lazy_server_that_no_request_reached_ends_at_once() -> None:
    with running_server("--lazy") as server:
        assert statuses(server) == {"smollm2-135m": "loadable"}
        assert server.end() == 0
