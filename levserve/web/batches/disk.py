"""The folder of files and batches: below `--state-dir`, or a temporary one that is made when it is needed."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from levserve.errors import StartupError

PART_SUFFIX = ".part"


class DiskFolder:
    """The files hold what clients wrote: only their owner may read them."""

    def __init__(self, state_dir: str, cache_path: Path) -> None:
        """Raises `StartupError` if the folder cannot be used.

        A temporary folder is below `cache_path` where the system has no place for one, as in a container
        whose root is read-only.
        """
        self._is_temporary = not state_dir
        self._root = _name_temporary(cache_path) if self._is_temporary else Path(state_dir)
        self.files, self.batches = self._root / "files", self._root / "batches"
        if self._is_temporary:
            return
        try:
            self.prepare()
            for folder in (self.files, self.batches):
                if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
                    raise PermissionError(0, "it cannot be written")
                for part in folder.glob(f"*{PART_SUFFIX}"):  # half-written by a process that was killed
                    part.unlink()
        except OSError as error:
            raise StartupError(f"cannot use --state-dir {state_dir}: {error.strerror}") from None

    def prepare(self) -> None:
        """Makes the folders, where they are missing. Raises `OSError`."""
        for folder in (self._root, self.files, self.batches):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def close(self) -> None:
        """Removes the folder, if it is a temporary one."""
        if self._is_temporary:
            shutil.rmtree(self._root, ignore_errors=True)


def _name_temporary(cache_path: Path) -> Path:
    try:
        place = Path(tempfile.gettempdir())
    except FileNotFoundError:
        place = cache_path
    return place / f"levserve-{secrets.token_hex(12)}"


def write_whole(path: Path, data: bytes) -> None:
    """Atomic: a reader finds the file as it was before or all of the new one. Raises `OSError`."""
    part = path.with_name(path.name + PART_SUFFIX)
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError:
        with suppress(OSError):
            part.unlink()
        raise
