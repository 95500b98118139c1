"""One client's connection: its socket, the bytes received so far, and the deadline of its state.

An HTTP thread owns the socket while it answers a request; at all other times the main loop owns it, and never
blocks on it.
"""

from __future__ import annotations

import errno
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

READ_BYTES = 2**16  # per read, so that no client keeps the main loop busy
# Input to discard after a refusal: urllib and http.client do not read an answer if the connection breaks
# while they send.
LINGER_BYTES = 2**26
FORM_BYTES = 2**16  # what a form may hold besides its file
# In seconds, except for the count.
KEEPALIVE = {socket.TCP_KEEPIDLE: 15, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
UNSENT_BYTES = 2**18  # kept by the kernel for a slow reader; by default 2.6 MB pile up on a fast link
ABORT = struct.pack("ii", 1, 0)  # SO_LINGER: drop unsent data and reset the connection


class State(Enum):
    IDLE = auto()  # between requests
    HEAD = auto()  # waiting for the rest of a request's head; a new connection may have sent nothing
    BODY = auto()  # the head is complete, the body is not
    RUNNING = auto()  # an HTTP thread owns it
    LINGERING = auto()  # answered; input is read and discarded, because a reset would destroy the answer
    CLOSED = auto()


class Connection:
    """Owned by the main loop. `deadline`, on the monotonic clock, is when it must leave its state."""

    def __init__(self, sock: socket.socket, client: Any, server: Any, settings: Settings) -> None:
        self.sock = sock
        self.client = client
        self.server = server
        self.buffer = RequestBuffer(
            settings.max_body_bytes,
            max_upload_bytes=settings.max_file_bytes + FORM_BYTES,
            upload_folder=settings.state_dir or None,
        )
        self.state = State.HEAD
        self.deadline = math.inf
        self._num_discarded = 0
        sock.setblocking(True)  # for the HTTP threads; the main loop passes MSG_DONTWAIT with each call
        _set_limits(sock, settings.send_timeout)

    def fileno(self) -> int:
        return self.sock.fileno()

    def enter(self, state: State, deadline: float) -> None:
        self.state = state
        self.deadline = deadline

    def receive(self) -> bytes | None:
        """New data, b"" if the client sends no more, None if nothing has arrived; OSError if it has gone."""
        try:
            return self.sock.recv(READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None

    def send_now(self, answer: bytes) -> bool:
        """Sends a short answer without waiting; whether all went out, as always if the client reads."""
        try:
            return self.sock.send(answer, socket.MSG_DONTWAIT) == len(answer)
        except OSError:
            return False

    def num_unread(self) -> int:
        """Bytes of earlier answers that the client has not received: many if it sends but never reads."""
        return int(struct.unpack("i", fcntl.ioctl(self.sock, termios.TIOCOUTQ, bytes(4)))[0])

    def has_timed_out(self) -> bool:
        """Whether the kernel has ended the connection because the client took nothing of its answer."""
        return self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ETIMEDOUT

    def finish_sending(self) -> None:
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)

    def has_lingered(self) -> bool:
        """Discards the input so far; whether the client has finished sending, or has sent too much."""
        try:
            data = self.receive()
        except OSError:
            return True
        self._num_discarded += len(data or b"")
        return data == b"" or self._num_discarded > LINGER_BYTES

    def hang_up(self) -> None:
        """Wakes the HTTP thread that owns the socket and waits on it; the thread gives the socket back."""
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.state = State.CLOSED
        self.sock.close()

    def abort(self) -> None:
        """Closes without sending the rest of the answer, which the client does not read."""
        with suppress(OSError):
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABORT)
        self.close()


def _set_limits(sock: socket.socket, send_seconds: float) -> None:
    """Has the kernel end sends to a client that does not read, and connections whose peer has vanished."""
    seconds = int(send_seconds)
    timeout = struct.pack("ll", seconds, int((send_seconds - seconds) * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(send_seconds * 1000))
