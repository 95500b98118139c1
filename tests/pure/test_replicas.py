"""Three replicas behind nginx with the repository's configuration: which one is asked, what losing one costs.

Left out where there is no nginx. The replicas are real servers around a parrot that takes 2 ms per byte.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from fleet_ring import Ring

from tests.fake_server import Client, Reply, ServerProcess, completion
from tests.nginx import free_port, running_nginx
from tests.waiting import wait_until

CONFIG = Path(__file__).parents[2] / "deploy" / "nginx" / "replicas.conf"
SYSTEM = {"role": "system", "content": "You repeat what you are told. " * 20}
ROOM = 8
FLAGS = ("--served-model-name", "parrot", "--max-running", str(ROOM // 2), "--max-waiting", str(ROOM // 2))
NUM_CLIENTS = 4

pytestmark = pytest.mark.nginx


class Fleet:
    """Three servers that keep their ports over restarts, and the nginx in front of them."""

    def __init__(self, folder: Path) -> None:
        self.ports = [free_port() for _ in range(3)]
        config = CONFIG.read_text()
        for place, port in enumerate(self.ports):
            assert config.count(f"127.0.0.1:{8000 + place} ") == 2
            config = config.replace(f"127.0.0.1:{8000 + place} ", f"127.0.0.1:{port} ")
        self.stack = ExitStack()
        self.port = self.stack.enter_context(running_nginx(config, folder))
        self.servers = [self._start(place) for place in range(3)]

    def wait_ready(self) -> None:
        for server in self.servers:
            server.wait_ready()

    def _start(self, place: int) -> ServerProcess:
        return ServerProcess(*FLAGS, "--port", str(self.ports[place]))

    def start_again(self, place: int) -> None:
        with self.servers[place]:
            pass
        self.servers[place] = self._start(place).wait_ready()

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Reply:
        with Client(self.port) as client:
            client.send(method, path, body, **headers)
            return client.receive()

    def chat(self, *words: str) -> Reply:
        """Asks with the turns of a talk so far, alternately the user's and the assistant's."""
        roles = ("user", "assistant")
        turns = [{"role": roles[place % 2], "content": text} for place, text in enumerate(words)]
        return self.ask("POST", "/v1/chat/completions", {"model": "toy", "messages": [SYSTEM, *turns]})

    def num_asked(self) -> list[int]:
        """How many sequences each replica was given."""
        return [sum("submit" in event for event in server.events) for server in self.servers]

    def who_answers(self, *words: str) -> int:
        before = self.num_asked()
        assert self.chat(*words).status == 200
        wait_until(lambda: sum(self.num_asked()) > sum(before))
        return next(place for place in range(3) if self.num_asked()[place] > before[place])

    def fill(self, place: int) -> Client:
        """Fills a replica up to its limits; the caller closes the client to free it."""
        before = self.num_asked()[place]
        client = self.servers[place].start_completion("x" * 3000, n=ROOM, max_tokens=1000)
        wait_until(lambda: self.num_asked()[place] == before + ROOM)
        return client

    def close(self) -> None:
        self.stack.close()
        for server in self.servers:
            with server:
                pass


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("nginx"))
    try:
        fleet.wait_ready()
        yield fleet
    finally:
        fleet.close()


def test_the_simulated_ring_is_nginx_own(fleet: Fleet) -> None:
    """bench/fleet.py must send talks where nginx does, or its check would compare different loads."""
    ring = Ring([f"127.0.0.1:{port}" for port in fleet.ports])
    for number in range(8):
        body = json.dumps({"model": "toy", "messages": [SYSTEM, {"role": "user", "content": str(number)}]})
        assert fleet.who_answers(str(number)) == ring.walk(body.removesuffix("}]}").encode(), 1)[0]


def test_a_talk_returns_to_its_replica_and_talks_are_spread(fleet: Fleet) -> None:
    replicas = set()
    for number in range(20):
        first = f'a "quoted" \\ {number}\n'
        place = fleet.who_answers(first)
        assert fleet.who_answers(first, "yes", "and then?") == place
        assert fleet.who_answers(first, "yes", "and then?", "no", "why?") == place
        replicas.add(place)
    assert replicas == {0, 1, 2}


@pytest.mark.parametrize(
    "content",
    [
        "x" * 2_000_000,
        '"role": "user", "content": "' * 50_000,
        "\\" * 300_000,
        [{"type": "text", "text": "x"}],
    ],
    ids=["long", "like a message", "backslashes", "parts"],
)
def test_a_body_of_any_shape_gets_an_answer_of_ours(fleet: Fleet, content: Any) -> None:
    for role in ("user", "assistant"):
        message = {"role": role, "content": content}
        reply = fleet.ask(
            "POST", "/v1/chat/completions", {"model": "toy", "messages": [message], "max_tokens": 1}
        )
        assert reply.status == (200 if isinstance(content, list) else 400), reply.body[:300]
        assert "x-request-id" in reply.headers
    assert fleet.ask("POST", "/v1/completions", b"\xff\x00\n{").status == 400
    assert fleet.ask("GET", "/v1/models").status == 200


def test_a_full_replica_spills_over_to_another(fleet: Fleet) -> None:
    place = fleet.who_answers("hello")
    busy = fleet.fill(place)
    assert fleet.servers[place].complete("x").status == 429
    assert fleet.who_answers("hello") != place
    busy.close()
    fleet.servers[place].wait_event("cancel")
    wait_until(lambda: fleet.servers[place].complete("x").status == 200)
    assert fleet.who_answers("hello") == place, "and it is asked again as soon as it has room"


def test_a_fleet_without_room_says_so_once(fleet: Fleet) -> None:
    busy = [fleet.fill(place) for place in range(3)]
    reply = fleet.chat("hello")
    assert reply.status == 429 and "retry-after" in reply.headers
    for client, server in zip(busy, fleet.servers):
        client.close()
        server.wait_event("cancel")


def test_files_of_a_client_are_kept_where_they_are_found(fleet: Fleet) -> None:
    replies = [fleet.ask("GET", f"/v1/files/file-{number}") for number in range(3)]
    assert [reply.status for reply in replies] == [404] * 3
    with Client(fleet.port) as client:
        form = b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n{}\r\n--x--\r\n'
        client.send("POST", "/v1/files", form, **{"Content-Type": "multipart/form-data; boundary=x"})
        made = client.receive()
    assert made.status == 200, made.body
    for _ in range(4):
        assert fleet.ask("GET", f"/v1/files/{made.json['id']}").status == 200


@dataclass
class Asked:
    began: float
    ended: float = 0.0
    failure: str = ""


@dataclass
class Clients:
    """Each client sends one request after another, half of them streamed; every answer must be whole."""

    port: int
    asked: list[Asked] = field(default_factory=list)
    is_over: threading.Event = field(default_factory=threading.Event)

    def talk(self, name: int) -> None:
        turn = 0
        while not self.is_over.is_set():
            turn += 1
            asked = Asked(time.monotonic())
            try:
                self._ask(f"{name} {turn} " + "talk " * 8, is_streamed=turn % 2 == 0)
            except (OSError, http.client.HTTPException, ValueError, AssertionError) as error:
                asked.failure = repr(error)
            asked.ended = time.monotonic()
            self.asked.append(asked)

    def _ask(self, prompt: str, *, is_streamed: bool) -> None:
        body = completion(prompt, max_tokens=100, stream=is_streamed)
        with Client(self.port) as client:
            client.send("POST", "/v1/completions", body)
            if not is_streamed:
                reply = client.receive()
                assert reply.status == 200, reply
                assert reply.json["choices"][0]["text"] == prompt
                return
            *events, last = client.stream()
            assert last == "[DONE]"
            assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == prompt

    def failures(self) -> list[Asked]:
        return [asked for asked in self.asked if asked.failure]

    def wait_for_more(self, count: int) -> None:
        wanted = len(self.asked) + count
        wait_until(lambda: len(self.asked) >= wanted)


@contextmanager
def asking(fleet: Fleet) -> Iterator[Clients]:
    clients = Clients(fleet.port)
    threads = [threading.Thread(target=clients.talk, args=(name,)) for name in range(NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield clients
    finally:
        clients.is_over.set()
        for thread in threads:
            thread.join()


def test_a_killed_replica_loses_only_what_was_in_flight(fleet: Fleet) -> None:
    place = fleet.who_answers("hello")
    with asking(fleet) as clients:
        clients.wait_for_more(2 * NUM_CLIENTS)
        os.kill(fleet.servers[place].worker_pid, signal.SIGKILL)
        killed = time.monotonic()
        assert fleet.servers[place].wait_exit() == 70
        clients.wait_for_more(8 * NUM_CLIENTS)
        assert fleet.who_answers("hello") != place, "its talks go on elsewhere"
        fleet.start_again(place)
        clients.wait_for_more(NUM_CLIENTS)
    lost = clients.failures()
    assert all(asked.began <= killed for asked in lost), lost
    assert len(lost) <= NUM_CLIENTS
    assert fleet.who_answers("hello") == place, "and come home"


def test_a_rolling_restart_under_load_loses_nothing(fleet: Fleet) -> None:
    with asking(fleet) as clients:
        for place in range(3):
            clients.wait_for_more(NUM_CLIENTS)
            fleet.servers[place].send_signal(signal.SIGTERM)
            assert fleet.servers[place].wait_exit() == 0
            clients.wait_for_more(NUM_CLIENTS)
            fleet.start_again(place)
        wait_until(lambda: all(fleet.num_asked()))  # the restarted servers are asked too
    assert clients.failures() == []
