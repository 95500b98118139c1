"""The server behind nginx, with the repository's configuration. Left out where there is no nginx."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from simple_websocket import Client as WebSocket

from levserve.settings.settings import Settings
from levserve.wire.connection import FORM_BYTES
from tests.fake_server import Client, ServerProcess, completion
from tests.nginx import running_nginx
from tests.waiting import PATIENCE_SECONDS

CONFIG = Path(__file__).parents[2] / "deploy" / "nginx" / "levserve.conf"

pytestmark = pytest.mark.nginx


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--max-running", "4", "--max-waiting", "4") as process:
        yield process.wait_ready()


@pytest.fixture(scope="module")
def port(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port on which nginx listens; its configuration is ours except for the two ports."""
    folder = tmp_path_factory.mktemp("nginx")
    config = CONFIG.read_text()
    assert config.count("127.0.0.1:8000") == 1
    with running_nginx(config.replace("127.0.0.1:8000", server.url.removeprefix("http://")), folder) as port:
        yield port


def test_a_token_arrives_while_the_next_is_not_there_yet(server: ServerProcess, port: int) -> None:
    with Client(port) as client:
        client.send("POST", "/v1/completions", completion("t6", stream=True))  # one token, then none
        assert json.loads(next(client.stream()))["choices"][0]["text"] == " t7"
    server.wait_event("cancel")


@pytest.mark.parametrize("stream", [False, True])
def test_who_hangs_up_on_nginx_has_hung_up_on_us(server: ServerProcess, port: int, stream: bool) -> None:
    server.skip_events()
    with Client(port) as client:
        client.send("POST", "/v1/completions", completion("t4", stream=stream))
        submitted = server.wait_event("submit")
    assert server.wait_event("cancel") == submitted


def test_connections_to_us_are_kept(server: ServerProcess, port: int) -> None:
    for _ in range(20):
        with Client(port) as client:
            client.send("POST", "/v1/completions", completion("t17", max_tokens=1))
            assert client.receive().json["choices"][0]["text"] == " t18"
    assert 1 <= server.num_connections() <= 4


def test_errors_come_through_as_we_made_them(port: int) -> None:
    with Client(port) as client:
        client.send("POST", "/v1/completions", completion("t17", n=-1))
        reply = client.receive()
        assert (reply.status, reply.json["error"]["param"]) == (400, "n")


def test_a_file_larger_than_other_bodies_comes_through(port: int) -> None:
    data = b"x" * (Settings().max_body_bytes + 1)
    boundary = b"----a-boundary"
    fields = {b'name="purpose"': b"batch", b'name="file"; filename="in.jsonl"': data}
    parts = [
        b"--%b\r\nContent-Disposition: form-data; %b\r\n\r\n%b\r\n" % (boundary, name, value)
        for name, value in fields.items()
    ]
    form = b"".join(parts) + b"--%b--\r\n" % boundary
    with Client(port) as client:
        headers = {"Content-Type": f"multipart/form-data; boundary={boundary.decode()}"}
        client.send("POST", "/v1/files", form, **headers)
        reply = client.receive()
        assert reply.status == 200, reply.body
        assert reply.json["bytes"] == len(data)
        client.send("DELETE", f"/v1/files/{reply.json['id']}")
        assert client.receive().status == 200


@pytest.mark.parametrize("name", ["levserve.conf", "replicas.conf"])
def test_the_largest_file_and_its_form_are_let_through(name: str) -> None:
    megabytes = re.findall(r"client_max_body_size (\d+)m;", CONFIG.with_name(name).read_text())
    settings = Settings()
    others, files = (int(number) * 2**20 for number in megabytes)
    assert others == settings.max_body_bytes
    assert files >= settings.max_file_bytes + FORM_BYTES


def test_a_websocket_comes_through(port: int) -> None:
    ws = WebSocket.connect(f"ws://127.0.0.1:{port}/v1/ws")
    ws.send(json.dumps({"path": "/v1/completions", **completion("t17", max_tokens=1)}))
    first = json.loads(str(ws.receive(timeout=PATIENCE_SECONDS)))
    assert first["choices"][0]["text"] == " t18"
    ws.close()
