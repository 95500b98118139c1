#!/usr/bin/env python3
"""Soaks a server in mixed traffic at twice its capacity, with clients that leave, hurry or send rubbish.

Standard library only. `Soak` runs threads that each do one `Act` after another; every answer is checked
when it arrives. After a first part that warms everything up, and again at the end, the traffic stops and
the server's own metrics are read: in between nothing may be lost, left behind or grown. Memory is
printed every minute; after five minutes it must stay level, and a server that is started here must stay
within the memory that its plan states.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ROWS, WAITING = 4, 8  # of a server that is started here; a small one is full sooner
WARM_SHARE = 0.3  # of the time, before memory and descriptors are first looked at
ANSWER_SECONDS = 120  # at most for an answer; a healthy server is far faster
READY_SECONDS = 600
IDLE_SECONDS = 60
SPARE_FILES = (
    8  # that may be open at the end and were not before: the log, a compiled program, our own scrape
)
GROWTH = 0.05  # share by which memory may grow, if that is more than
GROWTH_BYTES = 48 << 20  # for threads that start late, and what malloc keeps
LEVEL_MINUTES = 5  # after which memory may grow by at most
LEVEL_GROWTH = 0.03  # this share
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
ZERO = (
    "levserve_requests_running",
    "levserve_requests_waiting",
    "levserve_kv_pages_used",
    "levserve_websockets",
)
TRANSPORT = (OSError, http.client.HTTPException)
EPILOG = """\
examples:
  python bench/soak.py --minutes 10
  python bench/soak.py --minutes 60 --url http://127.0.0.1:8000 --concurrency 600
  python bench/soak.py --minutes 2 --model my-model --max-running 8

options that are not listed here go to the levserve that is started. --faults sets LEVSERVE_FAULTS for it; each `nan` in it may fail
one answer.

