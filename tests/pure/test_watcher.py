"""Noticing that a client has hung up."""

from __future__ import annotations

import queue
import socket
from collections.abc import Iterator

import pytest

from levserve.web.watcher import Watcher
from tests.waiting import PATIENCE_SECONDS


@pytest.fixture
def watcher() -> Iterator[Watcher]:
    watcher = Watcher()
    yield watcher
    watcher.stop()


@pytest.fixture
def gone() -> queue.Queue[str]:
    return queue.Queue()


def wait_until_idle(watcher: Watcher) -> None:
    """Waits until the watcher has handled all earlier events, by having it report one more leaving peer."""
    ours, theirs = socket.socketpair()
    told: queue.Queue[None] = queue.Queue()
    with ours:
        watch = watcher.watch(ours, lambda: told.put(None))
        theirs.close()
        told.get(timeout=PATIENCE_SECONDS)
        watcher.unwatch(watch)


@pytest.mark.parametrize("leaves_first", [False, True])
def test_a_peer_that_leaves_is_noticed_also_if_it_left_before(
    watcher: Watcher, gone: queue.Queue[str], leaves_first: bool
) -> None:
    ours, theirs = socket.socketpair()
    with ours:
        if leaves_first:
            theirs.close()
        watch = watcher.watch(ours, lambda: gone.put("gone"))
        theirs.close()
        assert gone.get(timeout=PATIENCE_SECONDS) == "gone"
        watcher.unwatch(watch)
        watcher.unwatch(watch)


def test_a_peer_that_closes_only_its_sending_side_has_left(watcher: Watcher, gone: queue.Queue[str]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        watch = watcher.watch(ours, lambda: gone.put("gone"))
        theirs.shutdown(socket.SHUT_WR)
        assert gone.get(timeout=PATIENCE_SECONDS) == "gone"
        watcher.unwatch(watch)


def test_a_peer_that_writes_has_not_left(watcher: Watcher, gone: queue.Queue[str]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        watch = watcher.watch(ours, lambda: gone.put("gone"))
        theirs.send(b"the next request")
        wait_until_idle(watcher)
        assert gone.empty()
        watcher.unwatch(watch)


def test_nobody_is_told_after_unwatching(watcher: Watcher, gone: queue.Queue[str]) -> None:
    ours, theirs = socket.socketpair()
    with ours:
        watcher.unwatch(watcher.watch(ours, lambda: gone.put("gone")))
        theirs.close()
        wait_until_idle(watcher)
        assert gone.empty()


def test_an_old_watch_does_not_end_the_one_that_took_its_descriptor(
    watcher: Watcher, gone: queue.Queue[str]
) -> None:
    ours, theirs = socket.socketpair()
    with ours:
        old = watcher.watch(ours, lambda: gone.put("old"))
        watcher.unwatch(old)
        new = watcher.watch(ours, lambda: gone.put("new"))
        watcher.unwatch(old)
        theirs.close()
        assert gone.get(timeout=PATIENCE_SECONDS) == "new"
        watcher.unwatch(new)
