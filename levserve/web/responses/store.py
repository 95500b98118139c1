"""Keeps responses, so that a later request can read them and continue from them.

Used by all HTTP threads. A response belongs to the API key that asked for it and is invisible to other keys.
The store is bounded in number, bytes and age; the oldest responses go first. It holds everything in memory,
and with a `StateFolder` also in files, which are read again at the next start.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import msgspec
from msgspec import Raw, Struct

from levserve.web.responses.input_items import InputItem
from levserve.web.responses.state_folder import StateFolder

log = logging.getLogger(__name__)

MAX_AGE_SECONDS = 30 * 86400.0
"""As long as OpenAI keeps responses."""


class StoredResponse(Struct, frozen=True):
    """A stored response. `items` are all that its model read, including those of earlier responses."""

    id: str
    owner: str
    stored_at: float
    """Seconds since 1970."""
    items: list[InputItem]
    response: Raw
    """The JSON of the response object."""

    @property
    def history(self) -> list[InputItem]:
        """What a later request continues from: the input and the output, without calls that were cut off."""
        output = msgspec.json.decode(self.response, type=StoredOutput).output
        cut = [item for item in output if item.type == "function_call" and item.status == "incomplete"]
        return [*self.items, *(item for item in output if item not in cut)]


class StoredOutput(Struct, frozen=True):
    output: list[InputItem]


class Entry(NamedTuple):
    owner: str
    stored_at: float
    data: bytes
    """A `StoredResponse` in JSON."""


class ResponseStore:
    def __init__(
        self,
        max_responses: int,
        max_bytes: int,
        folder: StateFolder | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._folder = folder
        self._clock = clock
        self._lock = threading.Lock()
        """Guards the entries and the number of their bytes."""
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        """From the oldest to the newest."""
        self._num_bytes = 0
        if folder is not None:
            self._load(folder)

    @property
    def is_open(self) -> bool:
        """Whether responses are kept at all."""
        return self._max_responses > 0

    def put(self, response_id: str, owner: str, items: list[InputItem], response: bytes) -> None:
        now = self._clock()
        stored = StoredResponse(response_id, owner, now, items, Raw(response))
        data = msgspec.json.encode(stored)
        if len(data) > self._max_bytes:  # it would only drive out all others
            log.warning(
                "%s is not stored: its %d bytes exceed --stored-responses-memory", response_id, len(data)
            )
            return
        if self._folder is not None:
            self._folder.write(response_id, data)
        with self._lock:
            self._insert(response_id, Entry(owner, now, data))
            dropped = self._drop_oldest()
        self._remove_files(dropped)

    def get(self, response_id: str, owner: str) -> StoredResponse | None:
        with self._lock:
            dropped = self._drop_oldest()
            entry = self._entries.get(response_id)
        self._remove_files(dropped)
        if entry is None or entry.owner != owner:
            return None
        return msgspec.json.decode(entry.data, type=StoredResponse)

    def delete(self, response_id: str, owner: str) -> bool:
        """Deletes a response; whether it was there."""
        with self._lock:
            entry = self._entries.get(response_id)
            is_found = entry is not None and entry.owner == owner
            if is_found:
                self._remove(response_id)
        if is_found:
            self._remove_files([response_id])
        return is_found

    def _load(self, folder: StateFolder) -> None:
        found: list[tuple[str, Entry]] = []
        for response_id, data in folder.read(self._max_responses, self._max_bytes):
            try:
                stored = msgspec.json.decode(data, type=StoredResponse)
                is_sound = stored.id == response_id and bool(stored.history)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                is_sound = False
            if is_sound:
                found.append((response_id, Entry(stored.owner, stored.stored_at, data)))
            else:
                folder.log_skipped(response_id)
        for response_id, entry in sorted(found, key=lambda one: one[1].stored_at):
            self._insert(response_id, entry)
        self._remove_files(self._drop_oldest())

    def _insert(self, response_id: str, entry: Entry) -> None:
        self._entries[response_id] = entry
        self._num_bytes += len(entry.data)

    def _remove(self, response_id: str) -> None:
        self._num_bytes -= len(self._entries.pop(response_id).data)

    def _drop_oldest(self) -> list[str]:
        """Drops what exceeds a bound; returns the ids."""
        dropped = []
        too_old = self._clock() - MAX_AGE_SECONDS
        while self._entries:
            response_id, oldest = next(iter(self._entries.items()))
            is_full = len(self._entries) > self._max_responses or self._num_bytes > self._max_bytes
            if not is_full and oldest.stored_at >= too_old:
                break
            self._remove(response_id)
            dropped.append(response_id)
        return dropped

    def _remove_files(self, response_ids: list[str]) -> None:
        if self._folder is not None:
            for response_id in response_ids:
                self._folder.remove(response_id)
