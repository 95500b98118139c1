"""Notices at once that a client hangs up while its request waits for tokens.

A thread that waits on a queue does not see its socket close, and only the second write to a closed socket
fails. One thread with one epoll set watches the sockets of all running requests: it notices within a
millisecond, without polling. A half-closed connection counts as a hang-up, as it does for nginx.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

GONE = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR


@dataclass(frozen=True, slots=True, eq=False)
class Watch:
    """One watched socket. Compared by identity: descriptors are reused, watches are not."""

    fd: int
    on_gone: Callable[[], None]


class Watcher:
    """Owns the thread `levserve-watcher`, which calls `on_gone`. HTTP threads call `watch` and `unwatch`."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC)
        self._epoll.register(self._wakeup, select.EPOLLIN)
        # Not held while the epoll set is changed: that releases the GIL, and every other thread would wait
        # for the lock until its holder has the GIL back.
        self._lock = threading.Lock()
        self._watches: dict[int, Watch] = {}
        self._thread = threading.Thread(target=self._run, name="levserve-watcher")
        self._thread.start()

    def watch(self, sock: socket.socket, on_gone: Callable[[], None]) -> Watch:
        """Calls `on_gone` once, on the watcher thread, if the peer leaves or has already left.

        The caller calls `unwatch` before it gives the socket back: the descriptor will be reused.
        """
        watch = Watch(sock.fileno(), on_gone)
        with self._lock:
            self._watches[watch.fd] = watch
        self._epoll.register(watch.fd, GONE | select.EPOLLONESHOT)
        return watch

    def unwatch(self, watch: Watch) -> None:
        """Forgets the socket; an `on_gone` that is running goes on, but none begins after this."""
        with self._lock:
            if self._watches.get(watch.fd) is not watch:
                return
            del self._watches[watch.fd]
        self._epoll.unregister(watch.fd)

    def stop(self) -> None:
        os.eventfd_write(self._wakeup, 1)
        self._thread.join()
        self._epoll.close()
        os.close(self._wakeup)

    def _run(self) -> None:
        while True:
            for fd, _ in self._epoll.poll():
                if fd == self._wakeup:
                    return
                watch = self._find_gone(fd)
                if watch is not None:
                    watch.on_gone()

    def _find_gone(self, fd: int) -> Watch | None:
        with self._lock:
            watch = self._watches.get(fd)
            # The event may be stale: the descriptor may belong to a newer connection. Ask the socket itself.
            return watch if watch is not None and _is_gone(fd) else None


def _is_gone(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLRDHUP)
    return bool(poll.poll(0))
