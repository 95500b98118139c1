"""The pieces of one answer as they come: an iterator, and one for event loops. Closing it ends the work."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from typing import Any

from levserve.api.results import Piece, PieceMaker
from levserve.api.window import make_in
from levserve.api.work import Job, Runtime, Work

Item = Piece | Exception | None
"""None is the end."""


class TextStream(Iterator[Piece]):
    """Belongs to one thread; any thread may call `close`."""

    def __init__(self, runtime: Runtime, job: Job[Any]) -> None:
        self._runtime = runtime
        self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._work = start_streaming(runtime, job, self._items.put)
        self._is_over = False

    def __next__(self) -> Piece:
        if self._is_over:
            raise StopIteration
        if self._runtime.is_forked:
            self._runtime.require_open()
        item = self._items.get()
        if isinstance(item, Piece):
            return item
        self._is_over = True
        if item is None:
            raise StopIteration
        raise item

    def close(self) -> None:
        """Ends the answer; the iterator then stops."""
        self._cancel()
        self._items.put(None)

    def __enter__(self) -> TextStream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_work"):
            self._cancel()  # nobody reads the rest

    def _cancel(self) -> None:
        # In a forked process it is the parent's work, and a lock may be held by a thread that is not here.
        if not self._runtime.is_forked:
            self._work.cancel()


async def stream_async(runtime: Runtime, make: Callable[[], Job[Any]], executor: Any) -> AsyncIterator[Piece]:
    """The same for an event loop, without blocking it."""
    loop = asyncio.get_running_loop()
    items: asyncio.Queue[Item] = asyncio.Queue()

    def put(item: Item) -> None:
        with suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(items.put_nowait, item)

    runtime.require_open()
    job = await make_in(executor, runtime, make)
    work = start_streaming(runtime, job, put)
    try:
        while (item := await items.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item
    finally:
        work.cancel()


def start_streaming(runtime: Runtime, job: Job[Any], put: Callable[[Item], None]) -> Work:
    maker = PieceMaker()
    work = Work(runtime, job, lambda index, delta: put(maker.make(index, delta)), put)
    work.start()
    return work
