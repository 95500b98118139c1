"""One HTTP request's tokens on their way from the device thread to the thread that waits for them."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence

from levserve.schedule.request import FinishReason, TokenBatch


class TokenStream:
    """Carries the batches of one HTTP request's sequences (several prompts, or n > 1) to its one reader.

    `put` and `note_admitted` are the device thread's and never block; `get` and iterating are the reader's; `close` may be called from any
    thread, any number of times. The device thread ends every sequence with exactly one batch whose `finish` is set.
    The queue needs no bound of its own: what can be in it was bounded when the request was admitted.
    """

    def __init__(self, request_ids: Sequence[str], on_close: Callable[[str, FinishReason], None]) -> None:
        self._request_ids = tuple(request_ids)
        self._on_close = on_close
        self._batches: queue.Queue[tuple[int, TokenBatch]] = queue.Queue()
        self._unfinished = set(range(len(request_ids)))
        self.admitted_at: float | None = None
        """When the first of the sequences got a row, on `time.monotonic`'s clock."""

    def note_admitted(self, now: float) -> None:
        if self.admitted_at is None:
            self.admitted_at = now

    def put(self, index: int, batch: TokenBatch) -> None:
        self._batches.put((index, batch))

    def get(self, timeout_seconds: float | None = None) -> tuple[int, TokenBatch]:
        """The next batch and the number of its sequence; raises `queue.Empty` when none came in time."""
        index, batch = self._batches.get(timeout=timeout_seconds)
        if batch.finish is not None:
            self._unfinished.discard(index)
        return index, batch

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
