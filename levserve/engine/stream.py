"""One HTTP request's tokens on their way from the device thread to the thread that waits for them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence

from levserve.schedule.request import FinishReason, TokenBatch

Carrier = Callable[[int, TokenBatch], TokenBatch | None]
"""Deals with a batch in place of the reader who waits for it; gives what is left for that one, which then is woken, or None."""


class TokenStream:
    """Carries the batches of one HTTP request's sequences (several prompts, or n > 1) to its one reader.

    `put` and `note_admitted` are the writer's and never block; `get` and iterating are the reader's; `close` may be called from any
    thread, any number of times. The device thread ends every sequence with exactly one batch whose `finish` is set.
    The queue needs no bound of its own: what can be in it was bounded when the request was admitted.
    """

    def __init__(self, request_ids: Sequence[str], on_close: Callable[[str, FinishReason], None]) -> None:
        self._request_ids = tuple(request_ids)
        self._on_close = on_close
        self._batches: queue.Queue[tuple[int, TokenBatch]] = queue.Queue()
        self._lock = (
            threading.Lock()
        )  # held while a batch is carried: the reader's things are the writer's as long
        self._carrier: Carrier | None = None
        self._unfinished = set(range(len(request_ids)))
        self.admitted_at: float | None = None
        """When the first of the sequences got a row, on `time.monotonic`'s clock."""

    def note_admitted(self, now: float) -> None:
        if self.admitted_at is None:
            self.admitted_at = now

    def put(self, index: int, batch: TokenBatch) -> None:
        with self._lock:
            left = batch if self._carrier is None else self._carrier(index, batch)
            if left is not None:
                self._carrier = None
                self._batches.put((index, left))

    def get(
        self, timeout_seconds: float | None = None, carrier: Carrier | None = None
    ) -> tuple[int, TokenBatch]:
        """The next batch and the number of its sequence; raises `queue.Empty` when none came in time.

        Until then what comes is given to the `carrier`, on the writer's thread; so it must neither block nor raise. It also gets
        what came before, on this thread: a reader that is late for one batch would be late for all that follow, and with
        enough of them, all would stay late for ever.
        """
        found = None
        while found is None and not self._lend(carrier):
            index, batch = self._batches.get_nowait()
            left = batch if carrier is None else carrier(index, batch)
            found = None if left is None else (index, left)
        if found is None:
            try:
                found = self._batches.get(timeout=timeout_seconds)
            finally:
                with self._lock:  # and not before it has ended
                    self._carrier = None
        index, batch = found
        if batch.finish is not None:
            self._unfinished.discard(index)
        return found

    def __iter__(self) -> Iterator[tuple[int, TokenBatch]]:
        while self._unfinished:
            yield self.get()

    @property
    def is_finished(self) -> bool:
        return not self._unfinished

    def close(self, index: int | None = None, finish: FinishReason = FinishReason.CANCELLED) -> None:
        """Tells the device thread that nobody wants the sequence (or any of them) any more, and why.

        Its row and pages are free within one round, and a reader blocked on the stream is woken by the batch that ends it.
        """
        for number in tuple(self._unfinished) if index is None else (index,):
            self._on_close(self._request_ids[number], finish)

    def _lend(self, carrier: Carrier | None) -> bool:
        """Lets the carrier have what comes, if nothing is here; whether that is so."""
        with self._lock:
            is_empty = self._batches.empty()
            self._carrier = carrier if is_empty else None
            return is_empty
