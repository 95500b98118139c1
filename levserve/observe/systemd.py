"""What systemd and the server tell each other: the socket it opened for us, and how we are.

`take_supervision` is called in the process that becomes the arbiter and takes systemd's variables out of the environment: gunicorn would
say READY before there is a worker. `Notifier` runs in the worker, on a thread of its own, and asks only the engine: it says READY when
the model is warm, and keeps the watchdog quiet only while the device thread shows signs of life. Speaks the protocol of sd_notify(3) and
sd_listen_fds(3), with no library.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import MutableMapping
from typing import NamedTuple

from levserve.errors import StartupError
from levserve.observe.health import Health, Phase

log = logging.getLogger(__name__)

FIRST_FD = 3
VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES")
TICK_SECONDS = 0.5
EXTEND_SECONDS = 30  # a start may take so much longer with every tick
MAX_SILENT_SECONDS = (
    600  # a start that gives no sign for so long is stuck; one compile of a large model may take minutes
)


class Supervision(NamedTuple):
    """What systemd gave us; all of it is empty for a server that it did not start."""

    address: str = ""
    """Of the socket that takes notifications; an @ at its beginning stands for a zero byte."""
    watchdog_seconds: float | None = None
    listener: socket.socket | None = None


def take_supervision(environ: MutableMapping[str, str]) -> Supervision:
    """Reads systemd's variables and removes them; raises `StartupError` for a socket that cannot be served."""
    given = {name: environ.pop(name, "") for name in VARIABLES}
    is_ours = given["WATCHDOG_PID"] in ("", str(os.getpid()))
    microseconds = int(given["WATCHDOG_USEC"]) if given["WATCHDOG_USEC"].isdigit() and is_ours else 0
    listener = _take_listener(given["LISTEN_FDS"]) if given["LISTEN_PID"] == str(os.getpid()) else None
    return Supervision(given["NOTIFY_SOCKET"], microseconds / 1e6 or None, listener)


def _take_listener(count: str) -> socket.socket | None:
    if count in ("", "0"):
        return None
    if count != "1":
        raise StartupError(f"systemd passed {count} sockets; levserve listens on one (ListenStream= once)")
    try:
        listener = socket.socket(fileno=FIRST_FD)
    except OSError as error:
        raise StartupError(f"the socket that systemd passed cannot be used: {error.strerror}") from None
    is_tcp = listener.family in (socket.AF_INET, socket.AF_INET6) and listener.type == socket.SOCK_STREAM
    if not is_tcp or not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        listener.close()
        raise StartupError(
            "the socket that systemd passed is no listening TCP socket (ListenStream= with a port, Accept=no)"
        )
    os.set_inheritable(FIRST_FD, False)
    return listener


class Notifier:
    """Tells systemd how the engine is, from the thread `levserve-notify`; without a notify socket it does nothing."""

    def __init__(self, supervision: Supervision, engine: Health) -> None:
        self._address = supervision.address
        self._watchdog_seconds = supervision.watchdog_seconds
        self._engine = engine
        self._is_stopped = threading.Event()
        self._told: Phase | None = None
        self._status = ""
        self._thread = threading.Thread(target=self._run, name="levserve-notify")

    def start(self) -> None:
        if self._address:
            self._thread.start()

    def stop(self) -> None:
        """Says that the server leaves, if the thread has not yet."""
        if self._thread.ident is None:
            return
        self._is_stopped.set()
        self._thread.join()
        if self._told is not Phase.DRAINING:
            self._send("STOPPING=1")

    def _run(self) -> None:
        ticks_per_ping = 1
        tick = TICK_SECONDS
        if self._watchdog_seconds is not None:
            tick = min(tick, self._watchdog_seconds / 3)
            ticks_per_ping = max(1, int(self._watchdog_seconds / 3 / tick))
        count = 0
        while not self._is_stopped.is_set():
            self._tell(pings=count % ticks_per_ping == 0)
            count += 1
            self._is_stopped.wait(tick)

    def _tell(self, *, pings: bool) -> None:
        """Everything that is new since the last time, in one message."""
        phase, lines = self._engine.phase, []
        status = self._engine.progress if phase in (Phase.LOADING, Phase.READY) else str(phase)
        if status != self._status:
            lines.append(f"STATUS={status}")
        if phase is Phase.LOADING and self._engine.heartbeat_age() < MAX_SILENT_SECONDS:
            lines.append(f"EXTEND_TIMEOUT_USEC={EXTEND_SECONDS * 1_000_000}")
        if phase is not self._told and phase is Phase.READY:
            lines.append("READY=1")
        if phase is not self._told and phase is Phase.DRAINING:
            lines.append("STOPPING=1")
        if pings and self._watchdog_seconds is not None and self._is_fresh():
            lines.append("WATCHDOG=1")
        if lines:
            self._send("\n".join(lines))
        self._told, self._status = phase, status

    def _is_fresh(self) -> bool:
        """An idle device thread beats every second. While it loads systemd does not look at the watchdog yet."""
        assert self._watchdog_seconds is not None
        is_serving = self._engine.phase in (Phase.READY, Phase.DRAINING) and not self._engine.is_stalled
        return is_serving and self._engine.heartbeat_age() < self._watchdog_seconds / 2

    def _send(self, message: str) -> None:
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
                notify.sendto(message.encode(), address)
        except OSError as error:
            log.warning("cannot notify systemd: %s", error)
