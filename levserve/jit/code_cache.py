"""Compiled code on disk, kernels and programs, kept for as long as nothing it was made from has changed.

`current` is the cache in use; it keeps nothing until a start calls `use_cache`. No LLVM here: only kernels
need that.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)

OUR_SOURCES = Path(__file__).parents[1]
COMPILED = (
    "model/**/*.py",
    "jit/*.py",
    "device/packing.py",
    "device/platform.py",
    "device/programs.py",
    "device/rounds.py",
    "device/rules.py",
)
"""The sources that programs and kernels are traced from. A change to any other file keeps what is
compiled."""
PACKAGES = ("equinox-", "haliax-", "jax", "llvmlite-", "marin_haliax-", "ml_dtypes-", "numpy-", "nvidia_")
"""Packages whose names begin so change what is compiled; jax has plugins, and nvidia's libraries are many."""
DIGEST_BYTES = 32
UNUSED_SECONDS = 30 * 24 * 3600
SWITCHES = ("JAX_", "XLA_", "NPROC", "PJRT_NPROC")
"""Environment variables with these prefixes change what is compiled."""


class CodeCache:
    """One file per entry: a digest of the code, which detects damage, and the code. Without a folder it keeps
    nothing."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder

    @property
    def is_persistent(self) -> bool:
        return self._folder is not None

    def find(self, name: str) -> bytes | None:
        if self._folder is None:
            return None
        try:
            data = (self._folder / name).read_bytes()
        except OSError:
            return None
        digest, code = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
        return code if _digest(code) == digest else None

    def keep(self, name: str, code: bytes) -> None:
        """Atomic and safe with concurrent writers; a failed write is logged and ignored."""
        if self._folder is None:
            return
        part = self._folder / f"{name}.{os.getpid()}-{threading.get_ident()}"
        try:
            part.write_bytes(_digest(code) + code)
            part.replace(self._folder / name)
        except OSError as error:
            log.warning("cannot keep compiled code: %s", error)


current = CodeCache()


def use_cache(cache: CodeCache) -> None:
    """Everything compiled from now on is looked up and kept in this cache."""
    global current
    current = cache


def open_folder(parent: Path, cpu: str) -> Path:
    """The folder for this version of everything on a CPU so described; folders unused for a month are
    removed."""
    path = parent / _made_from(cpu)
    path.mkdir(parents=True, exist_ok=True)
    with suppress(OSError):  # the folder may belong to another user
        os.utime(path)
        for other in parent.iterdir():
            if other.stat().st_mtime < time.time() - UNUSED_SECONDS:
                shutil.rmtree(other, ignore_errors=True)
    return path


def _made_from(cpu: str) -> str:
    """A digest of all that compiled code follows from, but for the model: sources, packages, CPU and
    environment."""
    digest = hashlib.sha256()
    sources = {source for pattern in COMPILED for source in OUR_SOURCES.glob(pattern)}
    for source in sorted(sources):
        digest.update(f"{source.relative_to(OUR_SOURCES)}\n".encode() + source.read_bytes())
    installed = {found.name for folder in sys.path for found in Path(folder).glob("*.dist-info")}
    packages = sorted(name for name in installed if name.startswith(PACKAGES))
    switches = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(SWITCHES))
    digest.update(repr((sys.version, cpu, len(os.sched_getaffinity(0)), packages, switches)).encode())
    return digest.hexdigest()[:16]


def _digest(code: bytes) -> bytes:
    return hashlib.sha256(code).digest()
