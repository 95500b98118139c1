"""Keeps the machine code of CPU kernels from one test run to the next, because LLVM takes most of the time of tests of kernels.

Code is found by LLVM's input and everything else that it depends on, so a test always calls the code of the sources at hand.
"""

from __future__ import annotations

import hashlib
import os
from importlib.metadata import version
from pathlib import Path

from levserve.jit.code_cache import CodeCache, read_sources
from levserve.jit.program import Program
from tests.conftest import CACHE_VARIABLE

_compile = Program.compile
_cache = CodeCache(Path(os.environ[CACHE_VARIABLE], "kernels"))
_llvm = version("llvmlite"), read_sources(("jit/program.py",))


def keep_kernels() -> None:
    """Makes this process look for compiled kernels before it compiles them."""
    Program.compile = _find_or_compile


def _find_or_compile(program: Program) -> bytes:
    made_from = str(program._module), program._target, program._is_unrolled, _llvm
    name = hashlib.sha256(repr(made_from).encode()).hexdigest()
    found = _cache.find(name)
    if found is not None:
        return found
    compiled = _compile(program)
    _cache.keep(name, compiled)
    return compiled
