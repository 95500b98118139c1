"""Writes the middle of a stream to its client on the delivery thread, while the HTTP thread sleeps.

Waking a thread for every event of every stream costs many times what the events cost, and delays the thread
that feeds the device. The HTTP thread keeps everything that may block: the first and last events, pings, and
the rest of an event that the client's socket has no room for. `generation.py` describes when each thread
runs.
"""

from __future__ import annotations

import socket

from levserve.generation import Delta
from levserve.web.events import StreamEvents
from levserve.web.heartbeat import PING, Heartbeat


class Relay:
    """Continues the chunked response that gunicorn began.

    The delivery thread calls the object itself, the stream's HTTP thread calls `send_rest`; never both at the
    same time.
    """

    def __init__(self, client: socket.socket, events: StreamEvents, heartbeat: Heartbeat) -> None:
        self._client = client
        self._events = events
        self._heartbeat = heartbeat
        self._rest = b""

    def __call__(self, index: int, delta: Delta) -> bool:
        """Sends a delta's event; False leaves the rest of it to the HTTP thread.

        Also when nothing could be sent, the event is kept: events are numbered and their text is gathered, so
        a delta's event must be made only once.
        """
        event = self._events.delta(index, delta)
        if not event:  # there are tokens, but their text is held back
            if not self._heartbeat.is_due():
                return True
            event = PING
        chunk = b"%X\r\n%b\r\n" % (len(event), event)
        try:
            num_sent = self._client.send(chunk, socket.MSG_DONTWAIT)
        except OSError:  # no room in the socket's buffer, or the client has gone, which `send_rest` finds
            num_sent = 0
        self._heartbeat.restart()
        self._rest = chunk[num_sent:]
        return not self._rest

    def send_rest(self) -> bool:
        """Whether the last event was not sent as a whole; if so, blocks until the rest of it is sent."""
        if not self._rest:
            return False
        rest, self._rest = self._rest, b""
        self._client.sendall(rest)
        return True
