"""One HTTP request's tokens on their way from the device to the HTTP thread that waits for them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence

from levserve.schedule.request import FinishReason, TokenBatch

OnBatch = Callable[[int, TokenBatch], TokenBatch | None]
"""Handles a batch in place of the waiting reader; returns None, or a batch to wake the reader with."""


class TokenStream:
    """Carries the batches of one HTTP request's sequences (several prompts, or n > 1) to its one reader.

    The writer calls `put` and `note_placed`, which never block; the reader calls `get` or iterates; any
    thread may call `close`, any number of times. Every sequence ends with a batch whose `finish` is set; what
    follows it is ignored. The queue needs no bound of its own: admission bounded what can be in it.

    Inline delivery: a reader that waits in `get` may leave an `on_batch` function. `put` then calls it on the
    writer's thread, and the reader sleeps on until the function returns a batch to wake it with.
    """

    def __init__(self, request_ids: Sequence[str], on_close: Callable[[str, FinishReason], None]) -> None:
        self._request_ids = tuple(request_ids)
        self._on_close = on_close
        self._batches: queue.Queue[tuple[int, TokenBatch]] = queue.Queue()
        # Held while `on_batch` runs: it uses the reader's objects, so the reader must not wake before it
        # returns.
        self._lock = threading.Lock()
        self._on_batch: OnBatch | None = None
        self._unfinished = set(range(len(request_ids)))
        self.placed_at: float | None = None
        """When the first of the sequences got a row, on `time.monotonic`'s clock."""

    def note_placed(self, now: float) -> None:
        if self.placed_at is None:
            self.placed_at = now

    def put(self, index: int, batch: TokenBatch) -> None:
        with self._lock:
            remaining = batch if self._on_batch is None else self._on_batch(index, batch)
            if remaining is not None:
                self._on_batch = None
                self._batches.put((index, remaining))

    def get(
        self, timeout_seconds: float | None = None, on_batch: OnBatch | None = None
    ) -> tuple[int, TokenBatch]:
        """The next batch and the number of its sequence; raises `queue.Empty` when none came in time.

        While this waits, batches go to `on_batch` on the writer's thread, so it must neither block nor raise.
        Batches that came before go to it on this thread: a reader that returned them one by one would be late
        for each batch that follows, and many late readers would stay late for good.
        """
        found = None
        while found is None and not self._deliver_inline(on_batch):
            index, batch = self._batches.get_nowait()
            remaining = batch if on_batch is None else on_batch(index, batch)
            found = None if remaining is None else (index, remaining)
        if found is None:
            try:
                found = self._batches.get(timeout=timeout_seconds)
            finally:
                with self._lock:  # waits for an `on_batch` that is still running
                    self._on_batch = None
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
        """Tells the device thread that one sequence (or all of them) is no longer wanted, and why.

        Its row and pages are free within one round, and the batch that ends it wakes a reader blocked on the
        stream.
        """
        for number in tuple(self._unfinished) if index is None else (index,):
            self._on_close(self._request_ids[number], finish)

    def end_rest(self, finish: FinishReason) -> None:
        """Ends every sequence that has not ended, for a writer that no longer does."""
        for number in tuple(self._unfinished):
            self.put(number, TokenBatch(tokens=(), finish=finish))

    def _deliver_inline(self, on_batch: OnBatch | None) -> bool:
        """Has the batches that come next delivered to `on_batch` if the queue is empty; whether it is."""
        with self._lock:
            is_empty = self._batches.empty()
            self._on_batch = on_batch if is_empty else None
            return is_empty


class PushStream(TokenStream):
    """A stream without a reader: each batch goes to a function, on the writer's thread, as it comes.

    The function must neither block nor raise. Any thread may call `close`.
    """

    def __init__(
        self,
        request_ids: Sequence[str],
        on_close: Callable[[str, FinishReason], None],
        push: Callable[[int, TokenBatch], None],
    ) -> None:
        super().__init__(request_ids, on_close)
        self._push = push

    def put(self, index: int, batch: TokenBatch) -> None:
        if batch.finish is not None:
            self._unfinished.discard(index)
        self._push(index, batch)
