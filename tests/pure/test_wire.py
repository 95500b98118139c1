"""Malformed requests, byte by byte over a real gunicorn: the answer always has OpenAI's error shape."""

from __future__ import annotations

import http.client
import io
import json
import socket
from collections.abc import Iterator

import pytest

from tests.fake_server import Reply, ServerProcess, completion
from tests.waiting import PATIENCE_SECONDS

BODY = json.dumps(completion("t17")).encode()
JSON = b"Host: x\r\nContent-Type: application/json\r\n"
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
POST = b"POST /v1/completions HTTP/1.1\r\n" + JSON
GET = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--max-running", "2", "--max-waiting", "2", "--max-body-bytes", "4KiB") as process:
        yield process.wait_ready()


class Wire(io.BytesIO):
    def makefile(self, mode: str) -> Wire:
        return self

    def close(self) -> None:
        """Does nothing, because another answer may follow."""


def exchange(server: ServerProcess, *pieces: bytes) -> Reply:
    """Sends the bytes as they are and reads one answer; the server must close the connection after it."""
    (reply,) = exchange_all(server, *pieces)
    return reply


def exchange_all(server: ServerProcess, *pieces: bytes) -> list[Reply]:
    """Sends the bytes as they are and reads all answers until the server closes the connection."""
    address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    with socket.create_connection(address, timeout=PATIENCE_SECONDS) as connection:
        for piece in pieces:
            connection.sendall(piece)
        received = Wire()
        while data := connection.recv(65536):
            received.write(data)
    received.seek(0)
    replies = []
    while received.tell() < len(received.getvalue()):
        response = http.client.HTTPResponse(received)  # type: ignore[arg-type]
        response.begin()
        replies.append(
            Reply(
                response.status,
                {name.lower(): value for name, value in response.getheaders()},
                response.read(),
            )
        )
    return replies


def check_shape(reply: Reply, status: int) -> None:
    assert reply.status == status
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-request-id"]
    assert list(reply.json) == ["error"]
    error = reply.json["error"]
    assert sorted(error) == ["code", "message", "param", "type"]
    assert error["type"] == "invalid_request_error" and error["message"]
    assert error["code"] is None or isinstance(error["code"], str)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"\r\n\r\n\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"GET /v1/models HTTP/1.1\nHost: x\n\n", 400),
        (GET + b"X-Bad: 1\n", 400),
        (GET + b"X-Folded: 1\r\n and more\r\n\r\n", 400),
        (b"get /v1/models HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET /v1/models HTTP/9.9\r\nHost: x\r\n\r\n", 400),
        (b"GET /%s HTTP/1.1\r\nHost: x\r\n\r\n" % (b"a" * 5000), 414),
        (GET + b"X-Long: %s\r\n\r\n" % (b"a" * 9000), 431),
        (GET + b"".join(b"X-%d: 1\r\n" % number for number in range(120)) + b"\r\n", 431),
        (GET + b"X-Long: %s" % (b"a" * 70_000), 431),
        (GET + b"X-Bad: a\x00b\r\n\r\n", 400),
        (GET + b"X Bad: 1\r\n\r\n", 400),
        (GET + b"no colon\r\n\r\n", 400),
        (POST + b"Content-Length: many\r\n\r\n" + BODY, 400),
        (POST + b"Content-Length: -1\r\n\r\n" + BODY, 400),
        (POST + LENGTH + b"Content-Length: 1\r\n\r\n" + BODY, 400),
        (POST + LENGTH + b"Transfer-Encoding: chunked\r\n\r\n" + BODY, 400),
        (POST + b"Transfer-Encoding: wind\r\n\r\n" + BODY, 501),
        (POST + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n", 400),
        (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", 501),
        (POST + b"Transfer-Encoding: wind, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", 501),
        (b"GET /v1/models HTTP/1.1\r\n\r\n", 400),
        (b"GET /v1/models HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", 400),
        (b"GET /metrics/router HTTP/1.1\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (POST + LENGTH + b"Expect: a miracle\r\n\r\n" + BODY, 417),
        (POST + b"Transfer-Encoding: chunked\r\n\r\nlong\r\n{}\r\n0\r\n\r\n", 400),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}{}\r\n0\r\n\r\n", 400),
    ],
)
def test_what_cannot_be_parsed_is_refused_in_the_same_shape(
    server: ServerProcess, sent: bytes, status: int
) -> None:
    reply = exchange(server, sent)
    check_shape(reply, status)
    assert reply.headers["date"].endswith(" GMT") and reply.headers["openai-processing-ms"].isdigit()
    assert server.ask("GET", "/healthz").status == 200


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /nowhere HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 404),
        (b"GET //v1//models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 404),
        (b"FETCH /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 405),
        (b"DELETE /tokenize HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 405),
        (b"GET /v1/completions HTTP/1.0\r\n\r\n", 405),
        (POST + b"Connection: close\r\n\r\n", 400),
        (POST + b"Connection: close\r\nContent-Length: 1\r\n\r\n{", 400),
        (POST + b"Connection: close\r\nContent-Length: 999999\r\n\r\n", 413),
        (POST + b"Connection: close\r\nContent-Length: 99999\r\n\r\n" + b" " * 99_999, 413),
        (
            POST
            + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n1388\r\n%s\r\n0\r\n\r\n"
            % (b" " * 5000),
            413,
        ),
        (POST + b"Content-Length: 99999999999999999999999\r\n\r\n", 413),
        (POST + b"Expect: 100-continue\r\nContent-Length: 999999\r\n\r\n", 413),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"10\r\n0123456789abcdef\r\n" * 300, 413),
        (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: text/plain\r\n"
            + LENGTH
            + b"\r\n"
            + BODY,
            415,
        ),
        (POST + b"Connection: close\r\nContent-Encoding: gzip\r\n" + LENGTH + b"\r\n" + BODY, 415),
    ],
)
def test_what_the_application_refuses_has_the_same_shape(
    server: ServerProcess, sent: bytes, status: int
) -> None:
    reply = exchange(server, sent)
    check_shape(reply, status)
    if status == 405:
        assert reply.headers["allow"]


