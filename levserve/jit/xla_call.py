"""Lets XLA's programs call our kernels on a CPU, and shares a call's work among XLA's threads.

XLA's foreign function interface passes one struct, the call frame; see xla/ffi/api/c_api.h in jaxlib's
include folder. The numbers below are offsets in its structs, in words of eight bytes. `unsupported_reason`
checks each of them against that header.

A kernel is a sequence of stages, and a stage is a number of tasks. The calling thread asks XLA's thread pool
for helpers; then every thread takes the next task until none is left. The calling thread waits for the tasks
that helpers took, but never for a helper to arrive: it may do all tasks itself. See `waiting` for how threads
wait.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

import jax

from levserve.jit import code_cache
from levserve.jit.builder import CACHE_LINE_BYTES, I32, Builder, Function, Value, Variable
from levserve.jit.program import Code, Program
from levserve.jit.target import Target, detect_target
from levserve.jit.waiting import write_wait, write_wake
from levserve.jit.xla_header import HEADER, Offset, header_mismatch, read_version
from levserve.observe.control_group import num_cpus

EXTENSION, API, CONTEXT = 1, 2, 3
ARGUMENTS, RESULTS = 9, 14
BUFFER_DATA, BUFFER_DIMS = 3, 5
METADATA_KIND, METADATA, METADATA_VERSION = 1, 3, 3
ERROR_CREATE, SCHEDULE = 6, 17
SCHEDULE_BYTES, ERROR_BYTES = 40, 32
RESOURCE_EXHAUSTED = 8
"""XLA's error code for a lack of memory."""
FRAME_OFFSETS = (
    Offset("XLA_FFI_CallFrame", "extension_start", EXTENSION),
    Offset("XLA_FFI_CallFrame", "api", API),
    Offset("XLA_FFI_CallFrame", "ctx", CONTEXT),
    Offset("XLA_FFI_CallFrame", "args", ARGUMENTS - 4),
    Offset("XLA_FFI_Args", "args", 4),
    Offset("XLA_FFI_CallFrame", "rets", RESULTS - 4),
    Offset("XLA_FFI_Rets", "rets", 4),
    Offset("XLA_FFI_Buffer", "data", BUFFER_DATA),
    Offset("XLA_FFI_Buffer", "dims", BUFFER_DIMS),
    Offset("XLA_FFI_Metadata_Extension", "metadata", METADATA),
    Offset("XLA_FFI_Metadata", "api_version", METADATA_VERSION - 2),
    Offset("XLA_FFI_Api_Version", "major_version", 2),
    Offset("XLA_FFI_Api", "api_version", 2),
    Offset("XLA_FFI_Api", "XLA_FFI_Error_Create", ERROR_CREATE),
    Offset("XLA_FFI_Api", "XLA_FFI_ThreadPool_Schedule", SCHEDULE),
    Offset("XLA_FFI_ThreadPool_Schedule_Args", "ctx", 2),
    Offset("XLA_FFI_ThreadPool_Schedule_Args", "task", 3),
    Offset("XLA_FFI_ThreadPool_Schedule_Args", "data", 4),
    Offset("XLA_FFI_Error_Create_Args", "message", 2),
    Offset("XLA_FFI_Error_Create_Args", "errc", 3),
)

FRAME, REFERENCES, ACTIVE_HELPERS, IS_FINISHED, SLEEPERS, COUNTERS = range(6)
"""Words of the state that the threads of a call share. Active helpers are counted below zero, because a wait
ends when a counter is large enough. Each stage has two counters, tasks taken and tasks done; after them comes
the kernel's shared memory. The two kinds of counters are in different cache lines, so that threads that wait
for tasks to be done do not slow down threads that take tasks."""

TAKES_PER_THREAD = 8
"""Threads take many small tasks in batches of an eighth of their share, because they would contend for the
counter if each took one at a time. At the end a thread waits for one such batch at most."""