exit code: 0 everything held, 1 something did not or the server did not start, 2 wrong usage.
"""


class Wrong(Exception):
    """An answer that no client should be given."""


class Failed(Wrong):
    """An answer that reports a failed server: a 500 or an error in a stream. Injected faults may cause it."""


@dataclass(frozen=True, slots=True)
class Act:
    """One thing a client does: what it sends, the statuses it may get, and how it treats the answer."""

    name: str
    path: str
    body: dict[str, Any] | bytes | None = None
    statuses: tuple[int, ...] = (200, 429)
    num_tokens: int | None = None
    """The exact number of tokens that must come, in all choices together."""
    leaves_after: float | None = None
    """Seconds until the client hangs up, whatever has come."""


class Acts:
    """Draws what the next client does. Each thread has its own."""

    def __init__(self, model: str, seed: int, *, chats: bool) -> None:
        self._model = model
        self._chats = chats
        self._random = random.Random(seed)
        self._makers: list[tuple[int, Callable[[], Act]]] = [
            (30, self._answer),
            (10, self._score),
            (
                5,
                lambda: Act(
                    "embeddings", "/v1/embeddings", {"model": model, "input": [self._text(), self._text()]}
                ),
            ),
            (15, self._hurry),
            (20, self._leave),
            (12, self._rubbish),
            (
                8,
                lambda: Act("ops", self._random.choice(("/healthz", "/readyz", "/metrics")), statuses=(200,)),
            ),
        ]

    def draw(self) -> Act:
        weights = [weight for weight, _ in self._makers]
        return self._random.choices([make for _, make in self._makers], weights)[0]()

    def _text(self) -> str:
        return " ".join(f"t{self._random.randrange(10, 300)}" for _ in range(self._random.randrange(1, 24)))

    def _body(self, **fields: Any) -> tuple[str, dict[str, Any]]:
        limits = {
            "model": self._model,
            "max_tokens": self._random.randrange(1, 33),
            "ignore_eos": True,
            **fields,
        }
        if not self._chats or self._random.random() < 0.5:
            return "/v1/completions", {"prompt": self._text(), **limits}
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": self._text()}], **limits}

    def _answer(self, **fields: Any) -> Act:
        extra: list[dict[str, Any]] = [
            {},
            {"n": 2},
            {"temperature": 0},
            {"top_k": 5, "seed": 1},
            {"repetition_penalty": 1.2},
        ]
        path, body = self._body(**self._random.choice(extra), **fields)
        is_stream = self._random.random() < 0.6
        if is_stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return Act(
            "stream" if is_stream else "answer", path, body, num_tokens=body["max_tokens"] * body.get("n", 1)
        )

    def _score(self) -> Act:
        pairs = {"prompts": [self._text()] * 3, "continuations": [f" {self._text()}" for _ in range(3)]}
        return Act("score", "/loglikelihood", pairs)

    def _hurry(self) -> Act:
        """A deadline that may pass: before the first token the answer is a 504, after it the text so far."""
        path, body = self._body(timeout=round(self._random.uniform(0.01, 1.0), 3))
        return Act("deadline", path, body | {"stream": self._random.random() < 0.5}, statuses=(200, 429, 504))

    def _leave(self) -> Act:
        path, body = self._body(stream=self._random.random() < 0.7)
        return Act("leaves", path, body, leaves_after=self._random.uniform(0, 0.5))

    def _rubbish(self) -> Act:
        path, body = self._body()
        choices: list[tuple[str, dict[str, Any] | bytes | None, int]] = [
            (path, b'{"model": ', 400),
            (path, b"\xff\x00" * 50, 400),
            (path, b"[" * 50_000, 400),
            (path, body | {"max_tokens": 10**18}, 400),
            (path, body | {"temperature": "warm"}, 400),
            (path, body | {"stop": ["x"] * 500}, 400),
            (path, body | {"model": "\ud800none"}, 400),
            (path, body | {"model": "none"}, 404),
            ("/v1/completions", {"model": self._model, "prompt": "t17 " * 20_000}, 400),
            ("/nowhere", body, 404),
            ("/healthz", body, 405),
        ]
        path, rubbish, status = self._random.choice(choices)
        return Act("rubbish", path, rubbish, statuses=(status, 429))


class Soak:
    """The traffic. `outcomes` counts the outcomes of each kind of act, `wrong` lists what must not happen."""

    def __init__(
        self, url: str, model: str, *, concurrency: int, seed: int, chats: bool = True, may_fail: int = 0
    ) -> None:
        self._address = urlsplit(url)
        self._model = model
        self._concurrency = concurrency
        self._seed = seed
        self._chats = chats
        self._may_fail = may_fail
        self._lock = threading.Lock()
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.wrong: list[str] = []

    def run(self, seconds: float) -> None:
        """Keeps all clients busy for so long, and waits for their last answers."""
        end = time.monotonic() + seconds
        self._seed += self._concurrency
        threads = [
            threading.Thread(target=self._live, args=(end, self._seed + number))
            for number in range(self._concurrency)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _live(self, end: float, seed: int) -> None:
        acts = Acts(self._model, seed, chats=self._chats)
        while time.monotonic() < end:
            act = acts.draw()
            try:
                outcome = self._do(act)
            except (Wrong, ValueError, KeyError, TypeError, *TRANSPORT) as error:
                is_ordered = isinstance(error, Failed) and self._may_fail > 0
                self._may_fail -= is_ordered
                outcome = "failed as ordered" if is_ordered else "WRONG"
                if not is_ordered:
                    self._note(f"{act.name} {act.path}: {type(error).__name__} {str(error)[:200]}")
            with self._lock:
                self.outcomes[act.name, outcome] += 1
            if outcome == "429":
                time.sleep(0.05)  # a client that came back at once would only count refusals

    def _note(self, text: str) -> None:
        with self._lock:
            self.wrong.append(text)

    def _do(self, act: Act) -> str:
        connection = http.client.HTTPConnection(
            self._address.hostname or "", self._address.port, timeout=ANSWER_SECONDS
        )
        try:
            if act.leaves_after is not None:
                return self._leave(connection, act)
            response = self._send(connection, act)
            data = response.read()
            return self._check(act, response, data)
        finally:
            connection.close()

    def _send(self, connection: http.client.HTTPConnection, act: Act) -> http.client.HTTPResponse:
        if act.body is None:
            connection.request("GET", act.path)
        else:
            data = act.body if isinstance(act.body, bytes) else json.dumps(act.body).encode()
            connection.request("POST", act.path, data, {"Content-Type": "application/json"})
        return connection.getresponse()

    def _leave(self, connection: http.client.HTTPConnection, act: Act) -> str:
        assert act.leaves_after is not None
        timer = threading.Timer(act.leaves_after, _hang_up, [connection])
        timer.start()
        try:
            self._send(connection, act).read()
            return "too late"
        except (
            *TRANSPORT,
            ValueError,
            AttributeError,
        ):  # http.client raises the last two when its socket is shut while in use
            return "left"
        finally:
            timer.cancel()
            timer.join()

    def _check(self, act: Act, response: http.client.HTTPResponse, data: bytes) -> str:
        if response.status == 500:
            raise Failed(f"500: {data[:160]!r}")
        if response.status not in act.statuses:
            raise Wrong(f"{response.status}: {data[:160]!r}")
        if response.status >= 400:
            error = json.loads(data)["error"]
            if not error["message"]:
                raise Wrong("an error without a message")
            if response.status == 429 and int(response.headers["retry-after-ms"]) < 0:
                raise Wrong("a refusal without a time to come back")
        elif isinstance(act.body, dict) and act.body.get("stream"):
            check_stream(act, data.decode())
        elif act.path.endswith("completions"):
            check_whole(act, json.loads(data))
        elif act.path == "/loglikelihood" and len(json.loads(data)["ll"]) != 3:
            raise Wrong("not a score for each pair")
        elif act.path == "/v1/embeddings" and len(json.loads(data)["data"]) != 2:
            raise Wrong("not an embedding for each text")
        return str(response.status)


def check_whole(act: Act, answer: dict[str, Any]) -> None:
    assert isinstance(act.body, dict)
    if [choice["index"] for choice in answer["choices"]] != list(range(act.body.get("n", 1))):
        raise Wrong("not every choice is there")
    if any(choice["finish_reason"] not in ("stop", "length") for choice in answer["choices"]):
        raise Wrong("a choice without an end")
    check_usage(act, answer["usage"])


def check_stream(act: Act, text: str) -> None:
    assert isinstance(act.body, dict)
    *events, done = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    if done != "[DONE]":
        raise Wrong("a stream without [DONE]")
    chunks = [json.loads(event) for event in events]
    errors = [chunk["error"] for chunk in chunks if "error" in chunk]
    if errors:
        if act.name == "deadline" and errors[0]["code"] == "deadline_exceeded":
            return
        raise Failed(f"an error in a stream: {errors[0]['message']}")
    ends = Counter(
        choice["index"]
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["finish_reason"] is not None
    )
    if ends != Counter(range(act.body.get("n", 1))):
        raise Wrong(f"ends of choices: {dict(ends)}")
    if "stream_options" in act.body:
        check_usage(act, chunks[-1]["usage"])


def check_usage(act: Act, usage: dict[str, int]) -> None:
    if (
        usage["prompt_tokens"] < 1
        or usage["total_tokens"] != usage["prompt_tokens"] + usage["completion_tokens"]
    ):
        raise Wrong(f"usage does not add up: {usage}")
    if act.num_tokens is not None and usage["completion_tokens"] != act.num_tokens:
        raise Wrong(f"{usage['completion_tokens']} tokens, not {act.num_tokens}")


def _hang_up(connection: http.client.HTTPConnection) -> None:
    if connection.sock is not None:
        with suppress(OSError):  # it had ended
            connection.sock.shutdown(2)


class Server:
    """Asks the server about itself."""

    def __init__(self, url: str) -> None:
        self._address = urlsplit(url)

    def ask(self, path: str) -> bytes:
        connection = http.client.HTTPConnection(
            self._address.hostname or "", self._address.port, timeout=ANSWER_SECONDS
        )
        try:
            connection.request("GET", path)
            return connection.getresponse().read()
        finally:
            connection.close()

    def scrape(self) -> dict[str, float]:
        lines = [line for line in self.ask("/metrics").decode().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def settle(self) -> dict[str, float]:
        """The metrics once the server is idle, or after a time limit; connections take a moment to close."""
        deadline = time.monotonic() + IDLE_SECONDS
        steady = 0
        before = self.scrape()
        while time.monotonic() < deadline:
            time.sleep(0.5)
            now = self.scrape()
            is_steady = (
                not any(now.get(name) for name in ZERO)
                and now["process_open_fds"] == before["process_open_fds"]
            )
            steady, before = steady + 1 if is_steady else 0, now
            if steady == 4:
                break
        return before


class MemoryLog:
    """Asks the server once a minute, on a thread of its own, how much memory it takes, and prints it."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.minutes: list[float] = []
        """Bytes at the end of each minute."""

    def __enter__(self) -> MemoryLog:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.wait(60):
            try:
                self.minutes.append(self._server.scrape()["process_resident_memory_bytes"])
            except TRANSPORT:
                return  # the traffic reports that the server is gone
            print(f"minute {len(self.minutes):3}  {self.minutes[-1] / 2**20:.1f} MiB", flush=True)


