"""Sends the middle of a stream without waking the thread it belongs to.

To wake a thread for every piece of every stream costs many times what the pieces cost, and holds up the thread that feeds
the device. So while a stream's own thread waits, the one that brings the tokens sends what they say. First and last words,
signs of life and whatever a client does not take at once stay with the stream's own thread, which may block.
"""

from __future__ import annotations

import socket

from levserve.generation import Delta
from levserve.web.events import Events, Heartbeat


class Relay:
    """Writes to the client of an answer that gunicorn has begun, chunked. Called on the thread that brings the tokens.

    `send_rest` is for the stream's own thread. Either has the socket only while the other does nothing with it.
    """

    def __init__(self, client: socket.socket, events: Events, heartbeat: Heartbeat) -> None:
        self._client = client
        self._events = events
        self._heartbeat = heartbeat
        self._rest = b""

    def __call__(self, index: int, delta: Delta) -> bool:
        """Sends a delta; False where its own thread has to see to it, or to the rest of it."""
        event = self._events.delta(index, delta)
        if not event:
            return not self._heartbeat.is_due()  # there are tokens, but their text is held back
        chunk = b"%X\r\n%b\r\n" % (len(event), event)
        try:
            num_sent = self._client.send(chunk, socket.MSG_DONTWAIT)
        except OSError:  # there is no room, or nobody any more
            return False
        self._heartbeat.restart()
        self._rest = chunk[num_sent:]
        return not self._rest

    def send_rest(self) -> bool:
        """Whether a part of the last delta was sent before; then this sends the rest, as patiently as any write."""
        if not self._rest:
            return False
        rest, self._rest = self._rest, b""
        self._client.sendall(rest)
        return True
