"""The connections between the hosts of a group: what arrives, who is refused, how dead hosts are noticed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from levserve.errors import ConfigError, StartupError
from levserve.hosts.follower import Follower
from levserve.hosts.frame import HEADER, MAX_BYTES, BadFrame, FrameKind, receive_frame, send_frame
from levserve.hosts.identity import Identity, Value, find_difference, identity_of, read_identity
from levserve.hosts.leader import Leader
from levserve.hosts.listener import listen
from levserve.hosts.peer import Peer, PeerLost
from levserve.settings.settings import Settings
from tests.waiting import wait_until

SAME = {"--dtype": Value("bfloat16", "default")}
SILENT_SECONDS = 2.5


@dataclass
class Group:
    """A leader on a free port, and what it reported about its followers."""

    address: tuple[str, int]
    leader: Leader
    lost: list[str] = field(default_factory=list)
    failed: list[StartupError] = field(default_factory=list)
    leaving: list[bool] = field(default_factory=list)
    ready: list[tuple[int, int]] = field(default_factory=list)
    stopped: list[bool] = field(default_factory=list)

    def gather(self, seconds: float = 20.0) -> threading.Thread:
        thread = threading.Thread(target=self.leader.gather, args=(seconds, lambda line: None))
        thread.start()
        return thread

    def follower(self, host_id: int = 1, **values: Value) -> Follower:
        """A follower that has introduced itself and is not accepted yet."""
        follower = Follower(
            self.address,
            timeout_seconds=10,
            on_lost=lambda reason: None,
            on_stop=lambda: self.stopped.append(True),
        )
        identity = Identity(host_id, {**SAME, **{f"--{name}": value for name, value in values.items()}})
        follower.send_text(FrameKind.HELLO, identity.to_json())
        return follower


@contextmanager
def group_of(num_hosts: int = 2) -> Iterator[Group]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = ("127.0.0.1", free.getsockname()[1])
    lost: list[str] = []
    failed: list[StartupError] = []
    leaving: list[bool] = []
    ready: list[tuple[int, int]] = []
    leader = Leader(
        address,
        Identity(0, SAME),
        num_hosts,
        on_lost=lost.append,
        on_failed=failed.append,
        on_leaving=lambda: leaving.append(True),
        on_ready=lambda host_id, number: ready.append((host_id, number)),
        silent_seconds=SILENT_SECONDS,
    )
    try:
        yield Group(address, leader, lost, failed, leaving, ready)
    finally:
        leader.close()


@contextmanager
def joined() -> Iterator[tuple[Group, Follower]]:
    """A leader and a follower that it has accepted."""
    with group_of() as group:
        gathering = group.gather()
        follower = group.follower()
        follower.expect(FrameKind.WELCOME)
        gathering.join()
        try:
            yield group, follower
        finally:
            follower.close()


def answer(follower: Follower, kind: FrameKind, number: int = 0, payload: bytes = b"") -> None:
    threading.Thread(target=follower.send, args=(kind, number, payload)).start()


FRAMES = st.tuples(
    st.sampled_from(FrameKind), st.integers(0, 2**16 - 1), st.lists(st.binary(max_size=300), max_size=4)
)


@given(st.lists(FRAMES, max_size=6), st.lists(st.integers(1, 40), min_size=1))
def test_frames_arrive_whole_and_in_order_however_they_are_cut(
    frames: list[tuple[FrameKind, int, list[bytes]]], sizes: list[int]
) -> None:
    ours, theirs = socket.socketpair()
    relay_in, relay_out = socket.socketpair()
    with ours, theirs, relay_in, relay_out:
        for kind, number, parts in frames:
            send_frame(ours, kind, number, [memoryview(part) for part in parts])
        ours.shutdown(socket.SHUT_WR)
        sent = b""
        while part := theirs.recv(1 << 16):
            sent += part
        position = index = 0
        while position < len(sent):
            size = sizes[index % len(sizes)]
            relay_in.sendall(sent[position : position + size])
            position, index = position + size, index + 1
        relay_in.shutdown(socket.SHUT_WR)
        for kind, number, parts in frames:
            assert receive_frame(relay_out) == (kind, number, b"".join(parts))
        assert receive_frame(relay_out) is None


@given(st.binary(min_size=1, max_size=200))
def test_rubbish_is_a_bad_frame_or_a_cut_one_and_never_anything_else(rubbish: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(rubbish)
        ours.shutdown(socket.SHUT_WR)
        try:
            while (frame := receive_frame(theirs, 64)) is not None:
                assert len(frame.payload) <= 64
        except (BadFrame, ConnectionResetError):
            pass


def test_a_large_array_goes_out_while_the_other_side_reads_slowly() -> None:
    ours, theirs = socket.socketpair()
    array = memoryview(bytes(range(256)) * 4096)
    with ours, theirs:
        sender = threading.Thread(target=send_frame, args=(ours, FrameKind.RUN, 7, [array, array]))
        sender.start()
        frame = receive_frame(theirs)
        sender.join()
    assert frame is not None and (frame.number, frame.payload) == (7, bytes(array) * 2)


@given(st.binary(max_size=100))
def test_only_an_introduction_is_read_as_one(payload: bytes) -> None:
    with pytest.raises(ValueError):
        read_identity(payload)


def test_an_introduction_survives_its_journey() -> None:
    identity = identity_of(Settings(host_id=1, num_hosts=2))
    assert read_identity(identity.to_json().encode()) == identity
    assert {"jax's version", "--dtype", "--max-running"} < identity.values.keys()


def test_what_differs_is_told_by_name_with_its_source() -> None:
    other = Identity(3, {"--dtype": Value("float32", "command line")})
    assert find_difference(Identity(0, SAME), other) == (
        "host 3 differs from host 0: --dtype is float32 (command line) there and bfloat16 (default) on host 0"
    )
    assert find_difference(Identity(0, SAME), Identity(3, SAME)) is None
    assert "unknown there" in str(find_difference(Identity(0, SAME), Identity(1, {})))


def test_all_hosts_are_welcomed_together_and_told_the_same_in_order() -> None:
    with group_of(3) as group:
        gathering = group.gather()
        followers = [group.follower(2)]
        assert followers[0].take(timeout_seconds=0.2) is None
        followers.append(group.follower(1))
        gathering.join()
        for number in range(100):
            group.leader.send(FrameKind.RUN, number, [memoryview(bytes([number]))])
        for follower in followers:
            follower.expect(FrameKind.WELCOME)
            assert [follower.expect(FrameKind.RUN).number for _ in range(100)] == list(range(100))
        for follower in followers:
            answer(follower, FrameKind.MEMORY, payload=b"5")
        assert group.leader.ask(FrameKind.MEMORY) == {1: b"5", 2: b"5"}
        for follower in followers:
            follower.close()


def test_a_host_with_another_setting_is_refused_by_name_and_may_come_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with group_of() as group:
        gathering = group.gather()
        other = group.follower(dtype=Value("float32", "file a.ini"))
        with pytest.raises(ConfigError, match=r"--dtype is float32 \(file a.ini\) there and bfloat16"):
            other.expect(FrameKind.WELCOME)
        other.close()
        assert "refused 127.0.0.1: host 1 differs from host 0: --dtype is float32" in caplog.text
        right = group.follower()
        right.expect(FrameKind.WELCOME)
        gathering.join()
        right.close()


@pytest.mark.parametrize("host_id, reason", [(0, "has the number 0"), (7, "has the number 7")])
def test_a_number_that_no_follower_has_is_refused(host_id: int, reason: str) -> None:
    with group_of() as group:
        gathering = group.gather()
        stranger = group.follower(host_id)
        with pytest.raises(ConfigError, match=reason):
            stranger.expect(FrameKind.WELCOME)
        stranger.close()
        right = group.follower()
        right.expect(FrameKind.WELCOME)
        gathering.join()
        right.close()


def test_two_hosts_cannot_have_one_number() -> None:
    with group_of(3) as group:
        gathering = group.gather()
        first = group.follower(1)
        wait_until(lambda: 1 in group.leader._peers)
        second = group.follower(1)
        with pytest.raises(ConfigError, match="host 1 has already joined, from 127.0.0.1"):
            second.expect(FrameKind.WELCOME)
        second.close()
        other = group.follower(2)
        gathering.join()
        for follower in (first, other):
            follower.close()


def test_strangers_on_the_port_are_sent_away_and_the_group_forms(caplog: pytest.LogCaptureFixture) -> None:
    with group_of() as group:
        gathering = group.gather()
        for rubbish in (b"GET / HTTP/1.1\r\n\r\n", HEADER.pack(FrameKind.HELLO, 0, MAX_BYTES), b"", b"\x01"):
            with socket.create_connection(group.address) as stranger:
                stranger.sendall(rubbish)
        with socket.create_connection(group.address) as stranger:
            send_frame(stranger, FrameKind.HELLO, 0, [memoryview(b'{"protocol": 1}')])
            stranger.settimeout(10)
            assert stranger.recv(1) == b""
        follower = group.follower()
        follower.expect(FrameKind.WELCOME)
        gathering.join()
        follower.close()
    assert caplog.text.count("which is not a host of this group") == 5


def test_a_stranger_that_sends_byte_after_byte_is_sent_away_in_time(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others wait meanwhile, and so does --hosts-timeout."""
    monkeypatch.setattr("levserve.hosts.leader.HELLO_SECONDS", 0.4)
    with group_of() as group, socket.create_connection(group.address) as stranger:
        gathering = group.gather()
        with pytest.raises(OSError):
            stranger.sendall(HEADER.pack(FrameKind.HELLO, 0, 60_000))
            for _ in range(100):
                stranger.sendall(b" ")
                time.sleep(0.1)
        follower = group.follower()
        follower.expect(FrameKind.WELCOME)
        gathering.join()
        follower.close()
    assert "which is not a host of this group: timed out" in caplog.text


