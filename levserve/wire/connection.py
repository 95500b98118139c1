"""One client's connection, as the main loop keeps it: its socket, what has come over it, and how long it may stay as it is.

While an HTTP thread answers a request the socket is the thread's; at all other times it is the main loop's, which never
blocks on it.
"""

from __future__ import annotations

import fcntl
import math
import socket
import struct
import termios
from contextlib import suppress
from enum import Enum, auto
from typing import Any

from levserve.settings.settings import Settings
from levserve.wire.framing import RequestBuffer

PIECE_BYTES = 2**16  # read at a time, so that no client keeps the main loop to itself
LINGER_BYTES = 2**18
KEEPALIVE_SECONDS = {
    socket.TCP_KEEPIDLE: 15,
    socket.TCP_KEEPINTVL: 5,
    socket.TCP_KEEPCNT: 3,
}  # the last is a count
UNSENT_BYTES = (
    2**18
)  # that the kernel keeps for a slow reader, where it would let 2.6 MB pile up on a fast link
ABORT = struct.pack("ii", 1, 0)  # SO_LINGER: forget what is unsent, and tell the peer


class State(Enum):
    IDLE = auto()  # between requests
    HEAD = auto()  # a part of a request's head is here, or of a new connection nothing
    BODY = auto()  # the head is here and a part of the body
    RUNNING = auto()  # an HTTP thread has it
    LINGERING = (
        auto()
    )  # all is said; what the client still sends is thrown away, for a reset would destroy what we said
    CLOSED = auto()


class Connection:
    """Owned by the main loop. `deadline`, on the monotonic clock, is when its state must have changed."""

    def __init__(self, sock: socket.socket, client: Any, server: Any, settings: Settings) -> None:
        self.sock = sock
        self.client = client
        self.server = server
        self.buffer = RequestBuffer(settings.max_body_bytes)
        self.state = State.HEAD
        self.deadline = math.inf
        self._num_discarded = 0
        sock.setblocking(
            True
        )  # for the HTTP threads; the main loop says at each call that it does not want to wait
        _set_limits(sock, settings.send_timeout)

    def fileno(self) -> int:
        return self.sock.fileno()

    def enter(self, state: State, deadline: float) -> None:
        self.state = state
        self.deadline = deadline

    def receive(self) -> bytes | None:
        """What has come, b"" if the client will send no more, None if nothing is here; raises OSError if it has gone."""
        try:
            return self.sock.recv(PIECE_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None

    def say(self, answer: bytes) -> bool:
        """Sends a short answer if there is room for it, as there always is for a client that reads."""
        try:
            return self.sock.send(answer, socket.MSG_DONTWAIT) == len(answer)
        except OSError:
            return False

    def num_unread(self) -> int:
        """Bytes of earlier answers that have not reached the client: many, if it sends requests and reads nothing."""
        return int(struct.unpack("i", fcntl.ioctl(self.sock, termios.TIOCOUTQ, bytes(4)))[0])

    def finish_sending(self) -> None:
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)

    def has_lingered(self) -> bool:
        """Throws away what has come; whether that is the end, or enough."""
        try:
            data = self.receive()
        except OSError:
            return True
        self._num_discarded += len(data or b"")
        return data == b"" or self._num_discarded > LINGER_BYTES

    def hang_up(self) -> None:
        """Wakes the HTTP thread that sends to, or waits for, this client; the socket stays the thread's to give back."""
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.state = State.CLOSED
        self.sock.close()

    def abort(self) -> None:
        """Closes without sending what is unsent: the client does not read it."""
        with suppress(OSError):
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABORT)
        self.close()


def _set_limits(sock: socket.socket, send_seconds: float) -> None:
    """Lets the kernel end what no main loop sees: sends to a client that does not read, peers that vanish without a word."""
    seconds = int(send_seconds)
    sock.setsockopt(
        socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", seconds, int((send_seconds - seconds) * 1e6))
    )
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE_SECONDS.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(send_seconds * 1000))
