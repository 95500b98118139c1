"""How threads of a kernel's call wait for each other: many look a while and then sleep, few yield.

Most waits take a few microseconds, less than it takes to wake a thread. A wait is long where the thread that
is waited for has lost its core to another program. Then the core of a thread that sleeps is free for it, and
a thread that has slept gets a core back sooner than one that has spent its turn looking, or given it away.

Few threads leave no core to the server's others, so one that waits yields its core at every look, and reads
the clock before and after. A yield that took as long as another program's turn tells that there is one. Then
all threads of the kernel sleep as many do, for some time. Alone, no yield takes that long.

A thread sleeps on the counter itself (a futex). The kernel lets it sleep only if the counter is unchanged.
"""

from __future__ import annotations

import time

from llvmlite import ir

from levserve.jit.builder import I32, I64, Builder, Function, Value
from levserve.jit.program import Program

LOOKS = 1000
"""How often a thread looks before it sleeps; a thousand times are some 40 microseconds."""
MANY_THREADS: dict[str, int | None] = {"x86_64": 5, "aarch64": None}
"""From so many threads on, all sleep always; None: they are always few. On two cores, eight streams alone
were a tenth slower with threads that do, because one that looks keeps a core that the server wants."""
TURN_NANOSECONDS = 1_000_000
"""A yield that takes so long has given the core to another program: Linux lets one that is busy run for 1.5
milliseconds or more, and the server's other threads run for less at a time."""
REMEMBERED_TURNS = 30
"""After such a yield threads sleep for so many times as long. Then they yield again, to see whether the other
program is still there, which costs them one turn in so many."""
FUTEX = {"x86_64": 202, "aarch64": 98}
"""The number of the system call."""
WAIT, WAKE = 128, 129
"""What to do, in one process only."""
EVERYONE = 2**31 - 1


def write_wait(program: Program, num_threads: int) -> Function:
    """Adds a function that returns when a counter has reached a number, for a call of so many threads.

    Its arguments are the addresses of the counter and of a count of those that sleep, and the number.
    """
    with program.function("wait", 3) as builder:
        counter, sleepers = (builder.to_pointer(address) for address in builder.arguments[:2])
        number, many = builder.arguments[2], MANY_THREADS[builder.target.arch]
        if many is None or num_threads < many:
            _write_yields(builder, counter, number)
        _write_looks(builder, counter, sleepers, number)
    return builder.function


def _write_yields(builder: Builder, counter: Value, number: Value) -> None:
    """Yields the core at every look until the counter has reached the number, or threads are to sleep."""
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
    """Looks so many times whether the counter has reached the number, and then sleeps until it has."""
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

    Whoever brings the counter to its number either sees this thread among the sleepers and wakes it, or has
    changed the counter before, so that the kernel does not let it sleep.
    """
    builder.atomic_add(sleepers, 1)
    _call_futex(builder, counter, WAIT, count)
    builder.atomic_add(sleepers, -1)


def write_wake(builder: Builder, counter: Value, sleepers: Value) -> None:
    """Wakes all that sleep on a counter that has reached their number."""
    with builder.when(builder.atomic_load(sleepers).differs_from(0)):
        _call_futex(builder, counter, WAKE, builder.constant(EVERYONE))


def _call_futex(builder: Builder, counter: Value, what: int, number: Value) -> None:
    """The kernel looks at the first four bytes of the counter, which are its lower half."""
    arguments = ir.Constant(I64, FUTEX[builder.target.arch]), counter.ir_value, ir.Constant(I32, what)
    forever = ir.Constant(I64, 0)
    builder.call_symbol("syscall", I64, *arguments, number.ir_value, forever)


def _shared_word(builder: Builder, name: str) -> Value:
    """A pointer to an int64 that all calls of the program share; it begins as 0."""
    word = ir.GlobalVariable(builder.function.module, I64, name)
    word.linkage, word.initializer = "internal", ir.Constant(I64, 0)
    return Value(builder, word)


def read_clock(builder: Builder) -> Value:
    """Nanoseconds of a clock that never goes back."""
    now = builder.stack_words(2)
    builder.call_symbol("clock_gettime", I32, ir.Constant(I32, time.CLOCK_MONOTONIC), now.ir_value)
    return builder.load_word(now, 0) * 10**9 + builder.load_word(now, 1)
