"""Compiled kernels on disk, where XLA keeps its own programs."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from pathlib import Path

log = logging.getLogger(__name__)

DIGEST_BYTES = 32


class KernelFolder:
    """A file each: a digest of the code, for who runs it would trust anything, and the code."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def find(self, name: str) -> bytes | None:
        try:
            data = self._file(name).read_bytes()
        except OSError:
            return None
        digest, code = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
        return code if _digest(code) == digest else None

    def keep(self, name: str, code: bytes) -> None:
        """All of it or nothing, also while others keep the same; who cannot does without."""
        part = self._file(name).with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        try:
            part.write_bytes(_digest(code) + code)
            part.replace(self._file(name))
        except OSError as error:
            log.warning("cannot keep a compiled kernel: %s", error)

    def _file(self, name: str) -> Path:
        return self._path / f"kernel-{name}.o"


def _digest(code: bytes) -> bytes:
    return hashlib.sha256(code).digest()
