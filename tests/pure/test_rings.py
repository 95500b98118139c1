"""The rings of tests: a test belongs to the ring whose folder it is in, and the first ring imports no jax."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_ring_of_a_test_is_its_folder(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("pure")
    assert not request.node.get_closest_marker("tiny") and not request.node.get_closest_marker("real")


def test_no_test_sits_outside_the_rings() -> None:
    assert {path.parent.name for path in (ROOT / "tests").rglob("test_*.py")} == {"pure", "tiny", "real"}


def test_importing_the_first_ring_imports_no_jax() -> None:
    modules = [f"tests.pure.{path.stem}" for path in sorted((ROOT / "tests" / "pure").glob("*.py"))]
    program = f"import sys, {', '.join(modules)}; print('jax' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert result.stdout == "False\n", result.stdout + result.stderr
