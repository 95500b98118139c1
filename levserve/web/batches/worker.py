"""Runs the server's batches, one after another, in the capacity that live requests leave free.

The work has its own thread, which exists only while a batch has not ended. Each result is written at once, to
files that no client sees before the batch has ended; a restarted server continues from them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Any

from levserve.api.admission_queue import AdmissionQueue
from levserve.batch.done import DoneLines
from levserve.batch.endpoints import Limits
from levserve.batch.line import InputLine, LineError, ResultLine, find_custom_id, result_id
from levserve.batch.ordering import order_lines
from levserve.batch.results import BeingWritten, ResultFile, remove_results
from levserve.batch.runner import Interrupted, Runner
from levserve.batch.source import Source
from levserve.errors import StartupError
from levserve.models.registry import Registry
from levserve.observe.health import Phase
from levserve.schedule.request import BACKGROUND
from levserve.settings.settings import Settings
from levserve.web.batches.disk import DiskFolder
from levserve.web.batches.files import FileStore
from levserve.web.batches.objects import (
    STATUSES,
    BatchObject,
    LineProblem,
    ProblemList,
    RequestCounts,
    StoredBatch,
)
from levserve.web.batches.store import BatchStore
from levserve.web.batches.validation import inspect_lines

log = logging.getLogger(__name__)

ROUNDS_AHEAD = 2
"""Sequences handed to the device for each of its rows, so that it never waits for the next lines."""
RETRY_SECONDS = 5.0
JOIN_SECONDS = 3.0
EXPIRED = LineError(
    "batch_expired", "This request could not be executed before the completion window expired."
)


class BatchWorker:
    """`wake`, `stop` and `close` may be called by any thread; the rest runs on the worker's thread."""

    def __init__(
        self, registry: Registry, settings: Settings, disk: DiskFolder, files: FileStore, batches: BatchStore
    ) -> None:
        self._engine = registry.engine
        self._settings = settings
        self._disk = disk
        self._files = files
        self._batches = batches
        max_inflight = self._engine.max_inflight
        rows = min(settings.max_running or max_inflight, max_inflight)
        self._runner = Runner(
            registry,
            settings,
            AdmissionQueue(self._engine, self._engine.background),
            Limits(self._engine.admission, rows, BACKGROUND),
            max_sequences=min(ROUNDS_AHEAD * rows, max_inflight),
        )
        self._lock = threading.Lock()
        """Guards `_thread`, which ends when there is nothing to do and is started when there is."""
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        files.is_in_use = batches.uses_file
        self._metrics = self._engine.metrics
        for status in STATUSES:
            self._metrics.batches.labels(status).set_function(partial(batches.num_with, status))
        self._engine.on_drain(self.stop)

    def wake(self) -> None:
        """Starts the thread if there is a batch to run."""
        with self._lock:
            has_work = self._batches.first_open() is not None and not self._stopping.is_set()
            if has_work and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="levserve-batches", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Stops work; the running batch stays as it is until the server's next start."""
        self._stopping.set()
        self._runner.stop()

    def close(self) -> None:
        """Stops, waits for the thread, and removes a temporary folder."""
        self.stop()
        thread = self._thread
        if thread is not None:
            thread.join(JOIN_SECONDS)
        self._disk.close()

    def _run(self) -> None:
        while not self._stopping.is_set():
            if not self._engine.wait_ready(RETRY_SECONDS / 10):
                if self._engine.phase is Phase.FAILED:
                    return
                continue
            stored = self._next()
            if stored is None:
                return
            try:
                self._advance(stored)
            except Interrupted:
                self._stopping.wait(RETRY_SECONDS)
            except BeingWritten as error:  # another server with the same folder runs it, and may be ending
                log.warning("%s waits: %s", stored.batch.id, error)
                self._stopping.wait(RETRY_SECONDS)
            except Exception as error:
                self._fail(stored.batch, error)

    def _next(self) -> StoredBatch | None:
        with self._lock:
            stored = self._batches.first_open()
            if stored is None:
                self._thread = None
        return stored

    def _advance(self, stored: StoredBatch) -> None:
        """Runs a batch to its end. Raises `Interrupted`, `BeingWritten`, `OSError`, `StartupError`."""
        batch = stored.batch
        if batch.status == "validating":
            batch = self._validate(batch)
        if batch.status in ("in_progress", "cancelling", "finalizing"):
            self._execute(batch, stored)

    def _validate(self, batch: BatchObject) -> BatchObject:
        limits = self._settings.max_batch_requests, self._settings.max_body_bytes
        inspection = inspect_lines(self._lines(batch), batch.endpoint, *limits)
        change = partial(self._batches.change, batch.id, only_from="validating")
        if inspection.problems:
            log.info("%s: refused, its input has %d problems", batch.id, len(inspection.problems))
            problems = ProblemList(inspection.problems)
            return change(status="failed", failed_at=self._batches.now(), errors=problems)
        log.info("%s: %d requests for %s", batch.id, inspection.num_requests, batch.endpoint)
        counts = RequestCounts(inspection.num_requests)
        return change(status="in_progress", in_progress_at=self._batches.now(), request_counts=counts)

    def _execute(self, batch: BatchObject, stored: StoredBatch) -> None:
        done = DoneLines()
        output_id, error_id = _result_ids(batch)
        with (
            ResultFile(self._files.path_of(output_id), done) as output,
            ResultFile(self._files.path_of(error_id), done) as errors,
        ):
            counter = _Counter(self._batches, batch, output, errors)
            counter.show()
            self._answer(batch, done, output, errors, counter)
            if self._is_late(batch) and not self._is_cancelled(batch):
                self._expire(batch, done, errors)
                counter.show()
            has_all = done.num_done >= counter.total
            self._batches.change(
                batch.id, only_from="in_progress", status="finalizing", finalizing_at=self._batches.now()
            )
        changes: dict[str, Any] = {
            "output_file_id": self._keep(output, output_id, f"{batch.id}_output.jsonl", stored),
            "error_file_id": self._keep(errors, error_id, f"{batch.id}_error.jsonl", stored),
        }
        status = self._final_status(batch, has_all=has_all, num_unrun=errors.statuses[0])
        log.info("%s: %s, %d answered, %d failed", batch.id, status, counter.completed, counter.failed)
        changes[f"{status}_at"] = self._batches.now()
        self._batches.change(batch.id, status=status, **changes)

    def _keep(self, results: ResultFile, file_id: str, name: str, stored: StoredBatch) -> str | None:
        """Adds a file of results to the store and returns its id; removes a file without results."""
        if not results.num_results:
            results.path.unlink(missing_ok=True)
            return None
        self._files.adopt(results.path, file_id, name, "batch_output", stored.owner, stored.output_seconds)
        return file_id

    def _answer(
        self,
        batch: BatchObject,
        done: DoneLines,
        output: ResultFile,
        errors: ResultFile,
        counter: _Counter,
    ) -> None:
        """Runs the lines that have no result yet, until the batch is cancelled or expires."""

        def is_wanted() -> bool:
            current = self._batches.find(batch.id)
            return current is not None and current.batch.status == "in_progress" and not self._is_late(batch)

        lines = order_lines(self._left(batch, done), self._settings.max_body_bytes)
        with closing(self._runner.run(lines, is_wanted)) as results:
            for result in results:
                is_answered = result.status == 200
                (output if is_answered else errors).write(result.result)
                done.add(result.result.id)
                self._metrics.batch_requests.labels("completed" if is_answered else "failed").inc()
                counter.show()

    def _expire(self, batch: BatchObject, done: DoneLines, errors: ResultFile) -> None:
        for line in self._left(batch, done):
            errors.write(ResultLine(result_id(line), find_custom_id(line), None, EXPIRED))
            done.add(result_id(line))
            self._metrics.batch_requests.labels("failed").inc()

    def _final_status(self, batch: BatchObject, *, has_all: bool, num_unrun: int) -> str:
        if num_unrun:
            return "expired"
        return "cancelled" if self._is_cancelled(batch) or not has_all else "completed"

    def _left(self, batch: BatchObject, done: DoneLines) -> Iterator[InputLine]:
        return (line for line in self._lines(batch) if not done.has(line))

    def _lines(self, batch: BatchObject) -> Iterator[InputLine]:
        source = Source(self._files.path_of(batch.input_file_id))
        return source.lines(self._settings.max_body_bytes)

    def _is_late(self, batch: BatchObject) -> bool:
        return self._batches.now() >= batch.expires_at

    def _is_cancelled(self, batch: BatchObject) -> bool:
        current = self._batches.find(batch.id)
        return current is not None and current.batch.status == "cancelling"

    def _fail(self, batch: BatchObject, error: Exception) -> None:
        """Ends a batch that failed, such as one whose files cannot be read or written; the others go on."""
        log.error("%s failed", batch.id, exc_info=error)
        is_known = isinstance(error, (OSError, StartupError))
        message = f"The batch's files cannot be used: {error}." if is_known else "The server failed."
        try:
            problems = ProblemList([LineProblem("server_error", message)])
            now = self._batches.now()
            self._batches.change(batch.id, status="failed", failed_at=now, errors=problems)
            for file_id in _result_ids(batch):
                remove_results(self._files.path_of(file_id))
        except OSError:
            self._stopping.wait(RETRY_SECONDS)  # the disk may be full for now; try again later


class _Counter:
    """Shows a batch's progress in its record."""

    def __init__(
        self, batches: BatchStore, batch: BatchObject, output: ResultFile, errors: ResultFile
    ) -> None:
        self._batches = batches
        self._batch_id = batch.id
        self._output = output
        self._errors = errors
        self.total = batch.request_counts.total

    @property
    def completed(self) -> int:
        return self._output.num_results

    @property
    def failed(self) -> int:
        return self._errors.num_results

    def show(self) -> None:
        self._batches.count(self._batch_id, RequestCounts(self.total, self.completed, self.failed))


def _result_ids(batch: BatchObject) -> tuple[str, str]:
    """The ids of a batch's files of results: always the same, so that a restarted server finds them."""
    digits = batch.id.removeprefix("batch_")
    return f"file-{digits}o", f"file-{digits}e"
