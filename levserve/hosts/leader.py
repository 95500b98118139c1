"""Host 0's side of the group: it waits for the others, refuses those that differ, and tells all what to run.

`Leader` is created on the device thread. Each follower has a thread that receives from it. Until all
hosts have joined, one that leaves may come back. After that the group is complete, and a lost follower is
reported to `on_lost`, which ends the process: the part of the KV cache that was on its devices is gone.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence

from levserve.errors import ConfigError, StartupError, startup_error
from levserve.hosts.frame import FIRST_MAX_BYTES, BadFrame, Frame, FrameKind, receive_frame
from levserve.hosts.identity import Identity, check_number, find_difference, read_identity
from levserve.hosts.listener import listen
from levserve.hosts.peer import SILENT_SECONDS, Beats, Peer, PeerLost

log = logging.getLogger(__name__)

HELLO_SECONDS = 5.0
"""A connection that does not introduce itself within this time is closed; others wait meanwhile."""
LISTEN_SECONDS = 0.25
STOP_SECONDS = 5.0
"""How long followers have to end before host 0 does, which takes jax's coordination service with it."""
ANSWERS = (FrameKind.MODEL, FrameKind.MEMORY, FrameKind.COMPILED, FrameKind.READ)


class Leader:
    """`send` and `ask` are for the device thread; a reload's thread may call `ask` too, while nothing
    else does.

    `on_ready` gets a host and the number of a program that it has compiled. Like `on_lost`, `on_failed` and
    `on_leaving`, it is called on the thread that receives from the host. Any thread may call `stop` or
    `refuse`.
    """

    def __init__(
        self,
        address: tuple[str, int],
        identity: Identity,
        num_hosts: int,
        *,
        on_lost: Callable[[str], None],
        on_failed: Callable[[StartupError], None],
        on_leaving: Callable[[], None],
        on_ready: Callable[[int, int], None],
        silent_seconds: float = SILENT_SECONDS,
    ) -> None:
        self._identity = identity
        self._num_hosts = num_hosts
        self._on_lost = on_lost
        self._on_failed = on_failed
        self._on_leaving = on_leaving
        self._on_ready = on_ready
        self._silent_seconds = silent_seconds
        self._changed = threading.Condition()
        self._peers: dict[int, Peer] = {}
        self._answers: dict[int, queue.SimpleQueue[Frame | PeerLost]] = {}
        self._refused = ""
        self._is_complete = self._is_stopping = self._has_failed = False
        self._listener = listen(*address)
        self._beats = Beats(lambda: list(self._peers.values()))

    def gather(self, timeout_seconds: float, report: Callable[[str], None]) -> None:
        """Waits until all hosts have joined; raises `StartupError` if some have not in time."""
        deadline = time.monotonic() + timeout_seconds
        self._listener.settimeout(LISTEN_SECONDS)
        told: list[int] = []
        with self._listener:
            while missing := self._missing():
                if missing != told:
                    report(f"waiting for {_name_hosts(missing)} of {self._num_hosts}")
                    told = missing
                if time.monotonic() >= deadline:
                    error = StartupError(
                        f"{_name_hosts(missing)} did not join within --hosts-timeout {timeout_seconds:g} s"
                        + (f"; {self._refused}" if self._refused else "")
                    )
                    self.refuse(error)
                    raise error
                try:
                    connection, address = self._listener.accept()
                except TimeoutError:
                    continue
                self._admit(connection, address[0])
        self.send(FrameKind.WELCOME)

    def send(self, kind: FrameKind, number: int = 0, payload: Sequence[memoryview] = ()) -> None:
        """Sends to all followers; raises `PeerLost` if one cannot be reached."""
        for host_id, peer in list(self._peers.items()):
            try:
                peer.send(kind, number, payload)
            except PeerLost as error:
                raise PeerLost(f"host {host_id} at {peer.address} {error}") from None

    def ask(self, kind: FrameKind) -> dict[int, bytes]:
        """Waits for the answer of each follower; raises `PeerLost` if one is lost before it answers."""
        found: dict[int, bytes] = {}
        for host_id, answers in self._answers.items():
            answer = answers.get()
            if isinstance(answer, PeerLost):
                raise answer
            assert answer.kind is kind, f"host {host_id} answered {answer.kind!r}, but {kind!r} was expected"
            found[host_id] = answer.payload
        return found

    def refuse(self, error: StartupError) -> None:
        """Tells all followers why the group cannot start, and waits for their end."""
        self._is_stopping = True
        for peer in list(self._peers.values()):
            peer.try_to_refuse(str(error), error.exit_code)
        self._wait_for_end()

    def stop(self) -> None:
        """Asks the followers to shut down, and waits until they have ended."""
        self._is_stopping = True
        try:
            self.send(FrameKind.STOP)
        except PeerLost as error:
            log.warning("%s", error)
        self._wait_for_end()

    def close(self) -> None:
        self._is_stopping = True
        self._beats.stop()
        self._listener.close()
        for peer in list(self._peers.values()):
            peer.end()

    def _missing(self) -> list[int]:
        with self._changed:
            missing = [number for number in range(1, self._num_hosts) if number not in self._peers]
            self._is_complete = not missing
            return missing

    def _admit(self, connection: socket.socket, address: str) -> None:
        """Lets a host in, or refuses it and goes on waiting: it may be started again with other settings."""
        try:
            frame = receive_frame(connection, FIRST_MAX_BYTES, time.monotonic() + HELLO_SECONDS)
            if frame is None or frame.kind is not FrameKind.HELLO:
                raise BadFrame("it does not introduce itself")
            identity = read_identity(frame.payload)
        except (OSError, BadFrame, ValueError) as error:
            log.warning("closed a connection from %s, which is not a host of this group: %s", address, error)
            connection.close()
            return
        peer = Peer(connection, self._silent_seconds)
        reason = self._find_fault(identity)
        if reason is None:
            self._add(identity.host_id, peer)
            return
        self._refused = f"refused {address}: {reason}"
        log.warning("%s", self._refused)
        peer.try_to_refuse(reason, ConfigError.exit_code)
        peer.close()

    def _find_fault(self, identity: Identity) -> str | None:
        if difference := find_difference(self._identity, identity):
            return difference
        try:
            check_number(identity, self._num_hosts)
        except ConfigError as error:
            return str(error)
        with self._changed:
            other = self._peers.get(identity.host_id)
        return None if other is None else f"host {identity.host_id} has already joined, from {other.address}"

    def _add(self, host_id: int, peer: Peer) -> None:
        log.info("host %d joined from %s", host_id, peer.address)
        with self._changed:
            self._peers[host_id] = peer
            self._answers[host_id] = queue.SimpleQueue()
        threading.Thread(
            target=self._receive, args=(host_id, peer), name=f"levserve-host-{host_id}", daemon=True
        ).start()

    def _receive(self, host_id: int, peer: Peer) -> None:
        try:
            while True:
                frame = peer.receive()
                if frame.kind is FrameKind.READY:
                    self._on_ready(host_id, frame.number)
                elif frame.kind in ANSWERS:
                    self._answers[host_id].put(frame)
                elif frame.kind is FrameKind.LEAVING:
                    self._let_leave(host_id, is_orderly=bool(frame.number))
                elif frame.kind is FrameKind.FAILED:
                    self._end_start(host_id, peer, frame)
                    return
        except PeerLost as error:
            self._lose(host_id, peer, PeerLost(f"host {host_id} at {peer.address} {error}"))

    def _end_start(self, host_id: int, peer: Peer, frame: Frame) -> None:
        """A follower cannot start, so nobody can, for the same reason and with the same exit code."""
        with self._changed:
            self._peers.pop(host_id, None)
            self._changed.notify_all()
        peer.close()
        if not self._is_stopping:  # otherwise host 0 has refused it, and it answers that
            self._has_failed = True
            reason = f"host {host_id} at {peer.address} cannot start: {frame.payload.decode()}"
            self._on_failed(startup_error(reason, frame.number))

    def _let_leave(self, host_id: int, *, is_orderly: bool) -> None:
        if not is_orderly:
            raise PeerLost("was stopped immediately")
        if not self._is_complete:
            raise PeerLost("was asked to end")
        if not self._is_stopping:
            log.info("host %d was asked to end, so all hosts do", host_id)
            self._on_leaving()

    def _lose(self, host_id: int, peer: Peer, error: PeerLost) -> None:
        with self._changed:
            is_complete = self._is_complete
            if not is_complete or self._is_stopping:
                self._peers.pop(host_id, None)
            self._changed.notify_all()
        if not self._has_failed:  # otherwise `on_failed` ends the process, for the reason that came first
            self._answers[host_id].put(error)
        peer.close()
        if self._is_stopping:
            return
        if is_complete:
            self._on_lost(str(error))
        else:
            log.warning("%s; it may come back", error)

    def _wait_for_end(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._peers, STOP_SECONDS)
        self.close()


def _name_hosts(numbers: Sequence[int]) -> str:
    names = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return f"host {names}" if len(numbers) == 1 else f"hosts {names}"
