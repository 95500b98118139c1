"""One request's tokens on their way from the device thread to the HTTP thread that waits for them."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator

from levserve.schedule.request import FinishReason, TokenBatch


class TokenStream:
    """Carries the batches of one request to one reader.

    `put` is the device thread's and never blocks; iterating is the reader's; `close` may be called from any thread and
    any number of times. The device thread ends every stream with exactly one batch whose `finish` is set.
    """

    def __init__(self, request_id: str, on_close: Callable[[str], None]) -> None:
        self.request_id = request_id
        self._batches: queue.Queue[TokenBatch] = queue.Queue()
        self._on_close = on_close
        self._is_finished = False

    def put(self, batch: TokenBatch) -> None:
        self._batches.put(batch)

    def get(self, timeout_seconds: float | None = None) -> TokenBatch:
        """The next batch; raises `queue.Empty` when none came in time."""
        batch = self._batches.get(timeout=timeout_seconds)
        self._is_finished = batch.finish is not None
        return batch

    def __iter__(self) -> Iterator[TokenBatch]:
        while not self._is_finished:
            yield self.get()

    def close(self) -> None:
        """Tells the device thread that nobody reads any more; its row and pages are free within one round.

        A reader blocked on the stream is woken by the batch that ends it.
        """
        if not self._is_finished:
            self._on_close(self.request_id)


def ended_stream(request_id: str, finish: FinishReason) -> TokenStream:
    """A stream whose only batch is its end."""
    stream = TokenStream(request_id, on_close=lambda _: None)
    stream.put(TokenBatch(tokens=(), finish=finish))
    return stream
