"""Brings the updates of a round to all its streams, so that the device thread does not: that one has the next round to plan."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple

from levserve.engine.stream import TokenStream
from levserve.schedule.request import TokenBatch

log = logging.getLogger(__name__)


class Delivered(NamedTuple):
    """A batch and the stream it belongs to, as one of its sequence `number`."""

    stream: TokenStream
    number: int
    batch: TokenBatch


class Delivery:
    """Owns the thread `levserve-delivery`; a context, which ends when all is delivered. `send` is the device thread's and never blocks.

    What can lie here is bounded as the streams are: at admission.
    """

    def __init__(self) -> None:
        self._rounds: queue.SimpleQueue[Sequence[Delivered] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="levserve-delivery", daemon=True)

    def send(self, updates: Sequence[Delivered]) -> None:
        if updates:
            self._rounds.put(updates)

    def __enter__(self) -> Delivery:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._rounds.put(None)
        self._thread.join()

    def _run(self) -> None:
        for updates in iter(self._rounds.get, None):
            for stream, number, batch in updates:
                try:
                    stream.put(number, batch)
                except Exception:  # no stream may take the others with it
                    log.exception("a stream did not take its tokens")
