"""How threads of a kernel's call wait for each other: many threads spin and then sleep, few threads yield.

Most waits take a few microseconds, less than it takes to wake a thread. A wait is long if the awaited thread
has lost its core to another program. A sleeping thread then leaves its core to the awaited one, and gets a
core back sooner than a thread that has spent its time slice spinning, or has yielded it.

Where a kernel has few threads, no core is left for the server's other threads. So a waiting thread yields its
core after every check, and reads the clock before and after. A yield as long as another program's time slice
shows that there is such a program. All threads of the kernel then spin and sleep for some time. Without
another program no yield takes that long.

A thread sleeps on the counter itself (a futex). Linux lets it sleep only if the counter is unchanged.
"""

from __future__ import annotations

import time

from llvmlite import ir

from levserve.jit.builder import I32, I64, Builder, Function, Value
from levserve.jit.program import Program

LOOKS = 1000
"""How many times a thread checks the counter before it sleeps; 1000 checks take some 40 microseconds."""
MANY_THREADS: dict[str, int | None] = {"x86_64": 5, "aarch64": None}
"""From this many threads on, threads never yield, but spin and sleep; None: any number of threads yields. On
two cores without other programs, eight streams were 10 % slower with spinning threads, because a thread that
spins keeps a core that the server needs."""
TURN_NANOSECONDS = 1_000_000
"""A yield that takes this long has given the core to another program: Linux lets a busy program run for 1.5
milliseconds or more, and the server's other threads run for less at a time."""
REMEMBERED_TURNS = 30
"""After such a yield, threads spin and sleep for this many times its duration. Then they yield again, to see
whether the other program is still running, which costs them one time slice in this many."""
FUTEX = {"x86_64": 202, "aarch64": 98}
"""The number of the system call on each architecture."""
WAIT, WAKE = 128, 129
"""The futex operations, for threads of one process only."""
ALL_SLEEPERS = 2**31 - 1


def write_wait(program: Program, num_threads: int) -> Function:
    """Adds a function that returns when a counter has reached a number, for a call of `num_threads` threads.

    Its arguments are the addresses of the counter and of the count of sleeping threads, and the number.
    """
    with program.function("wait", 3) as builder:
        counter, sleepers = (builder.to_pointer(address) for address in builder.arguments[:2])
        number, many = builder.arguments[2], MANY_THREADS[builder.target.arch]
        if many is None or num_threads < many:
            _write_yields(builder, counter, number)
        _write_looks(builder, counter, sleepers, number)
    return builder.function


def _write_yields(builder: Builder, counter: Value, number: Value) -> None:
    """Yields the core after every check until the counter has reached the number, or threads should sleep."""
    busy_until = _shared_word(builder, "busy_until")
    with builder.repeat() as after:
        builder.break_if(builder.atomic_load(counter) >= number, after)
        before = read_clock(builder)
        builder.break_if(before < builder.atomic_load(busy_until), after)
        builder.yield_processor()
        taken = read_clock(builder) - before
        with builder.when(taken >= TURN_NANOSECONDS):
            until = before + taken * (1 + REMEMBERED_TURNS)
            builder.ir.store_atomic(until.ir_value, busy_until.ir_value, "seq_cst", 8)


def _write_looks(builder: Builder, counter: Value, sleepers: Value, number: Value) -> None:
    """Checks `LOOKS` times whether the counter has reached the number, and then sleeps until it has."""
    looks = builder.variable(builder.constant(0))
    with builder.repeat() as after:
        count = builder.atomic_load(counter)
        builder.break_if(count >= number, after)
        builder.pause()
        looks.set(looks.get() + 1)
        with builder.when(looks.get() >= LOOKS):
            _write_sleep(builder, counter, sleepers, count)


def _write_sleep(builder: Builder, counter: Value, sleepers: Value, count: Value) -> None:
    """Sleeps until it is woken, unless the counter has changed.

    The thread that brings the counter to its number either sees this one among the sleepers and wakes it, or
    has changed the counter before, so that Linux does not let this one sleep.
    """
    builder.atomic_add(sleepers, 1)
    _call_futex(builder, counter, WAIT, count)
    builder.atomic_add(sleepers, -1)


def write_wake(builder: Builder, counter: Value, sleepers: Value) -> None:
    """Wakes all threads that sleep on a counter, which has reached their number."""
    with builder.when(builder.atomic_load(sleepers).differs_from(0)):
        _call_futex(builder, counter, WAKE, builder.constant(ALL_SLEEPERS))


def _call_futex(builder: Builder, counter: Value, what: int, number: Value) -> None:
    """Makes the system call. Linux compares only the first four bytes of the counter, its lower half."""
    arguments = ir.Constant(I64, FUTEX[builder.target.arch]), counter.ir_value, ir.Constant(I32, what)
    forever = ir.Constant(I64, 0)
    builder.call_symbol("syscall", I64, *arguments, number.ir_value, forever)


def _shared_word(builder: Builder, name: str) -> Value:
    """A pointer to an int64 that all calls of the program share; it begins as 0."""
    word = ir.GlobalVariable(builder.function.module, I64, name)
    word.linkage, word.initializer = "internal", ir.Constant(I64, 0)
    return Value(builder, word)


def read_clock(builder: Builder) -> Value:
    """Nanoseconds of a monotonic clock."""
    now = builder.stack_words(2)
    builder.call_symbol("clock_gettime", I32, ir.Constant(I32, time.CLOCK_MONOTONIC), now.ir_value)
    return builder.load_word(now, 0) * 10**9 + builder.load_word(now, 1)
