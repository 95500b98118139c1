"""How threads of a kernel's call wait for each other: they look a while, and then sleep until they are woken.

Most waits take a few microseconds, less than it takes to wake a thread. A wait is long where the thread that
is waited for has lost its core to another program. Then the core of a thread that sleeps is free for it, and
a thread that has slept gets a core back sooner than one that has spent its turn looking, or given it away.

A thread sleeps on the counter itself (a futex). The kernel lets it sleep only if the counter is unchanged.
"""

from __future__ import annotations

from llvmlite import ir

from levserve.jit.builder import I32, I64, Builder, Function, Value
from levserve.jit.program import Program

LOOKS: dict[str, int | None] = {"x86_64": 1000, "aarch64": None}
"""How often a thread looks before it sleeps; a thousand times are some 40 microseconds. With None it never
sleeps, and gives its core away after each look."""
MANY_THREADS = 5
"""Fewer threads never sleep: on two cores, eight streams alone were a tenth slower with threads that do."""
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
        looks = builder.variable(builder.constant(0))
        with builder.repeat() as after:
            count = builder.atomic_load(counter)
            builder.break_if(count >= builder.arguments[2], after)
            max_looks = LOOKS[builder.target.arch] if num_threads >= MANY_THREADS else None
            if max_looks is None:
                builder.yield_processor()
            else:
                builder.pause()
                looks.set(looks.get() + 1)
                with builder.when(looks.get() >= max_looks):
                    _write_sleep(builder, counter, sleepers, count)
    return builder.function


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