@dataclass(frozen=True, slots=True)
class Started:
    """A levserve of our own that is ready."""

    url: str
    pid: int
    is_complete: threading.Event
    """Set when all its programs are compiled."""
    planned_bytes: int | None
    """The most memory that it should need, as its log states on a CPU."""

    def peak_bytes(self) -> int:
        """The most memory that the process and its worker have taken."""
        workers = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        statuses = [Path(f"/proc/{pid}/status").read_text() for pid in (self.pid, *workers)]
        return sum(_peak_bytes(status) for status in statuses)


def _peak_bytes(status: str) -> int:
    match = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(match[1]) << 10 if match else 0


def planned_bytes(lines: list[str]) -> int | None:
    """The most memory that the plan in a log asks for; a plan of a GPU's memory has no such line."""
    for line in lines:
        match = re.search(r" memory +([\d.]+) (\w+) at most", line)
        if match:
            return int(float(match[1]) * UNITS[match[2]])
    return None


def judge_memory(
    minutes: list[float], peak_bytes: int = 0, planned_bytes: int | None = None
) -> list[tuple[str, str, bool]]:
    """Like `judge`: whether memory is level after it has settled, and whether it stayed within the plan."""
    rows = []
    if len(minutes) > LEVEL_MINUTES:
        # Maxima are compared, because the arrays of a long prompt come and go.
        start = max(minutes[LEVEL_MINUTES - 3 : LEVEL_MINUTES])
        growth = max(minutes[LEVEL_MINUTES:]) / start - 1
        found = f"{growth:+.1%} of {LEVEL_GROWTH:.0%} allowed"
        rows.append((f"memory grown after minute {LEVEL_MINUTES}", found, growth <= LEVEL_GROWTH))
    if planned_bytes is not None:
        found = f"{peak_bytes / 2**20:.0f} MiB of {planned_bytes / 2**20:.0f} planned"
        rows.append(("memory at its peak", found, peak_bytes <= planned_bytes))
    return rows