def test_a_host_that_leaves_before_all_are_there_may_come_back(caplog: pytest.LogCaptureFixture) -> None:
    with group_of(3) as group:
        gathering = group.gather()
        group.follower(1).close()
        wait_until(lambda: "it may come back" in caplog.text)
        followers = [group.follower(1), group.follower(2)]
        gathering.join()
        assert not group.lost
        for follower in followers:
            follower.close()


def test_hosts_that_do_not_come_in_time_are_named_on_all_others() -> None:
    with group_of(4) as group:
        here = group.follower(2)

        def leave() -> None:
            with pytest.raises(StartupError, match="host 0 refuses this host: hosts 1, 3 did not join"):
                here.expect(FrameKind.WELCOME)
            here.close()

        leaving = threading.Thread(target=leave)
        leaving.start()
        with pytest.raises(StartupError, match=r"hosts 1, 3 did not join within --hosts-timeout 1 s"):
            group.leader.gather(1.0, lambda line: None)
        leaving.join()


def test_a_host_0_that_does_not_come_in_time_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = free.getsockname()
    with pytest.raises(StartupError, match=rf"host 0 did not answer at 127.0.0.1:{address[1]} within"):
        Follower(address, timeout_seconds=0.6, on_lost=lambda reason: None, on_stop=lambda: None)


