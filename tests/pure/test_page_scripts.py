"""The page's scripts that need no browser (Markdown, events, metrics, code, calls), in node.

Left out where there is no node.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from levserve.web.static_files import FOLDER

TESTS = Path(__file__).parents[1] / "page.test.mjs"


@pytest.mark.node
def test_the_pages_scripts_in_node(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "static")
    (tmp_path / "package.json").write_text('{"type": "module"}')  # older versions of node would require .mjs
    shutil.copy(TESTS, tmp_path)
    done = subprocess.run(
        ["node", "--test", TESTS.name], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout
    assert "# fail 0" in done.stdout and "# pass 33" in done.stdout
