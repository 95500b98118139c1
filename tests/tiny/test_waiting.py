"""Threads of a call wait for each other: a stage sees all of the one before, and nobody sleeps for ever."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levserve.jit import waiting, xla_call
from levserve.jit.builder import Value
from levserve.jit.xla_call import Call, Kernel, Stage
from tests.targets import HOST

NUM_TASKS, NUM_ITERATIONS, NUM_THREADS = 12, 25, 4


def carousel(name: str) -> Kernel:
    """Moves numbers to their right neighbour's place plus one, there and back again, in tasks of one number each."""

    def num_tasks(call: Call) -> Value:
        return call.builder.constant(NUM_TASKS)

    def move(call: Call, source: Value, into: Value, task: Value) -> None:
        number = call.builder.load_word(source, (task + (NUM_TASKS - 1)) % NUM_TASKS)
        call.builder.store(into + task * 8, number + 1)

    def move_to_shared(call: Call, shared: Value, _: Value, task: Value) -> None:
        move(call, call.result(0), shared, task)

    def move_back(call: Call, shared: Value, _: Value, task: Value) -> None:
        move(call, shared, call.result(0), task)

    return Kernel(
        name,
        HOST,
        (Stage(num_tasks, move_to_shared), Stage(num_tasks, move_back)),
        NUM_ITERATIONS,
        shared_bytes=lambda call: call.builder.constant(8 * NUM_TASKS),
    )


@pytest.mark.parametrize("looks", [0, 1, 30, None])
def test_threads_that_sleep_are_woken_and_see_what_was_done(
    looks: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With hardly a look before they sleep, and more threads than cores, nearly every wait is a sleep."""
    monkeypatch.setenv("NPROC", "6")
    monkeypatch.setitem(waiting.LOOKS, HOST.arch, looks)
    name = xla_call.register(carousel(f"carousel_{looks}"))
    jax.config.update("jax_enable_x64", True)
    try:
        start = jnp.arange(NUM_TASKS, dtype=jnp.int64)
        call = jax.ffi.ffi_call(
            name, jax.ShapeDtypeStruct(start.shape, start.dtype), input_output_aliases={0: 0}
        )
        run = jax.jit(call).lower(start).compile()
    finally:
        jax.config.update("jax_enable_x64", False)
    moves = 2 * NUM_ITERATIONS
    wanted = np.roll(np.arange(NUM_TASKS), moves % NUM_TASKS) + moves
    failures: list[AssertionError] = []

    def work() -> None:
        try:
            for _ in range(300):
                np.testing.assert_array_equal(run(start), wanted)
        except AssertionError as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a thread sleeps for ever"
    assert not failures
