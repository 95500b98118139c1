"""Functions that LLVM compiles and Python calls without holding the GIL, so several threads run at once."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from levserve.jit import code_cache
from levserve.jit.builder import Builder
from levserve.jit.program import Code, Program
from levserve.jit.target import Target


class HostFunction:
    """A compiled function. Its name must differ from that of every other function for the same target."""

    def __init__(
        self, name: str, target: Target, num_arguments: int, write: Callable[[Builder], None]
    ) -> None:
        name = f"{name}_{target.name}"
        compiled = code_cache.current.find(name)
        if compiled is None:
            program = Program(target)
            with program.function("entry", num_arguments) as builder:
                write(builder)
            compiled = program.compile()
            code_cache.current.keep(name, compiled)
        self._code = Code(compiled)
        kind = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * num_arguments)
        self._call = kind(self._code.address("entry"))

    def __call__(self, *arguments: NDArray[np.generic] | int) -> None:
        """Arrays are passed by address, so they must be contiguous."""
        self._call(*(each if isinstance(each, int) else each.ctypes.data for each in arguments))
