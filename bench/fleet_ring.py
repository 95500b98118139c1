"""Computes which server nginx' `hash ... consistent` sends a key to, from the same points on the same ring.

With it, a simulation of a few replicas sends every talk where a real nginx sends it.
"""

from __future__ import annotations

import bisect
import zlib
from collections.abc import Sequence

POINTS = 160  # of each server, as in nginx


class Ring:
    """The ring of servers, which are given by their addresses in nginx' configuration: host:port."""

    def __init__(self, addresses: Sequence[str]) -> None:
        points: dict[int, int] = {}
        for place, address in enumerate(addresses):
            host, _, port = address.partition(":")
            base, previous = f"{host}\0{port}".encode(), b"\0\0\0\0"
            for _ in range(POINTS):
                point = zlib.crc32(base + previous)
                points.setdefault(point, place)
                previous = point.to_bytes(4, "little")
        self._points = sorted(points)
        self._places = [points[point] for point in self._points]

    def walk(self, key: bytes, count: int) -> list[int]:
        """The first `count` servers, or all, that the key meets on its way around the ring."""
        start = bisect.bisect_left(self._points, zlib.crc32(key))
        found: list[int] = []
        for step in range(len(self._points)):
            place = self._places[(start + step) % len(self._places)]
            if place not in found:
                found.append(place)
                if len(found) == count:
                    break
        return found
