"""Reports how far a long read or download has come, in short lines that do not flood a log."""

from __future__ import annotations

import time
from collections.abc import Callable

INTERVAL_SECONDS = 1.0  # a first start takes a minute: often enough to show life, rare enough for a journal

Report = Callable[[str], None]
"""Takes one line about what is being loaded; the log and systemd show it."""


class Progress:
    """Reports `what` with a percentage, at most once an interval and only when the percentage grew.

    Belongs to one thread.
    """

    def __init__(
        self, what: str, total: int, report: Report, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._what = what
        self._total = total
        self._report = report
        self._clock = clock
        self._done = 0
        self._last_percent = 0
        self._last_time = clock()

    def advance(self, amount: int) -> None:
        self.reach(self._done + amount)

    def reach(self, done: int) -> None:
        """Sets how much is done; a value past the total counts as the total."""
        self._done = max(self._done, min(done, self._total))
        percent = 100 * self._done // max(self._total, 1)
        now = self._clock()
        if percent > self._last_percent and now - self._last_time >= INTERVAL_SECONDS:
            self._last_percent, self._last_time = percent, now
            self._report(f"{self._what} {percent} %")