def test_a_taken_port_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(StartupError, match="cannot listen there: Address already in use"):
            listen(*taken.getsockname())


def test_host_0_listens_before_its_own_name_is_known(caplog: pytest.LogCaptureFixture) -> None:
    """A LeaderWorkerSet's DNS record may appear after the pod has started."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with listen("m-0.m.invalid", port):
        socket.create_connection(("127.0.0.1", port)).close()
    assert "m-0.m.invalid is not known here" in caplog.text


def test_a_follower_that_ends_is_missed_at_once() -> None:
    with joined() as (group, follower):
        follower.close()
        wait_until(lambda: bool(group.lost), 5)
        assert group.lost == ["host 1 at 127.0.0.1 has ended its connection"]
        with pytest.raises(PeerLost, match="host 1 at"):
            group.leader.ask(FrameKind.MODEL)


def join_telling_losses(group: Group, lost: list[str]) -> Follower:
    """A follower that the leader has accepted, and that notes here why it lost the leader."""
    gathering = group.gather()
    follower = Follower(group.address, timeout_seconds=10, on_lost=lost.append, on_stop=lambda: None)
    follower.join(Identity(1, SAME))
    gathering.join()
    return follower


def test_a_leader_that_ends_is_missed_at_once() -> None:
    lost: list[str] = []
    with group_of() as group:
        follower = join_telling_losses(group, lost)
    wait_until(lambda: bool(lost), 5)
    assert f"host 0 at 127.0.0.1:{group.address[1]} has ended its connection" in lost[0]
    with pytest.raises(PeerLost):
        follower.take()
    follower.close()


def test_a_group_that_is_stopped_in_order_loses_nobody() -> None:
    with joined() as (group, follower):
        stopping = threading.Thread(target=group.leader.stop)
        stopping.start()
        wait_until(lambda: bool(group.stopped), 5)
        follower.close()
        stopping.join(4)  # returns once the follower has left
        assert not stopping.is_alive()
        assert not group.lost


def test_a_follower_tells_what_it_has_compiled() -> None:
    with joined() as (group, follower):
        follower.send(FrameKind.READY, 7)
        wait_until(lambda: group.ready == [(1, 7)], 5)


def test_a_follower_that_is_asked_to_end_asks_the_leader() -> None:
    with joined() as (group, follower):
        follower.leave(is_orderly=True)
        wait_until(lambda: bool(group.leaving), 5)
        assert not group.lost


def test_a_follower_that_is_asked_to_end_before_all_are_there_goes_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with group_of(3) as group:
        gathering = group.gather()
        first = group.follower(1)
        wait_until(lambda: list(group.leader._peers) == [1])
        first.leave(is_orderly=True)
        wait_until(lambda: "host 1 at 127.0.0.1 was asked to end; it may come back" in caplog.text)
        first.close()
        followers = [group.follower(1), group.follower(2)]
        gathering.join()
        assert not group.lost and not group.leaving
        for follower in followers:
            follower.close()


@pytest.mark.parametrize("error", [StartupError("no weights"), ConfigError("--device gpu: none")])
def test_a_follower_that_cannot_start_ends_the_start_for_its_reason(error: StartupError) -> None:
    """A supervisor starts neither host again if the reason is a setting: the exit code says so."""
    with joined() as (group, follower):
        follower.fail(error.exit_code, str(error))
        wait_until(lambda: bool(group.failed), 5)
        assert str(group.failed[0]) == f"host 1 at 127.0.0.1 cannot start: {error}"
        assert type(group.failed[0]) is type(error)
        assert not group.lost


def test_a_follower_that_cannot_start_does_not_miss_the_leader_that_ends_for_it() -> None:
    """Else its process could end with the exit code of a lost host 0, and not with that of its own reason."""
    lost: list[str] = []
    with group_of() as group:
        follower = join_telling_losses(group, lost)
        follower.fail(1, "no weights")
        assert follower.is_leaving
    with pytest.raises(PeerLost):
        follower.take(5)
    wait_until(lambda: all(thread.name != "levserve-leader" for thread in threading.enumerate()), 5)
    assert not lost
    follower.close()


def test_followers_are_refused_with_the_exit_code_of_the_reason() -> None:
    with joined() as (group, follower):
        refusing = threading.Thread(target=group.leader.refuse, args=(ConfigError("--device gpu: none"),))
        refusing.start()
        with pytest.raises(ConfigError, match="host 0 refuses this host: --device gpu: none"):
            follower.expect(FrameKind.COMPILED)
        follower.close()
        refusing.join()


def test_a_follower_that_is_stopped_at_once_is_lost() -> None:
    with joined() as (group, follower):
        follower.leave(is_orderly=False)
        wait_until(lambda: bool(group.lost), 5)
        assert "was stopped immediately" in group.lost[0]


CHILD = """
import sys
from levserve.hosts.follower import Follower
from levserve.hosts.frame import FrameKind
from levserve.hosts.identity import Identity, Value
address = "127.0.0.1", int(sys.argv[1])
follower = Follower(address, timeout_seconds=10, on_lost=lambda reason: None, on_stop=lambda: None)
follower.join(Identity(1, {"--dtype": Value("bfloat16", "default")}))
while True:
    frame = follower.take()
    follower.send(FrameKind.MEMORY, frame.number, frame.payload)
