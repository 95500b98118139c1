#!/usr/bin/env python3
"""Shows where the time of a decode step goes on a CPU: each stage of the layers, and how long its threads wait.

    python bench/stages.py --shape smollm2-1.7b --rows 1 8
    python bench/stages.py --shape smollm2-1.7b --rows 1 --looks 0 20 1000 --task-outs 1024 128 --pinned

Every task notes when it begins and ends and on which thread. Printed are, of each stage and summed over
all layers: the time from the first beginning to the last end, the time until the next stage begins, the
share of the threads' time that is work, and how fast its matrix is read. The floor is the time to read
weights and KV at the speed of a kernel that only reads.

What may be varied: how often a waiting thread looks before it sleeps, how many outputs of a product a task has at most,
and whether each thread of XLA's pool stays on a core of its own. Each variant runs in a process of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import decode
import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from levserve.jit import xla_call
from levserve.jit.builder import F32, Value
from levserve.jit.target import detect_target
from levserve.jit.waiting import read_clock
from levserve.jit.xla_call import Call, Kernel, RunTask, Stage
from levserve.model.cpu import layers, linear
from levserve.model.parameter_shapes import parameter_shapes

STAGES = ("norm", "qkv", "rotate", "attend", "prepare", "out", "norm", "gate_up", "activate", "down")
MAX_TASKS = 1024
BEGIN, END, THREAD = range(3)
READ_BYTES, READ_TASK_BYTES = 1 << 30, 1 << 18


class Recorder:
    """What the last call of the layers' kernel noted: [layer, stage, task, 3]."""

    def __init__(self, num_layers: int) -> None:
        self.notes = np.zeros((num_layers, len(STAGES), MAX_TASKS, 3), np.int64)

    def watch(self, kernel: Kernel) -> Kernel:
        assert len(kernel.stages) == len(STAGES), "the layers have other stages than this knows"
        stages = tuple(
            stage._replace(run=self._noting(index, stage.run)) for index, stage in enumerate(kernel.stages)
        )
        return dataclasses.replace(kernel, stages=stages, name=f"watched_{kernel.name}")

    def _noting(self, index: int, run: RunTask) -> RunTask:
        def noting(call: Call, shared: Value, scratch: Value, task: Value) -> None:
            builder = call.builder
            place = (call.iteration * len(STAGES) + index) * MAX_TASKS + task.minimum(MAX_TASKS - 1)
            note = builder.to_pointer(place * 24 + self.notes.ctypes.data)
            builder.store(note + 8 * BEGIN, read_clock(builder))
            run(call, shared, scratch, task)
            builder.store(note + 8 * END, read_clock(builder))
            builder.store(note + 8 * THREAD, builder.to_address(scratch))

        return noting


def main() -> None:
    options = _parser().parse_args()
    variants = list(itertools.product(options.looks, options.task_outs, (False, True)[: 1 + options.pinned]))
    if len(variants) == 1:
        return measure(options)
    same = ["--shape", options.shape, "--quantize", options.quantize, "--repeats", str(options.repeats)]
    same += ["--rows", *map(str, options.rows), *(["--brief"] if options.brief else [])]
    for looks, outs, is_pinned in variants:
        varied = ["--pin"] if is_pinned else []
        varied += ["--looks", str(looks)] if looks is not None else []
        varied += ["--task-outs", str(outs)] if outs is not None else []
        subprocess.run([sys.executable, __file__, *same, *varied], check=False)


