"""The command `levserve` in processes forked from one that has imported jax and the device thread's modules.

Imports take two thirds of the start of a tiny model. Tests of the start itself, or of what a user sees of it,
do not use this.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.forks import ForkedProcess, ForkServer, wait_to_be_forked

MODULES = (
    "levserve.device.runner",
    "levserve.jit.xla_call",
    "levserve.models.load",
    "levserve.models.startup",
)
"""Modules whose imports include nearly everything that a worker imports."""


def fork_levserve(arguments: Sequence[str], environ: Mapping[str, str]) -> ForkedProcess:
    return _fork_server().start(arguments, environ)


def run_levserve(
    arguments: Sequence[str], environ: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Like `subprocess.run` with captured output."""
    process = fork_levserve(arguments, environ)
    with process.stdout, process.stderr, ThreadPoolExecutor(2) as pool:
        stdout, stderr = pool.submit(process.stdout.readall), pool.submit(process.stderr.readall)
        code = process.wait(timeout)
        return subprocess.CompletedProcess(
            ["levserve", *arguments], code, stdout.result().decode(), stderr.result().decode()
        )


@functools.cache
def _fork_server() -> ForkServer:
    """The fork server for all servers of this process."""
    path = os.pathsep.join(path for path in sys.path if path)
    server = ForkServer((sys.executable, str(Path(__file__))), {**os.environ, "PYTHONPATH": path})
    atexit.register(server.close)
    return server


if __name__ == "__main__":
    from levserve import cli

    for name in MODULES:
        importlib.import_module(name)
    sys.exit(cli.main(wait_to_be_forked(int(sys.argv[2]))))
