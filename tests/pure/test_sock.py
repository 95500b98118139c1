"""The WebSocket over a real gunicorn, with simple-websocket's client and tokens one can work out by hand."""

from __future__ import annotations

import json
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from simple_websocket import Client, ConnectionClosed, ConnectionError
from werkzeug.test import EnvironBuilder

from levserve.engine.engine import Engine
from levserve.models.registry import Registry
from levserve.observe.metrics import Metrics
from levserve.settings.settings import Settings
from levserve.web.app import create_app
from levserve.web.hijack import HijackedSocket
from levserve.web.watcher import Watcher
from tests.fake_device import FakeDevice
from tests.fake_server import Reply, ServerProcess, completion
from tests.waiting import PATIENCE_SECONDS, wait_until

CHAT = {
    "model": "toy",
    "messages": [{"role": "user", "content": "t17 t18"}],
    "temperature": 0,
    "max_tokens": 3,
}
UPGRADE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
}
KEY = "sk-test-0123456789"
MAX_SOCKETS = 3


@pytest.fixture(scope="module")
def shared() -> Iterator[ServerProcess]:
    limits = (
        "--max-running",
        "2",
        "--max-waiting",
        "4",
        "--max-sockets",
        str(MAX_SOCKETS),
        "--max-body-bytes",
        "4KiB",
    )
    with ServerProcess(*limits, "--cors-origins", "https://page.example") as process:
        yield process.wait_ready()
        assert not any("Traceback" in line for line in process.log.seen), "\n".join(process.log.seen)


@pytest.fixture
def server(shared: ServerProcess) -> ServerProcess:
    shared.skip_events()
    return shared


class TidyClient(Client):  # type: ignore[misc]
    """Closes the socket of a client that is refused, which the library forgets to do."""

    def handshake(self) -> None:
        try:
            super().handshake()
        except ConnectionError:
            self.sock.close()
            raise


class Socket:
    """A WebSocket whose receiving times out; connecting is repeated until there is a free place."""

    def __init__(self, server: ServerProcess, **headers: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                self._client = TidyClient.connect(
                    server.url.replace("http", "ws") + "/v1/ws", headers=headers
                )
                return
            except ConnectionError as error:
                assert error.status_code == 503 and time.monotonic() < deadline
                time.sleep(0.02)

    def send(self, message: Any) -> None:
        self._client.send(message if isinstance(message, (str, bytes)) else json.dumps(message))

    def receive(self) -> str:
        message = self._client.receive(timeout=PATIENCE_SECONDS)
        assert message is not None, "nothing came"
        return str(message)

    def answer(self) -> list[dict[str, Any]]:
        """The frames of one answer, without its [DONE]."""
        frames = []
        while (frame := self.receive()) != "[DONE]":
            frames.append(json.loads(frame))
        return frames

    def ask(self, path: str, body: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
        self.send(body | {"path": path} | fields)
        return self.answer()

    def wait_close(self) -> int:
        """The close code that the server sends."""
        with pytest.raises(ConnectionClosed) as closed:
            self.receive()
        return int(closed.value.reason)

    def vanish(self) -> None:
        """Hangs up without a close frame."""
        self._client.sock.shutdown(socket.SHUT_RDWR)
        self.close()

    def close(self) -> None:
        with suppress(ConnectionClosed, OSError):
            self._client.close()
        self._client.thread.join(PATIENCE_SECONDS)
        self._client.sock.close()


@contextmanager
def opened(server: ServerProcess, **headers: str) -> Iterator[Socket]:
    ws = Socket(server, **headers)
    try:
        yield ws
    finally:
        ws.close()


def knock(server: ServerProcess, path: str = "/v1/ws", **headers: str) -> Reply:
    """The answer to an upgrade request; a socket that opens is closed again."""
    with server.connect() as client:
        client.send("GET", path, **(UPGRADE | headers))
        return client.receive()


def read_stream(server: ServerProcess, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with server.connect() as client:
        client.send("POST", path, body | {"stream": True})
        *events, done = client.stream()
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


def without_names(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    assert len({chunk["id"] for chunk in chunks}) == 1
    return [
        {name: value for name, value in chunk.items() if name not in ("id", "created")} for chunk in chunks
    ]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 1}),
        ("/v1/chat/completions", CHAT | {"stream_options": {"include_usage": True}}),
        ("/v1/completions", completion("t17 t18", stop="t22", n=2, seed=1)),
        ("/v1/completions", completion(["t17", "t30"], max_tokens=2, stream=True)),
        ("/v1/completions", completion("t6", timeout=0.2)),
    ],
)
def test_the_frames_are_the_chunks_of_the_stream(
    server: ServerProcess, path: str, body: dict[str, Any]
) -> None:
    def by_choice(chunk: dict[str, Any]) -> list[int]:
        # The order of choices among each other is arbitrary.
        return [choice["index"] for choice in chunk["choices"]] or [99]

    with opened(server) as ws:
        frames = without_names(ws.ask(path, body))
    assert sorted(frames, key=by_choice) == sorted(
        without_names(read_stream(server, path, body)), key=by_choice
    )


