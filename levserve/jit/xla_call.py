"""Functions that XLA's programs call on a CPU: what XLA gives them, and how their work is shared among its threads.

XLA's foreign function interface passes one struct, the call frame, whose layout it keeps from version to version: see
xla/ffi/api/c_api.h in jaxlib's include folder. The numbers below are places in its structs, in words of eight bytes.

The work comes in pieces. XLA's own threads are asked to help and everyone takes the next piece until there is none; who called
waits for the pieces that others took, but never for a thread to come: it may do all of them itself.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

import jax

from levserve.jit import code_cache
from levserve.jit.builder import I32, LINE_BYTES, Builder, Function, Value
from levserve.jit.program import Code, Program

EXTENSION, API, CONTEXT = 1, 2, 3
ARGUMENTS, RESULTS = 9, 14
DATA, SIZES = 3, 5
"""In a buffer."""
METADATA_KIND, METADATA, ITS_VERSION = 1, 3, 3
API_VERSION, SCHEDULE = 4, 17
SCHEDULE_BYTES = 40

FRAME, USERS, INSIDE, IS_OVER, COUNTERS = range(5)
"""In what the threads share while they work on a call; after the counters of each work comes memory of the kernel's own."""


class Call(NamedTuple):
    """A call under way, as the function that is being written knows it."""

    writer: Builder
    frame: Value
    turn: Value
    """How often all works have been done."""

    def argument(self, index: Value | int) -> Value:
        """A pointer to an array."""
        return self._buffer(ARGUMENTS, index, DATA)

    def argument_size(self, index: Value | int, axis: int) -> Value:
        return self.writer.word(self._buffer(ARGUMENTS, index, SIZES), axis)

    def result(self, index: int) -> Value:
        return self._buffer(RESULTS, index, DATA)

    def _buffer(self, which: int, index: Value | int, field: int) -> Value:
        follow = self.writer.follow
        return follow(follow(follow(self.frame, which), index), field)


class Work(NamedTuple):
    """Pieces that may be done in any order, by any threads."""

    num_pieces: Callable[[Call], Value]
    do: Callable[[Call, Value, Value, Value], None]
    """(call, shared memory, a thread's own memory, number of the piece)"""


@dataclass(frozen=True)
class Kernel:
    """What a call does: one work after the other, and all of them again for each turn."""

    works: tuple[Work, ...]
    num_turns: int = 1
    shared_bytes: Callable[[Call], Value] | None = None
    own_bytes: Callable[[Call], Value] | None = None


_registered: set[str] = set()
_alive: list[Code] = []
"""As long as the process: XLA forgets no handler, and a thread that was asked to help may come when the call is long over."""
_registering = Lock()
"""Programs are traced on several threads, and XLA wants to hear of a handler once."""


def register(name: str, kernel: Kernel) -> None:
    """Compiles a kernel and tells XLA of it, if it does not know it yet; its name says all that makes it different from others."""
    with _registering:
        if name in _registered:
            return
        compiled = code_cache.current.find(name)
        if compiled is None:
            compiled = _compile(kernel)
            code_cache.current.keep(name, compiled)
        _introduce(name, compiled)


def recall(name: str) -> bool:
    """Tells XLA of a kernel that was compiled at an earlier start; False if there is none."""
    with _registering:
        if name not in _registered and (compiled := code_cache.current.find(name)) is not None:
            _introduce(name, compiled)
        return name in _registered


def _introduce(name: str, compiled: bytes) -> None:
    code = Code(compiled)
    _alive.append(code)
    jax.ffi.register_ffi_target(name, _capsule(code.address("handle")), platform="cpu", api_version=1)
    _registered.add(name)


def _compile(kernel: Kernel) -> bytes:
    program = Program()
    with program.function("work", 1) as writer:
        _write_work(writer, kernel)
        work = writer.function
    with program.function("help", 1) as writer:
        _write_help(writer, work)
        helper = writer.function
    with program.function("handle", 1) as writer:
        _write_handle(writer, kernel, work, helper)
    return program.compile()


def num_threads() -> int:
    """How many XLA has, which looks for the same."""
    given = os.environ.get("PJRT_NPROC") or os.environ.get("NPROC")
    return int(given) if given else len(os.sched_getaffinity(0))


