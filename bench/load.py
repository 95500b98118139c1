#!/usr/bin/env python3
"""Drives any OpenAI server with concurrent streams, checks every answer and prints how fast it was.

Standard library only: it knows the wire and nothing of the server behind it. `Load` runs threads that take
jobs in order, `AnswerCheck` reads each stream as it arrives, and `summarize` makes the rows into numbers.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import math
import os
import platform
import queue
import random
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

# Each is one token with its leading space in SmolLM2's vocabulary, and in most others that know English.
WORDS = """time people water house world night story music river garden winter summer letter market school family father mother morning
evening window street table paper island forest mountain ocean bridge castle village city country road train ship horse bird tree flower
stone fire light wind rain snow cloud sun moon star earth field green white black small great old young long short early late open quiet
strong simple happy bright round deep wide high low warm cold new first last next other many few more less red blue gold silver""".split()
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
# ValueError: a TLS socket that Ctrl-C shut under its reader.
TRANSPORT_ERRORS = (
    OSError,
    http.client.HTTPException,
    ValueError,
)
TRANSPORT_KINDS = {TimeoutError: "timeout", http.client.IncompleteRead: "truncated"}
EPILOG = """\
examples:
  python bench/load.py --url http://127.0.0.1:8000 --concurrency 8 --requests 64 --prompt-tokens 100 --output-tokens 64
  python bench/load.py --endpoint chat --rate 4 --concurrency 64 --requests 200 --warmup 8 --json result.json

what is checked: status 200, well-formed SSE, one id in all chunks, exactly one finish chunk per choice, no error event, some text,
usage, [DONE] at the end, and usage.completion_tokens equal to --output-tokens (at most that with --no-ignore-eos). A request fails
once, by the first thing found: http_STATUS, connection, timeout, truncated, malformed, error_event, mixed_ids, finish, missing_done,
missing_usage, wrong_usage, empty_text.

what the numbers mean: tokens and times are of requests that did not fail. A request is sent when its own new connection begins to
open, so that a full accept queue shows; with --keep-alive only a worker's first has a new one. A content delta is a chunk with
non-empty text.
  wall seconds    first request sent to last answer ended
  output tok/s    sum of usage.completion_tokens / wall seconds; prompt tok/s the same with usage.prompt_tokens
  TTFT            request sent to its first content delta; one value a request
  delta gap       time between two content deltas of a stream; one value a gap
  inter-token     delta gap / tokens in a delta; one value a gap. Tokens in a delta = completion_tokens after the stream's first delta
                  / its gaps, where the first delta's tokens are its share of the characters; at least one token a delta is assumed,
                  so the number is exact when each token comes by itself
  request         request sent to the end of its answer; one value a request
  p50 p90 p99     nearest rank: the smallest value that at least so many percent of the values do not exceed

