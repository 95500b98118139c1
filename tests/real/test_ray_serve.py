"""The example for Ray Serve with two replicas, on a Ray that runs on this machine alone.

Slow: ray is 400 MB, and goes into a virtual environment of its own. Run it with `pytest -m slow`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path

import pytest

from tests.conftest import GOLDEN
from tests.engines import cache_folder
from tests.examples import EXAMPLES, RAY
from tests.servers import Server

pytestmark = pytest.mark.slow

START_SECONDS = 300
READY = re.compile(r"ready: .* on (http://127\.0\.0\.1:\d+)")
FLAGS = f"--model {GOLDEN / 'llama'} --dtype float32 --max-running 4 --prefill-chunk 32"
PROMPT = {"model": "llama", "prompt": [10, 11, 12], "temperature": 0, "ignore_eos": True}


@dataclass
class Cluster:
    """Ray Serve, and the addresses of the servers that it has started so far, of which two are alive."""

    front: Server
    urls: list[str]

    def wait_for(self, count: int) -> list[Server]:
        deadline = time.monotonic() + START_SECONDS
        while len(self.urls) < count:
            assert self.front.process.poll() is None and time.monotonic() < deadline, self.front.lines
            time.sleep(0.5)
        return [Server(self.front.process, url) for url in self.urls]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("ray")
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    subprocess.run([folder / "venv/bin/pip", "install", "-q", RAY["ray_serve.py"]], check=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = f"{sys.executable} -m levserve {FLAGS} --cache-dir {cache_folder()}"
    application = {"import_path": "ray_serve:app", "args": {"replicas": 2, "command": command}}
    config = {"http_options": {"port": port}, "applications": [{"name": "levserve", **application}]}
    (folder / "serve.json").write_text(json.dumps(config))  # JSON is YAML
    path = os.pathsep.join([str(EXAMPLES), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [folder / "venv/bin/serve", "run", folder / "serve.json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": path, "RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0"},
    )
    cluster = Cluster(Server(process, f"http://127.0.0.1:{port}"), [])
    reader = threading.Thread(target=read_lines, args=(cluster,))
    reader.start()
    try:
        cluster.wait_for(2)
        wait_until_front_answers(cluster.front)
        yield cluster
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
        reader.join()
        if process.stdout is not None:
            process.stdout.close()
        assert not [url for url in cluster.urls if find_process(url)], "a server outlived its replica"


def read_lines(cluster: Cluster) -> None:
    for line in map(bytes.decode, cluster.front.process.stdout or ()):
        cluster.front.lines.append(line)
        if found := READY.search(line):
            cluster.urls.append(found[1])


def wait_until_front_answers(front: Server) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            if front.call("/readyz").status == 200:
                return
        except OSError:
            pass
        assert time.monotonic() < deadline, front.lines
        time.sleep(0.5)


def find_process(url: str) -> int | None:
    """The process ID of the levserve that was started with the port of this address."""
    flag = f"\0--port\0{url.rpartition(':')[2]}\0".encode()
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and flag in (folder / "cmdline").read_bytes():
                return int(folder.name)
        except OSError:
            continue  # it has ended meanwhile
    return None


def test_both_replicas_answer_as_levserve_does(cluster: Cluster) -> None:
    servers = cluster.wait_for(2)
    body = {**PROMPT, "max_tokens": 8}
    wanted = servers[0].call("/v1/completions", body).body["choices"]
    before = [server.metric("requests_total", route="/v1/completions", status="200") for server in servers]
    for _ in range(20):
        answer = cluster.front.call("/v1/completions", body)
        assert answer.status == 200 and answer.body["choices"] == wanted
    after = [server.metric("requests_total", route="/v1/completions", status="200") for server in servers]
    assert sum(after) - sum(before) == 20 and all(new > old for new, old in zip(after, before, strict=True))


def test_errors_and_headers_pass(cluster: Cluster) -> None:
    answer = cluster.front.call("/v1/completions", {**PROMPT, "model": "nobody"})
    assert answer.status == 404 and answer.body["error"]["code"] == "model_not_found"
    assert cluster.front.call("/v1/completions?x=1", {**PROMPT, "max_tokens": -1}).status == 400
    assert cluster.front.call("/v1/models").headers["content-type"] == "application/json"


def open_stream(cluster: Cluster, max_tokens: int) -> HTTPConnection:
    connection = HTTPConnection(cluster.front.url.removeprefix("http://"), timeout=60)
    body = json.dumps({**PROMPT, "max_tokens": max_tokens, "stream": True})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    return connection


def test_a_stream_comes_piece_by_piece(cluster: Cluster) -> None:
    connection = open_stream(cluster, 200)
    response = connection.getresponse()
    assert response.headers["content-type"].startswith("text/event-stream")
    pieces = []
    while piece := response.read1():
        pieces.append(piece)
    connection.close()
    assert len(pieces) > 5 and b"".join(pieces).endswith(b"data: [DONE]\n\n")


def test_a_client_that_leaves_frees_its_row(cluster: Cluster) -> None:
    servers = cluster.wait_for(2)[-2:]
    connection = open_stream(cluster, 230)
    connection.getresponse().read1()
    connection.close()
    deadline = time.monotonic() + 30
    while not any(server.metric("disconnects_total", phase="decode") for server in servers):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_server_that_is_killed_is_replaced(cluster: Cluster) -> None:
    """Runs last, because afterwards nothing listens at one of the addresses."""
    lost = find_process(cluster.urls[0])
    assert lost is not None
    os.kill(lost, signal.SIGKILL)
    statuses = []
    while len(cluster.urls) < 3:
        statuses.append(cluster.front.call("/v1/completions", {**PROMPT, "max_tokens": 8}).status)
        cluster.wait_for(2)
    assert statuses[-1] == 200 and statuses.count(200) > 0.9 * len(statuses), statuses
    cluster.wait_for(3)
