"""Finds nginx for tests that put it in front of servers, and runs it with one of this repository's files."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.node import NotAvailable
from tests.waiting import PATIENCE_SECONDS

TEMP_KINDS = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")


def find_nginx() -> Path:
    """The program; raises `NotAvailable` where there is none. Debian keeps it in a folder on root's PATH only."""
    found = shutil.which("nginx", path=os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin")))
    if found is None:
        raise NotAvailable("there is no nginx here (Debian: apt-get install nginx-light)")
    return Path(found)


@contextmanager
def running_nginx(config: str, folder: Path) -> Iterator[int]:
    """Runs nginx with this configuration on a free port, in place of its port 80, and yields the port."""
    port = free_port()
    assert config.count("listen 80;") == 1
    (folder / "levserve.conf").write_text(config.replace("listen 80;", f"listen 127.0.0.1:{port};"))
    temp = " ".join(f"{kind}_temp_path {folder}/{kind};" for kind in TEMP_KINDS)
    inside = f"access_log off; {temp} include {folder}/levserve.conf;"
    main = f"daemon off; pid {folder}/pid; error_log stderr; events {{}} http {{ {inside} }}"
    (folder / "nginx.conf").write_text(main)
    with subprocess.Popen(
        [find_nginx(), "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", "stderr"]
    ) as process:
        try:
            _wait_open(port, process)
            yield port
        finally:
            process.terminate()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _wait_open(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        assert process.poll() is None and time.monotonic() < deadline, "nginx did not start"
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except OSError:
            time.sleep(0.02)
