"""Puts a round's batches into their streams, on a thread beside the device thread, which plans meanwhile."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence
from typing import NamedTuple

from levserve.engine.stream import TokenStream
from levserve.schedule.request import TokenBatch

log = logging.getLogger(__name__)


class AddressedBatch(NamedTuple):
    """A batch, the stream that it goes to, and the number of its sequence there."""

    stream: TokenStream
    number: int
    batch: TokenBatch


class Delivery:
    """Owns the thread `levserve-delivery`, from entering this context until all that was sent is delivered.

    The device thread calls `send`, which never blocks. Admission bounds what can be in the queue.
    """

    def __init__(self) -> None:
        self._rounds: queue.SimpleQueue[Sequence[AddressedBatch] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="levserve-delivery", daemon=True)

    def send(self, batches: Sequence[AddressedBatch]) -> None:
        if batches:
            self._rounds.put(batches)

    def __enter__(self) -> Delivery:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._rounds.put(None)
        self._thread.join()

    def _run(self) -> None:
        for batches in iter(self._rounds.get, None):
            for stream, number, batch in batches:
                try:
                    stream.put(number, batch)
                except Exception:  # one stream that fails must not keep the others from their tokens
                    log.exception("a stream did not take its tokens")