def test_one_socket_takes_requests_one_after_another(server: ServerProcess) -> None:
    with opened(server) as ws:
        for number in range(17, 22):
            ws.send(completion(f"t{number}", max_tokens=1) | {"path": "/v1/completions", "id": str(number)})
        texts = [frames[0]["choices"][0]["text"] for frames in (ws.answer() for _ in range(5))]
        assert texts == [" t18", " t19", " t20", " t21", " t22"]
        assert ws.ask("/v1/chat/completions", CHAT)[1]["choices"][0]["delta"] == {"content": "t10"}


@pytest.mark.parametrize(
    ("message", "param", "code"),
    [
        ("{", None, None),
        ("[]", None, "invalid_type"),
        ('"text"', None, "invalid_type"),
        (b"bytes", None, None),
        ({}, "path", "missing_required_parameter"),
        ({"path": "/v1/nowhere"}, "path", None),
        ({"path": 3}, "path", "invalid_type"),
        ({"path": "/v1/completions", "id": 3}, "id", "invalid_type"),
        ({"path": "/v1/completions", "model": "toy"}, "prompt", "missing_required_parameter"),
        (completion("t17", stream=False) | {"path": "/v1/completions"}, "stream", None),
        (completion("t17", max_tokens=64) | {"path": "/v1/completions"}, "prompt", "context_length_exceeded"),
        (completion("t17", n=7) | {"path": "/v1/completions"}, "n", None),
        (CHAT | {"path": "/v1/chat/completions", "model": "other"}, "model", "model_not_found"),
        (CHAT | {"path": "/v1/chat/completions", "messages": []}, "messages", "empty_array"),
    ],
)
def test_a_mistake_is_told_and_the_socket_stays_open(
    server: ServerProcess, message: Any, param: str | None, code: str | None
) -> None:
    with opened(server) as ws:
        ws.send(message)
        ((error,),) = (frame.values() for frame in ws.answer())
        assert sorted(error) == ["code", "message", "param", "type"]
        assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
        assert ws.ask("/v1/completions", completion("t17", max_tokens=1))[0]["choices"][0]["text"] == " t18"


@pytest.mark.parametrize("prompt", ["t4", "t6"])  # t4 gets no token, t6 one
def test_a_cancel_frees_the_sequence_and_the_socket(server: ServerProcess, prompt: str) -> None:
    with opened(server) as ws:
        ws.send(completion(prompt) | {"path": "/v1/completions", "id": "mine"})
        sequence = server.wait_event("submit")
        ws.send({"cancel": "other"})
        ws.send({"cancel": "mine"})
        assert server.wait_event("cancel") == sequence
        *chunks, last = ws.answer()
        assert [chunk["choices"][0]["text"] for chunk in chunks] == ([" t7"] if prompt == "t6" else [])
        assert last["error"]["code"] == "request_cancelled"
        assert ws.ask("/v1/completions", completion("t17", max_tokens=1))[0]["choices"][0]["text"] == " t18"


def test_a_request_that_waits_can_be_cancelled_too(server: ServerProcess) -> None:
    with opened(server) as ws:
        for prompt, name in (("t4", "first"), ("t17", "second"), ("t30", "third")):
            ws.send(completion(prompt, max_tokens=1) | {"path": "/v1/completions", "id": name})
        ws.send({"cancel": "second"})
        ws.send({"cancel": "first"})
        ends = [ws.answer()[-1] for _ in range(3)]
        assert [end["error"]["code"] for end in ends[:2]] == ["request_cancelled"] * 2
        assert ends[2]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("leave", [Socket.close, Socket.vanish])