class Call(NamedTuple):
    """A call of a kernel, as seen by the code that writes what happens during it."""

    builder: Builder
    frame: Value
    argument_buffers: Value
    result_buffers: Value
    iteration: Value
    """How many times all stages have been completed."""
    num_done: Value
    """How many tasks of the stage this thread has done. Its scratch memory is as the last one left it."""

    @staticmethod
    def begin(builder: Builder, frame: Value) -> Call:
        """The call in its first iteration."""
        arguments, results = (builder.load_pointer(frame, each) for each in (ARGUMENTS, RESULTS))
        return Call(builder, frame, arguments, results, builder.constant(0), builder.constant(0))

    def argument(self, index: Value | int) -> Value:
        """A pointer to an argument's data."""
        return self._load(self.argument_buffers, index, BUFFER_DATA)

    def argument_size(self, index: Value | int, axis: int) -> Value:
        return self.builder.load_word(self._load(self.argument_buffers, index, BUFFER_DIMS), axis)

    def result(self, index: int) -> Value:
        """A pointer to a result's data."""
        return self._load(self.result_buffers, index, BUFFER_DATA)

    def _load(self, buffers: Value, index: Value | int, field: int) -> Value:
        return self.builder.load_pointer(self.builder.load_pointer(buffers, index), field)


RunTask = Callable[[Call, Value, Value, Value], None]
"""Writes one task, given the call, the shared memory, the thread's scratch memory and the task's number."""


class Stage(NamedTuple):
    """Tasks that may run in any order and on any thread."""

    num_tasks: Callable[[Call], Value]
    run: RunTask


@dataclass(frozen=True)
class Kernel:
    """What a call does: all stages, one after another, `num_iterations` times.

    The name must differ from that of every other kernel for the same target.
    """

    name: str
    target: Target
    stages: tuple[Stage, ...]
    num_iterations: int = 1
    shared_bytes: Callable[[Call], Value] | None = None
    """Memory that all threads of a call share."""
    scratch_bytes: Callable[[Call], Value] | None = None
    """Memory that each thread has for itself."""
    gains_by_unrolling: bool = False
    """Whether loops are so short that unrolling pays: the draw kernel takes 6 to 8 % less time on x86."""

    @property
    def call_name(self) -> str:
        """The name in XLA and in the code cache; it depends on the target, as the code does."""
        return f"{self.name}_{self.target.name}"


EMPTY = "levserve_empty"
_registered: set[str] = set()
_loaded: list[Code] = []
"""Never emptied: XLA keeps every kernel, and a helper thread may arrive long after its call has ended."""
_registering = Lock()
"""Programs are traced on several threads, and XLA refuses a name that is registered twice."""


def unsupported_reason() -> str | None:
    """Why the installed XLA cannot call kernels, or None.

    XLA compares the interface version only when a kernel is registered and jax's devices are known. So this
    registers an empty kernel before the backend is chosen.
    """
    reason = header_mismatch(HEADER, FRAME_OFFSETS)
    if reason is None:
        nothing = Stage(lambda call: call.builder.constant(0), lambda *_: None)
        try:
            register(Kernel(EMPTY, detect_target(), (nothing,)))
        except jax.errors.JaxRuntimeError as error:
            reason = str(error)
    return None if reason is None else f"this jaxlib cannot call kernels: {reason}"


def register(kernel: Kernel) -> str:
    """Compiles a kernel and registers it with XLA, once; returns the name that XLA knows it by."""
    name = kernel.call_name
    assert header_mismatch(HEADER, FRAME_OFFSETS) is None, "a backend checks this before it chooses kernels"
    assert kernel.target.runs_on(detect_target()), f"{name} cannot run on this CPU"
    with _registering:
        if name in _registered:
            return name
        compiled = code_cache.current.find(name)
        if compiled is None:
            compiled = compile_kernel(kernel)
            code_cache.current.keep(name, compiled)
        _register_compiled(name, compiled)
        return name


def register_cached(name: str) -> bool:
    """Registers a kernel that an earlier process compiled; False if the code cache does not have it."""
    with _registering:
        if name not in _registered and (compiled := code_cache.current.find(name)) is not None:
            _register_compiled(name, compiled)
        return name in _registered


def _register_compiled(name: str, compiled: bytes) -> None:
    code = Code(compiled)
    _loaded.append(code)
    jax.ffi.register_ffi_target(name, _capsule(code.address("entry")), platform="cpu", api_version=1)
    _registered.add(name)


def compile_kernel(kernel: Kernel) -> bytes:
    return write_kernel(kernel).compile()


def write_kernel(kernel: Kernel) -> Program:
    program = Program(kernel.target, gains_by_unrolling=kernel.gains_by_unrolling)
    wait = write_wait(program, num_threads())
    with program.function("run_stages", 2) as builder:
        _write_stages(builder, kernel, wait)
        run_stages = builder.function
    with program.function("help", 1) as builder:
        _write_helper(builder, kernel, run_stages)
        helper = builder.function
    with program.function("entry", 1) as builder:
        _write_entry(builder, kernel, CallFunctions(run_stages, helper, wait))
    return program


