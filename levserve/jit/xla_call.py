"""Functions that XLA's programs call on a CPU: what XLA gives them, and how their work is shared among its
threads.

XLA's foreign function interface passes one struct, the call frame; see xla/ffi/api/c_api.h in jaxlib's
include folder. The numbers below are offsets in its structs, in words of eight bytes, and
`unsupported_reason` checks each of them against that header.

The work comes in pieces. XLA's own threads are asked to help, and every thread takes the next piece until
there is none. The calling thread waits for the pieces that others took, but never for a thread to arrive: it
may do all pieces itself.
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
from levserve.jit.builder import I32, LINE_BYTES, Builder, Function, Value, Variable
from levserve.jit.program import Code, Program
from levserve.jit.target import Target, detect_target
from levserve.jit.xla_header import HEADER, Offset, read_version, unsupported_reason

EXTENSION, API, CONTEXT = 1, 2, 3
ARGUMENTS, RESULTS = 9, 14
DATA, SIZES = 3, 5
"""In a buffer."""
METADATA_KIND, METADATA, ITS_VERSION = 1, 3, 3
API_VERSION, ERROR_CREATE, SCHEDULE = 4, 6, 17
SCHEDULE_BYTES, ERROR_BYTES = 40, 32
RESOURCE_EXHAUSTED = 8
"""XLA's code of an error."""
FRAME_OFFSETS = (
    Offset("XLA_FFI_CallFrame", "extension_start", EXTENSION),
    Offset("XLA_FFI_CallFrame", "api", API),
    Offset("XLA_FFI_CallFrame", "ctx", CONTEXT),
    Offset("XLA_FFI_CallFrame", "args", ARGUMENTS - 4),
    Offset("XLA_FFI_Args", "args", 4),
    Offset("XLA_FFI_CallFrame", "rets", RESULTS - 4),
    Offset("XLA_FFI_Rets", "rets", 4),
    Offset("XLA_FFI_Buffer", "data", DATA),
    Offset("XLA_FFI_Buffer", "dims", SIZES),
    Offset("XLA_FFI_Metadata_Extension", "metadata", METADATA),
    Offset("XLA_FFI_Metadata", "api_version", ITS_VERSION - 2),
    Offset("XLA_FFI_Api_Version", "major_version", 2),
    Offset("XLA_FFI_Api", "api_version", API_VERSION - 2),
    Offset("XLA_FFI_Api", "XLA_FFI_Error_Create", ERROR_CREATE),
    Offset("XLA_FFI_Api", "XLA_FFI_ThreadPool_Schedule", SCHEDULE),
    Offset("XLA_FFI_ThreadPool_Schedule_Args", "ctx", 2),
    Offset("XLA_FFI_ThreadPool_Schedule_Args", "task", 3),
    Offset("XLA_FFI_ThreadPool_Schedule_Args", "data", 4),
    Offset("XLA_FFI_Error_Create_Args", "message", 2),
    Offset("XLA_FFI_Error_Create_Args", "errc", 3),
)

FRAME, USERS, INSIDE, IS_OVER, COUNTERS = range(5)
"""In what the threads share while they work on a call; after the counters of each work comes memory of the
kernel's own."""


class Call(NamedTuple):
    """A call under way, as the function that is being written knows it."""

    builder: Builder
    frame: Value
    turn: Value
    """How often all works have been done."""

    def argument(self, index: Value | int) -> Value:
        """A pointer to an array."""
        return self._buffer(ARGUMENTS, index, DATA)

    def argument_size(self, index: Value | int, axis: int) -> Value:
        return self.builder.word(self._buffer(ARGUMENTS, index, SIZES), axis)

    def result(self, index: int) -> Value:
        return self._buffer(RESULTS, index, DATA)

    def _buffer(self, which: int, index: Value | int, field: int) -> Value:
        follow = self.builder.follow
        return follow(follow(follow(self.frame, which), index), field)


class Work(NamedTuple):
    """Pieces that may be done in any order, by any threads."""

    num_pieces: Callable[[Call], Value]
    do: Callable[[Call, Value, Value, Value], None]
    """(call, shared memory, a thread's own memory, number of the piece)"""


