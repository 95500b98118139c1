"""One connection between host 0 and another host, watched from both ends.

Each side sends a beat every second, so silence means that the other process is stopped or its machine is
gone. A process that ends closes its connection, which is seen at once.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from levserve.hosts.frame import BadFrame, Frame, FrameKind, receive_frame, send_frame

BEAT_SECONDS = 1.0
SILENT_SECONDS = 15.0
"""A side that sends nothing for this long counts as dead. Python may delay its other threads for seconds."""


class PeerLost(Exception):
    """The other host cannot be reached any more. `Peer` writes only the end of a sentence about that host."""


class Peer:
    """Any thread may send; one thread receives."""

    def __init__(self, connection: socket.socket, silent_seconds: float = SILENT_SECONDS) -> None:
        connection.settimeout(silent_seconds)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._silent_seconds = silent_seconds
        self._sending = threading.Lock()
        self.address: str = connection.getpeername()[0]

    def send(self, kind: FrameKind, number: int = 0, payload: Sequence[memoryview] = ()) -> None:
        try:
            with self._sending:
                send_frame(self._connection, kind, number, payload)
        except TimeoutError:
            raise PeerLost(f"has read nothing for {self._silent_seconds:g} s") from None
        except OSError as error:
            raise PeerLost(f"has ended its connection ({error.strerror})") from None

    def try_to_refuse(self, reason: str, exit_code: int) -> None:
        """Tells the other side why it must end, unless it has ended already."""
        with suppress(PeerLost):
            self.send(FrameKind.REFUSED, exit_code, [memoryview(reason.encode())])

    def receive(self) -> Frame:
        try:
            frame = receive_frame(self._connection)
        except TimeoutError:
            raise PeerLost(f"has sent nothing for {self._silent_seconds:g} s") from None
        except OSError as error:
            raise PeerLost(f"has ended its connection ({error.strerror or error})") from None
        except BadFrame as error:
            raise PeerLost(f"has sent something that is not a levserve frame: {error}") from None
        if frame is None:
            raise PeerLost("has ended its connection")
        return frame

    def end(self) -> None:
        """Shuts the connection down, which wakes the thread that receives; that thread closes it.

        Closing it here could give its file descriptor to another connection while that thread is about to
        wait on it.
        """
        with suppress(OSError):  # the other side has ended it already
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the connection; only for the thread that receives."""
        self.end()
        self._connection.close()


class Beats:
    """Sends a beat to every peer each second, from a separate thread; lost peers are skipped."""

    def __init__(self, peers: Callable[[], Iterable[Peer]]) -> None:
        self._peers = peers
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="levserve-beats", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._is_stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_stopped.wait(BEAT_SECONDS):
            for peer in self._peers():
                with suppress(PeerLost):  # the thread that receives from it notices the same
                    peer.send(FrameKind.BEAT)
