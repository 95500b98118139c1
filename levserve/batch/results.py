"""A file of results that grows line by line, and outlives the process that writes it.

Its content tells which requests are done. A killed process may leave half a line at the end; the next process
cuts it off and computes that request again.
"""

from __future__ import annotations

import fcntl
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec import Struct

from levserve.batch.done import DoneLines
from levserve.batch.line import ResultLine
from levserve.errors import ConfigError

SYNC_BYTES = 8 << 20
"""About this much may have to be computed again if the machine itself fails."""


class WrittenResponse(Struct, frozen=True):
    status_code: int


class WrittenLine(Struct, frozen=True):
    """The fields of a written result that a later process needs."""

    id: str
    response: WrittenResponse | None


class BeingWritten(ConfigError):
    """Another process is writing the results."""


class ResultFile:
    """Open for writing by one process at a time. Belongs to one thread. Raises `ConfigError`, `OSError`."""

    def __init__(self, path: Path, done: DoneLines) -> None:
        self.path = path
        self.statuses: Counter[int] = Counter()
        """The number of results of each status, earlier ones included; 0 is for requests that did not run."""
        self._num_unsynced = 0
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._file: BinaryIO = open(descriptor, "r+b")  # noqa: SIM115  (`close` closes it)
        try:
            _lock(self._file, path)
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
        data = result.encode()
        self._file.write(data)
        self._file.flush()  # a result that was reported must survive a kill
        self.statuses[result.response.status_code if result.response is not None else 0] += 1
        self._num_unsynced += len(data)
        if self._num_unsynced > SYNC_BYTES:
            self.sync()

    def sync(self) -> None:
        os.fsync(self._file.fileno())
        self._num_unsynced = 0

    def close(self) -> None:
        if not self._file.closed:
            self.sync()
            self._file.close()

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _read(self, done: DoneLines) -> None:
        end = 0
        for line in _whole_lines(self._file):
            try:
                written = msgspec.json.decode(line, type=WrittenLine)
            except (msgspec.DecodeError, UnicodeDecodeError):
                raise self._not_ours() from None
            if not done.add(written.id):
                raise self._not_ours()
            self.statuses[written.response.status_code if written.response is not None else 0] += 1
            end += len(line)
        self._file.seek(end)
        self._file.truncate()

    def _not_ours(self) -> ConfigError:
        return ConfigError(f"{self.path} exists and is not the beginning of this batch's results")


def remove_results(path: Path) -> None:
    """Removes a file of results, if it exists and no process is writing it."""
    with suppress(FileNotFoundError, BeingWritten), path.open("rb") as file:
        _lock(file, path)
        path.unlink()


def _lock(file: BinaryIO, path: Path) -> None:
    """Until the file is closed."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BeingWritten(f"another process is writing {path}") from None


def _whole_lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines that end with a line break."""
    for line in file:
        if line.endswith(b"\n"):
            yield line