exit code: 0 every answer was right, 1 some failed or the run could not start, 2 wrong usage, 130 Ctrl-C (prints what it has).
"""


class WrongAnswer(Exception):
    """An answer that no OpenAI client should be given; `kind` is what failures are counted by."""

    def __init__(self, kind: str, message: str | bytes) -> None:
        super().__init__(shorten(message))
        self.kind = kind


def option(default: Any, text: str, *, least: float = -math.inf, **details: Any) -> Any:
    shown = "" if default in (None, True) else " (default: %(default)s)"
    metavar = {"metavar": "N"} if "type" in details else {}
    return field(
        default=default, metadata={"least": least, "flag": {"help": text + shown, **metavar, **details}}
    )


@dataclass(frozen=True, slots=True)
class Settings:
    """Every flag, declared once; `parse` makes the command line from it."""

    url: str = option("http://127.0.0.1:8000", "the server's address, with or without /v1")
    endpoint: str = option("completions", "what to call", choices=tuple(PATHS))
    model: str | None = option(None, "model to ask for (default: the first of GET /v1/models)")
    api_key: str | None = option(None, "sent as a bearer token (default: $OPENAI_API_KEY)")
    concurrency: int = option(
        8, "streams at a time; with --rate the most connections, reported when they bind", type=int, least=1
    )
    requests: int = option(64, "requests that count", type=int, least=1)
    warmup: int = option(0, "requests before those, which do not", type=int, least=0)
    rate: float | None = option(
        None, "arrivals a second, as a Poisson process that waits for no answer", type=float, least=1e-3
    )
    prompt_tokens: int = option(
        100, "words in a prompt, each about a token; usage has the true number", type=int, least=1
    )
    prompt_spread: float = option(0.0, "by what share of that they differ", type=float, least=0)
    shared_prefix: int = option(
        0, "how many of them, from the first, all prompts share; the rest differ", type=int, least=0
    )
    output_tokens: int = option(64, "max_tokens of each request", type=int, least=1)
    output_spread: float = option(
        0.0, "by what share of that they differ, so that they do not end together", type=float, least=0
    )
    temperature: float = option(0.0, "of each request; 0 is greedy", type=float, least=0)
    ignore_eos: bool = option(
        True,
        "send ignore_eos for a fixed length; OpenAI itself refuses it",
        action=argparse.BooleanOptionalAction,
    )
    seed: int | None = option(
        None,
        "fixes prompts and arrivals (default: new each run; a prefix cache may know an old one)",
        type=int,
    )
    keep_alive: bool = option(
        False,
        "ask again on the same connection, as SDKs do, and not on a new one each time",
        action="store_true",
    )
    timeout: float = option(
        600.0, "seconds that a connect, a read or a whole request may take", type=float, least=1e-3
    )
    wait_ready: float = option(
        0.0,
        "first wait so many seconds for GET /readyz, or /v1/models where that is 404",
        type=float,
        least=0,
    )
    json: str | None = option(
        None, "write settings, versions, summary and every request here too; - is stdout", metavar="FILE"
    )


@dataclass(frozen=True, slots=True)
class Job:
    index: int
    body: bytes
    output_tokens: int
    arrival_seconds: float | None  # None: as soon as a stream is free


@dataclass(frozen=True, slots=True)
class Row:
    """One request. `late_seconds` is how long its arrival waited because all connections were busy."""

    index: int
    sent_seconds: float  # since the run began
    late_seconds: float
    request_seconds: float
    failure: str | None = None
    message: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    ttft_seconds: float = 0.0
    tokens_per_gap: float = 1.0
    gaps_seconds: Sequence[float] = ()


def connect(settings: Settings) -> http.client.HTTPConnection:
    parts = urlsplit(settings.url)
    make = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = make(parts.netloc, timeout=settings.timeout)
    connection.connect()
    return connection


def send(
    connection: http.client.HTTPConnection, settings: Settings, path: str, body: bytes | None = None
) -> http.client.HTTPResponse:
    # So that an OPENAI_BASE_URL works as well.
    prefix = urlsplit(settings.url).path.rstrip("/").removesuffix("/v1")
    key = {"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
    connection.request(
        "POST" if body else "GET", prefix + path, body, {"Content-Type": "application/json", **key}
    )
    return connection.getresponse()


def get(settings: Settings, path: str) -> tuple[int, bytes, str | None]:
    """Returns status, body and what the server calls itself."""
    settings = replace(settings, timeout=min(settings.timeout, 10))
    with contextlib.closing(connect(settings)) as connection, send(connection, settings, path) as response:
        return response.status, response.read(), response.getheader("Server")


class AnswerCheck:
    """Reads one streamed answer as it arrives and raises `WrongAnswer` at the first thing that is wrong with
    it.

    `feed` takes bytes with the time they came; `close` says that no more will come, and sets the token
    counts. Knows no sockets.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.deltas: list[tuple[float, int]] = []  # time and characters of each content delta
        self.prompt_tokens = self.completion_tokens = 0
        self._tail, self._data = b"", list[bytes]()
        self._ids: set[str] = set()
        self._has_finished: dict[int, bool] = {}  # by choice
        self._usage: Any = None
        self._is_done = False

    def feed(self, piece: bytes, at: float) -> None:
        *lines, self._tail = (self._tail + piece).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                event, self._data = b"\n".join(self._data), []
                self._read_event(event, at)
            elif line and not line.startswith(b":"):  # OpenAI's SDK fails on event:, id: and retry: lines
                raise WrongAnswer("malformed", b"a line is neither data nor a comment: " + line)

    def close(self) -> None:
        if self._data or self._tail:
            raise WrongAnswer("truncated", "the stream ends inside an event")
        if not self._is_done:
            raise WrongAnswer(
                "missing_done", f"the stream ends without [DONE], after {len(self.deltas)} content deltas"
            )
        if not self._has_finished or not all(self._has_finished.values()):
            raise WrongAnswer("finish", "a choice has no finish chunk")
        if not self.deltas:
            raise WrongAnswer("empty_text", "the answer has no text")
        if not isinstance(self._usage, dict):
            raise WrongAnswer(
                "missing_usage", "no chunk has usage although stream_options.include_usage was set"
            )
        self.prompt_tokens, self.completion_tokens = (
            self._usage.get(name, 0) for name in ("prompt_tokens", "completion_tokens")
        )
        most = self._settings.output_tokens
        fewest = most if self._settings.ignore_eos else 1
        if (
            type(self.prompt_tokens) is not int
            or self.prompt_tokens < 1
            or self.completion_tokens not in range(fewest, most + 1)
        ):
            raise WrongAnswer("wrong_usage", f"asked for {fewest} to {most} tokens, usage is {self._usage}")

    def _read_event(self, event: bytes, at: float) -> None:
        if self._is_done:
            raise WrongAnswer("malformed", b"an event after [DONE]: " + event)
        self._is_done = event == b"[DONE]"
        if self._is_done:
            return
        try:
            self._read_chunk(json.loads(event), at)
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
        ) as error:  # not JSON, or not the shape of a chunk
            raise WrongAnswer("malformed", f"not a chunk ({error!r}): {event!r}") from error

    def _read_chunk(self, chunk: dict[str, Any], at: float) -> None:
        if chunk.get("error"):
            raise WrongAnswer("error_event", json.dumps(chunk["error"]))
        self._ids.add(chunk["id"])
        if len(self._ids) > 1:
            raise WrongAnswer("mixed_ids", f"one stream has the ids {self._ids}")
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk["choices"]:
            index, finish = choice["index"], choice.get("finish_reason")
            text = (
                choice["text"] if self._settings.endpoint == "completions" else choice["delta"].get("content")
            )
            if self._has_finished.get(index) and (text or finish):
                raise WrongAnswer("finish", f"choice {index} goes on after its finish chunk")
            self._has_finished[index] = self._has_finished.get(index, False) or bool(finish)
            if text:
                self.deltas.append((at, len(text)))