def judge(soak: Soak, before: dict[str, float], after: dict[str, float]) -> list[tuple[str, str, bool]]:
    """Each thing that must hold, what was found, and whether it holds."""
    failed = sum(
        value - before.get(name, 0)
        for name, value in after.items()
        if re.match(r'levserve_requests_total{.*status="5(0[0-35-9]|[1-9].)"', name)
    )
    late = after.get('levserve_compiles_total{when="serving"}', 0)
    memory, limit = (
        after["process_resident_memory_bytes"] - before["process_resident_memory_bytes"],
        GROWTH_BYTES,
    )
    limit = max(limit, int(GROWTH * before["process_resident_memory_bytes"]))
    files = after["process_open_fds"] - before["process_open_fds"]
    complete = sum(count for (_, outcome), count in soak.outcomes.items() if outcome == "200")
    ordered = sum(count for (_, outcome), count in soak.outcomes.items() if outcome.startswith("failed"))
    rows = [
        ("answers that were wrong", str(len(soak.wrong)), not soak.wrong),
        ("answers that were complete", str(complete), complete > 0),
        ("5xx by the server's own count", f"{failed:.0f}", failed <= ordered),
        ("compiles that a request waited for", f"{late:.0f}", late == 0),
        ("memory grown", f"{memory / 2**20:+.1f} MiB of {limit / 2**20:.0f} allowed", memory <= limit),
        ("descriptors grown", f"{files:+.0f} of {SPARE_FILES} allowed", files <= SPARE_FILES),
    ]
    rows += [
        (
            name.removeprefix("levserve_").replace("_", " ") + " at the end",
            f"{after[name]:.0f}",
            after[name] == 0,
        )
        for name in ZERO
    ]
    return rows


