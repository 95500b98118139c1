"""Socket activation, readiness and watchdog under systemd (sd_listen_fds(3), sd_notify(3)); needs no library.

`take_supervision` is called in the process that becomes gunicorn's arbiter. It removes systemd's variables
from the environment, because gunicorn would report READY before there is a worker. `Notifier` runs in the
worker, on its own thread. It reports READY once the model can serve, and feeds the watchdog only while the
device thread is alive.
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
EXTEND_SECONDS = 30  # each tick while loading asks systemd for this much more time
MAX_SILENT_SECONDS = 600  # without a heartbeat for this long, loading is stuck; one compile may take minutes


class Supervision(NamedTuple):
    """What systemd passed to us; empty if systemd did not start the server."""

    address: str = ""
    """Address of the notification socket; a leading @ stands for a zero byte."""
    watchdog_seconds: float | None = None
    listener: socket.socket | None = None


def take_supervision(environ: MutableMapping[str, str]) -> Supervision:
    """Reads and removes systemd's variables; raises `StartupError` for a socket that cannot be served."""
    given = {name: environ.pop(name, "") for name in VARIABLES}
    is_ours = given["WATCHDOG_PID"] in ("", str(os.getpid()))
    watchdog_seconds = None
    if is_ours and given["WATCHDOG_USEC"].isdigit():
        watchdog_seconds = int(given["WATCHDOG_USEC"]) / 1e6 or None
    listener = _take_listener(given["LISTEN_FDS"]) if given["LISTEN_PID"] == str(os.getpid()) else None
    return Supervision(given["NOTIFY_SOCKET"], watchdog_seconds, listener)


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
        needs = "ListenStream= with a port, and Accept=no"
        raise StartupError(f"the socket that systemd passed is not a listening TCP socket ({needs})")
    os.set_inheritable(FIRST_FD, False)
    return listener


class Notifier:
    """Reports the engine's state to systemd, if there is one, from the thread `levserve-notify`."""

    def __init__(self, supervision: Supervision, engine: Health) -> None:
        self._address = supervision.address
        self._watchdog_seconds = supervision.watchdog_seconds
        self._engine = engine
        self._is_stopped = threading.Event()
        self._reported: Phase | None = None
        self._status = ""
        self._thread = threading.Thread(target=self._run, name="levserve-notify")

    def start(self) -> None:
        if self._address:
            self._thread.start()

    def stop(self) -> None:
        """Reports that the server is stopping, unless the thread has done so already."""
        if self._thread.ident is None:
            return
        self._is_stopped.set()
        self._thread.join()
        if self._reported is not Phase.DRAINING:
            self._send("STOPPING=1")

    def _run(self) -> None:
        ticks_per_ping = 1
        tick = TICK_SECONDS
        if self._watchdog_seconds is not None:
            tick = min(tick, self._watchdog_seconds / 3)
            ticks_per_ping = max(1, int(self._watchdog_seconds / 3 / tick))
        count = 0
        while not self._is_stopped.is_set():
            self._report(pings=count % ticks_per_ping == 0)
            count += 1
            self._is_stopped.wait(tick)

    def _report(self, *, pings: bool) -> None:
        """Sends what has changed since the last report in one message."""
        phase, lines = self._engine.phase, []
        status = (
            self._engine.progress if phase in (Phase.LOADING, Phase.READY, Phase.FOLLOWING) else str(phase)
        )
        if status != self._status:
            lines.append(f"STATUS={status}")
        if phase is Phase.LOADING and self._engine.heartbeat_age() < MAX_SILENT_SECONDS:
            lines.append(f"EXTEND_TIMEOUT_USEC={EXTEND_SECONDS * 1_000_000}")
        if phase is not self._reported and phase in (Phase.READY, Phase.FOLLOWING):
            lines.append("READY=1")
        if phase is not self._reported and phase is Phase.DRAINING:
            lines.append("STOPPING=1")
        if pings and self._watchdog_seconds is not None and self._is_fresh():
            lines.append("WATCHDOG=1")
        if lines:
            self._send("\n".join(lines))
        self._reported, self._status = phase, status

    def _is_fresh(self) -> bool:
        """Whether the device thread is alive; an idle one beats every second. Not needed before READY."""
        assert self._watchdog_seconds is not None
        serving = (Phase.READY, Phase.FOLLOWING, Phase.DRAINING)
        is_serving = self._engine.phase in serving and not self._engine.is_stalled
        return is_serving and self._engine.heartbeat_age() < self._watchdog_seconds / 2

    def _send(self, message: str) -> None:
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
                notify.sendto(message.encode(), address)
        except OSError as error:
            log.warning("cannot notify systemd: %s", error)
