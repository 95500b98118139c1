"""Waiting for what must come true, on a machine of any speed."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_SECONDS = 60.0


def wait_until(holds: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)
