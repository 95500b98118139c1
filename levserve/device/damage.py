"""Removes what a full disk has cut short in folders that jax and Python write to.

jax never replaces an entry of its cache: it would compile that program at every start, each time with a
warning. Python 3.11 does not notice that it wrote only a part of a file of bytecode, and every later import
of it fails with "EOFError: marshal data too short" (https://github.com/python/cpython/issues/126606).
"""

from __future__ import annotations

import logging
import marshal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)

PROGRAMS = "*-cache"
BYTECODE = "**/*.pyc"
BYTECODE_HEADER_BYTES = 16
CHECKED = "checked"
"""A file that is as old as the last check: files that are older are whole, and are not read again."""


def remove_damaged_programs(folder: Path) -> None:
    """Called before jax looks for programs. One that another process is writing may go too; it is compiled
    once more."""
    try:
        from jax._src.compilation_cache import decompress_executable
    except ImportError:  # a later jax: the warnings stay
        return
    _remove_damaged(folder, PROGRAMS, decompress_executable)


def remove_damaged_bytecode(folder: Path) -> None:
    """Called before Python imports from the folder. Reading all files of jax and its packages takes 0.2 s."""
    _remove_damaged(folder, BYTECODE, lambda data: marshal.loads(data[BYTECODE_HEADER_BYTES:]))


def _remove_damaged(folder: Path, pattern: str, read: Callable[[bytes], object]) -> None:
    """Removes the files that `read` fails for, among those that were written since the last call."""
    checked = folder / CHECKED
    last_check = checked.stat().st_mtime if checked.exists() else 0.0
    try:
        checked.touch()
    except OSError:  # the folder belongs to another user
        return
    for path in folder.glob(pattern):
        with suppress(OSError):
            if path.stat().st_mtime < last_check:
                continue
            data = path.read_bytes()
            try:
                read(data)
            except Exception:  # each library has its own
                log.info("removing %s, which is damaged", path)
                path.unlink(missing_ok=True)
