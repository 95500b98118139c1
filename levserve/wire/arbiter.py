"""gunicorn's arbiter for exactly one worker: it exits when the worker does and never starts another.

Runs in the process that the user started; imports no jax.
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

from levserve.errors import FAULT_EXIT_CODE

log = logging.getLogger(__name__)

REPEAT_SECONDS = 1.0
ECHO_SECONDS = 0.5
"""A SIGTERM this soon after the first counts as the same: timeout(1) signals the process, then its group."""
REAP_SECONDS = 5.0


class OneWorkerArbiter(Arbiter):  # type: ignore[misc]
    """Ignores gunicorn's signals for workers and logs: the device has no memory for a second worker."""

    LISTENERS: list[socket.socket]
    _worker_exit = 0

    def _ignore(self) -> None:
        self.log.warning("signal ignored: restart the service instead")

    # SIGWINCH is not among them: terminals send it, and gunicorn ignores it unless it is a daemon.
    handle_hup = handle_ttin = handle_ttou = handle_usr1 = _ignore

    def handle_term(self) -> None:
        log.info("SIGTERM: shutting down after running requests")
        super().handle_term()

    def handle_int(self) -> None:
        log.info("SIGINT: shutting down at once")
        super().handle_int()

    def handle_quit(self) -> None:
        log.info("SIGQUIT: shutting down at once")
        super().handle_quit()

    def handle_usr2(self) -> None:
        """Forwards the signal to reload the weights to the worker, which holds them."""
        self.kill_workers(signal.SIGUSR2)

    def spawn_workers(self) -> None:
        """Called when there is no worker: at the start, and after the worker has ended."""
        if self.worker_age == 0:
            super().spawn_workers()
            return
        if self._worker_exit == -signal.SIGKILL:
            log.error(
                "the worker was killed (SIGKILL), most often by the system for want of memory; "
                "lower --kv-memory or --max-running"
            )
        elif self._worker_exit == -signal.SIGABRT:
            log.error(
                "a library aborted the worker (SIGABRT); see its last line above; if that is about memory, "
                "lower --kv-memory or --max-running, or raise the limit"
            )
        elif self._worker_exit not in (0, 1, 2):  # with these it has logged the reason itself
            log.error("the worker ended with code %s, which ends the server", self._worker_exit)
        raise HaltServer("the worker has ended")

    def reap_workers(self) -> None:
        """Notes how the worker ended, and reaps orphans, as the first process of a container must."""
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
        """Ends the worker at once, or after a drain that a second signal cuts short; kills it if late."""
        for listener in self.LISTENERS:
            listener.close()  # the worker has its own copy, and answers until it has drained
        self.LISTENERS = []
        number = signal.SIGTERM if graceful else signal.SIGQUIT
        began = time.monotonic()
        deadline = began + self.cfg.graceful_timeout
        while self.WORKERS and time.monotonic() < deadline:
            self.kill_workers(number)  # repeated: a worker that has just started has no handler yet
            with suppress(queue.Empty):
                received = self.SIG_QUEUE.get(timeout=REPEAT_SECONDS)
                is_echo = received == signal.SIGTERM and time.monotonic() < began + ECHO_SECONDS
                if received in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT) and not is_echo:
                    number = signal.SIGQUIT
            self.reap_workers()
        if self.WORKERS:
            log.error("the worker did not end in time; killing it")
            self.kill_workers(signal.SIGKILL)
        deadline = time.monotonic() + REAP_SECONDS
        while self.WORKERS and time.monotonic() < deadline:
            time.sleep(0.01)
            self.reap_workers()

    def halt(self, reason: str | None = None, exit_status: int = 0) -> None:
        self.stop()
        code = FAULT_EXIT_CODE
        if self._worker_exit in (0, 1, 2):
            code = self._worker_exit
        elif self._worker_exit == -signal.SIGTERM:  # it ended before it had a handler or anything to drain
            code = 0
        if code == 0:  # with any other code, the line that says why stays the last one
            log.info("exit with code 0")
        sys.exit(code)
