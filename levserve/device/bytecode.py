"""Keeps Python's bytecode in the cache folder if it is not kept beside the sources.

A worker imports a thousand files, and Python compiles them at every start if it may not write the bytecode:
in another user's environment without bytecode (uv installs none), or with PYTHONDONTWRITEBYTECODE. On two
Neoverse-N1 cores that takes 4 of the 8 seconds of a start.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path

from levserve.device.damage import remove_damaged_bytecode
from levserve.jit.code_cache import list_packages, read_sources

NUM_FOLDERS = 3
"""How many folders are kept: one for each set of package versions, 27 MB each."""


def keep_bytecode(parent: Path, package: str = "jax") -> None:
    """Must be called before the package is imported. Other programs' bytecode stays where it is."""
    if sys.pycache_prefix is not None:
        return  # the user has named a folder
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return
    kept = Path(importlib.util.cache_from_source(spec.origin))
    if kept.exists() or (not sys.dont_write_bytecode and _can_write(kept.parent)):
        return
    folder = parent / _fingerprint()
    with suppress(OSError):  # the folder may be read-only, and filled already
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)
        _remove_older(parent)
    if folder.exists():
        remove_damaged_bytecode(folder)
        sys.pycache_prefix = str(folder.absolute())
        sys.dont_write_bytecode = False


def _fingerprint() -> str:
    """A hash of all sources. Python itself compares times and sizes; in an image all times may be equal."""
    digest = hashlib.sha256(read_sources(("**/*.py",)))
    digest.update(repr((sys.version, list_packages(("",)))).encode())
    return digest.hexdigest()[:16]


def _remove_older(parent: Path) -> None:
    """Keeps the most recently used folders; a server whose folder is removed compiles its later imports."""
    newest_first = sorted(parent.iterdir(), key=lambda folder: folder.stat().st_mtime, reverse=True)
    for folder in newest_first[NUM_FOLDERS:]:
        shutil.rmtree(folder, ignore_errors=True)


def _can_write(folder: Path) -> bool:
    """Whether files can be written there, perhaps after the folder is made."""
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    return os.access(nearest, os.W_OK)
