"""Groups of levserve processes on this machine that serve one model together, each as a separate host."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.conftest import GOLDEN, QUICK_COMPILE
from tests.engines import cache_folder
from tests.forked_levserve import fork_levserve
from tests.forks import ForkedProcess
from tests.servers import user_environ
from tests.waiting import COMPILE_SECONDS, wait_until

MODEL = GOLDEN / "llama"
NUM_HOSTS = 2
SIZES = (
    *("--dtype", "float32", "--tensor-parallel", "4", "--max-running", "2", "--prefill-chunk", "8"),
    *("--page-size", "8", "--kv-pages", "64", "--max-seq-len", "128", "--drain-seconds", "20"),
)
"""Two CPU devices on each host, and few programs: prompts are prefilled eight tokens at a time."""
END_SECONDS = 60.0
"""How long hosts may take to end on a busy machine; the tests say what is expected on a quiet one."""


@dataclass
class Host:
    """One process of a group; `lines` is what it has logged so far."""

    process: ForkedProcess | subprocess.Popen[bytes]
    lines: list[str] = field(default_factory=list)
    url: str = ""
    listener: threading.Thread | None = None

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def listen(self) -> None:
        assert self.process.stderr is not None
        for line in map(bytes.decode, self.process.stderr):
            self.lines.append(line.rstrip())
            if found := re.search(r"listening on (http://[^\s,]+)", line):
                self.url = found[1]

    def wait_for(self, words: str, seconds: float = COMPILE_SECONDS) -> None:
        """Waits until it has logged these words; fails at once if it ends first."""
        wait_until(lambda: words in self.text or self.process.poll() is not None, seconds)
        assert words in self.text, self.text

    def exit_code(self, seconds: float = END_SECONDS) -> int:
        code = self.process.wait(seconds)
        assert self.listener is not None
        self.listener.join()
        return code

    def worker_id(self) -> int:
        """The id of the process that computes; its parent is the process that was started."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return int(children.split()[0])

    def complete(self, prompt: list[int], max_tokens: int, **fields: Any) -> Any:
        body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0, **fields}
        with self.post(body) as answer:
            return json.load(answer)

    def post(self, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps({"model": "llama", **body}).encode(),
            {"Content-Type": "application/json"},
        )
        return urllib.request.urlopen(request, timeout=120)

    def get(self, path: str) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(self.url + path, timeout=30) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)


@dataclass
class HostGroup:
    """Starts hosts; `host_group` kills them at the end."""

    coordinator: str
    hosts: list[Host] = field(default_factory=list)

    def start(
        self, host_id: int, *flags: str, model: Path = MODEL, is_fresh: bool = False, **variables: str
    ) -> Host:
        """Starts a host, forked from a process that has imported all modules unless it `is_fresh`."""
        server = ("--port", "0", "--cache-dir", str(cache_folder()), "--model", str(model))
        place = ("--coordinator", self.coordinator, "--num-hosts", str(NUM_HOSTS), "--host-id", str(host_id))
        arguments = [*server, *place, *SIZES, *flags]
        environ = user_environ() | QUICK_COMPILE | variables
        process: ForkedProcess | subprocess.Popen[bytes]
        if is_fresh:
            command = [sys.executable, "-m", "levserve", *arguments]
            process = subprocess.Popen(command, stderr=subprocess.PIPE, env=environ)
        else:
            process = fork_levserve(arguments, environ)
        host = Host(process)
        host.listener = threading.Thread(target=host.listen)
        host.listener.start()
        self.hosts.append(host)
        return host

    def start_both(self, *flags: str, is_fresh: bool = False) -> tuple[Host, Host]:
        return self.start(0, *flags, is_fresh=is_fresh), self.start(1, *flags, is_fresh=is_fresh)


@contextmanager
def host_group() -> Iterator[HostGroup]:
    group = HostGroup(f"127.0.0.1:{_free_port()}")
    try:
        yield group
    finally:
        for host in group.hosts:
            host.process.kill()
            host.process.wait()
            assert host.listener is not None
            host.listener.join()
            for pipe in filter(None, (host.process.stdout, host.process.stderr)):
                pipe.close()


def _free_port() -> int:
    """A port that is free like the next one, below the ports that the system assigns by itself."""
    for port in range(23000 + os.getpid() % 4000, 32000, 2):
        try:
            with socket.create_server(("127.0.0.1", port)), socket.create_server(("127.0.0.1", port + 1)):
                return port
        except OSError:
            continue
    raise AssertionError("no two free ports")
