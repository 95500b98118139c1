"""Says what the requested device is missing: a package, a driver, or a folder for its lock.

jax's own messages are misleading here: without NVIDIA's driver it logs a traceback about a library that is
installed, and if libtpu cannot write its lock it says that another process uses the TPU. Imports no jax.
"""

from __future__ import annotations

import ctypes
import os
from importlib.util import find_spec
from pkgutil import iter_modules

CUDA_DRIVER = "libcuda.so.1"
TPU_LOCK_FOLDER = "/tmp"  # libtpu_lockfile is in it


def find_missing(device: str) -> str | None:
    """What `device` certainly lacks, so that jax need not look for it; None if jax should look."""
    if device != "gpu":
        return None
    if not _has_cuda_plugin():
        return "jax's CUDA plugin is not installed: install levserve with its extra cuda13 or cuda12"
    if not _can_load(CUDA_DRIVER):
        return (
            f"there is no NVIDIA driver, because {CUDA_DRIVER} cannot be loaded; a container gets it from "
            "NVIDIA's container toolkit and --gpus all"
        )
    return None


def explain(device: str, reason: str) -> str:
    """The cause that jax does not see, or else jax's own `reason`."""
    if device == "tpu" and not os.access(TPU_LOCK_FOLDER, os.W_OK):
        return (
            f"libtpu keeps a lock in {TPU_LOCK_FOLDER}, which cannot be written; a container with a "
            "read-only root needs --tmpfs /tmp"
        )
    return reason


def _has_cuda_plugin() -> bool:
    plugins = find_spec("jax_plugins")
    if plugins is None:
        return False
    return any(
        module.name.startswith("xla_cuda") for module in iter_modules(plugins.submodule_search_locations)
    )


def _can_load(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
