"""What host 0 agrees on with the others before and while they serve; followers are threads without jax."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from levserve.engine.engine import Engine
from levserve.errors import StartupError
from levserve.hosts.follower import Follower
from levserve.hosts.frame import FrameKind
from levserve.hosts.identity import identity_of
from levserve.models.group import DROP, SWAP_IN, Group
from levserve.observe.metrics import Metrics
from levserve.settings.settings import Settings
from levserve.weights.fingerprint import fingerprint
from levserve.weights.model_files import ModelFiles
from tests.waiting import wait_until

if TYPE_CHECKING:
    from levserve.device.executor import Executor


@pytest.fixture
def files(tmp_path: Path) -> ModelFiles:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return ModelFiles("llama", tmp_path)


@contextmanager
def joined() -> Iterator[tuple[Group, Follower]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = Settings(coordinator=f"127.0.0.1:{port}", num_hosts=2, host_id=0)
    engine = Engine(max_inflight=1, metrics=Metrics())
    group = Group(settings, engine)
    gathering = threading.Thread(target=group.gather, args=(lambda line: None,))
    gathering.start()
    follower = Follower(
        ("127.0.0.1", port), timeout_seconds=10, on_lost=lambda reason: None, on_stop=lambda: None
    )
    follower.join(identity_of(Settings(coordinator=settings.coordinator, num_hosts=2, host_id=1)))
    gathering.join()
    ending = threading.Thread(target=engine.close)  # as the server does: the group ends in order
    try:
        yield group, follower
    finally:
        ending.start()
        follower.close()
        ending.join()


@contextmanager
def beside(work: Callable[[], object]) -> Iterator[None]:
    thread = threading.Thread(target=work)
    thread.start()
    yield
    thread.join()


def test_hosts_with_the_same_files_go_on(files: ModelFiles) -> None:
    with joined() as (group, follower):
        follower.send_text(FrameKind.MODEL, fingerprint(files))
        group.agree_on_model(files)
        follower.expect(FrameKind.MODEL)


def test_a_host_with_other_files_ends_the_start_everywhere(files: ModelFiles) -> None:
    with joined() as (group, follower):
        follower.send_text(FrameKind.MODEL, "other")
        told: list[str] = []

        def follow() -> None:
            with pytest.raises(StartupError) as refused:
                follower.expect(FrameKind.MODEL)
            told.append(str(refused.value))
            follower.close()

        with beside(follow), pytest.raises(StartupError, match="host 1 has another model than host 0"):
            group.agree_on_model(files)
        assert "the fingerprint" in told[0] and "other there" in told[0]


def test_all_hosts_plan_for_the_least_free_memory() -> None:
    with joined() as (group, follower):
        follower.send_text(FrameKind.MEMORY, "700")
        assert group.agree_on_memory(1000) == 700
        assert follower.expect(FrameKind.MEMORY).payload == b"700"


class Programs:
    """Stands in for an executor's programs; records which numbers were opened."""

    numbers = {"small": 4, "large": 5}

    def __init__(self) -> None:
        self.opened: list[int] = []
        self.on_compiled: Callable[[str], None] = lambda shape: None

    def open_number(self, number: int) -> None:
        self.opened.append(number)


class Led:
    """The parts of an executor that a group uses."""

    def __init__(self) -> None:
        self.programs = Programs()
        self.announce: Any = None
        self.announce_swap: Any = None


def test_a_program_is_used_when_all_hosts_have_compiled_it() -> None:
    with joined() as (group, follower):
        led = Led()
        follower.send(FrameKind.COMPILED)
        group.lead(cast("Executor", led))
        follower.send(FrameKind.READY, 4)
        led.programs.on_compiled("large")
        led.programs.on_compiled("small")
        wait_until(lambda: bool(led.programs.opened))
        assert led.programs.opened == [4]
        follower.send(FrameKind.READY, 5)
        wait_until(lambda: led.programs.opened == [4, 5])


def test_runs_and_swaps_reach_the_others_in_their_order() -> None:
    with joined() as (group, follower):
        led = Led()
        follower.send(FrameKind.COMPILED)
        group.lead(cast("Executor", led))
        led.announce(4, [memoryview(b"ab"), memoryview(b"c")])
        led.announce_swap()
        led.announce(5, [])
        assert follower.expect(FrameKind.RUN)[1:] == (4, b"abc")
        assert follower.expect(FrameKind.SWAP).number == SWAP_IN
        assert follower.expect(FrameKind.RUN).number == 5


def read_as(follower: Follower, answer: dict[str, str]) -> dict[str, str]:
    """Answers host 0's request to read weights; returns what was asked for."""
    asked: dict[str, str] = json.loads(follower.expect(FrameKind.READ).payload)
    follower.send_text(FrameKind.READ, json.dumps(answer))
    return asked


def test_a_reload_begins_when_all_hosts_have_read_the_same_weights(files: ModelFiles) -> None:
    with joined() as (group, follower):
        group.begin_read(Settings(model="/new", revision="r"))
        asked = read_as(follower, {"fingerprint": fingerprint(files)})
        assert asked == {"model": "/new", "checkpoint_path": "", "revision": "r"}
        group.end_read(files)
        assert follower.take(timeout_seconds=0.1) is None  # the swap is announced later, by the device thread


@pytest.mark.parametrize(
    "answer, reason",
    [
        ({"error": "cannot read them: gone"}, "host 1 cannot read them: gone"),
        ({"fingerprint": "x"}, "other files"),
    ],
)
def test_a_host_that_cannot_read_the_weights_refuses_the_reload_for_all(
    files: ModelFiles, answer: dict[str, str], reason: str
) -> None:
    with joined() as (group, follower):
        group.begin_read(Settings(model="/new"))
        read_as(follower, answer)
        with pytest.raises(StartupError, match=reason):
            group.end_read(files)
        assert follower.expect(FrameKind.SWAP).number == DROP


def test_weights_that_host_0_cannot_read_are_dropped_by_the_others() -> None:
    with joined() as (group, follower):
        group.begin_read(Settings(model="/new"))
        read_as(follower, {"fingerprint": "x"})
        group.end_read(None)
        assert follower.expect(FrameKind.SWAP).number == DROP
