"""The cache of fetched models: one folder each, cleared least recently used first, never while somebody serves from it.

Each folder has a file `.lock`. Who uses the folder holds a shared lock on it, who fills or clears it an exclusive one; the
kernel lets go of both when a process ends, however it ends. The lock file's time is the time of the last use.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from levserve.errors import StartupError

LOCK_FILE = ".lock"
POLL_SECONDS = 0.2


class Lease:
    """The right to use a folder of the cache, held until `close` or the end of the process."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def lease_folder(
    path: Path, is_whole: Callable[[], bool], fill: Callable[[], None], report: Callable[[str], None]
) -> Lease:
    """A shared hold on a folder that `is_whole`; if it is not, `fill` is called while nobody else has it."""
    is_told = False
    while True:
        descriptor = _open_lock(path)
        try:
            if is_whole():
                if _lock(descriptor, path, fcntl.LOCK_SH) and is_whole():
                    os.utime(path / LOCK_FILE)
                    return Lease(path, os.dup(descriptor))
            elif _lock(descriptor, path, fcntl.LOCK_EX):
                if not is_whole():
                    fill()
            else:
                if not is_told:
                    report(f"another process fills {path}; waiting for it")
                    is_told = True
                time.sleep(POLL_SECONDS)
        finally:
            os.close(descriptor)


def make_room(path: Path, num_bytes: int, limit_bytes: int) -> None:
    """Clears folders beside `path` until `num_bytes` more fit the limit; 0 is no limit."""
    if not limit_bytes:
        return
    others = sorted(
        (folder for folder in path.parent.iterdir() if folder.is_dir() and folder != path), key=_last_use
    )
    used = {folder: _size(folder) for folder in others}
    own = _size(path)
    for folder in others:
        if own + num_bytes + sum(used.values()) <= limit_bytes:
            return
        if _clear(folder):
            del used[folder]
    if own + num_bytes + sum(used.values()) > limit_bytes:
        held = f", and {sum(used.values()) / 1e6:,.1f} MB are in use" if used else ""
        raise StartupError(
            f"{path.name} needs {(own + num_bytes) / 1e6:,.1f} MB in {path.parent}; --cache-size allows {limit_bytes / 1e6:,.1f} MB{held}"
        )


def _open_lock(path: Path) -> int:
    path.mkdir(parents=True, exist_ok=True)
    return os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)


def _lock(descriptor: int, path: Path, kind: int) -> bool:
    """Whether the lock could be had at once, on a file that is still the folder's own."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path / LOCK_FILE))
    except FileNotFoundError:
        return False  # cleared a moment ago


def _clear(path: Path) -> bool:
    """Removes a folder unless somebody uses it."""
    descriptor = _open_lock(path)
    try:
        if not _lock(descriptor, path, fcntl.LOCK_EX):
            return False
        gone = path.rename(path.with_name(f".{path.name}.gone"))  # at once, so that nobody finds half of it
        shutil.rmtree(gone)
        return True
    finally:
        os.close(descriptor)


def _last_use(path: Path) -> float:
    lock = path / LOCK_FILE
    return lock.stat().st_mtime if lock.exists() else 0.0


def _size(path: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in path.rglob("*") if file.is_file())
