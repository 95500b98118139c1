"""A connection as the main loop uses it: it never blocks, and the kernel enforces the limits."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from levserve.settings.settings import Settings
from levserve.wire.connection import LINGER_BYTES, Connection

Pair = tuple[Connection, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname(), timeout=5) as peer,
    ):
        sock, address = listener.accept()
        connection = Connection(sock, address, listener.getsockname(), Settings(send_timeout=0.5))
        yield connection, peer
        connection.close()


def test_a_peer_that_vanishes_or_does_not_read_is_the_kernels_to_notice(pair: Pair) -> None:
    sock = pair[0].sock
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    idle, interval, count = (
        sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_KEEP{word}"))
        for word in ("IDLE", "INTVL", "CNT")
    )
    assert idle + interval * count == 30
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 500
    with pytest.raises((BlockingIOError, TimeoutError)):  # whichever limit comes first
        sock.sendall(b"x" * 2**26)


def test_nothing_to_read_is_not_waited_for(pair: Pair) -> None:
    connection, peer = pair
    assert connection.receive() is None
    assert not connection.has_lingered()
    peer.close()
    assert connection.receive() == b""
    assert connection.has_lingered()


def test_an_answer_that_does_not_fit_is_not_waited_for(pair: Pair) -> None:
    assert pair[0].send_now(b"short")
    assert not pair[0].send_now(b"x" * 2**26)


def test_lingering_ends_with_a_peer_that_sends_without_end(pair: Pair) -> None:
    connection, peer = pair
    connection.finish_sending()
    assert peer.recv(1) == b""
    peer.setblocking(False)
    num_sent = 0
    while not connection.has_lingered():
        num_sent += peer.send(b"x" * 4096)
    assert num_sent >= LINGER_BYTES


def test_what_is_aborted_is_reset(pair: Pair) -> None:
    connection, peer = pair
    connection.abort()
    with pytest.raises(ConnectionResetError):
        peer.recv(1)
