"""When memory is given back to the system; tests/tiny/test_compiled.py checks that it is."""

from __future__ import annotations

from levserve.device.malloc import TRIM_SECONDS, Trimmer


class Process:
    """A process whose memory and clock are set by hand; a trim leaves it `live` bytes."""

    def __init__(self, live: int) -> None:
        self.now = 100.0
        self.memory = self.live = live
        self.num_trims = 0
        self._trimmer = Trimmer(memory=lambda: self.memory, trim=self._trim, clock=lambda: self.now)

    def tick(self, memory: int, seconds: float = TRIM_SECONDS) -> None:
        self.memory = memory
        self.now += seconds
        self._trimmer.tick()

    def _trim(self) -> None:
        self.memory = self.live
        self.num_trims += 1


def test_memory_that_stays_level_is_left_alone() -> None:
    process = Process(1000)
    for memory in (1000, 1019, 1010, 1020, 1005):
        process.tick(memory)
    assert process.num_trims == 0


def test_memory_that_grows_slowly_is_given_back_at_two_percent() -> None:
    process = Process(1000)
    for _ in range(210):
        process.tick(process.memory + 1)
        assert process.memory <= 1020
    assert process.num_trims == 10


def test_what_a_trim_leaves_is_the_new_level() -> None:
    process = Process(1000)
    process.live = 1100
    process.tick(1150)
    process.tick(1120)
    assert process.num_trims == 1
    process.tick(1123)
    assert process.num_trims == 2


def test_a_process_that_shrank_may_grow_from_there_only() -> None:
    process = Process(1000)
    process.live = 500
    process.tick(500)
    process.tick(520)
    assert process.num_trims == 1


def test_trims_have_some_time_between_them() -> None:
    process = Process(1000)
    process.tick(2000)
    process.tick(2000, seconds=TRIM_SECONDS / 2)
    assert process.num_trims == 1
    process.tick(2000, seconds=TRIM_SECONDS / 2)
    assert process.num_trims == 2
