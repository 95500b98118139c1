"""gunicorn's arbiter with one worker for life: it ends as its worker ends, and never starts another.

Runs in the process that was started; imports no jax.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import sys
import time
from contextlib import suppress

from gunicorn.arbiter import Arbiter
from gunicorn.errors import HaltServer

from levserve.wire.worker import FAULT

log = logging.getLogger(__name__)

REPEAT_SECONDS = 1.0
REAP_SECONDS = 5.0


class OneWorkerArbiter(Arbiter):  # type: ignore[misc]
    """A second worker would want the device's memory again; so the signals that would start one are ignored."""

    LISTENERS: list[socket.socket]
    _worker_exit = 0

    def _ignore(self) -> None:
        self.log.warning("signal ignored: restart the service instead")

    handle_hup = handle_ttin = handle_ttou = handle_usr1 = (
        _ignore  # SIGWINCH is passed over: a terminal sends it
    )

    def handle_usr2(self) -> None:
        """Newer weights: the worker has them."""
        self.kill_workers(signal.SIGUSR2)

    def spawn_workers(self) -> None:
        """Called when there is no worker: at the start, and when the one we had is gone."""
        if self.worker_age == 0:
            super().spawn_workers()
            return
        if self._worker_exit not in (0, 1, 2):  # after these it has said itself what there was to say
            log.error("the worker ended with %s; so does the server", self._worker_exit)
        raise HaltServer("the worker has ended")

    def reap_workers(self) -> None:
        """Notes how the worker ended; as the first process of a container we also have orphans to collect."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            worker = self.WORKERS.pop(pid, None)
            if worker is not None:
                worker.tmp.close()
                self._worker_exit = os.waitstatus_to_exitcode(status)

    def stop(self, graceful: bool = True) -> None:
        """Ends the worker: with a drain, which a second signal cuts short, or at once. One that does not end is killed."""
        for listener in self.LISTENERS:
            listener.close()  # the worker has its own, and keeps answering until it has drained
        self.LISTENERS = []
        number = signal.SIGTERM if graceful else signal.SIGQUIT
        deadline = time.monotonic() + self.cfg.graceful_timeout
        while self.WORKERS and time.monotonic() < deadline:
            self.kill_workers(
                number
            )  # again and again: one that has just begun hears nothing yet, and twice is as once
            with suppress(queue.Empty):
                received = self.SIG_QUEUE.get(timeout=REPEAT_SECONDS)
                if received in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
                    number = signal.SIGQUIT
            self.reap_workers()
        if self.WORKERS:
            log.error("the worker did not end in time and is killed")
            self.kill_workers(signal.SIGKILL)
        deadline = time.monotonic() + REAP_SECONDS
        while self.WORKERS and time.monotonic() < deadline:
            time.sleep(0.01)
            self.reap_workers()

    def halt(self, reason: str | None = None, exit_status: int = 0) -> None:
        self.stop()
        is_told = (
            self._worker_exit == -signal.SIGTERM
        )  # before it had a handler for it: there was nothing to drain
        sys.exit(self._worker_exit if self._worker_exit in (0, 1, 2) else 0 if is_told else FAULT)
