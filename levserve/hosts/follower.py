"""Another host's side of the group: it finds host 0, introduces itself, and takes what host 0 sends.

`Follower` is created on the device thread, which takes frames from it in order. A separate thread
receives them, so that the loss of host 0 is noticed while the device thread computes. That thread then
calls `on_lost`, or `on_stop` when host 0 shuts the group down; either one ends the process.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from levserve.errors import StartupError, startup_error
from levserve.hosts.frame import Frame, FrameKind
from levserve.hosts.identity import Identity
from levserve.hosts.peer import SILENT_SECONDS, Beats, Peer, PeerLost

log = logging.getLogger(__name__)

RETRY_SECONDS = 0.5
CONNECT_SECONDS = 10.0


class Follower:
    """`take` is for the device thread; any thread may send."""

    def __init__(
        self,
        address: tuple[str, int],
        *,
        timeout_seconds: float,
        on_lost: Callable[[str], None],
        on_stop: Callable[[], None],
        silent_seconds: float = SILENT_SECONDS,
    ) -> None:
        self._address = address
        self._on_lost = on_lost
        self._on_stop = on_stop
        self._frames: queue.SimpleQueue[Frame | PeerLost] = queue.SimpleQueue()
        self._peer = Peer(connect(address, timeout_seconds), silent_seconds)
        self._beats = Beats(lambda: [self._peer])
        self._is_stopped = False
        self.is_welcome = False
        threading.Thread(target=self._receive, name="levserve-leader", daemon=True).start()

    @property
    def is_leaving(self) -> bool:
        """Whether the connection is expected to end: this host ends alone, is refused, or cannot start."""
        return self._is_stopped

    def join(self, identity: Identity) -> None:
        """Waits until all hosts have joined; raises `StartupError` if host 0 refuses this one."""
        self.send_text(FrameKind.HELLO, identity.to_json())
        self.expect(FrameKind.WELCOME)
        self.is_welcome = True

    def leave(self, *, is_orderly: bool) -> None:
        """Asks host 0 to end the group; until all hosts have joined, only this one leaves."""
        if not self.is_welcome or not is_orderly:
            self._is_stopped = True
        self.send(FrameKind.LEAVING, int(is_orderly))

    def fail(self, exit_code: int, reason: str) -> None:
        """Tells host 0 why this host cannot start. Host 0 then ends, for the same reason, and is not lost."""
        self._is_stopped = True
        with suppress(PeerLost):
            self.send(FrameKind.FAILED, exit_code, reason.encode())

    def send(self, kind: FrameKind, number: int = 0, payload: bytes = b"") -> None:
        try:
            self._peer.send(kind, number, [memoryview(payload)])
        except PeerLost as error:
            raise self._name(error) from None

    def send_text(self, kind: FrameKind, text: str) -> None:
        self.send(kind, payload=text.encode())

    def take(self, timeout_seconds: float | None = None) -> Frame | None:
        """The next frame; None if none comes in time. Raises `PeerLost` once host 0 is lost."""
        try:
            frame = self._frames.get(timeout=timeout_seconds)
        except queue.Empty:
            return None
        if isinstance(frame, PeerLost):
            raise frame
        return frame

    def expect(self, kind: FrameKind) -> Frame:
        """The next frame, which must be of this kind; raises `StartupError` if host 0 refuses this host."""
        frame = self.take()
        assert frame is not None
        if frame.kind is FrameKind.REFUSED:
            raise startup_error(f"host 0 refuses this host: {frame.payload.decode()}", frame.number)
        assert frame.kind is kind, f"host 0 sent {frame.kind!r}, and {kind!r} was expected"
        return frame

    def close(self) -> None:
        self._is_stopped = True
        self._beats.stop()
        self._peer.end()

    def _receive(self) -> None:
        try:
            while True:
                frame = self._peer.receive()
                if frame.kind is FrameKind.BEAT:
                    continue
                if frame.kind is FrameKind.STOP:
                    self._is_stopped = True
                    self._on_stop()
                    return
                if frame.kind is FrameKind.REFUSED:
                    self._is_stopped = True
                self._frames.put(frame)
        except PeerLost as error:
            named = self._name(error)
            self._frames.put(named)
            if not self._is_stopped:
                self._on_lost(str(named))
        finally:
            self._peer.close()

    def _name(self, error: PeerLost) -> PeerLost:
        host, port = self._address
        return PeerLost(f"host 0 at {host}:{port} {error}")


def connect(address: tuple[str, int], timeout_seconds: float) -> socket.socket:
    """Retries until host 0 listens; raises `StartupError` if it does not in time."""
    host, port = address
    deadline = time.monotonic() + timeout_seconds
    has_told = False
    while True:
        try:
            connection = socket.create_connection(address, CONNECT_SECONDS)
            if connection.getsockname() != connection.getpeername():
                return connection
            connection.close()  # nobody listens on the port, and the kernel has connected it to itself
            reason = "nobody listens there"
        except OSError as error:
            reason = error.strerror or str(error)
        if not has_told:
            log.info("waiting for host 0 at %s:%d (%s)", host, port, reason)
            has_told = True
        if time.monotonic() >= deadline:
            raise StartupError(
                f"host 0 did not answer at {host}:{port} within --hosts-timeout {timeout_seconds:g} s "
                f"({reason})"
            )
        time.sleep(RETRY_SECONDS)
