"""bench/soak.py: a short soak of a server with a tiny model holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.conftest import GOLDEN
from tests.engines import cache_folder
from tests.fake_device import TEMPLATE
from tests.pure.test_soak import PROGRAM


def test_a_server_holds_up_under_twice_what_it_can_hold(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    flags = [
        "--model",
        str(GOLDEN / "llama"),
        "--chat-template",
        str(template),
        "--dtype",
        "float32",
        "--cache-dir",
        str(cache_folder()),
    ]
    result = subprocess.run(
        [sys.executable, str(PROGRAM), "--minutes", "0.1", *flags],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    for act in ("answer", "stream", "deadline", "leaves", "rubbish", "ops"):
        assert any(line.startswith(act) for line in lines), f"no {act}"
    assert "429" in result.stdout, "it was never full"
    assert "FAILED" not in result.stdout
    assert any(line.startswith("ok      memory at its peak") for line in lines), "the plan was not found"
