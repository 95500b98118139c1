"""Pure tests import no jax, neither when they are collected nor when they run."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def no_jax() -> Iterator[None]:
    """In a run that collected tests of other rings too, jax is there before the first test and nothing can be told."""
    was_there = "jax" in sys.modules
    yield
    assert was_there or "jax" not in sys.modules, "a pure test imported jax"
