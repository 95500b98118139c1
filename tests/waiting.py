"""Waiting for what must come true, on a machine of any speed."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_SECONDS = 60.0
COMPILE_SECONDS = 600.0
"""For the programs of an engine, or a fresh process that imports jax: a crowded machine has taken five minutes."""


def wait_until(holds: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)
