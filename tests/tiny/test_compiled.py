"""What XLA makes of programs on a CPU: weights are read as stored, device state is written in place."""

from __future__ import annotations

import functools
import math
import subprocess
import sys
import threading
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from levserve.device.host import process_memory
from levserve.device.malloc import trim_malloc
from levserve.device.programs import Programs, Shape
from levserve.device.runner import Runner
from levserve.device.sizing import Sizes
from levserve.jit import code_cache
from levserve.model import cache
from levserve.model.backend import Backend
from levserve.model.cpu.backend import CpuBackend
from levserve.model.decoder import Blueprint
from levserve.model.quantize import NARROW, choose_quantization
from levserve.model.rules import Mode
from levserve.model.xla import XLA_ON_CPU, XlaBackend
from levserve.observe.metrics import Metrics
from levserve.weights.checkpoint import load_arrays, read_config
from tests.conftest import GOLDEN, QUICK_COMPILE
from tests.hlo import computed

SERVED = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "int8": jnp.bfloat16}
"""The formats that matrices can be asked for in, and the type in which each computes."""
DOT = CpuBackend(has_products=True, runs_layers=True)

WRITTEN = {"bfloat16": DOT, "int8": DOT, "uint8": replace(DOT, packs_int8=True)}
"""The formats of matrices for which all layers are one kernel; int8 that is packed is uint8."""
POOLS = {
    "float32": ("auto", jnp.float32),
    "bfloat16": ("fp8", jnp.uint8),
    "int8": ("auto", jnp.bfloat16 if jax.__version_info__ >= (0, 11) else jnp.uint16),
}
"""The KV cache that is asked for with each format, and the type it is stored in."""
# The flag that makes tests compile quickly also changes what XLA fuses.
HAS_FLAG = "xla_cpu_use_fusion_emitters" in QUICK_COMPILE["XLA_FLAGS"]
AS_SERVED = {"xla_cpu_use_fusion_emitters": True} if HAS_FLAG else {}
NUM_PAGES = 333  # so that nothing else has the pool's shape


@functools.cache
def runner_of(kind: str, backend: Backend = XLA_ON_CPU) -> Runner:
    """The golden model's first layer, as a server on a CPU would hold it."""
    asked = "int8" if kind == "uint8" else kind
    folder, dtype = GOLDEN / "llama", jnp.dtype(SERVED[asked])
    config = read_config(folder)
    quantization = choose_quantization(NARROW.get(asked), backend, dtype)
    arrays = load_arrays(folder, config, dtype, report=lambda _: None, quantization=quantization)
    arrays = {
        name: array
        for name, array in arrays.items()
        if not name.startswith("layers.") or name.startswith("layers.0.")
    }
    config = replace(config, num_layers=1)
    asked_kv = "auto" if backend.runs_layers else POOLS[kind][0]  # an fp8 cache is left to XLA
    storage = backend.kv_storage(cache.kv_dtype(asked_kv, dtype))
    sizes = Sizes(
        rows=4,
        max_seq_len=256,
        page_size=8,
        num_pages=NUM_PAGES,
        page_bytes=cache.page_bytes(config, 8, storage),
        weight_bytes=0,
        row_sizes=(4,),
        chunk_sizes=(24,),
        round_steps=1,
        num_draft=5,
    )
    return Runner(
        Blueprint(config, backend, quantization),
        arrays,
        sizes,
        storage,
        Metrics(),
    )


VERIFY = Shape(2, Mode.FULL, is_verify=True)
SHAPES = [
    *((kind, shape) for kind in SERVED for shape in (Shape(24), Shape(2, Mode.FULL))),
    ("bfloat16", VERIFY),
    *(("int8", shape) for shape in (VERIFY, Shape(4, Mode.GREEDY), Shape(4, Mode.FULL, is_mixed=True))),
]
"""Prefill and decode with matrices of every format; other programs with those most likely to be converted."""


@pytest.mark.parametrize(("kind", "shape"), SHAPES, ids=str)
def test_no_weight_is_converted_and_no_pool_copied(kind: str, shape: Shape) -> None:
    runner = runner_of(kind)
    pool_shape = runner._state.pools[0].shape
    weight_shapes = {leaf.shape for leaf in runner._leaves if leaf.ndim == 2}
    assert runner._state.pools[0].dtype == POOLS[kind][1]
    assert {str(leaf.dtype) for leaf in runner._leaves if leaf.ndim == 2} >= {kind}

    compiled = runner.programs.lower(shape).compile(AS_SERVED)
    made = computed(compiled.as_text())
    of_pool = [instruction for instruction in made if instruction.holds(pool_shape)]
    assert [instruction.operation for instruction in of_pool] == ["scatter"], [
        instruction.text for instruction in of_pool
    ]
    assert [instruction.text for instruction in made if any(map(instruction.holds, weight_shapes))] == []
    state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(runner._state))
    assert compiled.memory_analysis().alias_size_in_bytes == state_bytes


