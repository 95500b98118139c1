"""Compiled programs of earlier starts, found without tracing: tracing one takes longer than reading it.

jax's own cache finds a program only after it is traced.
"""

from __future__ import annotations

import logging
import pickle
import re
import zlib
from collections.abc import Sequence

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from levserve.jit import code_cache

log = logging.getLogger(__name__)

KERNEL = re.compile(r"@(levserve_\w+)")
"""The CPU kernels that a program calls, by name."""


def find_program(name: str, devices: Sequence[jax.Device]) -> jax.stages.Compiled | None:
    """The program that was kept under this name, for these devices, if there is one.

    It needs as many devices as it was compiled for: with fewer, XLA ends the process. These files are
    unpickled, so the cache folder must be trusted. `CodeCache` rejects corrupt files.
    """
    kept = code_cache.current.find(name)
    if kept is None:
        return None
    try:
        kernels, (program, in_tree, out_tree) = pickle.loads(zlib.decompress(kept))
        if not _register(kernels):
            return None
        compiled: jax.stages.Compiled = deserialize_and_load(
            program, in_tree, out_tree, devices[0].client, devices
        )
        return compiled
    except Exception:
        log.warning("a cached program cannot be used and is compiled again", exc_info=True)
        return None


def keep_program(name: str, lowered: jax.stages.Lowered, compiled: jax.stages.Compiled) -> None:
    if not code_cache.current.is_persistent:
        return
    try:
        kernels = sorted(set(KERNEL.findall(lowered.as_text())))
        code_cache.current.keep(name, zlib.compress(pickle.dumps((kernels, serialize(compiled))), level=1))
    except Exception as error:  # of many types, if jax cannot serialize a program; it still runs
        log.warning("a program cannot be cached, so that every start compiles it: %s", error)


def _register(kernels: list[str]) -> bool:
    """Registers the kernels that a program calls with XLA; whether all of them were found."""
    if not kernels:
        return True
    from levserve.jit.xla_call import register_cached  # imports LLVM, which only a CPU needs

    return all(register_cached(kernel) for kernel in kernels)
