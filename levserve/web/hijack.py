"""A connection taken over from gunicorn: a socket that simple-websocket's two threads can share.

The library sends from the view's thread and from its reader thread, both with `send`, and closes the socket
right after the last frame. Here each frame goes out whole, and the peer can still read the last one. A peer
that does not read runs into the send timeout that every connection has.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

PATH = "/v1/ws"
LINGER_SECONDS = 2.0
LINGER_BYTES = 2**24
ROOM_SECONDS = 0.05  # how often a reader without room looks again


class HijackedSocket:
    """The reader thread calls `recv` and `close`; any thread may call `send` and `hang_up`."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._has_room: Callable[[], bool] = lambda: True
        self._is_ending = threading.Event()

    def fileno(self) -> int:
        return self._sock.fileno()

    def read_while(self, has_room: Callable[[], bool]) -> None:
        """Pauses reading while there is no room: the library would buffer everything that the peer sends."""
        self._has_room = has_room

    def recv(self, num_bytes: int) -> bytes:
        while not self._has_room() and not self._is_ending.wait(ROOM_SECONDS):
            pass
        return self._sock.recv(num_bytes)

    def send(self, data: bytes) -> None:
        """Sends all of it or raises OSError; meanwhile a frame of the other thread waits."""
        with self._lock:
            self._sock.sendall(data)

    def hang_up(self) -> None:
        """Wakes the threads that read or send; `close` alone leaves them asleep on a reused descriptor."""
        self._is_ending.set()
        with suppress(OSError):  # gone already
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Reads on for a while: closing with unread data makes the kernel drop what the peer has not got."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
            deadline = time.monotonic() + LINGER_SECONDS
            num_read = 0
            while (remaining := deadline - time.monotonic()) > 0 and num_read < LINGER_BYTES:
                self._sock.settimeout(remaining)
                if not (data := self._sock.recv(65536)):
                    break
                num_read += len(data)
        self._sock.close()
