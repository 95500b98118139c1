"""Takes replicas away under load, and counts what clients lose."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from fleet_servers import Server
from http_client import TRANSPORT_ERRORS, Address, connect, send

SETTLE_SECONDS = 3.0
ANSWER_SECONDS = 120


@dataclass
class Clients:
    """Clients that ask without a pause, every other time for a stream; every answer must be whole."""

    url: str
    model: str
    num_asked: int = 0
    lost: list[str] = field(default_factory=list)
    is_over: threading.Event = field(default_factory=threading.Event)

    def run(self, name: int) -> None:
        turn = 0
        while not self.is_over.is_set():
            turn += 1
            try:
                self._ask(f"{name} says {turn}", is_streamed=bool(turn % 2))
            except TRANSPORT_ERRORS as error:
                self.lost.append(repr(error))
            self.num_asked += 1

    def _ask(self, text: str, *, is_streamed: bool) -> None:
        message = {"role": "user", "content": text}
        body = {
            "model": self.model,
            "messages": [message],
            "max_tokens": 16,
            "temperature": 0,
            "stream": is_streamed,
        }
        address = Address(self.url, timeout=ANSWER_SECONDS)
        with contextlib.closing(connect(address)) as connection:
            response = send(connection, address, "/v1/chat/completions", json.dumps(body).encode())
            answer = response.read()
        if response.status != 200 or (is_streamed and b"data: [DONE]" not in answer) or b'"error"' in answer:
            raise ValueError(f"{response.status} {answer[-200:]!r}")


def run_chaos(servers: Sequence[Server], url: str, model: str, num_clients: int) -> bool:
    """Kills one server, drains one, restarts all; returns whether no more was lost than a kill may lose."""
    clients = Clients(url, model)
    threads = [threading.Thread(target=clients.run, args=(name,)) for name in range(num_clients)]
    for thread in threads:
        thread.start()
    try:
        time.sleep(SETTLE_SECONDS)
        servers[0].kill()
        is_good = _report(clients, "one killed", num_clients)
        servers[0].start()
        servers[0].wait_ready()
        is_good &= _report(clients, "it came back", 0)
        servers[1].drain()
        is_good &= _report(clients, "one drained", 0)
        servers[1].start()
        servers[1].wait_ready()
        for server in servers:
            server.drain()
            server.start()
            server.wait_ready()
        is_good &= _report(clients, "all restarted, one after another", 0)
    finally:
        clients.is_over.set()
        for thread in threads:
            thread.join()
    return is_good


def _report(clients: Clients, what: str, may_lose: int) -> bool:
    time.sleep(SETTLE_SECONDS)
    lost, num_asked = clients.lost, clients.num_asked
    clients.lost, clients.num_asked = [], 0
    print(f"{what}: {len(lost)} of {num_asked} requests lost {lost[:3] if lost else ''}", flush=True)
    return len(lost) <= may_lose