def _write_work(writer: Builder, kernel: Kernel) -> None:
    """What every thread does, given what they share."""
    state = writer.as_pointer(writer.given[0])
    frame = writer.follow(state, FRAME)
    own = writer.allocate(kernel.own_bytes(_first(writer, frame))) if kernel.own_bytes is not None else state
    with writer.loop(0, kernel.num_turns) as turn:
        call = Call(writer, frame, turn)
        for index, work in enumerate(kernel.works):
            count = work.num_pieces(call)
            taken = state + (turn * len(kernel.works) + index) * 16 + 8 * COUNTERS
            done = taken + 8
            with writer.repeat() as after:
                piece = writer.atomic_add(taken, 1)
                writer.leave_if(piece >= count, after)
                work.do(call, state + 8 * _num_words(kernel), own, piece)
                writer.atomic_add(done, 1)
            with writer.repeat() as after:
                writer.leave_if(writer.atomic_get(done) >= count, after)
                writer.yield_processor()
    if kernel.own_bytes is not None:
        writer.free(own)


def _write_help(writer: Builder, work: Function) -> None:
    """What a thread does that came to help. The call may be over by then; if not, who called waits until it has left."""
    state = writer.as_pointer(writer.given[0])
    writer.atomic_add(state + 8 * INSIDE, 1)
    with writer.when(writer.atomic_get(state + 8 * IS_OVER).is_(0)):
        writer.call(work, writer.given[0])
    writer.atomic_add(state + 8 * INSIDE, -1)
    _write_release(writer, state)


def _write_handle(writer: Builder, kernel: Kernel, work: Function, helper: Function) -> None:
    frame = writer.as_pointer(writer.given[0])
    is_call = writer.variable(writer.number(1))
    with writer.when(writer.word(frame, EXTENSION).is_not(0)):
        extension = writer.follow(frame, EXTENSION)
        with writer.when(
            writer.load(extension + 8, I32).is_(METADATA_KIND)
        ):  # XLA asks which version this was made for: its own
            is_call.set(writer.number(0))
            version = writer.word(writer.follow(frame, API), API_VERSION)
            writer.store(writer.follow(extension, METADATA) + 8 * ITS_VERSION, version)
    with writer.when(is_call.get().is_(1)):
        _write_call(_first(writer, frame), kernel, work, helper)


def _first(writer: Builder, frame: Value) -> Call:
    return Call(writer, frame, writer.number(0))


def _write_call(call: Call, kernel: Kernel, work: Function, helper: Function) -> None:
    writer, frame, _ = call
    most = kernel.works[-1].num_pieces(call)
    helpers = (most.least(num_threads()) - 1).most(0)
    num_words = _num_words(kernel)
    shared_bytes = kernel.shared_bytes(call) if kernel.shared_bytes is not None else writer.number(0)
    state = writer.allocate(shared_bytes + 8 * num_words)
    with writer.loop(0, num_words) as number:
        writer.store(state + number * 8, writer.number(0))
    writer.store(state + 8 * FRAME, writer.as_number(frame))
    writer.store(state + 8 * USERS, helpers + 1)
    request = writer.allocate(writer.number(SCHEDULE_BYTES))
    given = (
        writer.number(SCHEDULE_BYTES),
        writer.number(0),
        writer.word(frame, CONTEXT),
        writer.address(helper),
        writer.as_number(state),
    )
    for place, value in enumerate(given):
        writer.store(request + 8 * place, value)
    schedule = writer.word(writer.follow(frame, API), SCHEDULE)
    with writer.loop(0, helpers):
        with writer.when(writer.call(schedule, writer.as_number(request)).is_not(0)):  # there is nobody
            writer.atomic_add(state + 8 * USERS, -1)
    writer.free(request)
    writer.call(work, writer.as_number(state))
    writer.atomic_add(state + 8 * IS_OVER, 1)
    with writer.repeat() as after:
        writer.leave_if(writer.atomic_get(state + 8 * INSIDE).is_(0), after)
        writer.yield_processor()
    _write_release(writer, state)


def _num_words(kernel: Kernel) -> int:
    """To a whole number of the cache's lines."""
    used = COUNTERS + 2 * len(kernel.works) * kernel.num_turns
    return -(-used * 8 // LINE_BYTES) * LINE_BYTES // 8


def _write_release(writer: Builder, state: Value) -> None:
    with writer.when(writer.atomic_add(state + 8 * USERS, -1).is_(1)):
        writer.free(state)


def _capsule(address: int) -> object:
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return make(address, None, None)
