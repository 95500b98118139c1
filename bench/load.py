#!/usr/bin/env python3
"""Drives any OpenAI server with concurrent requests, checks every answer and prints how fast it was.

Standard library only: it knows the protocol and nothing of the server behind it. `Load` runs threads
that take jobs in order; `jobs.py` makes the jobs from `prompts.py`, `answers.py` checks each answer as
it arrives, `figures.py` computes figures from the rows and `load_report.py` shows them.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from answers import Check, make_check
from figures import Row, find_notes, summarize, tokens_per_gap
from http_client import TRANSPORT_ERRORS, TRANSPORT_KINDS, WrongAnswer, connect, first_model, send, wait_ready
from jobs import Job, make_job, make_jobs
from load_options import PATHS, Settings, parse
from load_report import Step, make_document, make_sweep_table, make_table, write_json


class Load:
    """One run of jobs over at most `concurrency` connections.

    Each worker thread takes the next job, waits for its arrival time, asks, and appends a row; `run`, on the
    main thread, waits for the workers. It takes no rows from them: Ctrl-C could come with one in hand. With arrival times the loop is open: no job waits for
    the answer of another, except when all workers are busy, and then its row says so. `make_check` may
    tolerate what a server is known to leave out.
    """

    def __init__(
        self,
        settings: Settings,
        jobs: Sequence[Job],
        make_check: Callable[[Settings], Check] = make_check,
    ) -> None:
        self.rows: list[Row] = []
        self.is_interrupted = False
        self.cpu_seconds = 0.0  # this program's own
        self._settings, self._total, self._began, self._make_check = settings, len(jobs), 0.0, make_check
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()  # at its end a None for each worker
        self._ended: queue.SimpleQueue[None] = queue.SimpleQueue()  # a None from each worker that ends
        self._sockets: dict[str, socket.socket] = {}  # each worker's latest, for `_stop` to shut
        self._kept: dict[str, http.client.HTTPConnection] = {}  # each worker's, between its requests
        self._stopped = threading.Event()
        num_workers = min(settings.concurrency, len(jobs))
        self._workers = [
            threading.Thread(target=self._work, name=f"load-{i}", daemon=True) for i in range(num_workers)
        ]
        for job in (*jobs, *[None] * num_workers):
            self._jobs.put(job)

    def run(self) -> Load:
        """Runs all jobs, or until Ctrl-C."""
        cpu_began, self._began = time.process_time(), time.perf_counter()
        try:
            for worker in self._workers:
                worker.start()
            self._wait()
        except KeyboardInterrupt:
            self.is_interrupted = True
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)
        self._stop()
        self.rows = list(self.rows)  # a connect that hangs may append to the other list yet
        self.cpu_seconds = time.process_time() - cpu_began
        return self

    def _wait(self) -> None:
        num_running, shown_seconds, is_terminal = len(self._workers), 0.0, sys.stderr.isatty()
        while num_running:
            with contextlib.suppress(queue.Empty):
                self._ended.get(timeout=0.2)
                num_running -= 1
            if (seconds := self._now()) - shown_seconds > (0.2 if is_terminal else 5):
                shown_seconds = seconds
                tokens, num_failed = (
                    sum(row.completion_tokens for row in self.rows),
                    sum(row.failure is not None for row in self.rows),
                )
                line = f"{len(self.rows)}/{self._total} requests, {num_failed} failed, {tokens / seconds:.1f} tok/s, {seconds:.0f} s"
                print(f"\r{line}\033[K" if is_terminal else f"{line}\n", end="", file=sys.stderr, flush=True)

    def _stop(self) -> None:
        self._stopped.set()
        for sock in list(self._sockets.values()):
            with contextlib.suppress(OSError):  # most are closed by now
                sock.shutdown(socket.SHUT_RDWR)
        for worker in self._workers:
            if worker.ident:
                # Only a connect that hangs takes longer; because of it, the thread is a daemon.
                worker.join(timeout=5)

    def _now(self) -> float:
        return time.perf_counter() - self._began

    def _work(self) -> None:
        was_busy = False  # a worker's first job can be late only because its thread was slow to start
        try:
            while job := self._jobs.get():
                early_seconds = 0.0 if job.arrival_seconds is None else job.arrival_seconds - self._now()
                if self._stopped.wait(max(0.0, early_seconds)):
                    return
                row, was_busy = self._ask(job, max(0.0, -early_seconds) if was_busy else 0.0), True
                # What `_stop` cut off is no failure of the server.
                if row.failure is None or not self._stopped.is_set():
                    self.rows.append(row)
        finally:
            if kept := self._kept.pop(threading.current_thread().name, None):
                kept.close()
            self._ended.put(None)

    def _ask(self, job: Job, late_seconds: float) -> Row:
        check, sent = self._make_check(replace(self._settings, output_tokens=job.output_tokens)), self._now()
        name = threading.current_thread().name
        try:
            connection = self._kept.pop(name, None) or connect(self._settings.address)
            with contextlib.ExitStack() as stack:
                stack.enter_context(contextlib.closing(connection))
                self._sockets[name] = connection.sock
                if self._stopped.is_set():
                    raise ConnectionAbortedError("stopped")
                self._receive(connection, job.body, check)
                check.close()
                # The server has not asked to close it.
                if self._settings.keep_alive and connection.sock is not None:
                    self._kept[name] = connection
                    stack.pop_all()
        except (WrongAnswer, *TRANSPORT_ERRORS) as error:
            kind = (
                error.kind
                if isinstance(error, WrongAnswer)
                else TRANSPORT_KINDS.get(type(error), "connection")
            )
            return Row(job.index, sent, late_seconds, self._now() - sent, kind, str(error) or repr(error))
        return self._measure(job, sent, late_seconds, check)

    def _measure(self, job: Job, sent: float, late_seconds: float, check: Check) -> Row:
        request_seconds = self._now() - sent
        row = Row(
            job.index,
            sent,
            late_seconds,
            request_seconds,
            None,
            "",
            check.prompt_tokens,
            check.completion_tokens,
        )
        if not check.deltas:  # a whole answer
            return row
        times = [at for at, _ in check.deltas]
        return replace(
            row,
            ttft_seconds=times[0] - sent,
            tokens_per_gap=tokens_per_gap(check.completion_tokens, [chars for _, chars in check.deltas]),
            gaps_seconds=[later - earlier for earlier, later in itertools.pairwise(times)],
        )

    def _receive(self, connection: http.client.HTTPConnection, body: bytes, check: Check) -> None:
        deadline = self._now() + self._settings.timeout  # heartbeats renew the socket's own timeout
        with send(connection, self._settings.address, PATHS[self._settings.endpoint], body) as response:
            if response.status != 200:
                raise WrongAnswer(f"http_{response.status}", response.read(2_000))
            wanted = "text/event-stream" if self._settings.is_streamed else "application/json"
            if not (kind := response.getheader("Content-Type", "missing")).startswith(wanted):
                raise WrongAnswer("malformed", f"Content-Type is {kind}, not {wanted}")
            while piece := response.read1():
                check.feed(piece, now := self._now())
                if now > deadline:
                    raise TimeoutError(f"the answer has no end after {self._settings.timeout:g} s")


def identify(settings: Settings) -> tuple[str, str | None]:
    """Returns the model to ask for and what the server calls itself."""
    try:
        model, software = first_model(settings.address)
        return settings.model or model, software
    except ValueError as error:
        if settings.model or settings.endpoint == "generate":  # /generate needs no name
            return settings.model or "", None
        raise SystemExit(f"load.py: {error}") from error


def run_step(settings: Settings, model: str, number: int) -> Load:
    """Warms the server up and runs one step; an interrupted warm-up ends it."""
    first_warm = -1 - number * settings.warmup
    warm_jobs = [make_job(settings, model, first_warm - index) for index in range(settings.warmup)]
    load = Load(settings, warm_jobs).run()
    for note in find_notes(load, replace(settings, dataset=None), 0):
        print("warm-up:", note, file=sys.stderr)
    if load.is_interrupted:
        load.rows.clear()
        return load
    return Load(settings, make_jobs(settings, model, number * settings.requests)).run()


def run_steps(steps: Sequence[Settings], model: str) -> tuple[list[Step], bool]:
    """The steps that have results, and whether the run was not interrupted."""
    done: list[Step] = []
    for number, settings in enumerate(steps):
        load = run_step(settings, model, number)
        if load.rows or not load.is_interrupted:
            done.append(Step(settings, summarize(load, settings), load.rows))
        if load.is_interrupted:
            return done, False
        if len(steps) > 1:
            print(f"step {number + 1} of {len(steps)} has ended", file=sys.stderr)
    return done, True


def main(argv: Sequence[str] | None = None) -> int:
    steps = parse(argv, (__doc__ or "").partition("\n")[0])
    settings = steps[0]
    if settings.wait_ready:
        wait_ready(settings.address, settings.wait_ready)
    model, software = identify(settings)
    done, is_whole = run_steps(steps, model)
    if done:
        is_sweep = len(steps) > 1
        table = make_sweep_table(done, model) if is_sweep else make_table(settings, model, done[0].summary)
        print(table, file=sys.stderr if settings.json == "-" else sys.stdout)
        write_json(settings.json, make_document(done, model, software, is_sweep=is_sweep))
        draw(settings.plot, done, model)
    if not is_whole:
        return 130
    is_right = all(not step.summary["failures"] and len(step.rows) == step.settings.requests for step in done)
    return 0 if is_right else 1


def draw(path: str | None, steps: Sequence[Step], model: str) -> None:
    if path is None:
        return
    import chart  # matplotlib takes a second, and most runs draw nothing

    chart.draw_sweep(steps, model, Path(path))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
