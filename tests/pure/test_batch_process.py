"""Batches on a server process: uploads larger than bodies may be, and a kill in the middle."""

from __future__ import annotations

import io
import json
import signal
import socket
import time
from pathlib import Path

import openai

from levserve.wire.connections import BUFFERED_BYTES
from tests.fake_server import ServerProcess
from tests.pure.test_batch import TEXT, make_line
from tests.waiting import PATIENCE_SECONDS, wait_until

NUM_LINES = 1200
MAX_BODY = 20_000


def client_of(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def make_input() -> bytes:
    body = {"model": "toy", "temperature": 0, "max_tokens": 3}
    lines = (
        make_line(number, TEXT, body | {"prompt": f"t{20 + number % 200}"}) for number in range(NUM_LINES)
    )
    return b"\n".join(lines)


def test_a_server_that_is_killed_goes_on_with_nothing_lost_and_nothing_done_twice(tmp_path: Path) -> None:
    options = ["--state-dir", str(tmp_path), "--max-body-bytes", str(MAX_BODY), "--max-running", "8"]
    data = make_input()
    assert len(data) > 5 * MAX_BODY
    with ServerProcess(*options) as server:
        server.wait_ready()
        with client_of(server) as client:
            uploaded = client.files.create(file=("in.jsonl", io.BytesIO(data)), purpose="batch")
            assert client.files.content(uploaded.id).content == data
            batch = client.batches.create(input_file_id=uploaded.id, endpoint=TEXT, completion_window="24h")

            def num_done() -> int:
                counts = client.batches.retrieve(batch.id).request_counts
                return 0 if counts is None else counts.completed

            wait_until(lambda: num_done() >= 20)
        server.send_signal(signal.SIGKILL, to_group=True)
        server.wait_end()
    with ServerProcess(*options) as server:
        server.wait_ready()
        with client_of(server) as client:
            wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")
            ended = client.batches.retrieve(batch.id)
            assert ended.output_file_id is not None and ended.error_file_id is None
            lines = client.files.content(ended.output_file_id).text.splitlines()
            ids = [json.loads(line)["custom_id"] for line in lines]
            assert sorted(ids) == sorted(f"line {number}" for number in range(NUM_LINES))
        num_run = sum(json.loads(event)[0] == "submit" for event in server.events)
        assert 0 < num_run < NUM_LINES


def test_a_file_that_is_too_large_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    with ServerProcess("--max-file-bytes", "200000", "--max-body-bytes", str(MAX_BODY)) as server:
        server.wait_ready()
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS) as connection:
            kind = "multipart/form-data; boundary=x"
            head = f"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\nContent-Length: 1000000\r\n\r\n"
            connection.sendall(head.encode())
            answer = connection.recv(65536)
        assert answer.startswith(b"HTTP/1.1 413 ") and b"\r\nConnection: close\r\n" in answer
        with client_of(server) as client:
            large = io.BytesIO(b"x" * 1_000_000)
            try:
                client.files.create(file=("in.jsonl", large), purpose="batch")
            except openai.APIStatusError as error:
                assert error.status_code == 413 and "limit of" in error.message
            except openai.APIConnectionError:
                pass  # the server answered and hung up while the client was still sending
            else:
                raise AssertionError("it was taken")
            fits = client.files.create(file=("in.jsonl", io.BytesIO(b"x" * 200_000)), purpose="batch")
            assert fits.bytes == 200_000


def test_uploads_take_none_of_the_memory_for_unfinished_bodies() -> None:
    with ServerProcess() as server:
        server.wait_ready()
        with client_of(server) as client:
            for _ in range(3):
                uploaded = client.files.create(
                    file=("in.jsonl", io.BytesIO(bytes(BUFFERED_BYTES // 2))), purpose="batch"
                )
                client.files.delete(uploaded.id)
        body = json.dumps({"model": "toy", "prompt": "t20", "max_tokens": 1}).encode()
        head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS) as connection:
            connection.sendall(head.encode() + body[:5])
            time.sleep(0.2)  # the server must have read the first part before the rest comes
            connection.sendall(body[5:])
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_a_download_may_take_longer_than_a_request() -> None:
    data = bytes(range(256)) * 8000
    with ServerProcess("--request-timeout", "0.3", "--send-timeout", "1") as server:
        server.wait_ready()
        with client_of(server) as client:
            file_id = client.files.create(file=("in.jsonl", io.BytesIO(data)), purpose="batch").id
        host, port = server.url.removeprefix("http://").split(":")
        with socket.socket() as connection:
            connection.settimeout(PATIENCE_SECONDS)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((host, int(port)))
            head = f"GET /v1/files/{file_id}/content HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
            connection.sendall(head.encode())
            received = b""
            while piece := connection.recv(8192):
                received += piece
                time.sleep(0.004)  # so that reading all takes longer than the request may
        assert received.endswith(b"\r\n\r\n" + data)