class Load:
    """One run of jobs over at most `concurrency` connections.

    Each worker thread takes the next job, waits for its arrival and puts a row on a queue; `run`, on the main
    thread, collects them. With arrivals the loop is open: nothing waits for an answer, except when all
    workers are busy, and then the row says so. `make_check` may forgive what a server is known to leave out.
    """

    def __init__(
        self,
        settings: Settings,
        jobs: Sequence[Job],
        make_check: Callable[[Settings], AnswerCheck] = AnswerCheck,
    ) -> None:
        self.rows: list[Row] = []
        self.is_interrupted = False
        self.cpu_seconds = 0.0  # this program's own
        self._settings, self._total, self._began, self._make_check = settings, len(jobs), 0.0, make_check
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()  # at its end a None for each worker
        self._done: queue.SimpleQueue[Row | None] = queue.SimpleQueue()  # a None from each worker that ends
        self._sockets: dict[str, socket.socket] = {}  # each worker's latest, for `_stop` to shut
        self._kept: dict[str, http.client.HTTPConnection] = {}  # each worker's, while it asks nothing
        self._stopped = threading.Event()
        num_workers = min(settings.concurrency, len(jobs))
        self._workers = [
            threading.Thread(target=self._work, name=f"load-{i}", daemon=True) for i in range(num_workers)
        ]
        for job in (*jobs, *[None] * num_workers):
            self._jobs.put(job)

    def run(self) -> Load:
        """Runs all jobs, or to Ctrl-C."""
        cpu_began, self._began = time.process_time(), time.perf_counter()
        try:
            for worker in self._workers:
                worker.start()
            self._collect()
        except KeyboardInterrupt:
            self.is_interrupted = True
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)
        self._stop()
        while not self._done.empty():  # what ended just as Ctrl-C came
            self.rows += [row] if (row := self._done.get()) else []
        self.cpu_seconds = time.process_time() - cpu_began
        return self

    def _collect(self) -> None:
        num_running, shown_seconds, is_terminal = len(self._workers), 0.0, sys.stderr.isatty()
        while num_running:
            with contextlib.suppress(queue.Empty):
                row = self._done.get(timeout=0.2)
                num_running -= row is None
                self.rows += [row] if row else []
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
                # Only a connect that hangs takes longer; the thread is a daemon for its sake.
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
                    self._done.put(row)
        finally:
            if kept := self._kept.pop(threading.current_thread().name, None):
                kept.close()
            self._done.put(None)

    def _ask(self, job: Job, late_seconds: float) -> Row:
        check, sent = self._make_check(replace(self._settings, output_tokens=job.output_tokens)), self._now()
        name = threading.current_thread().name
        try:
            connection = self._kept.pop(name, None) or connect(self._settings)
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
        ended, times = self._now(), [at for at, _ in check.deltas]
        return Row(
            job.index,
            sent,
            late_seconds,
            ended - sent,
            None,
            "",
            check.prompt_tokens,
            check.completion_tokens,
            times[0] - sent,
            tokens_per_gap(check.completion_tokens, [chars for _, chars in check.deltas]),
            [later - earlier for earlier, later in itertools.pairwise(times)],
        )

    def _receive(self, connection: http.client.HTTPConnection, body: bytes, check: AnswerCheck) -> None:
        deadline = self._now() + self._settings.timeout  # the socket's own never passes while heartbeats come
        with send(connection, self._settings, PATHS[self._settings.endpoint], body) as response:
            if response.status != 200:
                raise WrongAnswer(f"http_{response.status}", response.read(2_000))
            if not (kind := response.getheader("Content-Type", "missing")).startswith("text/event-stream"):
                raise WrongAnswer("malformed", f"Content-Type is {kind}, not text/event-stream")
            while piece := response.read1():
                check.feed(piece, now := self._now())
                if now > deadline:
                    raise TimeoutError(f"the answer has no end after {self._settings.timeout:g} s")