def num_threads() -> int:
    """The size of XLA's thread pool; XLA reads the same environment variables."""
    return num_cpus()


class CallFunctions(NamedTuple):
    """The functions of a kernel's program that a call uses."""

    run_stages: Function
    helper: Function
    wait: Function


def _write_stages(builder: Builder, kernel: Kernel, wait: Function) -> None:
    """What every thread of a call does, given the shared state and its scratch memory.

    No thread waits for the tasks of the last stage: the caller waits for the helpers that have taken some.
    """
    state, scratch = (builder.to_pointer(argument) for argument in builder.arguments)
    begun = Call.begin(builder, builder.load_pointer(state, FRAME))
    with builder.loop(0, kernel.num_iterations) as iteration:
        call = begun._replace(iteration=iteration)
        for index, stage in enumerate(kernel.stages):
            num_tasks = stage.num_tasks(call)
            counters = state + 8 * _whole_lines(COUNTERS) + iteration * (16 * _counter_words(kernel))
            taken, done = counters + 8 * index, counters + 8 * (_counter_words(kernel) + index)
            step = (num_tasks // (TAKES_PER_THREAD * num_threads())).maximum(1)
            completed = builder.variable(builder.constant(0))
            with builder.repeat() as after:
                first = builder.atomic_add(taken, step)
                builder.break_if(first >= num_tasks, after)
                stop = (first + step).minimum(num_tasks)
                with builder.loop(first, stop) as task:
                    beginning = call._replace(num_done=completed.get() + (task - first))
                    stage.run(beginning, state + 8 * _state_words(kernel), scratch, task)
                completed.set(completed.get() + stop - first)
            is_last = index == len(kernel.stages) - 1
            with builder.when(iteration < (kernel.num_iterations - 1 if is_last else kernel.num_iterations)):
                with builder.when(completed.get().differs_from(0)):
                    before = builder.atomic_add(done, completed.get())
                    with builder.when(before + completed.get() >= num_tasks):
                        write_wake(builder, done, state + 8 * SLEEPERS)
                sleepers = builder.to_address(state + 8 * SLEEPERS)
                builder.call(wait, builder.to_address(done), sleepers, num_tasks)


def _write_helper(builder: Builder, kernel: Kernel, run_stages: Function) -> None:
    """What a helper thread does when it arrives, given the shared state.

    If the call has not finished, the caller waits until this helper has left. A helper that gets no scratch
    memory leaves at once, and the other threads do its tasks.
    """
    state = builder.to_pointer(builder.arguments[0])
    active = state + 8 * ACTIVE_HELPERS
    builder.atomic_add(active, -1)
    with builder.when(builder.atomic_load(state + 8 * IS_FINISHED).equals(0)):
        call = Call.begin(builder, builder.load_pointer(state, FRAME))
        scratch = builder.allocate(_scratch_bytes(call, kernel))
        with builder.when(builder.to_address(scratch).differs_from(0)):
            builder.call(run_stages, builder.arguments[0], builder.to_address(scratch))
            builder.free(scratch)
    with builder.when(builder.atomic_add(active, 1).equals(-1)):
        write_wake(builder, active, state + 8 * SLEEPERS)
    _write_release(builder, state)


def _write_entry(builder: Builder, kernel: Kernel, functions: CallFunctions) -> None:
    """The function that XLA calls: it reports the header version it was compiled for, or runs the kernel.

    Returns an XLA error, or 0.
    """
    frame = builder.to_pointer(builder.arguments[0])
    is_call, error = builder.variable(builder.constant(1)), builder.variable(builder.constant(0))
    with builder.when(builder.load_word(frame, EXTENSION).differs_from(0)):
        extension = builder.load_pointer(frame, EXTENSION)
        with builder.when(builder.load(extension + 8, I32).equals(METADATA_KIND)):
            is_call.set(builder.constant(0))
            version = read_version(HEADER)
            compiled_for = builder.constant(version.major | version.minor << 32)
            builder.store(builder.load_pointer(extension, METADATA) + 8 * METADATA_VERSION, compiled_for)
    with builder.when(is_call.get().equals(1)):
        _write_call(Call.begin(builder, frame), kernel, functions, error)
    builder.result = error.get()


def _scratch_bytes(call: Call, kernel: Kernel) -> Value:
    return call.builder.constant(8) if kernel.scratch_bytes is None else kernel.scratch_bytes(call)


def _write_call(call: Call, kernel: Kernel, functions: CallFunctions, error: Variable) -> None:
    """Allocates the memory of a call and runs it; sets an error if there is not enough memory."""
    builder = call.builder
    shared_bytes = kernel.shared_bytes(call) if kernel.shared_bytes is not None else builder.constant(0)
    state = builder.allocate(shared_bytes + 8 * _state_words(kernel))
    scratch = builder.allocate(_scratch_bytes(call, kernel))
    has_state = builder.to_address(state).differs_from(0)
    has_scratch = builder.to_address(scratch).differs_from(0)
    lacks_memory = builder.variable(builder.constant(1))
    with builder.when(has_state), builder.when(has_scratch):
        lacks_memory.set(builder.constant(0))
        _write_shared_run(call, kernel, functions, state, scratch)
        builder.free(scratch)
    with builder.when(lacks_memory.get().equals(1)):
        builder.free(state)
        builder.free(scratch)
        error.set(_write_error(call, kernel))


def _write_shared_run(
    call: Call, kernel: Kernel, functions: CallFunctions, state: Value, scratch: Value
) -> None:
    """Asks for helpers, works beside them, and waits until those that arrived have left."""
    builder, frame = call.builder, call.frame
    num_tasks = kernel.stages[-1].num_tasks(call)
    num_helpers = (num_tasks.minimum(num_threads()) - 1).maximum(0)
    with builder.loop(0, _state_words(kernel)) as index:
        builder.store(state + index * 8, builder.constant(0))
    builder.store(state + 8 * FRAME, builder.to_address(frame))
    builder.store(state + 8 * REFERENCES, num_helpers + 1)
    request = builder.stack_words(SCHEDULE_BYTES // 8)
    builder.store_words(
        request,
        builder.constant(SCHEDULE_BYTES),
        builder.constant(0),
        builder.load_word(frame, CONTEXT),
        builder.function_address(functions.helper),
        builder.to_address(state),
    )
    schedule = builder.load_word(builder.load_pointer(frame, API), SCHEDULE)
    with builder.loop(0, num_helpers):
        is_refused = builder.call(schedule, builder.to_address(request)).differs_from(0)
        with builder.when(is_refused):
            builder.atomic_add(state + 8 * REFERENCES, -1)
    builder.call(functions.run_stages, builder.to_address(state), builder.to_address(scratch))
    builder.atomic_add(state + 8 * IS_FINISHED, 1)
    counters = (builder.to_address(state + 8 * word) for word in (ACTIVE_HELPERS, SLEEPERS))
    builder.call(functions.wait, *counters, builder.constant(0))
    _write_release(builder, state)


def _write_error(call: Call, kernel: Kernel) -> Value:
    """Creates the XLA error that says there is not enough memory."""
    builder = call.builder
    arguments = builder.stack_words(ERROR_BYTES // 8)
    message = builder.string(f"not enough memory to run {kernel.name}")
    builder.store_words(
        arguments,
        builder.constant(ERROR_BYTES),
        builder.constant(0),
        builder.to_address(message),
        builder.constant(RESOURCE_EXHAUSTED),
    )
    create = builder.load_word(builder.load_pointer(call.frame, API), ERROR_CREATE)
    return builder.call(create, builder.to_address(arguments))


def _state_words(kernel: Kernel) -> int:
    """Words of the shared state, in whole cache lines."""
    return _whole_lines(COUNTERS) + 2 * _counter_words(kernel) * kernel.num_iterations


def _counter_words(kernel: Kernel) -> int:
    """Words of one counter per stage, in whole cache lines."""
    return _whole_lines(len(kernel.stages))


def _whole_lines(num_words: int) -> int:
    return -(-num_words * 8 // CACHE_LINE_BYTES) * CACHE_LINE_BYTES // 8


def _write_release(builder: Builder, state: Value) -> None:
    """Drops a reference to the state; the last thread to do so frees it."""
    with builder.when(builder.atomic_add(state + 8 * REFERENCES, -1).equals(1)):
        builder.free(state)


def _capsule(address: int) -> object:
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return make(address, None, None)
