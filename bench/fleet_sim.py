"""A discrete-event simulation of levserve replicas behind a router.

A replica decides as levserve's scheduler does on an accelerator (`fleet_replica.py`), and its rounds take measured times (`Costs`).
HTTP takes a constant time, `host_seconds`, on a request's way in and again on its way out.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from fleet_replica import Replica, Request

Choose = Callable[[Request, float, list[int]], int]
"""A router: the replica for this request at this time, with these loads."""


class Fleet:
    """Runs events in order of time."""

    def __init__(self, replicas: list[Replica], choose: Choose, max_tries: int = 2) -> None:
        self.replicas = replicas
        self.choose = choose
        self.loads = [0] * len(replicas)
        """Unfinished requests of each replica; policies read it."""
        self.now = 0.0
        self.done: list[Request] = []
        self.refused: list[Request] = []
        self._max_tries = max_tries
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.on_end: Callable[[Request], None] = lambda request: None

    def at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), act))

    def run(self, until: float = float("inf")) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, act = heapq.heappop(self._events)
            act()

    def send(self, request: Request) -> None:
        replica = self.replicas[self.choose(request, self.now, self.loads)]
        if self.loads[replica.place] >= replica.costs.max_running + replica.costs.max_waiting:
            if request.tries < self._max_tries:
                request.tries += 1
                self.send(request)
            else:
                self.refused.append(request)
                self.on_end(request)
            return
        self.loads[replica.place] += 1
        self.at(self.now + replica.costs.host_seconds, lambda: self._arrive(replica, request))

    def _arrive(self, replica: Replica, request: Request) -> None:
        replica.waiting.append(request)
        if replica.is_idle:
            self._turn(replica)

    def _turn(self, replica: Replica) -> None:
        """Begins the next round: the last one has ended, or a first request has arrived."""
        begun = replica.turn(self.now)
        if begun is None:
            return
        self.at(begun.ends, lambda: self._turn(replica))
        for request in begun.ending:
            self.at(request.ended, lambda request=request: self._end(replica, request))  # type: ignore[misc]

    def _end(self, replica: Replica, request: Request) -> None:
        self.loads[replica.place] -= 1
        self.done.append(request)
        self.on_end(request)