def print_table(soak: Soak, rows: list[tuple[str, str, bool]]) -> None:
    print(f"{'act':12}" + "outcomes")
    for name in sorted({name for name, _ in soak.outcomes}):
        told = sorted((outcome, count) for (act, outcome), count in soak.outcomes.items() if act == name)
        print(f"{name:12}" + "  ".join(f"{outcome}: {count}" for outcome, count in told))
    print()
    for what, found, holds in rows:
        print(f"{'ok' if holds else 'FAILED':8}{what:38}{found}")
    for text in soak.wrong[:20]:
        print(f"        {text}")


@contextmanager
def started(flags: list[str], faults: str) -> Iterator[Started]:
    """Starts a levserve, yields it when it is ready, and stops it."""
    command = [
        sys.executable,
        "-m",
        "levserve",
        "--port",
        "0",
        "--max-running",
        str(ROWS),
        "--max-waiting",
        str(WAITING),
        *flags,
    ]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | ({"LEVSERVE_FAULTS": faults} if faults else {}),
    )
    lines: list[str] = []
    is_ready, is_complete = threading.Event(), threading.Event()

    def listen() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if " ready: " in line:
                is_ready.set()
            if "programs are compiled" in line:
                is_complete.set()
            del lines[:-200]
        is_ready.set()
        is_complete.set()

    listener = threading.Thread(target=listen)
    listener.start()
    try:
        is_ready.wait(READY_SECONDS)
        found = next(
            (
                match[1]
                for match in (re.search(r" ready: .* on (http://\S+);", line) for line in lines)
                if match
            ),
            None,
        )
        if found is None:
            raise SystemExit("".join(lines[-5:]) + "soak: levserve did not start")
        yield Started(found, process.pid, is_complete, planned_bytes(lines))
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait()
        listener.join()
        assert process.stderr is not None
        process.stderr.close()
    if code != 0:
        raise SystemExit("".join(lines[-20:]) + f"soak: levserve ended with {code}")


def soak(
    url: str,
    minutes: float,
    concurrency: int,
    seed: int,
    faults: str,
    own: Started | None = None,
) -> bool:
    """Runs the traffic and prints the table; returns whether everything held."""
    server = Server(url)
    model = json.loads(server.ask("/v1/models"))["data"][0]["id"]
    chats = bool(json.loads(server.ask("/tokenizer_info"))["chat_template"])
    traffic = Soak(url, model, concurrency=concurrency, seed=seed, chats=chats, may_fail=faults.count("nan"))
    print(f"{concurrency} clients of {model} on {url} for {minutes:g} minutes", flush=True)
    with MemoryLog(server) as memory:
        traffic.run(minutes * 60 * WARM_SHARE)
        if own is not None:
            own.is_complete.wait(READY_SECONDS)  # memory for compiling must not count as growth
        before = server.settle()
        traffic.run(minutes * 60 * (1 - WARM_SHARE))
        after = server.settle()
    rows = judge(traffic, before, after)
    if own is None:
        rows += judge_memory(memory.minutes)
    else:
        rows += judge_memory(memory.minutes, own.peak_bytes(), own.planned_bytes)
    print_table(traffic, rows)
    return all(holds for _, _, holds in rows)


def main(argv: list[str] | None = None) -> int:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=shape, allow_abbrev=False
    )
    parser.add_argument("--minutes", type=float, default=10, help="how long (default: %(default)s)")
    parser.add_argument("--url", help="of a server that runs already; else one is started, and ended")
    parser.add_argument(
        "--concurrency",
        type=int,
        default=2 * (ROWS + WAITING),
        help="clients at a time (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of what the clients do (default: %(default)s)")
    parser.add_argument(
        "--faults", default="", help="for the server that is started, such as nan:300,stall:500:2"
    )
    options, flags = parser.parse_known_args(argv)
    if options.url and (flags or options.faults):
        parser.error(f"{' '.join(flags) or '--faults'}: there is no server to start with --url")
    if options.url:
        return 0 if soak(options.url, options.minutes, options.concurrency, options.seed, "") else 1
    with started(flags, options.faults) as own:
        held = soak(own.url, options.minutes, options.concurrency, options.seed, options.faults, own)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
