"""Files that outlive the process, one per record, in a folder of `--state-dir`.

Files that cannot be read or written are logged and otherwise ignored: losing one must not fail a request.
Used by all HTTP threads, each with its own names.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from levserve.errors import StartupError
from levserve.web.state_files import PART_SUFFIX, make_folder, write_whole

log = logging.getLogger(__name__)

NAME = re.compile(r"[A-Za-z0-9_-]{1,80}")
SUFFIX = ".json"


class StateFolder:
    """The files hold what clients wrote: only the server's own user may read them."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, name: str, data: bytes) -> None:
        place = self._place(name)
        try:
            write_whole(place, data)
        except OSError as error:
            log.warning("cannot keep %s: %s", place, error.strerror)

    def remove(self, name: str) -> None:
        try:
            self._place(name).unlink(missing_ok=True)
        except OSError as error:
            log.warning("cannot remove %s: %s", self._place(name), error.strerror)

    def read(self, max_files: int, max_bytes: int) -> Iterator[tuple[str, bytes]]:
        """The newest files that fit both bounds, newest first; removes the others and half-written ones."""
        for part in self._path.glob(f"*{PART_SUFFIX}"):
            with suppress(OSError):
                part.unlink()
        num_files = num_bytes = 0
        for name, size in self._by_age():
            num_files += 1
            num_bytes += size
            if num_files > max_files or num_bytes > max_bytes:
                self.remove(name)
                continue
            try:
                yield name, self._place(name).read_bytes()
            except OSError as error:
                log.warning("skipped %s: %s", self._place(name), error.strerror)

    def log_skipped(self, name: str) -> None:
        log.warning("skipped %s: not a levserve record", self._place(name))

    def _place(self, name: str) -> Path:
        return self._path / f"{name}{SUFFIX}"

    def _by_age(self) -> list[tuple[str, int]]:
        """The name and the size of each file, the newest first."""
        found = []
        with os.scandir(self._path) as entries:
            for entry in entries:
                name = entry.name.removesuffix(SUFFIX)
                if name == entry.name or not NAME.fullmatch(name) or not entry.is_file(follow_symlinks=False):
                    continue
                about = entry.stat(follow_symlinks=False)
                found.append((about.st_mtime_ns, name, about.st_size))
        return [(name, size) for _, name, size in sorted(found, reverse=True)]


def open_state_folder(state_dir: str, name: str) -> StateFolder | None:
    """The folder of this name, made if it is missing; None without a state folder. Raises `StartupError`."""
    if not state_dir:
        return None
    path = Path(state_dir) / name
    try:
        make_folder(path)
    except OSError as error:
        raise StartupError(f"cannot use --state-dir {state_dir}: {error.strerror}") from None
    return StateFolder(path)
