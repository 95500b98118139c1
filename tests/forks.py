"""Processes that are forked from one that has imported their program already: to import the server takes half a second of a core.

`ForkServer` starts a program that calls `wait_to_be_forked`, which returns in every process that is asked for.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import FileIO

MESSAGE_BYTES = 128 << 10
"""More than arguments and environment take."""


class ForkedProcess:
    """What a `subprocess.Popen` would be; its parent tells the exit code."""

    def __init__(self, parent: socket.socket, stdout: FileIO, stderr: FileIO) -> None:
        self.stdout, self.stderr = stdout, stderr
        self._parent = parent
        self._code: int | None = None
        self.pid = int(parent.recv(MESSAGE_BYTES))

    def send_signal(self, number: signal.Signals) -> None:
        if not self._has_ended():
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        return self.wait(timeout=0) if self._has_ended() else None

    def wait(self, timeout: float | None = None) -> int:
        if self._code is None:
            self._parent.settimeout(timeout)
            self._code = int(self._parent.recv(MESSAGE_BYTES))
            self._parent.close()
        return self._code

    def _has_ended(self) -> bool:
        try:
            self.wait(timeout=0)
        except BlockingIOError:
            return False
        return True


class ForkServer:
    """A process that has imported a program and waits to be forked; it ends when this is closed."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [*command, "--fork-by", str(theirs.fileno())],
                stdout=subprocess.DEVNULL,
                env=environ,
                pass_fds=[theirs.fileno()],
            )

    def start(self, arguments: Sequence[str], environ: Mapping[str, str]) -> ForkedProcess:
        """In a session of its own."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        (stdout, their_stdout), (stderr, their_stderr) = os.pipe(), os.pipe()
        message = json.dumps([list(arguments), dict(environ)]).encode()
        assert len(message) < MESSAGE_BYTES
        with theirs:
            socket.send_fds(self._control, [message], [their_stdout, their_stderr, theirs.fileno()])
        os.close(their_stdout)
        os.close(their_stderr)
        return ForkedProcess(ours, FileIO(stdout), FileIO(stderr))

    def close(self) -> None:
        self._control.close()
        self._process.wait()


def wait_to_be_forked(control_number: int) -> list[str]:
    """Returns in every new process, with its arguments; the process that forks them never returns."""
    running: dict[int, tuple[int, socket.socket]] = {}  # by the descriptors that tell of their end
    with socket.socket(fileno=control_number) as control, selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd != control_number:
                    selector.unregister(key.fd)
                    _tell_end(key.fd, *running.pop(key.fd))
                    continue
                message, descriptors, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 3)
                if not message:
                    sys.exit()
                stdout, stderr, requester = descriptors
                channel = socket.socket(fileno=requester)
                pid = os.fork()
                if pid == 0:
                    channel.close()
                    for descriptor, (_, other) in running.items():
                        os.close(descriptor)
                        other.close()
                    return _become(stdout, stderr, message)
                os.close(stdout)
                os.close(stderr)
                descriptor = os.pidfd_open(pid)
                selector.register(descriptor, selectors.EVENT_READ)
                running[descriptor] = pid, channel
                channel.send(str(pid).encode())


def _tell_end(descriptor: int, pid: int, requester: socket.socket) -> None:
    os.close(descriptor)
    _, status = os.waitpid(pid, 0)
    with requester, suppress(BrokenPipeError):  # nobody may wait for it
        requester.send(str(os.waitstatus_to_exitcode(status)).encode())


def _become(stdout: int, stderr: int, message: bytes) -> list[str]:
    os.setsid()
    for number, descriptor in (1, stdout), (2, stderr):
        os.dup2(descriptor, number)
        os.close(descriptor)
    arguments: list[str]
    arguments, environ = json.loads(message)
    os.environ.clear()
    os.environ.update(environ)
    return arguments