def measure(options: argparse.Namespace) -> None:
    (looks,), (outs,) = options.looks, options.task_outs
    decode.set_looks(looks)
    if outs is not None:
        linear.MAX_TASK_OUTS = outs
    config = decode.SHAPES[options.shape]
    recorder, kernel_for = Recorder(config.num_layers), layers.kernel_for
    layers.kernel_for = lambda shape: recorder.watch(kernel_for(shape))
    read = measure_reading()
    threads = xla_call.num_threads()
    print(
        f"\n{options.shape}, {threads} threads, looks {looks}, outputs of a task at most "
        f"{linear.MAX_TASK_OUTS}, {'pinned' if options.pin else 'not pinned'}: reads {read / 1e9:.1f} GB/s",
        flush=True,
    )
    flags = ["--rows", *map(str, options.rows), "--quantize", options.quantize, "--context", "256"]
    settings = decode._parser().parse_args([*flags, "--shape", options.shape, "--repeats", "3"])
    runner, sizes, _ = decode.build(config, jnp.dtype(jnp.bfloat16), "cpu", settings)
    if options.pin:
        pin_threads()
    matrices = matrix_bytes(options.shape, options.quantize)
    for rows in options.rows:
        firsts = jnp.asarray(decode.random_tokens(config, sizes.rows, rows), jnp.int32)
        runner._state = runner._state._replace(last_tokens=firsts)
        steps, notes = [], []
        for _ in range(options.repeats):
            steps.append(decode.measure_decode(runner, sizes, rows, settings))
            notes.append(recorder.notes.copy())
            recorder.notes[:] = 0
        step = statistics.median(steps)
        floor = (sizes.weight_bytes + rows * 256 * sizes.page_bytes // decode.PAGE_SIZE) / read
        inside = statistics.median(
            (each[..., END].max() - each[each > 0].min() if each.any() else 0)
            for each in [note[..., :2] for note in notes]
        )
        print(
            f"rows {rows}: {step * 1e3:.2f} ms a step, {floor / step:.0%} of the floor; in the layers "
            f"{inside / 1e6:.2f} ms",
            flush=True,
        )
        if not options.brief:
            print_stages(notes, threads, matrices)


def print_stages(notes: list[NDArray[np.int64]], threads: int, matrices: dict[str, int]) -> None:
    tables = np.array([summarize(note, threads) for note in notes])  # [repeat, stage, what summarize() gives]
    table = np.median(tables, axis=0)
    for name, (span, gap, work, tasks) in zip(STAGES, table):
        speed = f"{matrices[name] / span:6.1f} GB/s" if name in matrices else ""
        print(
            f"  {name:9} {span / 1e3:9.1f} us, then {gap / 1e3:7.1f} us; {tasks:5.0f} tasks, "
            f"{work:4.0%} work  {speed}",
            flush=True,
        )
    print(f"  all       {table[:, 0].sum() / 1e3:9.1f} us, then {table[:, 1].sum() / 1e3:7.1f} us")


def summarize(note: NDArray[np.int64], threads: int) -> list[tuple[float, float, float, float]]:
    """Of each stage: nanoseconds of its tasks, and until the next stage, share of work, tasks per layer."""
    num_layers = note.shape[0]
    used = note[..., BEGIN] > 0
    begin = np.where(used, note[..., BEGIN], np.iinfo(np.int64).max).min(axis=2)  # [layer, stage]
    end = note[..., END].max(axis=2)
    work = np.where(used, note[..., END] - note[..., BEGIN], 0).sum(axis=2)
    following = np.append(begin.reshape(-1)[1:], end.reshape(-1)[-1]).reshape(begin.shape)
    span, gap = end - begin, following - end
    return [
        (
            float(span[:, stage].sum()),
            float(gap[:, stage].sum()),
            float(work[:, stage].sum() / (threads * (span + gap)[:, stage].sum())),
            float(used[:, stage].sum() / num_layers),
        )
        for stage in range(len(STAGES))
    ]


def matrix_bytes(shape: str, quantize: str) -> dict[str, int]:
    """Bytes of each kind of matrix in all layers."""
    sizes = parameter_shapes(decode.SHAPES[shape])
    item = 2 if quantize == "none" else 1
    return {
        name: item * sum(int(np.prod(size)) for each, size in sizes.items() if each.endswith(name))
        for name in ("qkv", "out", "gate_up", "down")
    }


def measure_reading() -> float:
    """Bytes a second of a kernel that adds up a large array."""

    def num_tasks(call: Call) -> Value:
        return call.builder.constant(READ_BYTES // READ_TASK_BYTES)

    def read(call: Call, shared: Value, scratch: Value, task: Value) -> None:
        builder, start = call.builder, call.argument(0) + task * READ_TASK_BYTES
        sums = [builder.variable(builder.zeros(F32, 16)) for _ in range(8)]
        with builder.loop(0, READ_TASK_BYTES, 512) as at:
            for number, total in enumerate(sums):
                builder.prefetch(start + at + (4096 + 64 * number))
                total.set(total.get() + builder.load(start + at + 64 * number, F32, 16))
        for total in sums:
            builder.store(scratch, total.get())

    kernel = Kernel(
        "read",
        detect_target(),
        (Stage(num_tasks, read),),
        scratch_bytes=lambda call: call.builder.constant(64),
    )
    call = jax.ffi.ffi_call(xla_call.register(kernel), jax.ShapeDtypeStruct((1,), jnp.float32))
    array = jnp.ones(READ_BYTES // 4, jnp.float32)
    run = jax.jit(call)
    seconds = []
    for _ in range(8):
        start = time.perf_counter()
        jax.block_until_ready(run(array))
        seconds.append(time.perf_counter() - start)
    return READ_BYTES / statistics.median(seconds[2:])


def pin_threads() -> None:
    """Gives each thread of XLA's pool that works for kernels a core of its own."""
    cores = itertools.cycle(sorted(os.sched_getaffinity(0)))
    for thread in pool_threads():
        os.sched_setaffinity(thread, {next(cores)})


def pool_threads() -> Iterator[int]:
    for task in sorted(Path("/proc/self/task").iterdir()):
        if "XLAEigen" in (task / "comm").read_text():
            yield int(task.name)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=decode.SHAPES, default="smollm2-1.7b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--quantize", default="int8")
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--looks", type=int, nargs="+", default=[None])
    parser.add_argument("--task-outs", type=int, nargs="+", default=[None])
    parser.add_argument("--pinned", action="store_true", help="measure each variant with pinned threads too")
    parser.add_argument("--pin", action="store_true", help="pin the threads of this process")
    parser.add_argument("--brief", action="store_true", help="without the table of stages")
    return parser


if __name__ == "__main__":
    main()
