"""Runs the lines of a batch, enough at a time to keep the device busy, and yields their results as they end.

Belongs to the thread that iterates; the delivery thread only collects deltas and queues ended lines.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from levserve.api.admission_queue import AdmissionQueue
from levserve.api.work import Job, Runtime, Work
from levserve.batch.endpoints import Gathered, Limits, LineWork, Moments, Part, make_work, read_body
from levserve.batch.line import InputLine, RequestLine, ResultLine, find_custom_id, make_result
from levserve.batch.ordering import ReadyLine
from levserve.errors import Conflict, RetryLater, ServeError
from levserve.generation import ClientGone, Delta
from levserve.models.entry import NOT_LOADABLE
from levserve.models.handle import ModelHandle
from levserve.models.registry import Registry
from levserve.request.policy import Policy
from levserve.request.submission import Seeds
from levserve.settings.settings import Settings

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5
"""A run that waits checks this often whether it should stop."""
MAX_WAIT_SECONDS = 10.0
GIVE_UP_SECONDS = 300.0
"""For so long a batch waits for a model that cannot be loaded, because of its store's network for example."""


class Interrupted(Exception):
    """The engine ended, or the run was told to stop; lines without a result must be run again."""


class LineResult(NamedTuple):
    """The result of one line, with its counts."""

    line: InputLine
    result: ResultLine
    error_code: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def status(self) -> int:
        return 0 if self.result.response is None else self.result.response.status_code


class LineSeeds(Seeds):
    """With a base, a line without a seed gets one that depends only on the base and the line's number."""

    def __init__(self, base: int | None, number: int) -> None:
        super().__init__(base)
        self._number = number

    def draw(self) -> int:
        if self._base is None:
            return super().draw()
        text = b"%d:line %d" % (self._base, self._number)
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())


@dataclass(slots=True, eq=False)
class RunningLine:
    """A line whose parts run. `gathered` belongs to the delivery thread until all parts have ended."""

    line: InputLine
    request: RequestLine
    work: LineWork
    handle: ModelHandle
    started: float
    parts: list[Work] = field(default_factory=list)
    gathered: list[Gathered] = field(default_factory=list)
    num_open: int = 0
    submitted: float | None = None
    first_token: float | None = None
    error: Exception | None = None

    @property
    def moments(self) -> Moments:
        times = [part.placed_at for part in self.parts]
        placed = min((moment for moment in times if moment is not None), default=None)
        return Moments(self.started, self.submitted, placed, self.first_token)

    def cancel(self) -> None:
        for part in self.parts:
            part.cancel()
        self.handle.release()


