"""Compiled code on disk, kernels and programs, for as long as nothing has changed that it was made from."""

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
DIGEST_BYTES = 32
UNUSED_SECONDS = 30 * 24 * 3600
SWITCHES = ("JAX_", "XLA_", "NPROC", "PJRT_NPROC")
"""Variables of the environment that change what is compiled begin so."""


class CodeFolder:
    """A file each: a digest of the code, for who runs it would trust anything, and the code."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def find(self, name: str) -> bytes | None:
        try:
            data = (self._path / name).read_bytes()
        except OSError:
            return None
        digest, code = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
        return code if _digest(code) == digest else None

    def keep(self, name: str, code: bytes) -> None:
        """All of it or nothing, also while others keep the same; who cannot does without."""
        part = self._path / f"{name}.{os.getpid()}-{threading.get_ident()}"
        try:
            part.write_bytes(_digest(code) + code)
            part.replace(self._path / name)
        except OSError as error:
            log.warning("cannot keep compiled code: %s", error)


def open_folder(parent: Path, cpu: str) -> Path:
    """The folder of this version of everything, on a CPU that is described; those that no start has used for a month go."""
    path = parent / _made_from(cpu)
    path.mkdir(parents=True, exist_ok=True)
    with suppress(OSError):  # it may be somebody else's
        os.utime(path)
        for other in parent.iterdir():
            if other.stat().st_mtime < time.time() - UNUSED_SECONDS:
                shutil.rmtree(other, ignore_errors=True)
    return path


def _made_from(cpu: str) -> str:
    """A digest of our sources, of the names and versions of all packages, and of what the environment says."""
    digest = hashlib.sha256()
    for source in sorted(OUR_SOURCES.rglob("*.py")):
        digest.update(f"{source.relative_to(OUR_SOURCES)}\n".encode() + source.read_bytes())
    packages = sorted({found.name for folder in sys.path for found in Path(folder).glob("*.dist-info")})
    switches = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(SWITCHES))
    digest.update(repr((sys.version, cpu, len(os.sched_getaffinity(0)), packages, switches)).encode())
    return digest.hexdigest()[:16]


def _digest(code: bytes) -> bytes:
    return hashlib.sha256(code).digest()
