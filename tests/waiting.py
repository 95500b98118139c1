"""Waiting for what must come true, on a machine of any speed."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_SECONDS = 60.0
COMPILE_SECONDS = 600.0
"""For the programs of an engine, or a fresh process that imports jax: a crowded machine has taken five minutes."""
FIRST_PAUSE_SECONDS = 0.005
LONGEST_PAUSE_SECONDS = 0.1


def wait_until(holds: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> None:
    """Looks ever less often: a look may be a call of a browser or a scrape of all metrics, which takes processor time from
    what is waited for."""
    deadline = time.monotonic() + seconds
    pause = FIRST_PAUSE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(pause)
        pause = min(1.3 * pause, LONGEST_PAUSE_SECONDS)
