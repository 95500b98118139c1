"""The cache of downloaded models: one folder each, removed least recently used first, but never while in use.

Each folder has a file `.lock`. A process that uses the folder holds a shared lock on it; one that fills or
removes the folder holds an exclusive lock. The kernel releases both when a process ends, even if it is
killed. The lock file's modification time is the time of the last use.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from levserve.errors import StartupError
from levserve.weights.progress import Report

LOCK_FILE = ".lock"
GONE = ".gone"
"""Ends the name of a folder that is being removed, or was when its process was killed."""
POLL_SECONDS = 0.2
OPEN_ATTEMPTS = 100


class Lease:
    """The right to use a folder of the cache, held until `close`, or until nothing refers to it any more: a
    start that fails needs no cleaning up."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._close = weakref.finalize(self, os.close, descriptor)

    def close(self) -> None:
        self._close()


def lease_folder(
    path: Path, is_complete: Callable[[], bool], fill: Callable[[], None], report: Report
) -> Lease:
    """Takes a shared lock on a folder that `is_complete`, or calls `fill` first under an exclusive lock.

    An incomplete folder that other processes use was damaged. They keep the files that they have open, and a
    new folder takes its place.
    """
    has_reported = False
    while True:
        descriptor = _open_lock(path)
        try:
            if is_complete():
                if _lock(descriptor, path, fcntl.LOCK_SH) and is_complete():
                    os.utime(path / LOCK_FILE)
                    return Lease(path, os.dup(descriptor))
            elif _lock(descriptor, path, fcntl.LOCK_EX):
                if not is_complete():
                    fill()
            elif _lock(descriptor, path, fcntl.LOCK_SH) and not is_complete():
                if not _lock(descriptor, path, fcntl.LOCK_EX):
                    discard(path)
            else:
                if not has_reported:
                    report(f"waiting for another process that is filling {path}")
                    has_reported = True
                time.sleep(POLL_SECONDS)
        finally:
            os.close(descriptor)


def make_room(
    path: Path,
    num_bytes: int,
    limit_bytes: int,
    *,
    option: str = "--cache-size",
    check: Callable[[int], None] = lambda freed: None,
) -> None:
    """Removes folders beside `path` until it may grow by `num_bytes`; a limit of 0 means no limit.

    Raises `StartupError`, which names the option that sets the limit, if folders in use leave no room. If
    the limit is too small even for `path` alone, nothing is removed. `check` is called before anything is
    removed, with the number of bytes that will be freed, and may raise.
    """
    if not limit_bytes:
        return
    needed = _size(path) + num_bytes
    used = 0
    if needed <= limit_bytes:
        used = _shrink_others(path, limit_bytes - needed, check)
        before = None
        while needed + used > limit_bytes and used != before:  # another process may be removing some of it
            time.sleep(POLL_SECONDS)
            before, used = used, _shrink_others(path, limit_bytes - needed, check)
    if needed + used > limit_bytes:
        in_use = f", and {used / 1e6:,.1f} MB are in use" if used else ""
        raise StartupError(
            f"{path.name} needs {needed / 1e6:,.1f} MB in {path.parent}; "
            f"{option} allows {limit_bytes / 1e6:,.1f} MB{in_use}"
        )


def _shrink_others(path: Path, allowed_bytes: int, check: Callable[[int], None]) -> int:
    """Removes folders beside `path`, least recently used first; returns the bytes of those that remain."""
    others = []
    for folder in path.parent.iterdir():
        if folder.suffix == GONE:
            shutil.rmtree(folder, ignore_errors=True)
        elif folder.is_dir() and folder != path:
            others.append(folder)
    others.sort(key=_last_use)
    sizes = {folder: _size(folder) for folder in others}
    check(_least_sum(sizes.values(), sum(sizes.values()) - allowed_bytes))
    for folder in others:
        if sum(sizes.values()) <= allowed_bytes:
            break
        if _remove(folder):
            del sizes[folder]
    return sum(sizes.values())


def _least_sum(sizes: Iterable[int], least: int) -> int:
    """The sum of as many of the first sizes as it takes to reach `least`, or of all sizes."""
    total = 0
    for size in sizes:
        if total >= least:
            break
        total += size
    return total


def discard(path: Path) -> None:
    """Removes a folder, even one in use; processes that have its files open keep them."""
    gone = path.with_name(f".{path.name}.{uuid4().hex[:8]}{GONE}")
    with suppress(FileNotFoundError):  # another process was faster
        path.rename(gone)  # so that no process finds half of it
        shutil.rmtree(gone)


def _open_lock(path: Path) -> int:
    for _ in range(OPEN_ATTEMPTS):
        with suppress(FileNotFoundError, FileExistsError):  # another process removes it at the same time
            path.mkdir(parents=True, exist_ok=True)
            return os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    path.mkdir(parents=True, exist_ok=True)
    return os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)


def _lock(descriptor: int, path: Path, kind: int) -> bool:
    """Takes the lock without waiting; False if that fails, or if the folder has another lock file by then."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path / LOCK_FILE))
    except FileNotFoundError:
        return False  # removed a moment ago


def _remove(path: Path) -> bool:
    """Removes a folder unless it is in use; whether it is gone, also by another process."""
    try:
        descriptor = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    except FileNotFoundError:
        return True
    try:
        if not _lock(descriptor, path, fcntl.LOCK_EX):
            return False
        discard(path)
        return True
    finally:
        os.close(descriptor)


def _last_use(path: Path) -> float:
    with suppress(FileNotFoundError):
        return (path / LOCK_FILE).stat().st_mtime
    return 0.0


def _size(path: Path) -> int:
    """The bytes of its files on disk; those that another process removes meanwhile may or may not count."""
    total = 0
    for folder, _, names in os.walk(path):  # which passes over folders that have gone
        for name in names:
            with suppress(FileNotFoundError):
                found = os.lstat(os.path.join(folder, name))
                total += found.st_blocks * 512 if stat.S_ISREG(found.st_mode) else 0
    return total