def test_a_client_that_leaves_cancels_its_request(
    server: ServerProcess, leave: Callable[[Socket], None]
) -> None:
    with opened(server) as ws:
        ws.send(completion("t6", n=2) | {"path": "/v1/completions"})
        server.wait_event("submit")
        leave(ws)
        assert [server.wait_event("cancel")[-2:], server.wait_event("cancel")[-2:]] == ["-0", "-1"]


def test_a_full_server_tells_so_and_the_socket_stays_open(server: ServerProcess) -> None:
    client = server.start_completion("t4", n=6)
    with opened(server) as ws:
        assert ws.ask("/v1/completions", completion("t17"))[0]["error"]["code"] == "rate_limit_exceeded"
        client.close()
        server.wait_event("cancel")
        wait_until(lambda: "error" not in ws.ask("/v1/completions", completion("t17", max_tokens=1))[0])


def test_too_many_sockets_are_refused_before_the_upgrade(server: ServerProcess) -> None:
    with opened(server), opened(server), opened(server):
        reply = knock(server)
        assert (reply.status, reply.headers["retry-after"]) == (503, "5")
        assert reply.json["error"]["code"] == "unavailable"
        wait_until(lambda: "\nlevserve_websockets 3.0\n" in server.ask("GET", "/metrics").body.decode())
        assert 'levserve_refused_total{reason="sockets_full"}' in server.ask("GET", "/metrics").body.decode()
    wait_until(lambda: knock(server).status == 101)


def test_an_oversize_message_closes_the_socket_with_1009(server: ServerProcess) -> None:
    # The second message has fewer characters than the limit, but more bytes.
    for message in (
        "t17 " * 10_000,
        "ü" * 3000,
    ):
        with opened(server) as ws:
            ws.send(message)
            assert ws.wait_close() == 1009


@pytest.mark.parametrize(("number", "length"), [(17, 1), (3, 2000), (500, 1)])
def test_a_client_that_sends_more_than_can_wait_is_cut_off(
    server: ServerProcess, number: int, length: int
) -> None:
    with opened(server) as ws:
        ws.send(completion("t4") | {"path": "/v1/completions"})
        server.wait_event("submit")
        with suppress(ConnectionClosed, OSError):  # it may be cut off before it has sent them all
            for _ in range(number):
                ws.send(completion("t17", user="x" * length) | {"path": "/v1/completions"})
        assert ws.wait_close() == 1008
        server.wait_event("cancel")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "https://page.example"}, 101),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-WebSocket-Version": "8"}, 426),
        ({"Sec-WebSocket-Key": ""}, 400),
        ({"Host": ""}, 400),
        ({"Sec-WebSocket-Extensions": "permessage-deflate; server_max_window_bits=many"}, 101),
        ({"Sec-WebSocket-Protocol": "levserve, other"}, 101),
        ({"Upgrade": "h2c"}, 426),
    ],
)
def test_who_may_open_a_socket_is_decided_before_the_upgrade(
    server: ServerProcess, headers: dict[str, str], status: int
) -> None:
    replies: list[Any] = []

    def has_room() -> bool:  # sockets of other tests free their places a little later
        replies.append(knock(server, **headers))
        return bool(replies[-1].status != 503)

    wait_until(has_room)
    reply = replies[-1]
    assert reply.status == status
    if status != 101:
        assert reply.json["error"]["type"] == "invalid_request_error"
    if status == 426:
        assert reply.headers["upgrade"] == "websocket"


def test_other_paths_are_no_sockets_and_the_socket_is_no_page(server: ServerProcess) -> None:
    reply = knock(server, "/v1/models")
    assert reply.status == 400 and "/v1/ws" in reply.json["error"]["message"]
    reply = server.ask("GET", "/v1/ws")
    assert reply.status == 426 and reply.headers["upgrade"] == "websocket"
    assert server.ask("POST", "/v1/ws", {}).status in (405, 426)


def test_sockets_leave_no_threads_and_no_descriptors(server: ServerProcess) -> None:
    def count() -> tuple[int, int]:
        process = Path(f"/proc/{server.worker_pid}")
        return len(list((process / "task").iterdir())), len(list((process / "fd").iterdir()))

    def use(number: int) -> None:
        with opened(server) as ws:
            ws.ask("/v1/completions", completion("t17", max_tokens=1))
            if number % 3 == 0:
                ws.vanish()
            elif number % 3 == 1:
                ws.send("x" * 5000)
                ws.wait_close()

    for number in range(6):  # gunicorn starts its threads when they are first needed
        use(number)
    threads, descriptors = count()
    for number in range(20):
        use(number)
    wait_until(lambda: count()[1] <= descriptors)
    assert count()[0] <= threads + 2  # gunicorn's thread pool may still grow


