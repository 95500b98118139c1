"""Silent, slow, stuck or many clients: each costs a poller place for some seconds and disturbs no other."""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.fake_server import ServerProcess, completion
from tests.waiting import PATIENCE_SECONDS, wait_until

CROWD = 40
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
# More than the kernel buffers for a reader.
BIG = json.dumps({"messages": [{"role": "user", "content": "x" * 600_000}]}).encode()
LIMITS = ("--header-timeout", "1.5", "--body-timeout", "1.5", "--send-timeout", "1.5")
NUM_THREADS = 2 + 2 + 0 + 16  # rows, requests that wait, WebSockets, and spare threads
NUM_QUEUED = 64


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    options = ("--max-running", "2", "--max-waiting", "2", "--max-sockets", "0", "--sse-heartbeat", "0.0002")
    with ServerProcess(*options, *LIMITS) as process:
        yield process.wait_ready()


@pytest.fixture(scope="module")
def patient_server() -> Iterator[ServerProcess]:
    """A server with the default time limits."""
    with ServerProcess(
        "--max-running", "2", "--max-waiting", "2", "--max-sockets", "0", "--served-model-name", "talkative"
    ) as process:
        yield process.wait_ready()


@pytest.fixture(autouse=True)
def nothing_leaks(server: ServerProcess) -> Iterator[None]:
    """After each test, all descriptors are closed and the log has no traceback."""
    server.ask("GET", "/healthz")
    wait_until(lambda: server.num_connections() == 0)
    before = num_files(server)
    yield
    wait_until(lambda: num_files(server) <= before)
    assert not any("Traceback" in line for line in server.log.seen)


def open_socket(server: ServerProcess, sent: bytes = b"", *, is_small: bool = False) -> socket.socket:
    sock = socket.socket()
    sock.settimeout(PATIENCE_SECONDS)
    if is_small:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
    sock.sendall(sent)
    return sock


@contextmanager
def crowd(
    server: ServerProcess, sent: bytes, count: int = CROWD, *, is_small: bool = False
) -> Iterator[list[socket.socket]]:
    with ExitStack() as held:
        yield [held.enter_context(open_socket(server, sent, is_small=is_small)) for _ in range(count)]


