"""Threads of a call wait for each other: a stage sees all of the one before, and no thread sleeps forever."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levserve.jit import waiting, xla_call
from levserve.jit.builder import Value
from levserve.jit.program import Code, Program
from levserve.jit.xla_call import Call, Kernel, Stage
from tests.targets import HOST
from tests.waiting import PATIENCE_SECONDS, wait_until

NUM_TASKS, NUM_ITERATIONS, NUM_THREADS = 12, 25, 4
NEVER = 2**60


def set_way(
    monkeypatch: pytest.MonkeyPatch,
    *,
    sleeps_always: bool,
    looks: int = 0,
    turn: int = waiting.TURN_NANOSECONDS,
) -> None:
    monkeypatch.setitem(waiting.MANY_THREADS, HOST.arch, 0 if sleeps_always else None)
    monkeypatch.setattr(waiting, "LOOKS", looks)
    monkeypatch.setattr(waiting, "TURN_NANOSECONDS", turn)


@dataclass
class Counter:
    """A counter, the number of threads that sleep until it is 1, and a kernel's functions for both."""

    words: ctypes.Array[ctypes.c_int64] = field(default_factory=ctypes.c_int64 * 2)

    def __post_init__(self) -> None:
        program = Program(HOST)
        waiting.write_wait(program, 2)
        with program.function("reach", 2) as builder:
            counter, sleepers = (builder.to_pointer(address) for address in builder.arguments)
            builder.atomic_add(counter, 1)
            waiting.write_wake(builder, counter, sleepers)
        self._code = Code(program.compile())

    @property
    def num_sleepers(self) -> int:
        return self.words[1]

    def wait(self) -> None:
        self._call("wait", 1)

    def reach(self) -> None:
        self._call("reach")

    def _call(self, name: str, *numbers: int) -> None:
        kind = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * (2 + len(numbers)))
        start = ctypes.addressof(self.words)
        kind(self._code.address(name))(start, start + 8, *numbers)


@contextmanager
def running(work: Callable[[], None]) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield thread
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive(), "a thread sleeps for ever"


def test_a_thread_sleeps_after_a_yield_that_took_as_long_as_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    set_way(monkeypatch, sleeps_always=False, turn=0)
    monkeypatch.setattr(waiting, "REMEMBERED_TURNS", 10**6)
    counter = Counter()
    with running(counter.wait):
        wait_until(lambda: counter.num_sleepers == 1)
        counter.reach()
    counter.words[0] = 0
    with running(counter.wait):  # the long yield is remembered
        wait_until(lambda: counter.num_sleepers == 1)
        counter.reach()
    assert counter.num_sleepers == 0


def test_a_thread_that_waits_yields_while_no_yield_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    set_way(monkeypatch, sleeps_always=False, turn=NEVER)
    counter, done = Counter(), threading.Event()
    with running(lambda: (counter.wait(), done.set())):
        for _ in range(20):
            assert not done.wait(0.005) and counter.num_sleepers == 0
        counter.reach()


def test_a_thread_sleeps_beside_a_busy_process_on_its_core(monkeypatch: pytest.MonkeyPatch) -> None:
    set_way(monkeypatch, sleeps_always=False)
    counter, core = Counter(), {min(os.sched_getaffinity(0))}

    def wait_on_core() -> None:
        os.sched_setaffinity(0, core)  # of this thread only
        counter.wait()

    busy = subprocess.Popen(
        [sys.executable, "-c", f"import os; os.sched_setaffinity(0, {core})\nwhile True: pass"]
    )
    try:
        with running(wait_on_core):
            wait_until(lambda: counter.num_sleepers == 1)
            counter.reach()
    finally:
        busy.kill()
        busy.wait()


def carousel(name: str) -> Kernel:
    """Moves each number, plus one, a place to the right: to shared memory and back, one number per task."""

    def num_tasks(call: Call) -> Value:
        return call.builder.constant(NUM_TASKS)

    def move(call: Call, source: Value, into: Value, task: Value) -> None:
        number = call.builder.load_word(source, (task + (NUM_TASKS - 1)) % NUM_TASKS)
        call.builder.store(into + task * 8, number + 1)

    def move_to_shared(call: Call, shared: Value, _: Value, task: Value) -> None:
        move(call, call.result(0), shared, task)

    def move_back(call: Call, shared: Value, _: Value, task: Value) -> None:
        move(call, shared, call.result(0), task)

    return Kernel(
        name,
        HOST,
        (Stage(num_tasks, move_to_shared), Stage(num_tasks, move_back)),
        NUM_ITERATIONS,
        shared_bytes=lambda call: call.builder.constant(8 * NUM_TASKS),
    )


@pytest.mark.parametrize(
    "way",
    [
        {"sleeps_always": True, "looks": 0},
        {"sleeps_always": True, "looks": 30},
        {"sleeps_always": False, "turn": 0},
        {"sleeps_always": False, "turn": NEVER},
    ],
    ids=str,
)
def test_threads_that_sleep_are_woken_and_see_what_was_done(
    way: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads hardly look before they sleep, and outnumber the cores, so nearly every wait is a sleep."""
    monkeypatch.setenv("NPROC", "6")
    set_way(monkeypatch, **way)
    name = xla_call.register(carousel("carousel_" + "_".join(map(str, way.values()))))
    jax.config.update("jax_enable_x64", True)
    try:
        start = jnp.arange(NUM_TASKS, dtype=jnp.int64)
        call = jax.ffi.ffi_call(
            name, jax.ShapeDtypeStruct(start.shape, start.dtype), input_output_aliases={0: 0}
        )
        run = jax.jit(call).lower(start).compile()
    finally:
        jax.config.update("jax_enable_x64", False)
    moves = 2 * NUM_ITERATIONS
    wanted = np.roll(np.arange(NUM_TASKS), moves % NUM_TASKS) + moves
    failures: list[AssertionError] = []

    def work() -> None:
        try:
            for _ in range(300):
                np.testing.assert_array_equal(run(start), wanted)
        except AssertionError as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a thread sleeps for ever"
    assert not failures
