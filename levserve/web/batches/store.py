"""Keeps the records of batches in memory and on disk. Used by all HTTP threads and by the batch worker.

A batch belongs to the API key that made it. Once it has ended, it is forgotten 30 days after its creation, or
when many newer ones have ended.
"""

from __future__ import annotations

import logging
import re
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from levserve.errors import Conflict, Overloaded
from levserve.web.batches.disk import DiskFolder
from levserve.web.batches.objects import BatchBody, BatchObject, RequestCounts, StoredBatch, is_ended
from levserve.web.state_files import write_whole

log = logging.getLogger(__name__)

KEEP_SECONDS = 30 * 86400
MAX_OPEN = 100
"""Batches that run or wait; more are refused."""
MAX_ENDED = 10_000
"""Batches that have ended; of more, the oldest are forgotten."""
BATCH_ID = re.compile(r"batch_[0-9a-f]{1,64}")
RETRY_SECONDS = 60.0


class BatchStore:
    def __init__(self, disk: DiskFolder, clock: Callable[[], float] = time.time) -> None:
        self._disk = disk
        self._folder = disk.batches
        self._clock = clock
        self._lock = threading.Lock()
        """Guards the records and the order in which they change on disk."""
        self._records: dict[str, StoredBatch] = {}
        """From the oldest to the newest."""
        self._load()

    def now(self) -> int:
        return int(self._clock())

    def create(self, body: BatchBody, owner: str) -> BatchObject:
        """Adds a batch. Raises `Overloaded`, `OSError`."""
        self._purge()
        now = self.now()
        assert body.window_seconds is not None  # the body was checked
        batch = BatchObject(
            id=f"batch_{secrets.token_hex(12)}",
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            completion_window=body.completion_window,
            created_at=now,
            expires_at=now + body.window_seconds,
            metadata=body.metadata,
        )
        seconds = body.output_expires_after.seconds if body.output_expires_after is not None else None
        with self._lock:
            if sum(not is_ended(one.batch) for one in self._records.values()) >= MAX_OPEN:
                raise Overloaded(
                    f"{MAX_OPEN} batches are running or waiting; please try again.",
                    retry_after_seconds=RETRY_SECONDS,
                )
            self._put(StoredBatch(owner, batch, seconds))
        return batch

    def get(self, batch_id: str, owner: str) -> BatchObject | None:
        stored = self.find(batch_id)
        return stored.batch if stored is not None and stored.owner == owner else None

    def find(self, batch_id: str) -> StoredBatch | None:
        with self._lock:
            return self._records.get(batch_id)

    def owned_by(self, owner: str) -> list[BatchObject]:
        """The owner's batches, from the oldest to the newest."""
        self._purge()
        with self._lock:
            return [stored.batch for stored in self._records.values() if stored.owner == owner]

    def first_open(self) -> StoredBatch | None:
        """The oldest batch that has not ended."""
        with self._lock:
            return next((one for one in self._records.values() if not is_ended(one.batch)), None)

    def num_with(self, status: str) -> int:
        """How many batches of all owners have this status."""
        with self._lock:
            return sum(one.batch.status == status for one in self._records.values())

    def uses_file(self, file_id: str) -> bool:
        """Whether a batch that has not ended reads this file."""
        with self._lock:
            return any(
                one.batch.input_file_id == file_id and not is_ended(one.batch)
                for one in self._records.values()
            )

    def change(self, batch_id: str, *, only_from: str = "", **fields: Any) -> BatchObject:
        """Changes a batch, on disk too. Raises `OSError`.

        With `only_from`, a batch of any other status stays as it is: it may have been cancelled meanwhile.
        """
        with self._lock:
            stored = self._records[batch_id]
            if only_from and stored.batch.status != only_from:
                return stored.batch
            batch = structs.replace(stored.batch, **fields)
            self._put(structs.replace(stored, batch=batch))
        return batch

    def count(self, batch_id: str, counts: RequestCounts) -> None:
        """Notes a batch's progress, in memory only: the results on disk show it too."""
        with self._lock:
            stored = self._records[batch_id]
            batch = structs.replace(stored.batch, request_counts=counts)
            self._records[batch_id] = structs.replace(stored, batch=batch)

    def cancel(self, batch_id: str) -> BatchObject:
        """Asks the worker to end a batch; one that has ended stays as it is. Raises `OSError`."""
        with self._lock:
            stored = self._records[batch_id]
            batch = stored.batch
            if is_ended(batch):
                raise Conflict(f"Cannot cancel a batch with status '{batch.status}'.")
            if batch.status in ("validating", "in_progress"):
                batch = structs.replace(batch, status="cancelling", cancelling_at=self.now())
                self._put(structs.replace(stored, batch=batch))
        return batch

    def _put(self, stored: StoredBatch) -> None:
        self._disk.prepare()
        write_whole(self._path_of(stored.batch.id), msgspec.json.encode(stored), syncs=True)
        self._records[stored.batch.id] = stored

    def _path_of(self, batch_id: str) -> Path:
        return self._folder / f"{batch_id}.json"

    def _purge(self) -> None:
        too_old = self._clock() - KEEP_SECONDS
        with self._lock:
            ended = [stored.batch for stored in self._records.values() if is_ended(stored.batch)]
            num_too_many = len(ended) - MAX_ENDED
            late = [
                batch.id
                for number, batch in enumerate(ended)
                if number < num_too_many or batch.created_at < too_old
            ]
            for batch_id in late:
                del self._records[batch_id]
        for batch_id in late:
            self._path_of(batch_id).unlink(missing_ok=True)

    def _load(self) -> None:
        found: list[StoredBatch] = []
        for path in self._folder.glob("*.json"):
            try:
                stored = msgspec.json.decode(path.read_bytes(), type=StoredBatch)
                batch_id = stored.batch.id
                is_sound = path.name == f"{batch_id}.json" and BATCH_ID.fullmatch(batch_id) is not None
            except (OSError, msgspec.DecodeError, UnicodeDecodeError):
                is_sound = False
            if is_sound:
                found.append(stored)
            else:
                log.warning("skipped %s: not a levserve record", path)
        for stored in sorted(found, key=lambda one: one.batch.created_at):
            self._records[stored.batch.id] = stored
