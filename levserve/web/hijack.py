"""A connection taken over from gunicorn: the raw socket, as simple-websocket's two threads may share it.

The library sends from the view's thread and from its reader thread, with `send`, and closes at once what it has just sent.
Here every frame goes out whole and alone, and the last one can still be read. A peer that does not read is given up by the
limit on sending that every connection has.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

PATH = "/v1/ws"  # whose connections are taken over
LINGER_SECONDS = 2.0
LINGER_BYTES = 2**24
ROOM_SECONDS = 0.05  # between two looks whether there is room again


class HijackedSocket:
    """What simple-websocket needs of a socket. `recv` and `close` are its reader thread's; `send` and `hang_up` any thread's."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._has_room: Callable[[], bool] = lambda: True
        self._is_ending = threading.Event()

    def fileno(self) -> int:
        return self._sock.fileno()

    def read_while(self, has_room: Callable[[], bool]) -> None:
        """Lets the peer wait while there is no room for what it sends; the library would keep all of it."""
        self._has_room = has_room

    def recv(self, num_bytes: int) -> bytes:
        while not self._has_room() and not self._is_ending.wait(ROOM_SECONDS):
            pass
        return self._sock.recv(num_bytes)

    def send(self, data: bytes) -> None:
        """Sends all of it, or raises OSError; the other thread's frame waits."""
        with self._lock:
            self._sock.sendall(data)

    def hang_up(self) -> None:
        """Wakes whoever reads or sends; closing alone would leave them asleep on a number that is soon another socket's."""
        self._is_ending.set()
        with suppress(OSError):  # gone already
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Reads on for a while: what is unread when a socket closes makes the kernel throw away what the peer has yet to get."""
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
