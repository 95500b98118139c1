"""The examples for LangChain and LiteLLM against a live server.

Slow: each gets a virtual environment of its own with its packages. Run them with `pytest -m slow`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.examples import EXAMPLES, HEAVY, client_environ
from tests.servers import Server, running_server

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(bundled_gguf: Path) -> Iterator[Server]:
    flags = ("--served-model-name", "smollm2-135m", "--max-running", "4", "--prefill-chunk", "128")
    with running_server("--model", str(bundled_gguf), *flags) as server:
        yield server


@pytest.mark.parametrize("name", HEAVY)
def test_example_runs_with_the_packages_it_names(name: str, server: Server, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    subprocess.run([tmp_path / "venv/bin/pip", "install", "-q", HEAVY[name]], check=True)
    done = subprocess.run(
        [tmp_path / "venv/bin/python", EXAMPLES / name],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | client_environ(server.url),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Paris" in done.stdout
