"""Starts several levserves on this machine, and nginx in front of them with the repository's configuration."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "deploy" / "nginx" / "replicas.conf"
POLICIES = {
    "hash": "hash $levserve_beginning consistent;",
    "least_conn": "least_conn;",
    "session": "hash $http_x_session_id consistent;",
    "round_robin": "",
}
STEP_MS, PREFILL_US = "HOST_BENCH_STEP_MS", "HOST_BENCH_PREFILL_US"  # read by bench/host.py
READY_SECONDS = 600
STOP_SECONDS = 60
TEMP_KINDS = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")


@dataclass
class Server:
    """A levserve on a port of its own, which it keeps when it is restarted."""

    port: int
    flags: Sequence[str]
    device: tuple[float, float] | None = None
    """Milliseconds of a step and microseconds of a prefilled token, for bench/host.py's simulated device."""
    process: subprocess.Popen[bytes] = field(init=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        program, environ = ["-m", "levserve"], os.environ | {"PYTHONPATH": str(ROOT)}
        if self.device is not None:
            program = [str(ROOT / "bench" / "host.py"), "serve"]
            environ |= {STEP_MS: str(self.device[0]), PREFILL_US: str(self.device[1])}
        command = [sys.executable, *program, "--port", str(self.port), "--log-level", "warning"]
        self.process = subprocess.Popen([*command, *self.flags], env=environ)

    def wait_ready(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(urllib.error.URLError, OSError):
                with urllib.request.urlopen(f"{self.url}/readyz", timeout=5):
                    return
            time.sleep(0.1)
        raise SystemExit(f"the server on port {self.port} did not become ready")

    def drain(self) -> None:
        """Stops it as `systemctl stop` does."""
        self.process.send_signal(signal.SIGTERM)
        if self.process.wait(STOP_SECONDS) != 0:
            raise SystemExit(f"the server on port {self.port} ended with {self.process.returncode}")

    def kill(self) -> None:
        """Kills its worker, like a crash; the process that started the worker then exits with 70."""
        os.kill(self._worker(), signal.SIGKILL)
        self.process.wait(STOP_SECONDS)

    def cpu_seconds(self) -> float:
        return sum(_cpu_seconds(pid) for pid in (self.process.pid, self._worker()))

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            page = answer.read().decode()
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", page, re.MULTILINE))

    def _worker(self) -> int:
        pid = self.process.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


@contextlib.contextmanager
def start_servers(
    count: int, flags: Sequence[str], device: tuple[float, float] | None = None
) -> Iterator[list[Server]]:
    """Yields ready servers, started one by one, so that the later ones find what the first has compiled."""
    servers = [Server(free_port(), flags, device) for _ in range(count)]
    started: list[Server] = []
    try:
        for server in servers:
            server.start()
            started.append(server)
            server.wait_ready()
        yield servers
    finally:
        for server in started:
            server.process.terminate()
        for server in started:
            server.process.wait(STOP_SECONDS)


@contextlib.contextmanager
def start_nginx(servers: Sequence[Server], policy: str) -> Iterator[str]:
    """Yields the address of an nginx with the repository's configuration for these servers and a policy."""
    program = shutil.which("nginx", path=os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin")))
    if program is None:
        raise SystemExit("there is no nginx here (Debian: apt-get install nginx-light)")
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "levserve.conf").write_text(write_config(servers, policy, port))
        temp = " ".join(f"{kind}_temp_path {folder}/{kind};" for kind in TEMP_KINDS)
        inside = f"access_log off; {temp} include {folder}/levserve.conf;"
        main = f"daemon off; pid {folder}/pid; error_log {folder}/errors; events {{}} http {{ {inside} }}"
        Path(folder, "nginx.conf").write_text(main)
        command = [program, "-p", folder, "-c", f"{folder}/nginx.conf", "-e", f"{folder}/errors"]
        with subprocess.Popen(command) as process:
            try:
                _wait_open(port, process)
                yield f"http://127.0.0.1:{port}"
            finally:
                process.terminate()


def write_config(servers: Sequence[Server], policy: str, port: int) -> str:
    config = CONFIG.read_text()
    for old, new in (("listen 80;", f"listen 127.0.0.1:{port};"), (POLICIES["hash"], POLICIES[policy])):
        assert config.count(old) == 1, old
        config = config.replace(old, new)
    lines = "".join(f"    server 127.0.0.1:{server.port} max_fails=0;\n" for server in servers)
    return re.sub(r"(?:    server 127\.0\.0\.1:\d+ max_fails=0;\n)+", lines, config)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _wait_open(port: int, process: subprocess.Popen[bytes]) -> None:
    for _ in range(500):
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port)).close()
            return
        if process.poll() is not None:
            break
        time.sleep(0.02)
    raise SystemExit("nginx did not start")


def _cpu_seconds(pid: int) -> float:
    """CPU seconds of all threads, counted in nanoseconds; /proc/PID/stat counts in hundredths of a second."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):
            total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9