def test_a_client_that_sends_far_too_much_gets_to_read_its_refusal(server: ServerProcess) -> None:
    check_shape(server.ask("POST", "/v1/completions", b" " * 10_000_000), 413)


def test_a_refusal_quotes_little_of_what_was_sent(server: ServerProcess) -> None:
    reply = exchange(server, b"GET " + b"a" * 3000 + b"\r\n\r\n")
    assert len(reply.json["error"]["message"]) < 300


def test_a_body_sent_byte_by_byte_is_a_request_like_any_other(server: ServerProcess) -> None:
    reply = exchange(server, POST + LENGTH + b"Connection: close\r\n\r\n", *(bytes((byte,)) for byte in BODY))
    assert reply.status == 200 and reply.json["choices"][0]["text"].startswith(" t18")


def test_a_client_that_asks_before_it_sends_is_told_to_go_on(server: ServerProcess) -> None:
    with socket.create_connection(
        ("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=PATIENCE_SECONDS
    ) as client:
        client.sendall(POST + LENGTH + b"Expect: 100-continue\r\n\r\n")
        assert client.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(BODY)
        assert client.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_a_chunked_body_is_a_body_like_any_other_also_with_trailers(server: ServerProcess) -> None:
    chunks = b"".join(
        b"%x\r\n%b\r\n" % (len(BODY[at : at + 7]), BODY[at : at + 7]) for at in range(0, len(BODY), 7)
    )
    sent = (
        POST + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\nX-Sum: 1\r\n\r\n"
    )
    assert exchange(server, sent).json["choices"][0]["text"].startswith(" t18")
    assert exchange(server, *(bytes((byte,)) for byte in sent)).json["choices"][0]["text"].startswith(" t18")


@pytest.mark.parametrize(
    "head",
    [
        GET + b"X_Odd: 1\r\nConnection: close\r\n\r\n",
        b"GET /v1/models HTTP/1.0\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost:\r\nConnection: close\r\n\r\n",
    ],
)
def test_old_and_careless_clients_are_served(server: ServerProcess, head: bytes) -> None:
    assert exchange(server, head).json["object"] == "list"


def test_a_client_of_a_later_minor_version_is_answered_in_http_1_1(server: ServerProcess) -> None:
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as client:
        client.settimeout(PATIENCE_SECONDS)
        client.sendall(b"GET /v1/models HTTP/1.2\r\nHost: x\r\n\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 200 OK\r\n")


def test_a_stream_to_an_http_1_0_client_has_no_chunks_and_ends_with_the_connection(
    server: ServerProcess,
) -> None:
    body = json.dumps(completion("t17", max_tokens=40, stream=True)).encode()
    head = (
        b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        % len(body)
    )
    reply = exchange(server, head + body)
    assert "transfer-encoding" not in reply.headers
    assert reply.body.endswith(b"data: [DONE]\n\n")
    assert all(event.startswith(b"data: ") for event in reply.body.removesuffix(b"\n\n").split(b"\n\n"))


def test_requests_that_come_all_at_once_are_answered_in_their_order(server: ServerProcess) -> None:
    bodies = [json.dumps(completion(f"t{number}", max_tokens=1)).encode() for number in (17, 27, 37)]
    posts = b"".join(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body + b"\r\n" for body in bodies)
    unread = (
        b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nGET / HTT"  # its body is never read
    )
    sent = GET + b"\r\n" + posts + unread + GET + b"Connection: close\r\n\r\n"
    replies = exchange_all(server, sent)
    assert [reply.status for reply in replies] == [200, 200, 200, 200, 404, 200]
    assert [reply.json["choices"][0]["text"] for reply in replies[1:4]] == [" t18", " t28", " t38"]


def test_an_error_leaves_a_connection_for_the_next_request(server: ServerProcess) -> None:
    bad, good = completion("t17", n=7), completion("t17", max_tokens=1)
    with server.connect() as client:
        for body, status in ((bad, 400), (good, 200), ({}, 400), (good, 200)):
            client.send("POST", "/v1/completions", body)
            assert client.receive().status == status
