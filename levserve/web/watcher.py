"""Notices at once when a client hangs up, for requests that wait for tokens.

A thread that waits on a queue does not see its socket close, and writing tells only at the second try. One thread with one
epoll set watches the sockets of all running requests (under a millisecond, no polling). Half-closing a connection counts
as leaving, as it does for nginx.
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
    """One watched socket. Compared by identity: a descriptor is reused, a watch is not."""

    fd: int
    on_gone: Callable[[], None]


class Watcher:
    """Owns the thread `levserve-watcher`, which calls `on_gone`. `watch` and `unwatch` are for HTTP threads; `stop` joins."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC)
        self._epoll.register(self._wakeup, select.EPOLLIN)
        # Never held while the epoll set is changed: that lets go of the GIL, and all others would wait for who waits to get it back.
        self._lock = threading.Lock()
        self._watches: dict[int, Watch] = {}
        self._thread = threading.Thread(target=self._run, name="levserve-watcher")
        self._thread.start()

    def watch(self, sock: socket.socket, on_gone: Callable[[], None]) -> Watch:
        """Calls `on_gone` once from the watcher thread if the peer leaves, also if it has already left.

        The caller unwatches before it gives the socket back: its descriptor's number will be another connection's.
        """
        watch = Watch(sock.fileno(), on_gone)
        with self._lock:
            self._watches[watch.fd] = watch
        self._epoll.register(watch.fd, GONE | select.EPOLLONESHOT)
        return watch

    def unwatch(self, watch: Watch) -> None:
        """Forgets the socket; `on_gone` may still be running, but does not begin any more."""
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
            # The event may be of a connection that has ended since, its number taken by a new one: ask the socket itself.
            return watch if watch is not None and _is_gone(fd) else None


def _is_gone(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLRDHUP)
    return bool(poll.poll(0))