def shorten(text: str | bytes) -> str:
    text = " ".join((text.decode(errors="replace") if isinstance(text, bytes) else text).split())
    return text if len(text) <= 240 else text[:240] + "..."


def tokens_per_gap(completion_tokens: int, chars: Sequence[int]) -> float:
    """Mean tokens of the deltas after the first, from the characters of each delta; --help says how."""
    num_gaps = len(chars) - 1
    after_first = completion_tokens * (1 - chars[0] / sum(chars))
    return max(num_gaps, min(after_first, completion_tokens - 1)) / (num_gaps or 1)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Nearest rank, so always one of the values; empty when there are none."""
    ranked, percents = sorted(values), {"p50": 50, "p90": 90, "p99": 99, "max": 100}
    return (
        {name: ranked[math.ceil(percent * len(ranked) / 100) - 1] for name, percent in percents.items()}
        if ranked
        else {}
    )


def make_job(settings: Settings, model: str, index: int, arrival_seconds: float | None = None) -> Job:
    shared = random.Random(f"{settings.seed} shared").choices(WORDS, k=settings.shared_prefix)
    rng = random.Random(f"{settings.seed} {index}")
    own = rng.choices(
        WORDS, k=spread_length(settings.prompt_tokens, settings.prompt_spread, rng) - settings.shared_prefix
    )
    prompt = " ".join(shared + own)
    ask = (
        {"prompt": prompt}
        if settings.endpoint == "completions"
        else {"messages": [{"role": "user", "content": prompt}]}
    )
    output_tokens = spread_length(settings.output_tokens, settings.output_spread, rng)
    body = {
        "model": model,
        **ask,
        "max_tokens": output_tokens,
        "temperature": settings.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"ignore_eos": True} if settings.ignore_eos else {}),
    }
    return Job(index, json.dumps(body).encode(), output_tokens, arrival_seconds)


def spread_length(length: int, spread: float, rng: random.Random) -> int:
    """A length that differs from this by at most a share, evenly."""
    return max(round(length * rng.uniform(1 - spread, 1 + spread)), 1)


def make_jobs(settings: Settings, model: str) -> list[Job]:
    if settings.rate is None:
        return [make_job(settings, model, index) for index in range(settings.requests)]
    clock, rate = random.Random(f"{settings.seed} arrivals"), settings.rate
    arrivals = itertools.accumulate(clock.expovariate(rate) for _ in range(settings.requests))
    return [make_job(settings, model, index, arrival) for index, arrival in enumerate(arrivals)]


def summarize(load: Load, settings: Settings) -> dict[str, Any]:
    rows, good = load.rows, [row for row in load.rows if row.failure is None]
    output_tokens, prompt_tokens = (
        sum(row.completion_tokens for row in good),
        sum(row.prompt_tokens for row in good),
    )
    wall = max((row.sent_seconds + row.request_seconds for row in rows), default=0.0) - min(
        (row.sent_seconds for row in rows), default=0.0
    )
    latencies = {
        "TTFT": [row.ttft_seconds for row in good],
        "inter-token": [gap / row.tokens_per_gap for row in good for gap in row.gaps_seconds],
        "delta gap": [gap for row in good for gap in row.gaps_seconds],
        "request": [row.request_seconds for row in good],
    }
    return {
        "requests": len(rows),
        "failures": sum(row.failure is not None for row in rows),
        "failures_by_kind": dict(Counter(row.failure for row in rows if row.failure)),
        "wall_seconds": wall,
        "output_tokens_per_second": output_tokens / (wall or 1),
        "prompt_tokens_per_second": prompt_tokens / (wall or 1),
        "output_tokens": output_tokens,
        "prompt_tokens": prompt_tokens,
        "tokens_per_delta": output_tokens / (sum(len(row.gaps_seconds) + 1 for row in good) or 1),
        "latency_ms": {
            name: percentiles([1e3 * seconds for seconds in values]) for name, values in latencies.items()
        },
        "notes": find_notes(load, settings, wall),
    }


def find_notes(load: Load, settings: Settings, wall_seconds: float) -> list[str]:
    """Returns what a reader must know before trusting the numbers."""
    counts, firsts = (
        Counter(row.failure for row in load.rows),
        {row.failure: row.message for row in reversed(load.rows)},
    )
    notes = [f"failed {count} x {kind}, the first: {firsts[kind]}" for kind, count in counts.items() if kind]
    if load.is_interrupted:
        notes.append(f"interrupted when {len(load.rows)} of {settings.requests} requests had ended")
    if late := [row.late_seconds for row in load.rows if row.late_seconds > 0]:
        notes.append(
            f"not an open loop: {len(late)} arrivals found all {settings.concurrency} connections busy and waited, one of them "
            f"{max(late):.3f} s; raise --concurrency"
        )
    if wall_seconds > 0.5 and load.cpu_seconds > 0.7 * wall_seconds:  # Python threads share one core
        notes.append(
            f"this program kept {load.cpu_seconds / wall_seconds:.0%} of a core busy: the server may be faster than this"
        )
    return notes


def make_table(settings: Settings, model: str, summary: dict[str, Any]) -> str:
    pace = f"{settings.concurrency} streams" if settings.rate is None else f"{settings.rate:g} requests/s"
    words, tokens = (
        f"{length} (+-{spread:.0%})" if spread else length
        for length, spread in (
            (settings.prompt_tokens, settings.prompt_spread),
            (settings.output_tokens, settings.output_spread),
        )
    )
    lengths = f"{words} words in, {tokens} tokens out"
    title = f"{model} at {settings.url}: {settings.endpoint}, {pace}, {lengths}, seed {settings.seed}\n"
    figures = [
        f"{name.replace('tokens_per_second', 'tok/s').replace('_', ' '):<16}{value:>10{'.2f' if isinstance(value, float) else ''}}"
        for name, value in summary.items()
        if isinstance(value, (int, float))
    ]
    latencies = [
        f"{name:<16}" + ("".join(f"{value:>10.2f}" for value in ranks.values()) or f"{'-':>10}")
        for name, ranks in summary["latency_ms"].items()
    ]
    header = f"\n{'ms':<16}{'p50':>10}{'p90':>10}{'p99':>10}{'max':>10}"
    return "\n".join([title, *figures, header, *latencies, "", *summary["notes"]]).rstrip()


def wait_ready(settings: Settings) -> None:
    deadline, path = time.perf_counter() + settings.wait_ready, "/readyz"
    while True:
        try:
            status = get(settings, path)[0]
            if status == 200:
                return
            answer = f"GET {path} answers {status}"
            path = "/v1/models" if status == 404 else path
        except TRANSPORT_ERRORS as error:
            answer = str(error)
        if time.perf_counter() >= deadline:
            raise SystemExit(f"load.py: the server is not ready after {settings.wait_ready:g} s: {answer}")
        time.sleep(0.1)


def identify(settings: Settings) -> tuple[str, str | None]:
    """Returns the model to ask for and what the server calls itself."""
    try:
        status, body, software = get(settings, "/v1/models")
        if status != 200 and not settings.model:
            raise ValueError(f"{status} {shorten(body)}")
        return settings.model or json.loads(body)["data"][0]["id"], software
    except (*TRANSPORT_ERRORS, LookupError, TypeError) as error:
        if settings.model:
            return settings.model, None
        raise SystemExit(f"load.py: GET /v1/models of {settings.url} names no model: {error!r}") from error


def parse(argv: Sequence[str] | None) -> Settings:
    parser = argparse.ArgumentParser(
        prog="load.py",
        description=(__doc__ or "").partition("\n")[0],
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for setting in fields(Settings):
        parser.add_argument(
            "--" + setting.name.replace("_", "-"), default=setting.default, **setting.metadata["flag"]
        )
    given = parser.parse_args(argv)
    for setting in fields(Settings):
        value, least = getattr(given, setting.name), setting.metadata["least"]
        if isinstance(value, (int, float)) and not value >= least:
            parser.error(f"--{setting.name.replace('_', '-')} {value} is below {least}")
    shortest = max(round(given.prompt_tokens * (1 - given.prompt_spread)), 1)
    if given.shared_prefix >= shortest:
        parser.error(
            f"--shared-prefix {given.shared_prefix} leaves nothing to differ of a prompt of {shortest} words, the shortest that "
            "--prompt-tokens and --prompt-spread make"
        )
    if not given.url.startswith(("http://", "https://")):
        parser.error(f"--url {given.url} does not start with http:// or https://")
    if given.json and not Path(given.json).absolute().parent.is_dir():  # better now than after the run
        parser.error(f"--json {given.json}: no such folder")
    given.api_key = (given.api_key or os.environ.get("OPENAI_API_KEY", "")).strip()
    given.seed = random.randrange(2**31) if given.seed is None else given.seed
    return Settings(**vars(given))


def write_json(
    settings: Settings, model: str, software: str | None, summary: dict[str, Any], rows: Sequence[Row]
) -> None:
    versions = {
        "format": 1,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "server": software,
    }
    text = json.dumps(
        {
            "settings": {name: value for name, value in asdict(settings).items() if name != "api_key"},
            "model": model,
            "versions": versions,
            "ended": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "summary": summary,
            "requests": [asdict(row) for row in rows],
        }
    )
    if settings.json == "-":
        print(text)
    elif settings.json:
        Path(settings.json).write_text(text + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    settings = parse(argv)
    if settings.wait_ready:
        wait_ready(settings)
    model, software = identify(settings)
    load = Load(settings, [make_job(settings, model, -1 - index) for index in range(settings.warmup)]).run()
    for note in find_notes(load, settings, 0):
        print("warm-up:", note, file=sys.stderr)
    if not load.is_interrupted:
        load = Load(settings, make_jobs(settings, model)).run()
        summary = summarize(load, settings)
        print(make_table(settings, model, summary), file=sys.stderr if settings.json == "-" else sys.stdout)
        write_json(settings, model, software, summary, load.rows)
    if load.is_interrupted:
        return 130
    return 0 if len(load.rows) == settings.requests and not summary["failures"] else 1


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
