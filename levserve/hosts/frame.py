"""The frames that hosts send each other: a kind, a number and bytes, whose length comes before them.

Arrays travel as they are in memory: both sides know the shapes from the programs that both have compiled. All
hosts of a group have the same byte order, because they run the same programs. Nothing is unpickled.
"""

from __future__ import annotations

import math
import socket
import struct
import time
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

HEADER = struct.Struct("!BHI")
"""Kind, number, and bytes that follow."""
MAX_BYTES = 1 << 28
"""More than any round needs. A frame with a larger length is not from a host of the group."""
FIRST_MAX_BYTES = 1 << 16
"""For the first frame of a connection, which may come from anyone."""


class FrameKind(IntEnum):
    HELLO = 1
    """From a follower: its number, versions and settings."""
    REFUSED = 2
    """From the leader: why the follower cannot join, as a sentence."""
    WELCOME = 3
    """From the leader: all hosts have joined."""
    BEAT = 4
    """From both, every second: the sender is alive."""
    MODEL = 5
    """From a follower: the fingerprint of its model's files. From the leader: all have the same."""
    MEMORY = 6
    """From a follower: its free bytes. From the leader: the least of all hosts."""
    COMPILED = 7
    """From a follower: it has compiled what the first runs need."""
    RUN = 8
    """From the leader: run the program of this number with these arrays."""
    READY = 9
    """From a follower: it has compiled the program of this number."""
    READ = 10
    """From the leader: read other weights. From a follower: it has read them, or why it has not."""
    SWAP = 11
    """From the leader: serve the weights that were read; with the number 0: drop them."""
    LEAVING = 12
    """From a follower: it was asked to end, in an orderly way (1) or at once (0)."""
    FAILED = 13
    """From a follower: why it cannot start, as a sentence, and the exit code that this has."""
    STOP = 14
    """From the leader: the group shuts down in an orderly way."""


class Frame(NamedTuple):
    kind: FrameKind
    number: int
    payload: bytes


class BadFrame(Exception):
    """The other side does not speak this protocol."""


def send_frame(
    connection: socket.socket, kind: FrameKind, number: int = 0, payload: Sequence[memoryview] = ()
) -> None:
    """Sends a whole frame; its parts are not copied together first."""
    num_bytes = sum(part.nbytes for part in payload)
    waiting = [memoryview(HEADER.pack(kind, number, num_bytes)), *payload]
    while waiting:
        sent = connection.sendmsg(waiting)
        while waiting and sent >= waiting[0].nbytes:
            sent -= waiting.pop(0).nbytes
        if waiting and sent:
            waiting[0] = waiting[0][sent:]


def receive_frame(
    connection: socket.socket, max_bytes: int = MAX_BYTES, deadline: float = math.inf
) -> Frame | None:
    """Waits for a frame; None at the end of the stream. Raises `BadFrame` for bytes that cannot be one.

    The connection's own timeout is for each piece of a frame. `deadline`, on the monotonic clock, is for the
    whole frame: it changes the connection's timeout, and `TimeoutError` is raised when it has passed.
    """
    header = _receive(connection, HEADER.size, deadline, may_end=True)
    if header is None:
        return None
    kind, number, num_bytes = HEADER.unpack(header)
    if num_bytes > max_bytes:
        raise BadFrame(f"a length of {num_bytes} bytes")
    try:
        known = FrameKind(kind)
    except ValueError:
        raise BadFrame(f"an unknown kind {kind}") from None
    payload = _receive(connection, num_bytes, deadline)
    assert payload is not None
    return Frame(known, number, bytes(payload))


def _receive(
    connection: socket.socket, num_bytes: int, deadline: float, *, may_end: bool = False
) -> bytearray | None:
    received = bytearray(num_bytes)
    view = memoryview(received)
    while view.nbytes:
        if deadline < math.inf:
            seconds = deadline - time.monotonic()
            if seconds <= 0:
                raise TimeoutError("timed out")
            connection.settimeout(seconds)
        count = connection.recv_into(view)
        if not count:
            if may_end and view.nbytes == num_bytes:
                return None
            raise ConnectionResetError("the connection ended within a message")
        view = view[count:]
    return received