@dataclass(frozen=True)
class Kernel:
    """What a call does: one work after the other, and all of them again for each turn.

    Its name tells it from every other kernel for its target.
    """

    name: str
    target: Target
    works: tuple[Work, ...]
    num_turns: int = 1
    shared_bytes: Callable[[Call], Value] | None = None
    own_bytes: Callable[[Call], Value] | None = None

    @property
    def call_name(self) -> str:
        """The name that XLA and the code cache know: code for one target is never found for another."""
        return f"{self.name}_{self.target.name}"


_registered: set[str] = set()
_alive: list[Code] = []
"""As long as the process: XLA forgets no handler, and a thread that was asked to help may come when the call
is long over."""
_registering = Lock()
"""Programs are traced on several threads, and XLA wants to hear of a handler once."""


def refuse_xla() -> str | None:
    """Why the installed XLA cannot call kernels, or None."""
    reason = unsupported_reason(HEADER, FRAME_OFFSETS)
    return None if reason is None else f"this jaxlib cannot call kernels: {reason}"


def register(kernel: Kernel) -> str:
    """Compiles a kernel and tells XLA of it, if it does not know it yet; gives the name to call it by."""
    name = kernel.call_name
    assert refuse_xla() is None, "backends ask before they choose kernels"
    assert kernel.target.runs_on(detect_target()), f"{name} cannot run on this CPU"
    with _registering:
        if name in _registered:
            return name
        compiled = code_cache.current.find(name)
        if compiled is None:
            compiled = compile_kernel(kernel)
            code_cache.current.keep(name, compiled)
        _introduce(name, compiled)
        return name


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


def compile_kernel(kernel: Kernel) -> bytes:
    program = Program(kernel.target)
    with program.function("work", 2) as builder:
        _write_work(builder, kernel)
        work = builder.function
    with program.function("help", 1) as builder:
        _write_help(builder, kernel, work)
        helper = builder.function
    with program.function("handle", 1) as builder:
        _write_handle(builder, kernel, work, helper)
    return program.compile()


def num_threads() -> int:
    """How many XLA has, which looks for the same."""
    given = os.environ.get("PJRT_NPROC") or os.environ.get("NPROC")
    return int(given) if given else len(os.sched_getaffinity(0))


def _write_work(builder: Builder, kernel: Kernel) -> None:
    """What every thread does, given what they share and memory of its own."""
    state, own = (builder.as_pointer(given) for given in builder.given)
    frame = builder.follow(state, FRAME)
    with builder.loop(0, kernel.num_turns) as turn:
        call = Call(builder, frame, turn)
        for index, work in enumerate(kernel.works):
            count = work.num_pieces(call)
            taken = state + (turn * len(kernel.works) + index) * 16 + 8 * COUNTERS
            done = taken + 8
            with builder.repeat() as after:
                piece = builder.atomic_add(taken, 1)
                builder.leave_if(piece >= count, after)
                work.do(call, state + 8 * _num_words(kernel), own, piece)
                builder.atomic_add(done, 1)
            with builder.repeat() as after:
                builder.leave_if(builder.atomic_get(done) >= count, after)
                builder.yield_processor()


def _write_help(builder: Builder, kernel: Kernel, work: Function) -> None:
    """What a thread does that comes to help. If the call is not over yet, the caller waits until this thread
    has left.

    A thread that gets no memory leaves at once: the others do its pieces.
    """
    state = builder.as_pointer(builder.given[0])
    builder.atomic_add(state + 8 * INSIDE, 1)
    with builder.when(builder.atomic_get(state + 8 * IS_OVER).is_(0)):
        own = builder.allocate(_own_bytes(_first(builder, builder.follow(state, FRAME)), kernel))
        with builder.when(builder.as_number(own).is_not(0)):
            builder.call(work, builder.given[0], builder.as_number(own))
            builder.free(own)
    builder.atomic_add(state + 8 * INSIDE, -1)
    _write_release(builder, state)


