"""Keeps compiled kernels and programs on disk, for as long as nothing they were compiled from has changed.

`current` is the cache in use; it keeps nothing until `use_cache` is called at start-up. This file does not
import LLVM, which only CPU kernels need.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import shutil
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from levserve.observe.control_group import num_cpus

log = logging.getLogger(__name__)

OUR_SOURCES = Path(__file__).parents[1]
COMPILED = (
    "model/**/*.py",
    "jit/*.py",
    "device/draft_rounds.py",
    "device/masks.py",
    "device/packing.py",
    "device/platform.py",
    "device/program_set.py",
    "device/programs.py",
    "device/rounds.py",
    "device/rules.py",
    "device/sampling.py",
    "device/lowering.py",
    "device/text_programs.py",
    "device/text_rounds.py",
    "observe/control_group.py",
    "text/grammar_matcher.py",
    "weights/gguf_blocks.py",
)
"""The sources that programs and kernels are traced from. A change to any other file invalidates nothing."""
PACKAGES = ("equinox-", "haliax-", "jax", "llvmlite-", "marin_haliax-", "ml_dtypes-", "numpy-", "nvidia_")
"""Prefixes of packages that change what is compiled: jax has plugins, and NVIDIA many libraries."""
DIGEST_BYTES = 32
UNUSED_SECONDS = 30 * 24 * 3600
SWITCHES = ("JAX_", "XLA_", "NPROC", "PJRT_NPROC")
"""Environment variables with these prefixes change what is compiled."""


class CodeCache:
    """One file per entry: a digest of the code, which detects damage, then the code.

    Without a folder it keeps nothing.
    """

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
            with suppress(OSError):
                part.unlink(missing_ok=True)


current = CodeCache()


def use_cache(cache: CodeCache) -> None:
    """Makes this the cache for everything that is compiled from now on."""
    global current
    current = cache


def open_folder(parent: Path, cpu: str) -> Path:
    """The folder for the installed versions and this CPU; removes folders unused for a month."""
    path = parent / _fingerprint(cpu)
    path.mkdir(parents=True, exist_ok=True)
    with suppress(OSError):  # the folder may belong to another user
        os.utime(path)
        for other in parent.iterdir():
            if other.stat().st_mtime < time.time() - UNUSED_SECONDS:
                shutil.rmtree(other, ignore_errors=True)
    return path


def _fingerprint(cpu: str) -> str:
    """A digest of everything besides the model that decides what is compiled."""
    digest = hashlib.sha256(read_sources(COMPILED))
    packages = list_packages(PACKAGES)
    switches = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(SWITCHES))
    digest.update(repr((sys.version, cpu, num_cpus(), packages, switches)).encode())
    return digest.hexdigest()[:16]


def read_sources(patterns: tuple[str, ...]) -> bytes:
    """levserve's own source files that match any of the patterns, each after its name.

    They are read once, so replacing files under a running server has no effect on it.
    """
    return _read_once(OUR_SOURCES, patterns)


@functools.cache
def _read_once(folder: Path, patterns: tuple[str, ...]) -> bytes:
    sources = {source for pattern in patterns for source in folder.glob(pattern)}
    named = (f"{source.relative_to(folder)}\n".encode() + source.read_bytes() for source in sorted(sources))
    return b"".join(named)


def list_packages(prefixes: tuple[str, ...]) -> list[str]:
    """Installed packages whose names begin with any of the prefixes, with their versions."""
    installed = {found.name for folder in sys.path for found in Path(folder).glob("*.dist-info")}
    return sorted(name for name in installed if name.startswith(prefixes))


def _digest(code: bytes) -> bytes:
    return hashlib.sha256(code).digest()
