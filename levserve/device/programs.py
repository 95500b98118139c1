"""The compiled programs: which shapes exist, which are ready, and the best ready one for a round.

The smallest ones are compiled before the server is ready, because several runs of them can do anything; on a
GPU the largest ones as well. Background threads compile the rest. Until a program is there, a larger one runs
in its place, or a smaller one several times. So a round never waits for a compile.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from levserve.device.compile_events import listen
from levserve.device.malloc import trim_malloc
from levserve.device.packing import NUM_COLUMNS
from levserve.device.program_cache import find_program, keep_program
from levserve.device.rounds import (
    Arrays,
    Skeleton,
    SlotMasks,
    State,
    decode_round,
    fill_pages,
    fork_slot,
    mixed_round,
    prefill_chunk,
    sample_only_prefill,
    set_masks,
    set_memory,
    verify_round,
)
from levserve.device.sizing import Sizes
from levserve.model.backend import CompilerOptions
from levserve.model.sampler import MAX_EDITS, Memory, Mode
from levserve.observe.metrics import Metrics
from levserve.observe.threads import COMPILER_THREAD

log = logging.getLogger(__name__)

MODES = (Mode.GREEDY, Mode.PLAIN, Mode.FULL)
"""From the cheapest to the one that can do everything."""
WELL_FILLED = 0.7
"""The part of a program that must be in use. Padding takes time too, but two smaller programs take longer."""
CORES_PER_COMPILER = 4
"""For each background compiler: the server serves requests meanwhile."""
COMPILER_STACK_BYTES = 64 << 20
"""XLA's recursion grows with the layers; a thread's default stack is too small for deep models."""

RoundCall = Callable[[Arrays, State, object], tuple[State, Any]]
"""Returns the fields of a `ChunkOutput` for prefill, an array for decoding, and two for a mixed round."""


class Shape(NamedTuple):
    """What a program is compiled for: prefill of `size` tokens, or decoding or verifying `size` rows."""

    size: int
    mode: Mode | None = None
    """How rows are sampled; None for prefill."""
    is_verify: bool = False
    is_sample_only: bool = False
    """Prefill that gives the next token and nothing else, drawn in plain mode."""
    is_mixed: bool = False
    """Decoding that prefills in the same pass."""

    @property
    def is_prefill(self) -> bool:
        return self.mode is None

    def __str__(self) -> str:
        if self.is_verify:
            return f"drafts of {self.size} rows"
        if self.mode is None:
            return f"{'sample-only ' if self.is_sample_only else ''}prefill of {self.size} tokens"
        return f"{self.mode} decode of {self.size} rows{' and prefill' if self.is_mixed else ''}"


class Programs:
    """Compiles programs and chooses among them.

    Compiler threads only add to `_ready`, so the device thread may read it at any time.
    """

    def __init__(
        self, leaves: Arrays, state: State, skeleton: Skeleton, sizes: Sizes, metrics: Metrics
    ) -> None:
        self._leaves = jax.tree.map(_aval, leaves)
        self._state = jax.tree.map(_aval, state)
        self._skeleton = skeleton
        self._backend = skeleton.backend
        self._sizes = sizes
        self._device = _device_of(leaves[0])
        self._compiles = listen(metrics)
        self._ready: dict[Shape, RoundCall] = {}
        self._cold: queue.SimpleQueue[Shape] = queue.SimpleQueue()
        self._tracing = threading.Lock()
        """One compiler at a time traces: tracing runs Python, and the serving threads wait for the GIL."""
        self._stopping = threading.Event()
        self._background: list[threading.Thread] = []

    @property
    def first_shapes(self) -> list[Shape]:
        """What is compiled before the server is ready, the smallest prefill first."""
        chunks, rows = self._sizes.chunk_sizes, self._sizes.row_sizes
        ends = (0, -1) if self._backend.traits.warms_largest else (0,)
        prefill = [Shape(chunks[end]) for end in ends]
        decode = [Shape(rows[end], Mode.FULL) for end in ends]
        return _unique(*prefill, *decode)

    @property
    def all_shapes(self) -> list[Shape]:
        """Every program, in the order in which they are compiled."""
        sizes = self._sizes
        modes = MODES if sizes.has_all_modes else (Mode.FULL,)
        decode = [Shape(size, mode) for mode in modes for size in sizes.row_sizes]
        if sizes.mixed_tokens:
            decode = [shape._replace(is_mixed=shape.size == sizes.row_sizes[-1]) for shape in decode]
        verify = [Shape(size, Mode.FULL, is_verify=True) for size in sizes.verify_sizes]
        prefill = [Shape(size) for size in sizes.chunk_sizes]
        sample_only = []
        if sizes.has_all_modes:
            sample_only = [shape._replace(is_sample_only=True) for shape in prefill]
        return _unique(*self.first_shapes, *sample_only, *decode, *verify, *prefill)

    def compile_first(self, report: Callable[[str], None]) -> None:
        """Compiles what the server needs to be ready, side by side: compiling does not hold the GIL."""
        failures: list[BaseException] = []

        def work(shape: Shape) -> None:
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

    def compile_only(self, shapes: Sequence[Shape]) -> None:
        """Compiles these programs and drops all others, for measurements."""
        self._ready.clear()
        for shape in shapes:
            self._compile(shape, "startup")

    def start_background(self) -> None:
        """Compiles the remaining programs while the server runs; `stop` waits for those that it has begun."""
        self._compiles.note_ready()
        rest = deque(shape for shape in self.all_shapes if shape not in self._ready)
        num_threads = max((os.cpu_count() or 1) // CORES_PER_COMPILER, 1)
        self._background = [
            _compiler_thread(functools.partial(self._compile_rest, rest)) for _ in range(num_threads)
        ]

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._background:
            thread.join()
        self._compiles.stop()

    @property
    def is_complete(self) -> bool:
        return len(self._ready) == len(self.all_shapes)

    @property
    def has_cold(self) -> bool:
        return not self._cold.empty()

    def next_cold(self) -> Shape | None:
        """A program to run once while no request waits: its first run takes up to a second longer."""
        try:
            return self._cold.get_nowait()
        except queue.Empty:
            return None

    def __getitem__(self, shape: Shape) -> RoundCall:
        return self._ready[shape]

    def prefill(self, num_tokens: int, *, can_split: bool = False, is_sample_only: bool = False) -> Shape:
        """The smallest ready program that holds `num_tokens`, or else the largest one.

        With `can_split`, tokens that would leave too much of it unused go to the largest program that they
        fill. Where only samples are wanted, of two programs of a size it is the sample-only one.
        """
        ready: dict[int, Shape] = {}
        for shape in self._ready.copy():
            if shape.is_sample_only and is_sample_only:
                ready[shape.size] = shape
            elif shape.is_prefill and not shape.is_sample_only:
                ready.setdefault(shape.size, shape)
        size = min((size for size in ready if size >= num_tokens), default=max(ready))
        if can_split and num_tokens < WELL_FILLED * size:
            size = max((size for size in ready if size <= num_tokens), default=size)
        return ready[size]

    def decode(self, num_rows: int, mode: Mode) -> Shape:
        """The narrowest ready program that serves these rows, preferably in their own mode, or the widest."""
        able = MODES[MODES.index(mode) :]
        shapes = (shape for shape in self._ready.copy() if shape.mode in able and not shape.is_verify)
        ready = sorted(shapes, key=lambda shape: (shape.size, shape.mode != mode))
        return next((shape for shape in ready if shape.size >= num_rows), ready[-1])

    def mixed(self, num_rows: int, num_tokens: int, mode: Mode) -> Shape | None:
        """A ready program that samples so many rows and prefills so many tokens, if there is one."""
        if num_tokens > self._sizes.mixed_tokens:
            return None
        able = MODES[MODES.index(mode) :]
        for shape in self._ready.copy():
            if shape.is_mixed and shape.mode in able and shape.size >= num_rows:
                return shape
        return None

    def verify(self, num_rows: int) -> Shape:
        """The smallest ready program for the drafts of so many rows, at most `max_verified`."""
        return min(shape for shape in self._ready.copy() if shape.is_verify and shape.size >= num_rows)

    @property
    def max_verified(self) -> int:
        """Rows whose drafts can be verified together; 0 until such a program is ready."""
        return max((shape.size for shape in self._ready.copy() if shape.is_verify), default=0)

    def set_memory(self) -> Callable[..., Memory]:
        """The program that gives a row the tokens and logit edits of its sequence."""
        memory = self._state.memory
        slot = jax.ShapeDtypeStruct((), jnp.int32)
        history = jax.ShapeDtypeStruct((memory.history.shape[1],), jnp.int32)
        ids = until = jax.ShapeDtypeStruct((MAX_EDITS,), jnp.int32)
        values = jax.ShapeDtypeStruct((MAX_EDITS,), jnp.float32)
        jitted = jax.jit(set_memory, donate_argnums=0)
        return self._get("set memory", lambda: jitted.lower(memory, slot, history, ids, values, until))

    def set_masks(self, rows: int) -> Callable[..., tuple[SlotMasks, jax.Array]]:
        """The program that holds the next draws of so many rows to masks."""
        masks, last_tokens = self._state.masks, self._state.last_tokens
        packed = jax.ShapeDtypeStruct((rows, 3), jnp.int32)
        words = jax.ShapeDtypeStruct((rows, masks.words.shape[1]), jnp.uint32)
        jitted = jax.jit(set_masks, donate_argnums=(0, 1))
        return self._get(f"set {rows} masks", lambda: jitted.lower(masks, last_tokens, packed, words))

    def fork_slot(self) -> Callable[[State, object], State]:
        """The program that gives a computed prompt to one more row."""
        fork = jax.ShapeDtypeStruct((4,), jnp.int32)
        return self._get("fork slot", lambda: jax.jit(fork_slot, donate_argnums=0).lower(self._state, fork))

    def fill_pages(self) -> Callable[[Arrays, object, object], Arrays]:
        """The program that overwrites pages, as many at a time as a page table has."""
        pages = jax.ShapeDtypeStruct((self._sizes.table_width,), jnp.int32)
        value = jax.ShapeDtypeStruct((), self._state.pools[0].dtype)
        return self._get(
            "fill pages", lambda: jax.jit(fill_pages, donate_argnums=0).lower(self._state.pools, pages, value)
        )

    def lower(self, shape: Shape) -> jax.stages.Lowered:
        """A program before XLA compiles it; tests look at it too."""
        width = NUM_COLUMNS + self._sizes.table_width
        function: Callable[..., tuple[State, Any]]
        if shape.mode is None:
            function = functools.partial(
                sample_only_prefill if shape.is_sample_only else prefill_chunk, skeleton=self._skeleton
            )
            rows, chunk = self._sizes.prefill_rows(shape.size)
            packed = jax.ShapeDtypeStruct((rows, width + chunk + 1), jnp.int32)
        elif shape.is_verify:
            function = functools.partial(verify_round, skeleton=self._skeleton)
            packed = jax.ShapeDtypeStruct((shape.size, width + self._sizes.num_draft), jnp.int32)
        elif shape.is_mixed:
            function = functools.partial(
                mixed_round, skeleton=self._skeleton, num_sampled=shape.size, mode=shape.mode
            )
            packed = jax.ShapeDtypeStruct((shape.size + self._sizes.mixed_tokens, width + 1), jnp.int32)
        else:
            function = functools.partial(
                decode_round, skeleton=self._skeleton, num_steps=self._sizes.round_steps, mode=shape.mode
            )
            packed = jax.ShapeDtypeStruct((shape.size, width), jnp.int32)
        return jax.jit(function, donate_argnums=1).lower(self._leaves, self._state, packed)

    def _compile(self, shape: Shape, when: str) -> None:
        start = time.monotonic()
        program = self._get(str(shape), lambda: self.lower(shape), self._compiler_options(shape))
        trim_malloc()
        self._ready[shape] = program
        if shape not in self.first_shapes:
            self._cold.put(shape)
        log.debug("got %s in %.1f s (%s)", shape, time.monotonic() - start, when)

    def _get(
        self, name: str, lower: Callable[[], jax.stages.Lowered], options: CompilerOptions | None = None
    ) -> jax.stages.Compiled:
        """A program from disk, or a new one."""
        start = time.monotonic()
        key = hashlib.sha256(f"{self._made_from} {name} {options}".encode()).hexdigest()
        program = find_program(key, self._device)
        if program is not None:
            self._compiles.note_found(name, time.monotonic() - start)
            return program
        with self._tracing:
            lowered = lower()
        num_found = self._compiles.num_found_here
        program = lowered.compile(options)
        if self._compiles.num_found_here == num_found:  # XLA cannot serialize all of what jax found on disk
            keep_program(key, lowered, program)
        return program

    def _compiler_options(self, shape: Shape) -> CompilerOptions:
        is_quantized = any(leaf.dtype.itemsize == 1 for leaf in self._leaves)
        return self._backend.compiler_options(
            num_tokens=shape.size, is_prefill=shape.is_prefill, is_quantized=is_quantized
        )

    @functools.cached_property
    def _made_from(self) -> str:
        """Everything that programs depend on, besides the sources of this package and of others."""
        device = self._device.device_kind, self._device.client.platform_version
        given = self._sizes, self._leaves, self._state, str(self._skeleton.tree)
        precision = getattr(jax.config, "jax_default_matmul_precision")
        return hashlib.sha256(repr((device, given, precision)).encode()).hexdigest()

    def _compile_rest(self, shapes: deque[Shape]) -> None:
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
            if self.is_complete:
                log.info("all %d programs are compiled", len(self._ready))


def _unique(*shapes: Shape) -> list[Shape]:
    return list(dict.fromkeys(shapes))


def _compiler_thread(work: Callable[[], None]) -> threading.Thread:
    before = threading.stack_size(COMPILER_STACK_BYTES)
    try:
        thread = threading.Thread(target=work, name=COMPILER_THREAD, daemon=True)
        thread.start()
    finally:
        threading.stack_size(before)
    return thread


def _device_of(array: jax.Array) -> Any:
    (device,) = array.sharding.device_set
    return device


def _aval(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
