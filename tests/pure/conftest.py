"""Pure tests import no jax, neither when they are collected nor when they run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session", autouse=True)
def no_jax(request: pytest.FixtureRequest) -> Iterator[None]:
    """Checks nothing when tests of other rings run too, because those import jax."""
    is_pure = all(HERE in item.path.parents for item in request.session.items)
    was_there = "jax" in sys.modules
    yield
    assert not is_pure or was_there or "jax" not in sys.modules, "a pure test imported jax"