class Runner:
    """Runs lines on the models of a registry. `stop` may be called by any thread."""

    def __init__(
        self,
        registry: Registry,
        settings: Settings,
        waiting: AdmissionQueue,
        limits: Limits,
        *,
        max_sequences: int,
    ) -> None:
        self._registry = registry
        self._settings = settings
        self._waiting = waiting
        self._limits = limits
        self._max_sequences = max_sequences
        self._numbers = itertools.count()
        self._unloadable_since: dict[str | None, float] = {}
        self._ends: queue.SimpleQueue[RunningLine | None] = queue.SimpleQueue()
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Makes `run` raise `Interrupted` soon."""
        self._stopping.set()
        self._ends.put(None)

    def run(
        self, lines: Iterable[ReadyLine], is_wanted: Callable[[], bool] = lambda: True
    ) -> Generator[LineResult, None, None]:
        """Yields the results in the order in which lines end. Leaving the iterator cancels running lines.

        Once `is_wanted` returns False, no further line is begun and running ones are cancelled. Raises
        `Interrupted`.
        """
        left = iter(lines)
        running: set[RunningLine] = set()
        num_sequences = 0
        kept: ReadyLine | None = None  # it waits for its model until no line runs
        is_at_end = False
        try:
            while True:
                while not is_at_end and num_sequences < self._max_sequences and is_wanted():
                    ready = kept or next(left, None)
                    kept = None
                    if ready is None:
                        is_at_end = True
                        break
                    begun = self._begin(ready, is_wanted, may_wait=not running)
                    if isinstance(begun, LineResult):
                        yield begun
                    elif begun is not None:
                        running.add(begun)
                        num_sequences += begun.work.num_sequences
                    else:
                        kept = ready
                        break
                self._check_stop()
                if not running or not is_wanted():
                    return
                ended = self._wait()
                if ended is None or ended not in running:
                    continue
                running.discard(ended)
                num_sequences -= ended.work.num_sequences
                yield self._finish(ended)
        finally:
            for one in running:
                one.cancel()

    def _wait(self) -> RunningLine | None:
        try:
            return self._ends.get(timeout=POLL_SECONDS)
        except queue.Empty:
            return None

    def _check_stop(self) -> None:
        if self._stopping.is_set():
            raise Interrupted

    def _begin(
        self, ready: ReadyLine, is_wanted: Callable[[], bool], *, may_wait: bool
    ) -> RunningLine | LineResult | None:
        """Starts a line, or returns its result if it cannot run.

        Returns None if the line must wait for its model and may not, or if the batch is no longer wanted.
        """
        line, request = ready
        if isinstance(request, ServeError):
            return _refused(line, find_custom_id(line), request)
        started = time.monotonic()
        try:
            body = read_body(request.url, request.method, bytes(request.body))
            handle = self._borrow(body.model, is_wanted) if may_wait else self._borrow_loaded(body.model)
            if handle is None:
                return None
            try:
                work = make_work(
                    body,
                    handle,
                    Policy.of(self._settings.models.get(handle.model.name, self._settings)),
                    LineSeeds(self._settings.seed, line.number),
                    f"batch:{next(self._numbers)}",  # no client can choose such an id
                    self._limits,
                )
            except BaseException:
                handle.release()
                raise
        except RetryLater as error:
            if error.code != NOT_LOADABLE:
                raise Interrupted from error
            return _refused(line, request.custom_id, error)
        except ServeError as error:
            return _refused(line, request.custom_id, error)
        except Exception:
            log.exception("line %d of a batch failed", line.number)
            return _refused(line, request.custom_id, _fault())
        begun = RunningLine(line, request, work, handle, started, num_open=len(work.parts))
        self._start(begun)
        return begun

    def _borrow_loaded(self, name: str | None) -> ModelHandle | None:
        """Borrows a model without waiting; None if it is not loaded, or a live request needs its room.

        While lines run, their models are held until this thread collects the ends: if it waited for another
        model then, and there is no room for both, it would wait for itself.
        """
        try:
            return self._registry.borrow(name, loads=False, is_background=True)
        except (Conflict, RetryLater):
            return None

    def _borrow(self, name: str | None, is_wanted: Callable[[], bool]) -> ModelHandle | None:
        """Borrows a model and waits until it is loaded; None if the batch is no longer wanted.

        Raises `Unavailable` if it could not be loaded for minutes: it may never be, and other lines must not
        wait for it. From then on, each of its lines tries once.
        """
        pause = POLL_SECONDS
        while is_wanted():
            self._check_stop()
            try:
                handle = self._try_to_borrow(name, is_wanted)
                self._unloadable_since.pop(name, None)
                return handle
            except RetryLater as error:
                if error.code == NOT_LOADABLE:
                    since = self._unloadable_since.setdefault(name, time.monotonic())
                    if time.monotonic() - since >= GIVE_UP_SECONDS:
                        raise
                self._registry.engine.require_ready()
                self._stopping.wait(pause)
                pause = min(2 * pause, MAX_WAIT_SECONDS)  # live requests may need the room for long
        return None

    def _try_to_borrow(self, name: str | None, is_wanted: Callable[[], bool]) -> ModelHandle | None:
        handle = self._registry.borrow(name, is_background=True)
        try:
            while not handle.wait(POLL_SECONDS):
                self._check_stop()
                if not is_wanted():
                    handle.release()
                    return None
            _ = handle.resident  # raises if it could not be loaded
        except BaseException:
            handle.release()
            raise
        return handle

    def _start(self, begun: RunningLine) -> None:
        runtime = Runtime(self._registry.engine, begun.handle.model, self._waiting)
        lock = threading.Lock()
        begun.submitted = time.monotonic()
        for part in begun.work.parts:
            gathered: list[list[Delta]] = [[] for _ in part.choices]
            begun.gathered.append(gathered)
            begun.parts.append(self._make_part(begun, part, gathered, runtime, lock))
        for one in begun.parts:
            one.start()

    def _make_part(
        self,
        begun: RunningLine,
        part: Part,
        gathered: list[list[Delta]],
        runtime: Runtime,
        lock: threading.Lock,
    ) -> Work:
        def take(index: int, delta: Delta) -> None:
            if begun.first_token is None and delta.tokens:
                begun.first_token = time.monotonic()
            gathered[index].append(delta)

        def end(error: Exception | None) -> None:
            with lock:
                begun.num_open -= 1
                begun.error = begun.error or error
                is_over = not begun.num_open
            if is_over:
                self._ends.put(begun)

        return Work(runtime, Job(part.requests, part.choices, part.num_tokens, _nothing), take, end)

    def _finish(self, ended: RunningLine) -> LineResult:
        ended.handle.release()
        line, custom_id = ended.line, ended.request.custom_id
        error = ended.error
        if error is None:
            try:
                body = ended.work.finish(ended.gathered, ended.moments)
            except ServeError as failure:
                error = failure
            except Exception:
                log.exception("line %d of a batch failed", line.number)
                error = _fault()
            else:
                result = make_result(line, custom_id, 200, body)
                work = ended.work
                return LineResult(line, result, None, work.prompt_tokens, work.completion_tokens)
        if isinstance(error, (RetryLater, ClientGone)) or type(error) is ServeError:
            raise Interrupted from error  # the engine stopped; the line itself is not at fault
        if not isinstance(error, ServeError):
            log.error("line %d of a batch failed", line.number, exc_info=error)
            error = _fault()
        return _refused(line, custom_id, error)


def _nothing(gathered: Gathered) -> None:
    """The parts of a line are joined when all of them have ended."""


def _fault() -> ServeError:
    return ServeError("The server failed to handle the request.")


def _refused(line: InputLine, custom_id: str | None, error: ServeError) -> LineResult:
    result = make_result(line, custom_id, error.status, error.body())
    return LineResult(line, result, error.code or error.type)
