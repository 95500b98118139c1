"""Runs any number of jobs, as many at a time as the engine takes, and yields their outcomes as they end.

Jobs are made one at a time and only when there is room for one more, so a list may be of any length.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncGenerator, Callable, Generator, Iterable
from concurrent.futures import Executor
from contextlib import suppress
from typing import Generic, NamedTuple, TypeVar

from levserve.api.work import Job, Runtime, Work
from levserve.generation import Delta

T = TypeVar("T")

MakeJob = Callable[[], Job[T]]


class Outcome(NamedTuple, Generic[T]):
    """How the job of this number ended."""

    number: int
    value: T | None
    error: Exception | None

    def get(self) -> T:
        if self.error is not None:
            raise self.error
        assert self.value is not None
        return self.value


def run_jobs(runtime: Runtime, jobs: Iterable[MakeJob[T]]) -> Generator[Outcome[T], None, None]:
    """The outcomes in the order in which they come; closing the iterator cancels the running jobs."""
    done: queue.SimpleQueue[Outcome[T]] = queue.SimpleQueue()
    left = enumerate(jobs)
    running: dict[int, Work] = {}
    try:
        while True:
            while len(running) < runtime.engine.max_inflight and (job := next(left, None)) is not None:
                number, make = job
                try:
                    made = make()
                except Exception as error:
                    yield Outcome(number, None, error)
                    continue
                running[number] = start_job(runtime, number, made, done.put)
            if not running:
                return
            outcome = done.get()
            del running[outcome.number]
            yield outcome
    finally:
        for work in running.values():
            work.cancel()


async def run_jobs_async(
    runtime: Runtime, jobs: Iterable[MakeJob[T]], executor: Executor
) -> AsyncGenerator[Outcome[T], None]:
    """The same for an event loop, without blocking it: the executor makes the jobs."""
    loop = asyncio.get_running_loop()
    done: asyncio.Queue[Outcome[T]] = asyncio.Queue()

    def put(outcome: Outcome[T]) -> None:
        with suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(done.put_nowait, outcome)

    left = enumerate(jobs)
    running: dict[int, Work] = {}
    try:
        while True:
            while len(running) < runtime.engine.max_inflight and (job := next(left, None)) is not None:
                number, make = job
                try:
                    made = await make_in(executor, runtime, make)
                except Exception as error:
                    yield Outcome(number, None, error)
                    continue
                running[number] = start_job(runtime, number, made, put)
            if not running:
                return
            outcome = await done.get()
            del running[outcome.number]
            yield outcome
    finally:
        for work in running.values():
            work.cancel()


async def make_in(executor: Executor, runtime: Runtime, make: MakeJob[T]) -> Job[T]:
    """Makes a job beside the event loop. Raises `Unavailable` if the model was closed meanwhile."""
    try:
        return await asyncio.get_running_loop().run_in_executor(executor, make)
    except RuntimeError as error:  # the executor is shut down
        raise runtime.explain(error) from None


def start_job(runtime: Runtime, number: int, job: Job[T], put: Callable[[Outcome[T]], None]) -> Work:
    gathered: list[list[Delta]] = [[] for _ in job.choices]

    def end(error: Exception | None) -> None:
        if error is not None:
            put(Outcome(number, None, error))
            return
        try:
            outcome = Outcome(number, job.finish(gathered), None)
        except Exception as failure:
            outcome = Outcome[T](number, None, failure)
        put(outcome)

    work = Work(runtime, job, lambda index, delta: gathered[index].append(delta), end)
    work.start()
    return work
