"""Compiles the programs of a model: the first before the server is ready, the rest in the background.

A subclass for each kind of model says which shapes there are and how each is lowered. Compiled programs are
kept on disk, found by what they were made from.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp

from levserve.device.compile_events import listen
from levserve.device.lowering import Lowering
from levserve.device.malloc import trim_malloc
from levserve.device.program_cache import find_program, keep_program
from levserve.device.sampling import set_memory
from levserve.model.backend import CompilerOptions
from levserve.model.placement import devices_of, mesh_of
from levserve.model.rules import Memory
from levserve.observe.control_group import num_cpus
from levserve.observe.metrics import Metrics
from levserve.observe.threads import COMPILER_THREAD

log = logging.getLogger(__name__)

CORES_PER_COMPILER = 4
"""CPUs for each background compiler, because the server serves requests meanwhile."""
COMPILER_STACK_BYTES = 64 << 20
"""XLA's recursion grows with the layers; a thread's default stack is too small for deep models."""

ShapeT = TypeVar("ShapeT", bound=Hashable)


class ProgramSet(ABC, Generic[ShapeT]):
    """The programs of a model.

    Compiler threads only add to `_ready`, so the device thread may read it at any time. `made_from` is
    everything that programs depend on, besides the sources of this package and of others.
    """

    def __init__(self, array: jax.Array, made_from: object, metrics: Metrics) -> None:
        self._devices = devices_of(array)
        self._lowering = Lowering(mesh_of(array))
        self._made_from_parts = made_from
        self._compiles = listen(metrics)
        self._compiled: dict[ShapeT, Callable[..., Any]] = {}
        self._ready: dict[ShapeT, Callable[..., Any]] = {}
        self.on_compiled: Callable[[ShapeT], None] = self.open
        """Called when a program is compiled; several hosts open it only when all of them have compiled it."""
        self._cold: queue.SimpleQueue[ShapeT] = queue.SimpleQueue()
        self._tracing = threading.Lock()
        """One compiler at a time traces: tracing runs Python, and the serving threads wait for the GIL."""
        self._stopping = threading.Event()
        self._background: list[threading.Thread] = []

    @property
    @abstractmethod
    def first_shapes(self) -> list[ShapeT]:
        """What is compiled before the server is ready: enough to serve everything, if slowly."""

    @property
    @abstractmethod
    def all_shapes(self) -> list[ShapeT]:
        """Every program, in the order in which they are compiled."""

    @abstractmethod
    def lower(self, shape: ShapeT) -> jax.stages.Lowered:
        """A program before XLA compiles it; tests look at it too."""

    @abstractmethod
    def _compiler_options(self, shape: ShapeT) -> CompilerOptions: ...

    def compile_first(self, report: Callable[[str], None]) -> None:
        """Compiles what the server needs to be ready, in parallel: compiling does not hold the GIL."""
        failures: list[BaseException] = []

        def work(shape: ShapeT) -> None:
            try:
                self._compile(shape, "startup")
            except BaseException as error:
                failures.append(error)

        report("compiling " + " and ".join(map(str, self.first_shapes)))
        threads = [_compiler_thread(functools.partial(work, shape)) for shape in self.first_shapes]
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    def compile_only(self, shapes: Sequence[ShapeT]) -> None:
        """Compiles these programs and drops all others, for measurements."""
        self._compiled.clear()
        self._ready.clear()
        for shape in shapes:
            self._compile(shape, "startup")

    def start_background(self) -> None:
        """Compiles the remaining programs while the server runs; `stop` waits for those already begun."""
        self._compiles.note_ready()
        rest = deque(shape for shape in self.all_shapes if shape not in self._compiled)
        num_threads = max(num_cpus() // CORES_PER_COMPILER, 1)
        self._background = [
            _compiler_thread(functools.partial(self._compile_rest, rest)) for _ in range(num_threads)
        ]

    def stop(self, *, waits: bool = True) -> None:
        """Compiles nothing more, and waits for what is being compiled if asked to."""
        self._stopping.set()
        if waits:
            for thread in self._background:
                thread.join()
        self._compiles.stop()

    def open(self, shape: ShapeT) -> None:
        """Lets rounds use a program that is compiled; any thread may call this."""
        self._ready[shape] = self._compiled[shape]
        if shape not in self.first_shapes:
            self._cold.put(shape)

    @property
    def is_complete(self) -> bool:
        return len(self._ready) == len(self.all_shapes)

    @property
    def has_cold(self) -> bool:
        return not self._cold.empty()

    def next_cold(self) -> ShapeT | None:
        """A program to run once while no request waits: its first run takes up to a second longer."""
        try:
            return self._cold.get_nowait()
        except queue.Empty:
            return None

    def set_memory(self, memory: Memory) -> Callable[..., Memory]:
        """The program that gives a slot the tokens and logit edits of its sequence."""
        kept = jax.tree.map(aval, memory)
        number = self._lowering.argument((), jnp.int32)
        of_slot = [self._lowering.argument(array.shape[1:], array.dtype) for array in memory]
        given = kept, number, *of_slot
        return self._get(
            "set memory", lambda: self._lowering.lower(set_memory, *given, returns=kept, donate=0)
        )

    def __getitem__(self, shape: ShapeT) -> Callable[..., Any]:
        return self._ready[shape]

    def _compile(self, shape: ShapeT, when: str) -> None:
        start = time.monotonic()
        program = self._get(str(shape), lambda: self.lower(shape), self._compiler_options(shape))
        trim_malloc()
        self._compiled[shape] = program
        self.on_compiled(shape)
        log.debug("got %s in %.1f s (%s)", shape, time.monotonic() - start, when)

    def _get(
        self, name: str, lower: Callable[[], jax.stages.Lowered], options: CompilerOptions | None = None
    ) -> jax.stages.Compiled:
        """A program from disk, or a new one."""
        start = time.monotonic()
        if self._devices[0].platform == "gpu" and len({device.process_index for device in self._devices}) > 1:
            # The hosts would share the trial of kernels, and wait for one that found its program on disk.
            options = {**(options or {}), "xla_gpu_shard_autotuning": False}
        key = hashlib.sha256(f"{self._made_from} {name} {options}".encode()).hexdigest()
        program = find_program(key, self._devices)
        if program is not None:
            self._compiles.note_found(name, time.monotonic() - start)
            return program
        with self._tracing:
            lowered = lower()
        num_compiled = self._compiles.num_compiled_here
        program = lowered.compile(options)
        if self._compiles.num_compiled_here > num_compiled:
            # XLA serializes a program that it loaded from disk without its code. jax may have loaded this one
            # now, or earlier: it keeps that of another model with the same jaxpr in memory.
            keep_program(key, lowered, program)
        return program

    @functools.cached_property
    def _made_from(self) -> str:
        precision = getattr(jax.config, "jax_default_matmul_precision")
        parts = identify(self._devices), self._made_from_parts, precision
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def _compile_rest(self, shapes: deque[ShapeT]) -> None:
        """Compiles from a queue that several threads share, until it is empty."""
        while not self._stopping.is_set():
            try:
                shape = shapes.popleft()
            except IndexError:
                return
            try:
                self._compile(shape, "background")
            except Exception:
                log.exception("could not compile %s; other programs serve in its place", shape)
            if len(self._compiled) == len(self.all_shapes):
                log.info("all %d programs are compiled", len(self._compiled))


def aval(array: jax.Array) -> jax.ShapeDtypeStruct:
    """The shape, type and sharding of an array, which is what a program is compiled for."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def identify(devices: Sequence[jax.Device]) -> tuple[object, ...]:
    """The properties of its devices that a compiled program depends on.

    A program for one device runs on any device of that kind. A program for several devices names them, and
    devices of several hosts have other ids than as many devices of one host.
    """
    first = devices[0]
    numbers = [(device.process_index, device.id) for device in devices] if len(devices) > 1 else []
    return first.device_kind, first.client.platform_version, numbers


def _compiler_thread(work: Callable[[], None]) -> threading.Thread:
    before = threading.stack_size(COMPILER_STACK_BYTES)
    try:
        thread = threading.Thread(target=work, name=COMPILER_THREAD, daemon=True)
        thread.start()
    finally:
        threading.stack_size(before)
    return thread
