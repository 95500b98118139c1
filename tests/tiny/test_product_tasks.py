"""How a product is shared among threads: every output once, in whole tiles, and finer for many threads."""

from __future__ import annotations

import ctypes

import jax.numpy as jnp
import pytest

from levserve.jit.program import Code, Program
from levserve.model.cpu import linear
from levserve.model.cpu.products import product_for
from tests.targets import HOST

MOST_TASKS = 1000
PRODUCT = product_for(jnp.dtype(jnp.bfloat16), 64, HOST)


def list_ranges(num_outs: list[int]) -> list[list[tuple[int, int]]]:
    """The outputs of each task, for matrices with these numbers of outputs."""
    program = Program(HOST)
    with program.function("list_ranges", 2) as builder:
        num_out, place = builder.arguments
        ranges = builder.to_pointer(place)
        num_tasks = linear.num_tasks(PRODUCT, num_out)
        builder.store(ranges, num_tasks)
        with builder.loop(0, num_tasks.minimum(MOST_TASKS)) as task:
            builder.store_words(ranges + task * 16 + 8, *linear.task_range(PRODUCT, task, num_out))
    code = Code(program.compile())
    call = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(code.address("list_ranges"))
    found = []
    for num_out in num_outs:
        words = (ctypes.c_int64 * (1 + 2 * MOST_TASKS))()
        call(num_out, ctypes.addressof(words))
        found.append([(words[1 + 2 * task], words[2 + 2 * task]) for task in range(words[0])])
    return found


@pytest.mark.parametrize(("num_threads", "tasks_each"), [(1, 2), (2, 2), (4, 2), (5, 4), (16, 4)])
def test_a_product_is_shared_in_whole_tiles_and_finer_by_many_threads(
    num_threads: int, tasks_each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPROC", str(num_threads))
    even = 64 * tasks_each * num_threads
    sizes = [4, 32, 100, 2048, even, 49152]
    for num_out, ranges in zip(sizes, list_ranges(sizes)):
        starts, stops = zip(*ranges)
        assert starts == (0, *stops[:-1]) and stops[-1] == num_out
        assert all(start % PRODUCT.tile_outs == 0 and start < stop for start, stop in ranges)
        widths = {stop - start for start, stop in ranges[:-1]}
        assert all(linear.MIN_TASK_OUTS <= width <= linear.MAX_TASK_OUTS for width in widths)
        if num_out == even:
            assert len(ranges) == tasks_each * num_threads
