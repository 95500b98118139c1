"""A file of results that grows line by line, and outlives the process that writes it.

Its content tells which requests are done. A killed process may leave half a result at the end; the next
process cuts it off and computes that request again. A file that has anything else is left as it is.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import IO

import msgspec
from msgspec import Struct

from levserve.batch.done import DoneLines
from levserve.batch.line import ResultLine
from levserve.errors import ConfigError

SYNC_BYTES = 8 << 20
"""About this much may have to be computed again if the machine itself fails."""
FIRST_FIELD = b'{"id":"batch_req_'
HALF_RESULT = re.compile(FIRST_FIELD + rb'[0-9a-f]{0,12}(_[0-9a-f]{0,8}(".*)?)?', re.DOTALL)
"""The beginning of a result, cut off after its first field has begun."""


class WrittenResponse(Struct, frozen=True):
    status_code: int


class WrittenLine(Struct, frozen=True):
    """The fields of a written result that a later process needs."""

    id: str
    response: WrittenResponse | None


class BeingWritten(ConfigError):
    """Another process is writing the results."""


class ResultFile:
    """Open for writing by one process at a time. Belongs to one thread. Raises `ConfigError`, `OSError`.

    What it `overwrites` stays until the first result is written.
    """

    def __init__(self, path: Path, done: DoneLines, *, overwrites: bool = False) -> None:
        self.path = path
        self.statuses: Counter[int] = Counter()
        """The number of results of each status, earlier ones included; 0 is for requests that did not run."""
        self._num_unsynced = 0
        self._has_old = overwrites
        _require_regular(path)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        # Without a buffer: what a full disk did not take must not be written again when the file is closed.
        self._file = open(descriptor, "r+b", buffering=0)  # noqa: SIM115  (`close` closes it)
        try:
            _lock(self._file, path)
            if not overwrites:
                self._read(done)
        except BaseException:
            self._file.close()
            raise

    @property
    def num_bytes(self) -> int:
        return self._file.tell()

    @property
    def num_results(self) -> int:
        return self.statuses.total()

    @property
    def num_failed(self) -> int:
        return self.num_results - self.statuses[200]

    def write(self, result: ResultLine) -> None:
        self._remove_old()
        data = result.encode()
        self._append(data)
        self.statuses[result.response.status_code if result.response is not None else 0] += 1
        self._num_unsynced += len(data)
        if self._num_unsynced > SYNC_BYTES:
            self.sync()

    def sync(self) -> None:
        os.fsync(self._file.fileno())
        self._num_unsynced = 0

    def finish(self) -> None:
        """Called when every line has its result."""
        self._remove_old()
        self.close()

    def close(self) -> None:
        if self._file.closed:
            return
        try:
            self.sync()
        finally:
            self._file.close()

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _remove_old(self) -> None:
        if self._has_old:
            self._file.truncate(0)
            self._has_old = False

    def _append(self, data: bytes) -> None:
        left = memoryview(data)
        while left:  # a disk that is almost full takes a part
            left = left[self._file.write(left) :]

    def _read(self, done: DoneLines) -> None:
        end = 0
        with open(self._file.fileno(), "rb", closefd=False) as reader:
            for line in reader:
                if line.endswith(b"\n"):
                    self._count(line, done)
                    end += len(line)
                elif not _is_half_result(line):
                    raise self._not_ours()
        self._file.seek(end)
        self._file.truncate()

    def _count(self, line: bytes, done: DoneLines) -> None:
        try:
            written = msgspec.json.decode(line, type=WrittenLine)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise self._not_ours() from None
        if not done.add(written.id):
            raise self._not_ours()
        self.statuses[written.response.status_code if written.response is not None else 0] += 1

    def _not_ours(self) -> ConfigError:
        return ConfigError(f"{self.path} exists and is not the beginning of this batch's results")


def remove_results(path: Path) -> None:
    """Removes a file of results, if it exists and no process is writing it."""
    with suppress(FileNotFoundError, BeingWritten), path.open("rb") as file:
        _lock(file, path)
        path.unlink()


def _require_regular(path: Path) -> None:
    """Refuses pipes and devices, which keep no results that a later process could read."""
    with suppress(FileNotFoundError):
        mode = os.stat(path).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # opening a folder fails with the reason
            raise ConfigError(f"cannot write {path}: it is not a regular file")


def _lock(file: IO[bytes], path: Path) -> None:
    """Until the file is closed."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BeingWritten(f"another process is writing {path}") from None


def _is_half_result(line: bytes) -> bool:
    line = line.rstrip(b"\0")  # which some file systems leave in place of what a power failure took
    return FIRST_FIELD.startswith(line) or HALF_RESULT.fullmatch(line) is not None
