"""Keeps the files that clients upload and the results of batches, each with a record beside it.

Used by all HTTP threads and by the batch worker. A file belongs to the API key that made it and is invisible
to other keys. Files are removed when they are deleted or have expired; their total size is bounded.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

import msgspec

from levserve.errors import BadRequest, BodyTooLarge
from levserve.web.batches.disk import DiskFolder
from levserve.web.batches.objects import FileObject, StoredFile
from levserve.web.state_files import PART_SUFFIX, write_whole

log = logging.getLogger(__name__)

DEFAULT_SECONDS = 30 * 86400
RECORD_SUFFIX = ".json"
FILE_ID = re.compile(r"file-[0-9a-z]{1,64}")
MAX_NAME_CHARS = 255
MAX_FILES = 10_000


class FileStore:
    def __init__(
        self, disk: DiskFolder, max_bytes: int, max_file_bytes: int, clock: Callable[[], float] = time.time
    ) -> None:
        self._disk = disk
        self._folder = disk.files
        self._max_bytes = max_bytes
        self._max_file_bytes = max_file_bytes
        self._clock = clock
        self._lock = threading.Lock()
        """Guards the records."""
        self._records: dict[str, StoredFile] = {}
        """From the oldest to the newest."""
        self.is_in_use: Callable[[str], bool] = lambda file_id: False
        """Whether a batch still needs a file: such a file is kept even when it has expired."""
        self._load()

    def path_of(self, file_id: str) -> Path:
        return self._folder / file_id

    def create(
        self, stream: IO[bytes], filename: str, purpose: str, owner: str, seconds: int | None = None
    ) -> FileObject:
        """Keeps what the stream holds. Raises `BodyTooLarge`, and `BadRequest` if there is no room."""
        self.purge()
        file_id = f"file-{secrets.token_hex(12)}"
        part = self._folder / f"{file_id}{PART_SUFFIX}"
        try:
            self._disk.prepare()
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "wb") as file:
                shutil.copyfileobj(stream, file, 1 << 20)
                num_bytes = file.tell()
            self._check_room(num_bytes)
            return self.adopt(part, file_id, filename, purpose, owner, seconds)
        finally:
            with suppress(OSError):
                part.unlink(missing_ok=True)

    def adopt(
        self, path: Path, file_id: str, filename: str, purpose: str, owner: str, seconds: int | None
    ) -> FileObject:
        """Adds a complete file to the store, its record first: without one it would never be removed."""
        now = int(self._clock())
        shown = FileObject(
            file_id,
            path.stat().st_size,
            now,
            now + (seconds or DEFAULT_SECONDS),
            filename[:MAX_NAME_CHARS],
            purpose,
        )
        stored = StoredFile(owner, shown)
        write_whole(self._record_of(file_id), msgspec.json.encode(stored), syncs=True)
        os.replace(path, self.path_of(file_id))
        with self._lock:
            self._records[file_id] = stored
        return shown

    def get(self, file_id: str, owner: str) -> FileObject | None:
        self.purge()
        with self._lock:
            stored = self._records.get(file_id)
        return stored.file if stored is not None and stored.owner == owner else None

    def owned_by(self, owner: str) -> list[FileObject]:
        """The owner's files, from the oldest to the newest."""
        self.purge()
        with self._lock:
            return [stored.file for stored in self._records.values() if stored.owner == owner]

    def delete(self, file_id: str) -> None:
        with self._lock:
            self._records.pop(file_id, None)
        for path in (self.path_of(file_id), self._record_of(file_id)):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                log.warning("cannot remove %s: %s", path, error.strerror)

    def purge(self) -> None:
        """Removes what has expired."""
        now = self._clock()
        with self._lock:
            late = [file_id for file_id, stored in self._records.items() if stored.file.expires_at <= now]
        for file_id in late:
            if not self.is_in_use(file_id):
                self.delete(file_id)

    def _check_room(self, num_bytes: int) -> None:
        if num_bytes > self._max_file_bytes:
            raise BodyTooLarge(self._max_file_bytes, "file")
        with self._lock:
            num_files = len(self._records)
            num_kept = sum(stored.file.bytes for stored in self._records.values())
        if num_files >= MAX_FILES or num_kept + num_bytes > self._max_bytes:
            raise BadRequest(
                f"The server keeps {num_files} files of {num_kept} bytes and has no room for another "
                f"{num_bytes} bytes; delete some files.",
                param="file",
                code="no_room",
            )

    def _record_of(self, file_id: str) -> Path:
        return self._folder / f"{file_id}{RECORD_SUFFIX}"

    def _load(self) -> None:
        found: list[StoredFile] = []
        for path in self._folder.glob(f"*{RECORD_SUFFIX}"):
            file_id = path.name.removesuffix(RECORD_SUFFIX)
            try:
                stored = msgspec.json.decode(path.read_bytes(), type=StoredFile)
                is_sound = stored.file.id == file_id and FILE_ID.fullmatch(file_id) is not None
            except (OSError, msgspec.DecodeError, UnicodeDecodeError):
                is_sound = False
            if not is_sound:
                log.warning("skipped %s: not a levserve record", path)
            elif not self.path_of(file_id).is_file():  # the process was killed before it named the file
                path.unlink(missing_ok=True)
            else:
                found.append(stored)
        for stored in sorted(found, key=lambda one: one.file.created_at):
            self._records[stored.file.id] = stored
