"""Programs of earlier starts, found by what they were made from: to trace one takes longer than to read it back.

jax keeps what it compiles too, but finds it only by what was traced.
"""

from __future__ import annotations

import logging
import pickle
import re
import zlib

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from levserve.jit import code_cache

log = logging.getLogger(__name__)

KERNEL = re.compile(r"@(levserve_\w+)")
"""What a program on a CPU calls by name."""


def find_program(name: str, device: jax.Device) -> jax.stages.Compiled | None:
    """Of these files only who may write the cache can have made one; what was spoilt has not come so far."""
    kept = code_cache.current.find(name)
    if kept is None:
        return None
    try:
        kernels, (program, in_tree, out_tree) = pickle.loads(zlib.decompress(kept))
        if not _has(kernels):
            return None
        compiled: jax.stages.Compiled = deserialize_and_load(
            program, in_tree, out_tree, device.client, [device]
        )
        return compiled
    except Exception:
        log.warning("a program that was kept cannot be used, so it is compiled anew", exc_info=True)
        return None


def keep_program(name: str, lowered: jax.stages.Lowered, compiled: jax.stages.Compiled) -> None:
    if not code_cache.current.is_persistent:
        return
    try:
        kernels = sorted(set(KERNEL.findall(lowered.as_text())))
        code_cache.current.keep(name, zlib.compress(pickle.dumps((kernels, serialize(compiled))), level=1))
    except Exception as error:  # jax says in many ways that a program has something that cannot be saved; it runs all the same
        log.warning("a program cannot be kept, so every start will compile it: %s", error)


def _has(kernels: list[str]) -> bool:
    """Tells XLA of kernels before the program that calls them comes; whether there are all of them."""
    if not kernels:
        return True
    from levserve.jit.xla_call import recall  # brings LLVM, which a GPU has no use for

    return all([recall(kernel) for kernel in kernels])
