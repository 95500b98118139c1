"""Answers a router's scrape on the worker's main loop: no thread, no parser, no Flask.

A router that asks a server every 50 ms would otherwise cost it 3 % of a core. Only what is plainly a request
for this page and needs no key is answered here. For everything else `answer` returns None, and the request
takes the usual path, where this page is the same.
"""

from __future__ import annotations

import random
import re

from levserve.observe.metrics import CONTENT_TYPE, Metrics
from levserve.settings.settings import Settings

ROUTER_PATH = "/metrics/router"
PLAIN = re.compile(
    rb"GET %b HTTP/1\.1\r\n(?:[\w!#$%%&'*+.^`|~-]+:[^\0\r\n]*\r\n)*\r\n" % ROUTER_PATH.encode()
)
UNUSUAL = re.compile(
    rb"\r\n(?:origin|upgrade|expect|transfer-encoding|content-length|x-request-id"
    rb"|connection(?!: keep-alive\r\n)):",
    re.IGNORECASE,
)
MAX_KNOWN = 16
MAX_KNOWN_BYTES = 2048


class QuickScrape:
    """Used by the worker's main loop alone."""

    def __init__(self, metrics: Metrics, settings: Settings) -> None:
        self._metrics = metrics
        self._count = metrics.requests.labels(ROUTER_PATH, 200)
        is_open = settings.open_metrics or not settings.api_keys
        # With debug logs or tracing, every request must become a log line or a span.
        is_silent = settings.log_level != "debug" and settings.tracing == "off"
        self._is_used = is_open and is_silent
        self._known: set[bytes] = set()
        """Requests that were found plain: a router sends the same bytes each time."""
        self._head = f"HTTP/1.1 200 OK\r\nConnection: keep-alive\r\nContent-Type: {CONTENT_TYPE}\r\n".encode()

    def answer(self, data: bytes) -> bytes | None:
        """The whole HTTP response to what a client has sent, or None if it must take the usual path."""
        if len(data) > MAX_KNOWN_BYTES or (data not in self._known and not self._is_plain(data)):
            return None
        self._count.inc()
        page = self._metrics.render_for_router()
        rest = b"Content-Length: %d\r\nx-request-id: %016x\r\n\r\n" % (len(page), random.getrandbits(64))
        return self._head + rest + page

    def _is_plain(self, data: bytes) -> bool:
        """Whether this is one whole request for the page and nothing else; remembered if it is."""
        if not self._is_used or not PLAIN.fullmatch(data) or UNUSUAL.search(data):
            return False
        if b"\r\nhost:" not in data.lower():
            return False
        if len(self._known) == MAX_KNOWN:
            self._known.clear()
        self._known.add(data)
        return True