"""


@pytest.fixture
def child() -> Iterator[tuple[Group, subprocess.Popen[bytes]]]:
    """A leader's group and a follower process, which sends back the payloads it receives."""
    with group_of() as group:
        gathering = group.gather()
        process = subprocess.Popen([sys.executable, "-c", CHILD, str(group.address[1])])
        gathering.join()
        try:
            yield group, process
        finally:
            process.kill()
            process.wait()


def test_a_killed_process_is_missed_at_once(child: tuple[Group, subprocess.Popen[bytes]]) -> None:
    group, process = child
    group.leader.send(FrameKind.RUN, 3, [memoryview(b"abc")])
    assert group.leader.ask(FrameKind.MEMORY) == {1: b"abc"}
    process.kill()
    wait_until(lambda: bool(group.lost), 5)
    assert "host 1 at 127.0.0.1 has ended its connection" in group.lost[0]


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_process_that_hangs_is_missed_within_seconds(
    child: tuple[Group, subprocess.Popen[bytes]], is_busy: bool
) -> None:
    """Its machine still acknowledges what is sent to it, so only the missing beats reveal the hang."""
    group, process = child
    os.kill(process.pid, signal.SIGSTOP)
    if is_busy:
        block = memoryview(bytes(1 << 20))
        with pytest.raises(PeerLost, match="has read nothing for|has ended its connection"):
            while True:
                group.leader.send(FrameKind.RUN, 0, [block])
    wait_until(lambda: bool(group.lost), 4 * SILENT_SECONDS)
    assert "for 2.5 s" in group.lost[0] or "has ended its connection" in group.lost[0]


def test_an_idle_group_stays_together_by_its_beats(child: tuple[Group, subprocess.Popen[bytes]]) -> None:
    group, _ = child
    time.sleep(SILENT_SECONDS + 1)
    group.leader.send(FrameKind.RUN, 1, [memoryview(b"x")])
    assert group.leader.ask(FrameKind.MEMORY) == {1: b"x"}
    assert not group.lost


def test_a_peer_that_is_closed_wakes_the_thread_that_receives() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    peer = Peer(ours)
    failures: list[Exception] = []

    def receive() -> None:
        try:
            peer.receive()
        except PeerLost as error:
            failures.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    peer.end()
    thread.join(5)
    peer.close()
    theirs.close()
    assert failures