@pytest.mark.parametrize(
    ("kind", "shape"), [*((kind, Shape(4, Mode.GREEDY)) for kind in WRITTEN), ("uint8", Shape(24))], ids=str
)
def test_a_kernel_of_all_layers_converts_no_weight_and_writes_its_pool_in_place(
    kind: str, shape: Shape
) -> None:
    runner = runner_of(kind, WRITTEN[kind])
    pool_shape, weight_shapes = (
        runner._state.pools[0].shape,
        {leaf.shape for leaf in runner._leaves if leaf.ndim == 2},
    )
    assert {str(leaf.dtype) for leaf in runner._leaves if leaf.ndim == 2} >= {kind}
    compiled = runner.programs.lower(shape).compile(AS_SERVED)
    assert "levserve_layers_" in compiled.as_text()
    made = computed(compiled.as_text())
    assert {instruction.operation for instruction in made if instruction.holds(pool_shape)} <= {"custom-call"}
    assert [instruction.text for instruction in made if any(map(instruction.holds, weight_shapes))] == []
    assert compiled.memory_analysis().alias_size_in_bytes == sum(
        leaf.nbytes for leaf in jax.tree.leaves(runner._state)
    )


def test_of_several_compilers_one_at_a_time_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracing runs Python, and the serving threads wait for the GIL."""
    lower, tracing, seen = Programs.lower, threading.Semaphore(1), []

    def watched(programs: Programs, shape: Shape) -> jax.stages.Lowered:
        seen.append(tracing.acquire(blocking=False))
        time.sleep(0.2)  # so that the other compiler can come
        lowered = lower(programs, shape)
        tracing.release()
        return lowered

    monkeypatch.setattr(Programs, "lower", watched)
    monkeypatch.setattr(
        code_cache, "current", code_cache.CodeCache()
    )  # an empty one, so every program must be traced
    runner_of("float32").programs.compile_first(lambda _: None)
    assert seen == [True, True]


@pytest.mark.parametrize(
    ("times", "num_runs"),
    [((4.0, 2.0, 2.01, 1.0), 3), ((2.0, 2.01, 1.0), 2), ((9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0), 8)],
)
def test_prefill_is_timed_until_two_runs_agree(
    times: tuple[float, ...], num_runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_of("float32")
    first = len(runner.programs.first_shapes)
    run: list[Shape] = []

    def run_idle(runner: Runner, shape: Shape, num_tokens: int) -> float:
        run.append(shape)
        return 100.0 if len(run) <= first else times[len(run) - first - 1]  # first runs take longer

    monkeypatch.setattr(Runner, "_run_idle", run_idle)
    monkeypatch.setattr(runner, "prefill_token_seconds", math.inf)
    runner.warm_up(lambda _: None)
    assert run == runner.programs.first_shapes + [Shape(24)] * num_runs
    assert runner.prefill_token_seconds == min(times[:num_runs]) / 24


LARGE = """
from levserve.device.malloc import tune_malloc
from levserve.device.host import process_memory
tune_malloc()
for _ in range(2):  # after the first glibc itself would no longer map one for itself
    large, small = b"x" * 20_000_000, [b"x" * 600 for _ in range(10_000)]
    before = process_memory()
    del large
    print(before - process_memory() > 15_000_000)
"""


def test_what_is_large_is_given_back_when_it_is_freed() -> None:
    assert subprocess.run(
        [sys.executable, "-c", LARGE], capture_output=True, text=True, check=True
    ).stdout.split() == ["True", "True"]


ARENAS = """
import ctypes, threading
from levserve.device.malloc import tune_malloc
tune_malloc()
together = threading.Barrier(8)
def allocate():
    blocks = [b"x" * 5_000 for _ in range(100)]
    together.wait()
threads = [threading.Thread(target=allocate) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
libc = ctypes.CDLL(None)
libc.fdopen.restype = ctypes.c_void_p
libc.malloc_info(0, ctypes.c_void_p(libc.fdopen(1, b"w")))
libc.fflush(None)
"""


def test_threads_share_one_arena_of_malloc() -> None:
    described = subprocess.run(
        [sys.executable, "-c", ARENAS], capture_output=True, text=True, check=True
    ).stdout
    assert described.count("<heap nr=") == 1


def test_on_a_gpu_the_largest_programs_are_among_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = runner_of("float32").programs
    monkeypatch.setattr(
        programs, "_sizes", replace(programs._sizes, chunk_sizes=(8, 24, 64), row_sizes=(2, 4, 8))
    )
    assert programs.first_shapes == [Shape(8), Shape(2, Mode.FULL)]
    monkeypatch.setattr(programs, "_backend", XlaBackend("gpu"))
    assert programs.first_shapes == [Shape(8), Shape(64), Shape(2, Mode.FULL), Shape(8, Mode.FULL)]


def test_what_was_freed_in_the_middle_of_a_heap_is_given_back() -> None:
    blocks = [bytearray(b"x" * 60_000) for _ in range(3_000)]
    kept = blocks[::500] + blocks[-1:]
    blocks.clear()
    before = process_memory()
    trim_malloc()
    assert before - process_memory() > 100_000_000, "of 180 MB"
    assert len(kept) == 7
