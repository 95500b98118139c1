"""Ways in which the threads of CPU kernels wait for each other, to measure them by turns in one process.

A kernel is generated with the constants of its modules, so each way has its own kernels, under their own
names, and its own programs; the weights are shared. Because ways take turns, other processes disturb all
alike.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import decode
import jax
import jax.numpy as jnp

from levserve.device.programs import Shape
from levserve.jit import waiting
from levserve.jit.target import detect_target
from levserve.jit.xla_call import Kernel
from levserve.model.rules import Mode

NEVER = 2**60
"""A limit that is never reached, in nanoseconds or threads."""


class Constant(NamedTuple):
    module: ModuleType
    name: str
    value: Any


def many_from(num_threads: int) -> Constant:
    return Constant(waiting, "MANY_THREADS", {detect_target().arch: num_threads})


WAYS: dict[str, tuple[Constant, ...]] = {
    "default": (),
    "yield": (many_from(NEVER), Constant(waiting, "TURN_NANOSECONDS", NEVER)),
    "turn": (many_from(NEVER),),
    "sleep": (many_from(0),),
}
"""The last three always yield, sleep after a yield that took long, and always sleep."""


@contextmanager
def kernels_in(way: str) -> Iterator[None]:
    """Inside this context, kernels are generated for this way and have it in their names."""
    with ExitStack() as stack:
        for constant in WAYS[way]:
            stack.enter_context(patch.object(*constant))
        name = property(lambda kernel: f"{kernel.name}_{kernel.target.name}_{way}")
        stack.enter_context(patch.object(Kernel, "call_name", name))
        jax.clear_caches()
        yield


class Steps:
    """Decode steps of a model with random weights, without the engine."""

    def __init__(self, shape: str, rows: list[int], num_steps: int, quantize: str = "int8") -> None:
        flags = ["--shape", shape, "--quantize", quantize, "--repeats", str(num_steps), "--rows"]
        self._options = decode._parser().parse_args([*flags, *map(str, rows)])
        config = decode.SHAPES[shape]
        with patch.object(decode, "random_arrays", _random_arrays):
            self._runner, self._sizes, _ = decode.build(config, jnp.dtype(jnp.bfloat16), "cpu", self._options)
        self._runner.programs.compile_only([Shape(size, Mode.GREEDY) for size in self._sizes.row_sizes])
        for count in rows:
            self.measure(count)

    def measure(self, rows: int) -> float:
        """Tokens a second over all steps, slow ones too."""
        seconds = decode.time_rounds(self._runner, self._sizes, rows, self._options)
        return rows * len(seconds) / sum(seconds)


_random_arrays = functools.cache(decode.random_arrays)