def test_a_drain_ends_idle_sockets_with_1001_and_lets_requests_finish() -> None:
    with ServerProcess("--max-running", "2", "--drain-seconds", "10").wait_ready() as server:
        with opened(server) as idle, opened(server) as busy:
            busy.send(completion("t3", max_tokens=3) | {"path": "/v1/completions"})
            server.wait_event("submit")
            server.send_signal(signal.SIGTERM)
            assert idle.wait_close() == 1001
            assert "".join(chunk["choices"][0]["text"] for chunk in busy.answer()) == " t4 t5 t6"
            assert busy.wait_close() == 1001
            assert server.wait_exit() == 0


def test_a_request_that_outlives_the_drain_ends_with_an_error() -> None:
    with ServerProcess("--max-running", "2", "--drain-seconds", "0.2").wait_ready() as server:
        with opened(server) as ws:
            ws.send(completion("t6") | {"path": "/v1/completions"})
            server.wait_event("submit")
            server.send_signal(signal.SIGTERM)
            *_, last = ws.answer()
            assert last["error"]["code"] == "unavailable"
            assert ws.wait_close() == 1001
            assert server.wait_exit() == 0


def test_the_key_is_asked_for_before_the_upgrade() -> None:
    with ServerProcess("--max-running", "2", "--api-key", KEY).wait_ready() as server:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Sec-WebSocket-Protocol": "levserve, openai-insecure-api-key.wrong"},
        ):
            reply = knock(server, **headers)
            assert (reply.status, reply.json["error"]["code"]) == (401, "invalid_api_key")
        with opened(server, Authorization=f"Bearer {KEY}") as ws:
            assert len(ws.ask("/v1/chat/completions", CHAT)) == 5
        reply = knock(server, **{"Sec-WebSocket-Protocol": f"levserve, openai-insecure-api-key.{KEY}"})
        assert (reply.status, reply.headers["sec-websocket-protocol"]) == (101, "levserve")


def test_a_bug_closes_the_socket_and_writes_no_http_answer_on_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    registry, watcher = Registry(Engine(max_inflight=1, metrics=Metrics())), Watcher()
    FakeDevice(registry)  # publishes the model
    app = create_app(registry, Settings(), watcher)
    watcher.stop()
    monkeypatch.setattr(registry.engine, "reserve", lambda body_bytes: 1 / 0)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        environ = EnvironBuilder(
            "/v1/ws", headers=UPGRADE, environ_base={"gunicorn.socket": theirs}
        ).get_environ()

        def serve() -> None:
            with pytest.raises(StopIteration):
                app(environ, None)

        view = threading.Thread(target=serve)
        view.start()
        assert ours.recv(4096).startswith(b"HTTP/1.1 101")
        ours.sendall(b"\x81\x82\0\0\0\0{}")  # a text frame, masked with zeros
        received = ours.recv(4096)
        ours.shutdown(socket.SHUT_WR)
        while data := ours.recv(4096):
            received += data
        view.join(PATIENCE_SECONDS)
        assert (received[0], int.from_bytes(received[2:4]), len(received)) == (0x88, 1011, received[1] + 2), (
            "one close frame"
        )
        assert theirs.fileno() == -1, "gunicorn finds it closed"
    assert "ZeroDivisionError" in caplog.text


def test_a_peer_waits_while_there_is_no_room_for_what_it_sends() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        hijacked = HijackedSocket(theirs)
        room = threading.Event()
        hijacked.read_while(room.is_set)
        ours.sendall(b"first")
        received: list[bytes] = []
        reader = threading.Thread(target=lambda: received.extend((hijacked.recv(10), hijacked.recv(10))))
        reader.start()
        assert not received
        room.set()
        wait_until(lambda: hijacked.fileno() != -1 and not select.select([theirs], [], [], 0)[0])
        room.clear()
        hijacked.hang_up()  # wakes it, room or not
        reader.join(PATIENCE_SECONDS)
        assert received == [b"first", b""]
