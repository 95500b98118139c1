"""Admits work while there is room, by priority and then in order of arrival; the rest waits.

The server refuses excess work; a program that brings its own work wants it to wait instead.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from levserve.engine.admission import Admission, Reservation
from levserve.engine.engine import Engine

OnGranted = Callable[[Reservation | Exception], None]
"""Gets the reservation, or the error if there can be none; must not block."""


@dataclass(slots=True, order=True)
class WaitingWork:
    """Work that waits for admission; cancelled work stays in the heap until its turn."""

    priority: int
    number: int
    num_requests: int = field(compare=False)
    num_tokens: int = field(compare=False)
    on_granted: OnGranted = field(compare=False)
    is_cancelled: bool = field(default=False, compare=False)


class AdmissionQueue:
    """Any thread may call its methods.

    It reserves places from the engine's admission unless another one is given, as for background work, which
    takes no places from live requests.
    """

    def __init__(self, engine: Engine, admission: Admission | None = None) -> None:
        self._engine = engine
        self._admission = admission or engine.admission
        self._lock = threading.Lock()
        self._waiting: list[WaitingWork] = []
        self._num_inside = 0
        self._is_held_back = False
        self._is_empty = threading.Condition(self._lock)
        self._numbers = itertools.count()

    def ask(self, num_requests: int, num_tokens: int, priority: int, on_granted: OnGranted) -> WaitingWork:
        """Calls `on_granted`: now if there is room, else later on the thread that made the room."""
        waiter = WaitingWork(priority, next(self._numbers), num_requests, num_tokens, on_granted)
        with self._lock:
            heapq.heappush(self._waiting, waiter)
        self._grant()
        return waiter

    def release(self, reservation: Reservation) -> None:
        with self._lock:
            reservation.release()
            self._num_inside -= 1
            self._is_empty.notify_all()
        self._grant()

    @contextmanager
    def hold_back(self) -> Iterator[None]:
        """Waits until all admitted work has ended, and admits nothing until the block ends.

        For one thread at a time.
        """
        try:
            with self._lock:
                self._is_held_back = True
                self._is_empty.wait_for(lambda: self._num_inside == 0)
            yield
        finally:
            with self._lock:
                self._is_held_back = False
            self._grant()

    def close(self) -> None:
        """Fails all waiting work; the engine refuses what comes later."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            granted = self._reserve(waiter)
            with self._lock:
                self._num_inside += isinstance(granted, Reservation)
            waiter.on_granted(granted)

    def _grant(self) -> None:
        while True:
            with self._lock:
                while self._waiting and self._waiting[0].is_cancelled:
                    heapq.heappop(self._waiting)
                if not self._waiting or self._is_held_back or not self._has_room(self._waiting[0]):
                    return
                waiter = heapq.heappop(self._waiting)
                granted = self._reserve(waiter)
                self._num_inside += isinstance(granted, Reservation)
            waiter.on_granted(granted)

    def _has_room(self, waiter: WaitingWork) -> bool:
        room = self._admission.room()
        can_never_fit = waiter.num_requests > room.max_requests or waiter.num_tokens > room.max_tokens
        fits = waiter.num_requests <= room.free_requests and waiter.num_tokens <= room.free_tokens
        return fits or can_never_fit  # `_reserve` refuses the latter and names the limit

    def _reserve(self, waiter: WaitingWork) -> Reservation | Exception:
        try:
            self._engine.require_ready()
            reservation = self._admission.reserve(0, 0)
        except Exception as error:
            return error
        try:
            reservation.grow_to(waiter.num_requests, waiter.num_tokens)
        except Exception as error:
            reservation.release()
            return error
        return reservation
