"""Where connections wait while they have no whole request: the main loop's part of every connection's life.

    accepted -> HEAD -> BODY -> RUNNING -> IDLE -> HEAD ...
                                        -> LINGERING -> closed

Everything here runs on the worker's main thread and never blocks: sockets are read and written only as far as they are ready.
Each state has a deadline, so a client that is silent, slow or stuck costs a few kilobytes for some seconds and never a thread.
"""

from __future__ import annotations

import logging
import math
import selectors
import socket
import time
from collections.abc import Callable
from functools import partial

from levserve.errors import RequestTimeout, ServeError, Unavailable
from levserve.observe.metrics import Metrics
from levserve.settings.settings import Settings
from levserve.wire.connection import Connection, State
from levserve.wire.framing import RawRequest
from levserve.wire.refusal import CONTINUE, render

log = logging.getLogger(__name__)

ACCEPTS_PER_TURN = 64
LINGER_SECONDS = 2.0
BUFFERED_BODIES = 16  # unfinished bodies of the largest size that there is memory for
BUFFERED_BYTES = 2**26  # ... and at least this much
LATE_STATES = {State.HEAD: "header", State.BODY: "body"}

Dispatch = Callable[[Connection, RawRequest], None]


class Connections:
    """Owns every connection that no HTTP thread has, and the list of those that one has."""

    def __init__(
        self,
        poller: selectors.BaseSelector,
        settings: Settings,
        metrics: Metrics,
        dispatch: Dispatch,
        *,
        max_connections: int,
    ) -> None:
        self._poller = poller
        self._settings = settings
        self._metrics = metrics
        self._dispatch = dispatch
        self._max_connections = max_connections
        self._max_buffered = max(BUFFERED_BODIES * settings.max_body_bytes, BUFFERED_BYTES)
        self._num_buffered = 0
        self._waiting: dict[Connection, None] = {}  # in the poller, in the order they came there
        self.running: set[Connection] = set()

    @property
    def num_lingering(self) -> int:
        return sum(connection.state is State.LINGERING for connection in self._waiting)

    def accept(self, listener: socket.socket) -> None:
        """Takes what has come, some at a time; raises OSError if the system has no room for more."""
        for _ in range(ACCEPTS_PER_TURN):
            try:
                sock, client = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            if len(self._waiting) + len(self.running) >= self._max_connections:
                self.make_room()
            connection = Connection(sock, client, listener.getsockname(), self._settings)
            connection.enter(State.HEAD, time.monotonic() + self._settings.header_timeout)
            self._wait_for(connection)
            self._read(connection)  # most have sent their request already

    def make_room(self) -> None:
        """Drops the connection that has waited longest: most likely one that nobody needs any more."""
        if self._waiting:
            self._drop(next(iter(self._waiting)))

    def give_back(self, connection: Connection, *, keep: bool) -> None:
        """From an HTTP thread: its request is answered."""
        self.running.discard(connection)
        if connection.fileno() < 0:  # a WebSocket, which has seen to its end itself
            self._drop(connection)
        elif keep:
            connection.enter(State.IDLE, time.monotonic() + self._settings.keep_alive)
            self._wait_for(connection)
            self._advance(connection)
        else:
            self._linger(connection)

    def give_up(self, connection: Connection) -> None:
        """The client does not take what it is sent."""
        self.running.discard(connection)
        self._count_cut("send")
        self._forget_buffer(connection)
        connection.abort()

    def refuse(self, connection: Connection, error: ServeError) -> None:
        """Answers in the application's place, and ends the connection."""
        if connection.say(render(error)):
            self._linger(connection)
        else:
            self._drop(connection)

    def check_deadlines(self) -> None:
        now = time.monotonic()
        for connection in [one for one in (*self._waiting, *self.running) if now >= one.deadline]:
            if connection.state is State.RUNNING:
                self._count_cut("request")
                connection.enter(State.RUNNING, math.inf)
                connection.hang_up()
            elif connection.state in LATE_STATES:
                self._cut_late(connection)
            else:
                self._drop(connection)

    def close(self) -> None:
        for connection in list(self._waiting):
            self._drop(connection)

    def _cut_late(self, connection: Connection) -> None:
        late_with = LATE_STATES[connection.state]
        self._count_cut(late_with)
        if len(connection.buffer):
            seconds = (
                self._settings.header_timeout
                if connection.state is State.HEAD
                else self._settings.body_timeout
            )
            self.refuse(
                connection,
                RequestTimeout(f"The request's {late_with} did not arrive within {seconds:g} seconds."),
            )
        else:
            self._drop(connection)  # one that never spoke gets no answer

    def _count_cut(self, reason: str) -> None:
        log.debug("cut a connection for its %s", reason)
        self._metrics.cut.labels(reason).inc()

    def _wait_for(self, connection: Connection) -> None:
        self._poller.register(connection, selectors.EVENT_READ, partial(self._on_readable, connection))
        self._waiting[connection] = None

    def _stop_waiting(self, connection: Connection) -> None:
        if connection in self._waiting:
            del self._waiting[connection]
            self._poller.unregister(connection)

    def _on_readable(self, connection: Connection, _: object) -> None:
        if connection.state is State.LINGERING:
            if connection.has_lingered():
                self._drop(connection)
        elif connection in self._waiting:  # another event of this turn may have ended it
            self._read(connection)

    def _read(self, connection: Connection) -> None:
        try:
            data = connection.receive()
        except OSError:
            data = b""
        if data is None:
            return
        if not data:
            self._drop(connection)
            return
        connection.buffer.feed(data)
        self._num_buffered += len(data)
        self._advance(connection)

    def _advance(self, connection: Connection) -> None:
        """Hands the next request over if it is whole, else notes what is missing."""
        buffer, before = connection.buffer, len(connection.buffer)
        request = buffer.take()
        self._num_buffered -= before - len(buffer)
        if request is not None:
            self._stop_waiting(connection)
            self._dispatch(connection, request)
        elif self._num_buffered > self._max_buffered:
            self._metrics.refused.labels("memory_full").inc()
            self.refuse(
                connection,
                Unavailable("The server is busy receiving; please try again.", retry_after_seconds=1.0),
            )
        elif buffer.has_head and connection.state is not State.BODY:
            connection.enter(State.BODY, time.monotonic() + self._settings.body_timeout)
            if buffer.pop_invitation() and not connection.say(CONTINUE):
                self._drop(connection)
        elif len(buffer) and connection.state is State.IDLE:
            connection.enter(State.HEAD, time.monotonic() + self._settings.header_timeout)

    def _linger(self, connection: Connection) -> None:
        self._forget_buffer(connection)
        connection.finish_sending()
        if connection.has_lingered():
            self._drop(connection)
            return
        connection.enter(State.LINGERING, time.monotonic() + LINGER_SECONDS)
        if connection not in self._waiting:
            self._wait_for(connection)

    def _drop(self, connection: Connection) -> None:
        self._stop_waiting(connection)
        self._forget_buffer(connection)
        connection.close()

    def _forget_buffer(self, connection: Connection) -> None:
        self._num_buffered -= len(connection.buffer)
        connection.buffer.clear()
