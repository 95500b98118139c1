"""A real server process around the fake device, and a simple client for it."""

from __future__ import annotations

import atexit
import functools
import http.client
import json
import os
import queue
import re
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from tests.forks import ForkedProcess, ForkServer
from tests.waiting import PATIENCE_SECONDS

COMMAND = (sys.executable, "-W", "error", str(Path(__file__).parent / "fake_device.py"))


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Lines:
    """What a process writes to one pipe, line by line; `seen` is all of it so far."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self.seen: list[str] = []
        self._pipe, self._rest, self._lock = pipe, b"", threading.Lock()
        self._queue: queue.Queue[str] = queue.Queue()
        os.set_blocking(pipe.fileno(), False)
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def wait_for(self, is_wanted: Callable[[str], bool]) -> str:
        """The next line that is wanted; lines before it are skipped."""
        while True:
            line = self._queue.get(timeout=PATIENCE_SECONDS)
            if is_wanted(line):
                return line

    def skip(self) -> None:
        """Skips everything written so far, including what the thread has not read yet."""
        self._take()
        while not self._queue.empty():
            self._queue.get()

    def wait_end(self) -> None:
        """Waits until every process that could write here has ended."""
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive()

    def close(self) -> None:
        self._thread.join()
        self._pipe.close()

    def _read(self) -> None:
        while self._take():
            select.select([self._pipe], [], [])

    def _take(self) -> bool:
        """Reads all that is there; returns whether more may come."""
        with self._lock:
            while piece := self._pipe.read(65536):
                *lines, self._rest = (self._rest + piece).split(b"\n")
                for line in map(bytes.decode, lines):
                    self.seen.append(line)
                    self._queue.put(line)
            return piece is None


class Client:
    """One keep-alive connection."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)

    def send(self, method: str, path: str, body: Any = None, **headers: str) -> None:
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        self._connection.request(method, path, data, {"Content-Type": "application/json"} | headers)

    def send_chunked(self, path: str, data: bytes) -> None:
        headers = {"Content-Type": "application/json", "Transfer-Encoding": "chunked"}
        self._connection.request("POST", path, iter((data[:10], data[10:])), headers, encode_chunked=True)

    def receive(self) -> Reply:
        response = self._connection.getresponse()
        return Reply(
            response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
        )

    def stream(self) -> Iterator[str]:
        """The data of each event as it comes, after a 200."""
        with self._connection.getresponse() as response:
            assert response.status == 200, response.read()
            for line in response:
                if line != b"\n":
                    assert line.startswith(b"data: ")
                    yield line.decode().removeprefix("data: ").rstrip("\n")

    def fileno(self) -> int:
        return self._connection.sock.fileno()

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class ServerProcess:
    """A separate server process; a context manager that kills what is left of it at the end.

    A `listener` is passed to it as systemd does, as descriptor 3. A server is forked from a process that has
    already imported everything, unless a limit or a listener is given, or `is_fresh`, which is for tests of
    the start itself.
    """

    def __init__(
        self,
        *options: str,
        files_limit: int | None = None,
        environ: Mapping[str, str] | None = None,
        listener: socket.socket | None = None,
        is_fresh: bool = False,
    ) -> None:
        flags, variables = ["--port", "0", *options], _environ() | dict(environ or {})
        self._process: ForkedProcess | subprocess.Popen[bytes]
        if is_fresh or files_limit is not None or listener is not None:
            self._process = _start(flags, variables, files_limit, listener)
        else:
            self._process = _fork_server().start(flags, variables)
        assert self._process.stdout is not None and self._process.stderr is not None
        self._events = Lines(self._process.stdout)
        self.log = Lines(self._process.stderr)

    def wait_ready(self) -> ServerProcess:
        self.log.wait_for(lambda line: "ready: " in line)
        return self

    @property
    def url(self) -> str:
        line = next(line for line in self.log.seen if "listening on " in line)
        return line.partition("listening on ")[2].partition(",")[0]

    @property
    def worker_pid(self) -> int:
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        return int(children[0])

    def num_connections(self) -> int:
        """How many client connections the worker has open."""
        links = Path(f"/proc/{self.worker_pid}/fd").iterdir()
        return sum(link.is_socket() for link in links) - 1  # less the listener

    def cpu_seconds(self) -> float:
        """The CPU time that arbiter and worker have used so far."""
        stats = (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            for pid in (self._process.pid, self.worker_pid)
        )
        return sum(
            int(user) + int(system) for user, system in (fields[11:13] for fields in stats)
        ) / os.sysconf("SC_CLK_TCK")

    def native_packages(self) -> set[str]:
        """The packages whose compiled code is mapped by the arbiter or the worker."""
        maps = (Path(f"/proc/{pid}/maps").read_text() for pid in (self._process.pid, self.worker_pid))
        return {found for text in maps for found in re.findall(r"/site-packages/(\w+)/\S+\.so", text)}

    def connect(self) -> Client:
        return Client(int(self.url.rpartition(":")[2]))

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Reply:
        with self.connect() as client:
            client.send(method, path, body, **headers)
            return client.receive()

    def complete(self, prompt: Any, **fields: Any) -> Reply:
        return self.ask("POST", "/v1/completions", completion(prompt, **fields))

    def start_completion(self, prompt: Any, **fields: Any) -> Client:
        """Sends the request and waits until the device has it; its answer is still to be received."""
        client = self.connect()
        client.send("POST", "/v1/completions", completion(prompt, **fields))
        self.wait_event("submit")
        return client

    @property
    def events(self) -> list[str]:
        """All lines that it has written to stdout."""
        return self._events.seen

    def skip_events(self) -> None:
        self._events.skip()

    def wait_event(self, event: str) -> str:
        """Waits until the device reports this event; returns the request's id."""
        return str(json.loads(self._events.wait_for(lambda line: json.loads(line)[0] == event))[1])

    def send_signal(self, number: signal.Signals, *, to_group: bool = False) -> None:
        """Sends a signal to the process that was started, or to its process group as a terminal does."""
        if to_group:
            os.killpg(self._process.pid, number)
        else:
            self._process.send_signal(number)

    def wait_end(self) -> None:
        """Waits until the worker has ended too."""
        self._events.wait_end()

    def wait_exit(self) -> int:
        return self._process.wait(timeout=PATIENCE_SECONDS)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=PATIENCE_SECONDS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(
                    self._process.pid, signal.SIGKILL
                )  # the worker too, should it have outlived the arbiter
            self._process.wait()
            self._events.close()
            self.log.close()


def _environ() -> dict[str, str]:
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("LEVSERVE_", "LEVANTER_"))
    }
    return inherited | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


@functools.cache
def _fork_server() -> ForkServer:
    """The fork server for all servers of this process."""
    server = ForkServer(COMMAND, _environ())
    atexit.register(server.close)
    return server


def _start(
    flags: list[str], environ: dict[str, str], files_limit: int | None, listener: socket.socket | None
) -> subprocess.Popen[bytes]:
    limits = [] if files_limit is None else ["prlimit", f"--nofile={files_limit}", "--"]
    command = [*limits, *COMMAND, *flags]
    if listener is not None:
        script = f'export LISTEN_FDS=1 LISTEN_PID=$$; exec "$@" 3<&{listener.fileno()}'
        command = ["bash", "-c", script, "bash", *command]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        env=environ,
        pass_fds=() if listener is None else (listener.fileno(),),
        start_new_session=True,
    )


def completion(prompt: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "toy", "prompt": prompt, "temperature": 0} | fields