def _write_handle(builder: Builder, kernel: Kernel, work: Function, helper: Function) -> None:
    """Tells XLA which version it was compiled for, the header's, or does the work; gives an error or 0."""
    frame = builder.as_pointer(builder.given[0])
    is_call, error = builder.variable(builder.number(1)), builder.variable(builder.number(0))
    with builder.when(builder.word(frame, EXTENSION).is_not(0)):
        extension = builder.follow(frame, EXTENSION)
        with builder.when(builder.load(extension + 8, I32).is_(METADATA_KIND)):
            is_call.set(builder.number(0))
            version = read_version(HEADER)
            compiled_for = builder.number(version.major | version.minor << 32)
            builder.store(builder.follow(extension, METADATA) + 8 * ITS_VERSION, compiled_for)
    with builder.when(is_call.get().is_(1)):
        _write_call(_first(builder, frame), kernel, work, helper, error)
    builder.returned = error.get()


def _own_bytes(call: Call, kernel: Kernel) -> Value:
    return call.builder.number(8) if kernel.own_bytes is None else kernel.own_bytes(call)


def _first(builder: Builder, frame: Value) -> Call:
    return Call(builder, frame, builder.number(0))


def _write_call(call: Call, kernel: Kernel, work: Function, helper: Function, error: Variable) -> None:
    builder = call.builder
    shared_bytes = kernel.shared_bytes(call) if kernel.shared_bytes is not None else builder.number(0)
    state = builder.allocate(shared_bytes + 8 * _num_words(kernel))
    own = builder.allocate(_own_bytes(call, kernel))
    has_state, has_own = builder.as_number(state).is_not(0), builder.as_number(own).is_not(0)
    is_lacking = builder.variable(builder.number(1))
    with builder.when(has_state), builder.when(has_own):
        is_lacking.set(builder.number(0))
        _write_shared_work(call, kernel, work, helper, state, own)
        builder.free(own)
    with builder.when(is_lacking.get().is_(1)):
        builder.free(state)
        builder.free(own)
        error.set(_write_error(call, kernel))


def _write_shared_work(
    call: Call, kernel: Kernel, work: Function, helper: Function, state: Value, own: Value
) -> None:
    """Asks for helpers, works beside them, and waits until those that came have left."""
    builder, frame, _ = call
    most = kernel.works[-1].num_pieces(call)
    helpers = (most.least(num_threads()) - 1).most(0)
    with builder.loop(0, _num_words(kernel)) as number:
        builder.store(state + number * 8, builder.number(0))
    builder.store(state + 8 * FRAME, builder.as_number(frame))
    builder.store(state + 8 * USERS, helpers + 1)
    request = builder.stack_words(SCHEDULE_BYTES // 8)
    given = (
        builder.number(SCHEDULE_BYTES),
        builder.number(0),
        builder.word(frame, CONTEXT),
        builder.address(helper),
        builder.as_number(state),
    )
    for place, value in enumerate(given):
        builder.store(request + 8 * place, value)
    schedule = builder.word(builder.follow(frame, API), SCHEDULE)
    with builder.loop(0, helpers):
        is_refused = builder.call(schedule, builder.as_number(request)).is_not(0)
        with builder.when(is_refused):
            builder.atomic_add(state + 8 * USERS, -1)
    builder.call(work, builder.as_number(state), builder.as_number(own))
    builder.atomic_add(state + 8 * IS_OVER, 1)
    with builder.repeat() as after:
        builder.leave_if(builder.atomic_get(state + 8 * INSIDE).is_(0), after)
        builder.yield_processor()
    _write_release(builder, state)


def _write_error(call: Call, kernel: Kernel) -> Value:
    """An error of XLA's that says there is no memory."""
    builder = call.builder
    given = builder.stack_words(ERROR_BYTES // 8)
    message = builder.text(f"{kernel.name} has no memory for its work")
    values = (
        builder.number(ERROR_BYTES),
        builder.number(0),
        builder.as_number(message),
        builder.number(RESOURCE_EXHAUSTED),
    )
    for place, value in enumerate(values):
        builder.store(given + 8 * place, value)
    create = builder.word(builder.follow(call.frame, API), ERROR_CREATE)
    return builder.call(create, builder.as_number(given))


def _num_words(kernel: Kernel) -> int:
    """To a whole number of the cache's lines."""
    used = COUNTERS + 2 * len(kernel.works) * kernel.num_turns
    return -(-used * 8 // LINE_BYTES) * LINE_BYTES // 8


def _write_release(builder: Builder, state: Value) -> None:
    with builder.when(builder.atomic_add(state + 8 * USERS, -1).is_(1)):
        builder.free(state)


def _capsule(address: int) -> object:
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return make(address, None, None)
