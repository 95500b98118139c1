"""Real levserve processes for tests: started as a user starts them, found by what they print, ended by a signal."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.engines import cache_folder
from tests.forked_levserve import fork_levserve
from tests.forks import ForkedProcess

READY_SECONDS = 300


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: Any


@dataclass
class Server:
    """A running levserve; `lines` is what it has said so far."""

    process: ForkedProcess | subprocess.Popen[bytes]
    url: str = ""
    lines: list[str] = field(default_factory=list)

    def call(self, path: str, body: object = None, *, method: str | None = None, key: str = "") -> Reply:
        """One request with the standard library, whatever the status; a POST if it has a body, unless told otherwise."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return Reply(response.status, dict(response.headers), _parse(response.read()))
        except urllib.error.HTTPError as error:
            with error:
                return Reply(error.code, dict(error.headers), _parse(error.read()))

    def metric(self, name: str, **labels: str) -> float:
        """A sample of a fresh scrape; 0 where it has not been counted yet."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=10) as response:
            families = text_string_to_metric_families(response.read().decode())
        samples = [sample for family in families for sample in family.samples]
        return next(
            (
                sample.value
                for sample in samples
                if sample.name == f"levserve_{name}" and sample.labels == labels
            ),
            0.0,
        )

    def end(self, how: signal.Signals = signal.SIGTERM) -> int:
        """Sends a signal and waits for the exit code."""
        self.process.send_signal(how)
        return self.process.wait(timeout=60)


def user_environ() -> dict[str, str]:
    """The environment without settings and the quick compiles of the tests' own jax: programs are those of users."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("LEVSERVE_", "LEVANTER_", "XLA_"))
    }


@contextmanager
def running_server(*flags: str, is_forked: bool = False, **variables: str) -> Iterator[Server]:
    """Starts `levserve` on a free port and waits until it says it is ready; kills it afterwards if nothing else did.

    Where the start is not what a test is about, it `is_forked`, which spares it the imports.
    """
    arguments = ["--port", "0", "--cache-dir", str(cache_folder()), *flags]
    process: ForkedProcess | subprocess.Popen[bytes]
    if is_forked:
        process = fork_levserve(arguments, user_environ() | variables)
    else:
        command = [sys.executable, "-m", "levserve", *arguments]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, env=user_environ() | variables)
    server = Server(process)
    is_ready = threading.Event()

    def listen() -> None:
        assert process.stderr is not None
        for line in map(bytes.decode, process.stderr):
            server.lines.append(line.rstrip())
            if found := re.search(r"ready: .* on (http://\S+);", line):
                server.url = found[1]
                is_ready.set()
        is_ready.set()  # it has ended

    listener = threading.Thread(target=listen)
    listener.start()
    try:
        is_ready.wait(READY_SECONDS)
        assert server.url, "\n".join(["levserve did not become ready:", *server.lines])
        yield server
    finally:
        process.kill()
        process.wait()
        listener.join()
        for pipe in filter(None, (process.stdout, process.stderr)):
            pipe.close()


def _parse(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode()
