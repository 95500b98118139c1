"""Waits for conditions, on machines of any speed."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_SECONDS = 60.0
COMPILE_SECONDS = 600.0
"""For an engine's programs, or a fresh process that imports jax: a busy machine has taken five minutes."""
FIRST_PAUSE_SECONDS = 0.005
LONGEST_PAUSE_SECONDS = 0.1


def wait_until(holds: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> None:
    """Checks less and less often: a check may call a browser or scrape all metrics, which takes CPU time from
    what it waits for."""
    deadline = time.monotonic() + seconds
    pause = FIRST_PAUSE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(pause)
        pause = min(1.3 * pause, LONGEST_PAUSE_SECONDS)
