"""Keeps the connections that wait for a whole request: the main loop's part of every connection's life.

    accepted -> HEAD -> BODY -> RUNNING -> IDLE -> HEAD ...
                                        -> LINGERING -> closed

Everything here runs on the worker's main thread and never blocks: sockets are read and written only as far as
they are ready. Each state has a deadline, so a silent, slow or stuck client costs a few kilobytes for a few
seconds, never a thread.
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

MAX_ACCEPTS = 64  # in one turn of the main loop
LINGER_SECONDS = 2.0
BUFFERED_BODIES = 16  # how many incomplete bodies of the largest size may be in memory
BUFFERED_BYTES = 2**26  # may be in memory even if --max-body-bytes is small
MAX_UPLOADS = 4  # uploads of the largest size that may be arriving at the same time
LATE_STATES = {State.HEAD: "header", State.BODY: "body"}

Dispatch = Callable[[Connection, RawRequest], None]
AnswerQuickly = Callable[[bytes], bytes | None]
"""Returns the answer to a request that arrived in one piece and needs no thread; None for all others."""


class Connections:
    """Owns every connection that no HTTP thread has, and keeps track of those that HTTP threads have."""

    def __init__(
        self,
        poller: selectors.BaseSelector,
        settings: Settings,
        metrics: Metrics,
        dispatch: Dispatch,
        answer_quickly: AnswerQuickly,
        *,
        max_connections: int,
    ) -> None:
        self._poller = poller
        self._settings = settings
        self._metrics = metrics
        self._dispatch = dispatch
        self._answer_quickly = answer_quickly
        self._max_connections = max_connections
        self._max_buffered = max(BUFFERED_BODIES * settings.max_body_bytes, BUFFERED_BYTES)
        self._num_buffered = 0
        self._waiting: dict[Connection, None] = {}  # registered with the poller, in that order
        self.running: set[Connection] = set()

    @property
    def num_lingering(self) -> int:
        return sum(connection.state is State.LINGERING for connection in self._waiting)

    def accept(self, listener: socket.socket) -> None:
        """Accepts some of the new connections; raises OSError if the system allows no more."""
        for _ in range(MAX_ACCEPTS):
            try:
                sock, client = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            if len(self._waiting) + len(self.running) >= self._max_connections:
                self.make_room()
            connection = Connection(sock, client, listener.getsockname(), self._settings)
            connection.enter(State.HEAD, time.monotonic() + self._settings.header_timeout)
            self._wait_for(connection)
            self._read(connection)  # most clients have sent their request by now

    def make_room(self) -> None:
        """Drops the connection that has waited longest, which its client most likely needs least."""
        if self._waiting:
            self._drop(next(iter(self._waiting)))

    def give_back(self, connection: Connection, *, keep: bool) -> None:
        """Takes a connection back from an HTTP thread that has answered its request."""
        self.running.discard(connection)
        if connection.fileno() < 0:  # a WebSocket, which closes its socket itself
            self._drop(connection)
        elif keep:
            connection.enter(State.IDLE, time.monotonic() + self._settings.keep_alive)
            self._wait_for(connection)
            self._advance(connection)
        elif connection.has_timed_out():  # noticed before the HTTP thread's own send could fail
            self.give_up(connection)
        else:
            self._linger(connection)

    def give_up(self, connection: Connection) -> None:
        """Ends the connection of a client that does not read its answer."""
        self.running.discard(connection)
        self._count_cut("send")
        self._forget_buffer(connection)
        connection.abort()

    def refuse(self, connection: Connection, error: ServeError) -> None:
        """Answers in place of the application, and ends the connection."""
        if connection.send_now(render(error)):
            self._linger(connection)
        else:
            self._drop(connection)

    def check_deadlines(self) -> None:
        now = time.monotonic()
        late = [connection for connection in (*self._waiting, *self.running) if now >= connection.deadline]
        for connection in late:
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
        late_part = LATE_STATES[connection.state]
        self._count_cut(late_part)
        if not len(connection.buffer):  # the client never sent a byte: there is nothing to answer
            self._drop(connection)
            return
        is_head = connection.state is State.HEAD
        seconds = self._settings.header_timeout if is_head else self._body_seconds(connection)
        message = f"The request's {late_part} did not arrive within {seconds:g} seconds."
        self.refuse(connection, RequestTimeout(message))

    def _count_cut(self, reason: str) -> None:
        log.debug("cut a connection: %s timeout", reason)
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
        elif connection in self._waiting:  # an earlier event of this turn may have ended it
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
        if not len(connection.buffer) and (answer := self._answer_quickly(data)) is not None:
            self._send_at_once(connection, answer)
            return
        before = len(connection.buffer)
        connection.buffer.feed(data)
        self._num_buffered += len(connection.buffer) - before  # an upload goes to its file
        self._advance(connection)

    def _send_at_once(self, connection: Connection, answer: bytes) -> None:
        """Answers on the main loop: handing the connection to a thread would cost more than the answer."""
        if connection.send_now(answer):
            connection.enter(State.IDLE, time.monotonic() + self._settings.keep_alive)
        else:
            self._stop_waiting(connection)
            self.give_up(connection)

    def _advance(self, connection: Connection) -> None:
        """Hands over the next request if it is whole, else waits for the rest."""
        buffer, before = connection.buffer, len(connection.buffer)
        request = buffer.take()
        self._num_buffered -= before - len(buffer)
        if request is not None:
            self._stop_waiting(connection)
            self._dispatch(connection, request)
        elif self._num_buffered > self._max_buffered:
            self._metrics.refused.labels("memory_full").inc()
            message = "The server is busy receiving requests; please try again."
            self.refuse(connection, Unavailable(message, retry_after_seconds=1.0))
        elif buffer.has_head and connection.state is not State.BODY:
            connection.enter(State.BODY, time.monotonic() + self._body_seconds(connection))
            if self._is_full_of_uploads(connection):
                self._metrics.refused.labels("memory_full").inc()
                message = "The server is busy receiving files; please try again."
                self.refuse(connection, Unavailable(message, retry_after_seconds=1.0))
            elif buffer.pop_expects_continue() and not connection.send_now(CONTINUE):
                self._drop(connection)
        elif len(buffer) and connection.state is State.IDLE:
            connection.enter(State.HEAD, time.monotonic() + self._settings.header_timeout)

    def _body_seconds(self, connection: Connection) -> float:
        """The time allowed for a body; an upload must arrive as fast as the largest of other bodies."""
        share = connection.buffer.upload_bytes / self._settings.max_body_bytes
        return self._settings.body_timeout * max(share, 1.0)

    def _is_full_of_uploads(self, connection: Connection) -> bool:
        """Whether this upload is one too many. Anyone can begin one, because keys are checked later."""
        if not connection.buffer.upload_bytes:
            return False
        expected = sum(one.buffer.upload_bytes for one in self._waiting)
        return expected > MAX_UPLOADS * self._settings.max_file_bytes

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
