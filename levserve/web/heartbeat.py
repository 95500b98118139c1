"""Decides when a silent stream sends its client a ping, so that proxies do not cut the connection."""

from __future__ import annotations

import time

from levserve.generation import Deltas, OnDelta

PING = b": ping\n\n"
"""A comment, which clients of server-sent events skip."""


class Heartbeat:
    """A clock that starts with the request and restarts whenever anything is sent; 0 seconds mean no pings.

    Belongs to one HTTP thread, and to the delivery thread while it writes the stream's events.
    """

    def __init__(self, seconds: float, started: float) -> None:
        self._seconds = seconds
        self._due = started + seconds

    def seconds_left(self) -> float | None:
        """Until a ping is due, at least 0; None if there are no pings."""
        return max(self._due - time.monotonic(), 0) if self._seconds else None

    def wait_for(self, deltas: Deltas, on_delta: OnDelta | None) -> bool:
        """Waits; whether the next delta, or the end, came before a ping was due.

        `on_delta` may send deltas meanwhile, which restarts the clock.
        """
        while not deltas.wait(self.seconds_left(), on_delta):
            if self.is_due():
                return False
        return True

    def is_due(self) -> bool:
        return self._seconds > 0 and time.monotonic() >= self._due

    def restart(self) -> None:
        self._due = time.monotonic() + self._seconds