def post(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def read_to_end(sock: socket.socket) -> bytes:
    received = b""
    while data := sock.recv(65536):
        received += data
    return received


def num_files(server: ServerProcess) -> int:
    return len(os.listdir(f"/proc/{server.worker_pid}/fd"))


def metric(server: ServerProcess, name: str, **labels: str) -> float:
    families = text_string_to_metric_families(server.ask("GET", "/metrics").body.decode())
    samples = [sample for family in families for sample in family.samples]
    return next(
        (sample.value for sample in samples if sample.name == f"levserve_{name}" and sample.labels == labels),
        0.0,
    )


def check_speed(server: ServerProcess, *paths: str) -> None:
    """A quarter of the answers must take under 0.1 s: a busy machine delays some, stuck threads delay all."""
    seconds = []
    for path in paths * 8:
        started = time.monotonic()
        assert server.ask("GET", path).status == 200
        seconds.append(time.monotonic() - started)
    assert sorted(seconds)[len(seconds) // 4] < 0.1, seconds


def check_service(server: ServerProcess) -> None:
    check_speed(server, "/healthz")
    assert server.complete("t17", max_tokens=2).json["choices"][0]["text"] == " t18 t19"


@pytest.mark.parametrize(
    ("sent", "late_with", "answer"),
    [
        (b"", "header", b""),
        (HEAD, "header", b"HTTP/1.1 408 "),
        (HEAD + b"Content-Length: 1000\r\n\r\n{", "body", b"HTTP/1.1 408 "),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{", "body", b"HTTP/1.1 408 "),
    ],
    ids=["silent", "half a header", "half a body", "half a chunk"],
)
def test_a_crowd_that_never_finishes_its_requests_is_cut_and_disturbs_nobody(
    server: ServerProcess, sent: bytes, late_with: str, answer: bytes
) -> None:
    before = metric(server, "connections_cut_total", reason=late_with)
    with crowd(server, sent) as clients:
        check_service(server)
        answers = [read_to_end(client) for client in clients]
        assert all(one.startswith(answer) and bool(one) == bool(answer) for one in answers)
    if answer:
        error = json.loads(answers[0].partition(b"\r\n\r\n")[2])["error"]
        assert error["code"] == "request_timeout" and late_with in error["message"]
    assert metric(server, "connections_cut_total", reason=late_with) == before + CROWD


def test_a_crowd_that_sends_a_byte_now_and_then_is_cut(server: ServerProcess) -> None:
    with crowd(server, HEAD[:1]) as clients:
        going = set(clients)
        for byte in HEAD[1:] * 3:
            for client in list(going):
                if select.select([client], [], [], 0)[0]:
                    assert client.recv(65536).startswith(b"HTTP/1.1 408 ")
                    going.discard(client)
                else:
                    client.send(bytes((byte,)))
            time.sleep(0.02)
            if not going:
                break
        assert not going
        check_service(server)


def test_a_crowd_that_stays_after_the_last_answer_disturbs_nobody_and_is_closed(
    server: ServerProcess,
) -> None:
    with crowd(server, b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n") as clients:
        assert all(read_to_end(client).startswith(b"HTTP/1.1 200 ") for client in clients)
        check_service(server)
        wait_until(lambda: server.num_connections() == 0)


def test_what_a_client_sends_after_its_answer_does_not_destroy_it(server: ServerProcess) -> None:
    """A close with unread bytes resets the connection, and the kernel drops what the client has not read."""
    with open_socket(server, HEAD + b"Content-Length: 9999999\r\n\r\n" + b"x" * 100_000) as client:
        for _ in range(5):
            time.sleep(0.02)
            client.sendall(b"x" * 20_000)
        assert read_to_end(client).startswith(b"HTTP/1.1 413 ")


def test_a_stream_to_a_reader_that_is_stuck_is_cut_and_its_request_ends(server: ServerProcess) -> None:
    before = metric(server, "connections_cut_total", reason="send")
    server.skip_events()
    with open_socket(
        server, post("/v1/completions", json.dumps(completion("t4", stream=True)).encode()), is_small=True
    ) as stuck:
        server.wait_event("submit")
        server.wait_event("cancel")
        wait_until(lambda: metric(server, "connections_cut_total", reason="send") == before + 1)
        assert stuck.recv(1)
    check_service(server)


def test_one_byte_readers_are_cut_too(server: ServerProcess) -> None:
    with crowd(server, post("/apply_template", BIG), 4, is_small=True) as clients:
        before = metric(server, "connections_cut_total", reason="send")

        def read_a_byte() -> bool:
            for client in clients:
                client.recv(1)
            return metric(server, "connections_cut_total", reason="send") == before + len(clients)

        wait_until(read_a_byte)


def test_when_no_thread_is_free_health_is_answered_and_the_rest_is_refused_by_the_main_loop(
    patient_server: ServerProcess,
) -> None:
    server = patient_server
    with ExitStack() as held:
        # An answer of a megabyte that needs no place in the queue, so that each one can hold a thread.
        stuck = held.enter_context(
            crowd(server, b"GET /tokenizer_info HTTP/1.1\r\nHost: x\r\n\r\n", NUM_THREADS, is_small=True)
        )
        assert all(client.recv(1) for client in stuck)
        waiting = held.enter_context(
            crowd(server, b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n", NUM_QUEUED + 1)
        )
        # One is refused, so the others are in the queue.
        wait_until(lambda: metric(server, "refused_total", reason="threads_full") == 1)
        check_speed(server, "/healthz", "/readyz", "/metrics")
        refused = server.complete("t17")
        assert (refused.status, refused.headers["retry-after"], refused.headers["connection"]) == (
            503,
            "1",
            "close",
        )
        assert sorted(refused.json["error"]) == ["code", "message", "param", "type"]
        assert metric(server, "refused_total", reason="threads_full") == 2
        for client in stuck:
            client.close()
        answers = sorted(client.recv(65536)[:12] for client in waiting)
        assert answers == [b"HTTP/1.1 200"] * NUM_QUEUED + [b"HTTP/1.1 503"], "they have their turn"
    check_service(server)


def test_who_asks_for_metrics_on_and_on_and_reads_nothing_does_not_keep_them_from_others(
    patient_server: ServerProcess,
) -> None:
    before = metric(patient_server, "connections_cut_total", reason="send")
    with crowd(patient_server, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 300, 12, is_small=True):
        seconds = []

        def is_over() -> bool:
            started = time.monotonic()
            num_cut = metric(patient_server, "connections_cut_total", reason="send") - before
            seconds.append(time.monotonic() - started)
            return num_cut == 12

        wait_until(is_over)
        assert max(seconds) < 20, "a thread has waited for one of them to read, for which they have 30"


def test_unfinished_bodies_have_only_so_much_memory_together(server: ServerProcess) -> None:
    part = HEAD + b"Content-Length: 4000000\r\n\r\n" + b"x" * 3_900_000
    with ExitStack() as held:
        for _ in range(20):
            with suppress(ConnectionError):  # refused before all of it was sent
                held.enter_context(open_socket(server, part))
        wait_until(lambda: metric(server, "refused_total", reason="memory_full") >= 1)
        check_service(server)


def test_a_reader_that_takes_its_answer_in_sips_is_cut_when_the_requests_time_is_over() -> None:
    with ServerProcess(
        "--max-running", "2", "--request-timeout", "0.5", "--send-timeout", "1"
    ).wait_ready() as server:
        with open_socket(server, post("/apply_template", BIG), is_small=True) as client:

            def sip() -> bool:
                # So that reading takes longer than the request may, even on a fast machine.
                time.sleep(0.008)
                with suppress(ConnectionError):
                    client.recv(4096)
                return metric(server, "connections_cut_total", reason="request") == 1

            wait_until(sip)
            wait_until(lambda: server.num_connections() == 0)


def test_a_burst_over_the_limit_is_refused_at_once_and_health_goes_on(server: ServerProcess) -> None:
    running = [server.start_completion("t4") for _ in range(4)]
    with crowd(server, post("/v1/completions", json.dumps(completion("t17")).encode()), 60) as clients:
        check_speed(server, "/healthz", "/metrics")
        statuses = {client.recv(65536).split(b" ")[1] for client in clients}
        assert statuses == {b"429"}
    for client in running:
        client.close()


def test_a_leaver_is_noticed_within_ten_milliseconds(server: ServerProcess) -> None:
    for stream in (False, True):
        seconds = []
        for _ in range(7):
            server.skip_events()
            client = server.start_completion("t6" if stream else "t4", stream=stream)
            started = time.monotonic()
            client.close()
            server.wait_event("cancel")
            seconds.append(time.monotonic() - started)
        assert min(seconds) < 0.01, seconds


def test_clients_that_reset_their_connections_at_any_moment_leave_nothing_behind(
    server: ServerProcess,
) -> None:
    sent = post("/v1/completions", json.dumps(completion("t17", stream=True)).encode())
    for length in range(0, len(sent), 3):
        client = open_socket(server, sent[:length])
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
    check_service(server)


def test_more_connections_than_there_is_room_for_push_out_the_oldest() -> None:
    with ServerProcess(
        "--max-running", "2", "--max-waiting", "2", files_limit=20 + 64 + 4 + 256 + 16 + 30
    ) as server:
        server.wait_ready()
        with crowd(server, b"", 160) as clients:
            assert read_to_end(clients[0]) == b""
            assert server.complete("t17", max_tokens=1).status == 200
            assert not select.select(clients[-10:], [], [], 0)[0], "the youngest are still there"
