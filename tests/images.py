"""Builds the container image with buildah, and runs it with podman, for the tests of containers.

What a machine needs besides, for example another runtime or a certificate, belongs in its containers.conf(5).
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.documents import ROOT
from tests.node import NotAvailable

READY_SECONDS = 300


def find_podman() -> Path:
    found = shutil.which("podman")
    if found is None or shutil.which("buildah") is None:
        raise NotAvailable("buildah and podman are not installed")
    return Path(found)


def build_image(target: str, name: str) -> None:
    file = ROOT / "deploy" / "docker" / "Dockerfile"
    command = [
        "buildah",
        "build",
        "--layers",
        "--format",
        "docker",
        "--target",
        target,
        "-t",
        name,
        "-f",
        str(file),
        str(ROOT),
    ]
    subprocess.run(command, check=True)


def podman(*words: str) -> str:
    """The output of a podman command that must succeed."""
    result = subprocess.run(["podman", *words], capture_output=True, text=True)
    assert result.returncode == 0, f"podman {' '.join(words)}: {result.stderr}"
    return result.stdout.strip()


class Container:
    """A running container on the host's network, with its own port."""

    def __init__(self, image: str, *options: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        network = ("--network", "host", "--env", f"PORT={self.port}")
        self.id = podman("run", "--detach", *network, *options, image)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        result = subprocess.run(["podman", "logs", self.id], capture_output=True, text=True)
        return result.stdout + result.stderr

    def wait_ready(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while not self._is_ready():
            assert self.inspect("{{.State.Running}}") == "true", self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.5)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/readyz", timeout=5) as response:
                return response.status == 200
        except (urllib.error.HTTPError, OSError):
            return False

    def inspect(self, template: str) -> str:
        return podman("inspect", "--format", template, self.id)

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Runs a command inside the container."""
        return subprocess.run(["podman", "exec", self.id, *words], capture_output=True, text=True)

    def wait_exit(self) -> int:
        return int(podman("wait", self.id))


@contextmanager
def running_container(image: str, *options: str) -> Iterator[Container]:
    """Removes the container and its volumes afterwards."""
    container = Container(image, *options)
    try:
        yield container
    finally:
        podman("rm", "--force", "--volumes", "--time", "0", container.id)
