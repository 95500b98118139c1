"""Files below `--state-dir`: folders and files that only the server's own user may read, written whole."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

PART_SUFFIX = ".part"
"""Marks a file that is being written; one found at startup was left by a process that was killed."""


def make_folder(path: Path) -> None:
    """Makes a folder if it is missing. Raises `OSError`, also if an existing one cannot be used."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise PermissionError(0, "read, write or search permission is missing")


def write_whole(path: Path, data: bytes, *, syncs: bool = False) -> None:
    """Writes a file atomically: a reader finds the old file or all of the new one. Raises `OSError`.

    With `syncs`, the file also survives a failure of the machine.
    """
    part = path.with_name(path.name + PART_SUFFIX)
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(data)
            if syncs:
                file.flush()
                os.fsync(file.fileno())
        os.replace(part, path)
    except OSError:
        with suppress(OSError):
            part.unlink()
        raise
