"""bench/load.py against a fake server: the model that a request names decides what goes wrong.

A prompt's tokens are its words, and each answer has as many tokens as asked for, so that every total can be
worked out by hand.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"
PROGRAM = BENCH / "load.py"
sys.path.insert(0, str(BENCH))

import figures
import jobs
import load
import load_options
import prompts

from tests.documents import commands

TOTALS = {"requests": 6, "failures": 0, "prompt_tokens": 60, "output_tokens": 30, "tokens_per_delta": 1.0}
GIVEN = ("--requests", "6", "--concurrency", "3", "--output-tokens", "5")  # for tests that supply the prompts
SMALL = (*GIVEN, "--prompt-tokens", "10")


def data(**changes: Any) -> str:
    chunk = {"id": "cmpl-1", "choices": [{"index": 0, "text": "", "finish_reason": None}], "usage": None}
    return f"data: {json.dumps(chunk | changes)}\n\n"


def choice(text: str = "", finish: str | None = None) -> str:
    return data(choices=[{"index": 0, "text": text, "finish_reason": finish}])


def usage(prompt_tokens: int, completion_tokens: int) -> str:
    return data(choices=[], usage={"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens})


def good_answer(ask: dict[str, Any]) -> list[str]:
    """Deltas, then one finish chunk, one usage chunk and [DONE]; most rules change the last three."""
    num_tokens = ask["max_tokens"]
    deltas = [choice(f"word{i} ") for i in range(num_tokens)]
    return [
        *deltas,
        choice(finish="length"),
        usage(len(ask["prompt"].split()), num_tokens),
        "data: [DONE]\n\n",
    ]


def chat_answer(ask: dict[str, Any]) -> list[str]:
    num_tokens = ask["max_tokens"]
    deltas = [{"role": "assistant", "content": ""}, *[{"content": "word "}] * num_tokens]
    chunks = [data(choices=[{"index": 0, "delta": delta, "finish_reason": None}]) for delta in deltas]
    finish = data(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
    return [
        *chunks,
        finish,
        usage(len(ask["messages"][0]["content"].split()), num_tokens),
        "data: [DONE]\n\n",
    ]


def whole_answer(ask: dict[str, Any]) -> dict[str, Any]:
    """A chat or completions answer in one piece; its prompt tokens are the words of all prompts."""
    asked = [ask["messages"][0]["content"]] if "messages" in ask else ask["prompt"]
    texts = asked if isinstance(asked, list) else [asked]
    choices = []
    for index in range(len(texts)):
        text = (
            {"message": {"role": "assistant", "content": "word"}} if "messages" in ask else {"text": "word"}
        )
        choices.append({"index": index, "finish_reason": "length", **text})
    return {"id": "cmpl-1", "choices": choices, "usage": count_usage(texts, ask)}


def generate_answer(ask: dict[str, Any]) -> dict[str, Any]:
    return {"completions": ["word"] * len(ask["prompts"]), "usage": count_usage(ask["prompts"], ask)}


def count_usage(texts: list[str], ask: dict[str, Any]) -> dict[str, int]:
    num_words = sum(len(text.split()) for text in texts)
    return {"prompt_tokens": num_words, "completion_tokens": ask["max_tokens"] * len(texts)}


WHOLE_RULES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "fewer-tokens": lambda good: good | {"usage": {"prompt_tokens": 10, "completion_tokens": 4}},
    "no-usage": lambda good: good | {"usage": None},
    "no-finish": lambda good: good | {"choices": [good["choices"][0] | {"finish_reason": None}]},
    "no-text": lambda good: good | {"choices": [good["choices"][0] | {"text": ""}]},
    "two-choices": lambda good: good | {"choices": good["choices"] * 2},
    "not-an-answer": lambda good: [good],
}


RULES: dict[str, Callable[[list[str]], list[str]]] = {
    "heartbeats": lambda good: [
        frame for pair in zip(itertools.repeat(": ping\n\n"), good) for frame in pair
    ],
    "crlf": lambda good: [frame.replace("\n", "\r\n") for frame in good],
    "one-write": lambda good: ["".join(good)],
    "bytewise": lambda good: list("".join(good)),
    "error-event": lambda good: [
        good[0],
        'data: {"error": {"message": "out of pages"}}\n\n',
        "data: [DONE]\n\n",
    ],
    "fewer-tokens": lambda good: [*good[:-2], usage(10, 4), good[-1]],
    "more-tokens": lambda good: [*good[:-2], usage(10, 6), good[-1]],
    "no-usage": lambda good: [*good[:-2], good[-1]],
    "no-done": lambda good: good[:-1],
    "half-event": lambda good: [*good[:-1], good[-1][:8]],
    "two-ids": lambda good: [good[0], good[1].replace("cmpl-1", "cmpl-2"), *good[2:]],
    "no-finish": lambda good: [*good[:-3], *good[-2:]],
    "two-finishes": lambda good: [*good[:-3], good[-3], *good[-3:]],
    "text-after-finish": lambda good: [good[-3], *good[:-3], *good[-2:]],
    "not-json": lambda good: [good[0], "data: {broken\n\n", *good[1:]],
    "not-a-chunk": lambda good: [good[0], "data: [1, 2]\n\n", *good[1:]],
    "named-event": lambda good: ["event: ping\n\n", *good],
    "after-done": lambda good: [*good, good[0]],
    "no-text": lambda good: good[-3:],
}


class FakeServer(ThreadingHTTPServer):
    daemon_threads = False  # so that closing the server joins its handlers
    request_queue_size = 64  # a connection that finds no place tries again after a second

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), FakeHandler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.callers: list[Any] = []  # client addresses: one port per connection
        self.ready_statuses = [200]  # the last one is repeated
        self.good_before_hang = 2
        self.is_hanging = threading.Event()
        self.release = threading.Event()


class FakeHandler(BaseHTTPRequestHandler):
    server: FakeServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        if self.path == "/readyz":
            statuses = self.server.ready_statuses
            self.send_plain(statuses.pop(0) if len(statuses) > 1 else statuses[0], "{}")
        else:
            self.send_plain(200, '{"data": [{"id": "first-model"}, {"id": "second-model"}]}')

    def do_POST(self) -> None:
        ask = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(ask)
        self.server.keys.append(self.headers["Authorization"])
        self.server.callers.append(self.client_address)
        rule = ask.get("model", "")
        with contextlib.suppress(ConnectionError):  # the client gave up
            if rule == "busy":
                self.send_plain(429, '{"error": {"message": "queue is full"}}')
            elif rule == "json":
                self.send_plain(200, "{}")
            elif rule == "hang-up":
                self.close_connection = True
            elif not ask.get("stream"):
                whole = generate_answer(ask) if self.path == "/generate" else whole_answer(ask)
                self.send_plain(200, json.dumps(WHOLE_RULES.get(rule, dict)(whole)))
            else:
                frames = chat_answer(ask) if "chat" in self.path else good_answer(ask)
                self.send_stream(rule, RULES.get(rule, list)(frames))

    def send_plain(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def send_stream(self, rule: str, frames: list[str]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if rule == "hang" and len(self.server.asked) > self.server.good_before_hang:
            self.server.is_hanging.set()
            self.server.release.wait(30)
        while rule == "endless-heartbeats" and not self.server.release.wait(0.01):
            self.send_chunk(": ping\n\n")
        for frame in frames[:2] if rule == "cut-off" else frames:
            if rule == "slow":
                self.server.release.wait(0.02)
            self.send_chunk(frame)
        if rule == "cut-off":
            self.close_connection = True
        else:
            self.send_chunk("")

    def send_chunk(self, text: str) -> None:
        self.wfile.write(f"{len(text.encode()):x}\r\n{text}\r\n".encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    fake = FakeServer()
    thread = threading.Thread(target=fake.serve_forever, kwargs={"poll_interval": 0.01}, name="fake-server")
    thread.start()
    yield fake
    fake.release.set()
    fake.shutdown()
    fake.server_close()
    thread.join()


@pytest.fixture
def run(server: FakeServer, tmp_path: Path) -> Callable[..., tuple[int, dict[str, Any]]]:
    def run_program(*flags: str, small: Sequence[str] = SMALL) -> tuple[int, dict[str, Any]]:
        code = load.main(["--url", server.url, *small, "--json", str(tmp_path / "out.json"), *flags])
        return code, json.loads((tmp_path / "out.json").read_text())

    return run_program


Run = Callable[..., tuple[int, dict[str, Any]]]


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_totals_are_those_the_server_counted(run: Run, endpoint: str) -> None:
    code, result = run("--endpoint", endpoint)
    assert code == 0
    assert {name: result["summary"][name] for name in TOTALS} == TOTALS
    assert result["summary"]["output_tokens_per_second"] == pytest.approx(
        30 / result["summary"]["wall_seconds"]
    )
    assert result["summary"]["prompt_tokens_per_second"] == pytest.approx(
        60 / result["summary"]["wall_seconds"]
    )


@pytest.mark.parametrize("rule", ["heartbeats", "crlf", "one-write", "bytewise"])
def test_every_legal_way_to_frame_a_stream_is_accepted(run: Run, rule: str) -> None:
    code, result = run("--model", rule)
    assert (code, result["summary"]["output_tokens"]) == (0, 30)


@pytest.mark.parametrize(
    ("rule", "kind"),
    [
        ("busy", "http_429"),
        ("hang-up", "connection"),
        ("cut-off", "truncated"),
        ("half-event", "truncated"),
        ("json", "malformed"),
        ("error-event", "error_event"),
        ("fewer-tokens", "wrong_usage"),
        ("more-tokens", "wrong_usage"),
        ("no-usage", "missing_usage"),
        ("no-done", "missing_done"),
        ("two-ids", "mixed_ids"),
        ("no-finish", "finish"),
        ("two-finishes", "finish"),
        ("text-after-finish", "finish"),
        ("not-json", "malformed"),
        ("not-a-chunk", "malformed"),
        ("named-event", "malformed"),
        ("after-done", "malformed"),
        ("no-text", "empty_text"),
    ],
)
def test_wrong_answer_is_found_and_named(run: Run, rule: str, kind: str) -> None:
    code, result = run("--model", rule)
    assert code == 1
    assert result["summary"]["failures_by_kind"] == {kind: 6}
    assert result["summary"]["output_tokens"] == 0


@pytest.mark.parametrize("rule", ["hang", "endless-heartbeats"])
def test_answer_that_never_ends_is_a_timeout(server: FakeServer, run: Run, rule: str) -> None:
    server.good_before_hang = 0
    code, result = run("--model", rule, "--timeout", "0.1", "--requests", "3")
    assert (code, result["summary"]["failures_by_kind"]) == (1, {"timeout": 3})


def test_first_message_of_a_failure_is_shown(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run("--model", "busy")
    shown = capsys.readouterr().out
    assert "6 x http_429" in shown
    assert "queue is full" in shown


def test_answer_that_stops_early_is_right_only_when_eos_counts(server: FakeServer, run: Run) -> None:
    assert run("--model", "fewer-tokens", "--no-ignore-eos")[0] == 0
    assert "ignore_eos" not in server.asked[-1]
    assert run("--model", "more-tokens", "--no-ignore-eos")[0] == 1


def test_the_temperature_is_what_was_said(server: FakeServer, run: Run) -> None:
    run("--requests", "1", "--temperature", "0.6")
    assert server.asked[0]["temperature"] == 0.6


def test_request_asks_for_a_greedy_stream_of_fixed_length(server: FakeServer, run: Run) -> None:
    run("--requests", "1")
    ask = server.asked[0]
    assert len(ask.pop("prompt").split()) == 10
    assert ask == {
        "model": "first-model",
        "max_tokens": 5,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_lengths_differ_by_the_spread_and_each_answer_is_held_to_its_own(
    server: FakeServer, run: Run
) -> None:
    outputs, prompts = (
        ("--output-tokens", "20", "--output-spread", "0.5"),
        ("--prompt-tokens", "20", "--prompt-spread", "0.5"),
    )
    code, result = run("--requests", "40", *outputs, *prompts)
    lengths, words = (
        [ask["max_tokens"] for ask in server.asked],
        [len(ask["prompt"].split()) for ask in server.asked],
    )
    for found in (lengths, words):
        assert code == 0 and len(set(found)) > 5 and 10 <= min(found) < 15 < 25 < max(found) <= 30
    assert result["summary"]["output_tokens"] == sum(lengths)


def test_workers_ask_on_new_connections_or_each_on_its_own(server: FakeServer, run: Run) -> None:
    flags = "--requests", "6", "--concurrency", "2"
    assert run(*flags)[0] == 0 and len(set(server.callers)) == 6
    server.callers.clear()
    assert run(*flags, "--keep-alive")[0] == 0 and len(server.callers) == 6 and len(set(server.callers)) <= 2


def test_prompts_differ_from_the_first_words_on(server: FakeServer, run: Run) -> None:
    run("--requests", "40", "--warmup", "10", "--prompt-tokens", "20")
    assert len({tuple(ask["prompt"].split()[:5]) for ask in server.asked}) == 50


def test_shared_prefix_is_shared_and_the_rest_differs(server: FakeServer, run: Run) -> None:
    run("--prompt-tokens", "20", "--shared-prefix", "8")
    prompts = [ask["prompt"].split() for ask in server.asked]
    assert len({tuple(words[:8]) for words in prompts}) == 1
    assert len({tuple(words[8:]) for words in prompts}) == 6


def test_seed_repeats_prompts_and_another_run_does_not(server: FakeServer, run: Run) -> None:
    for flags in (["--seed", "7"], ["--seed", "7"], []):
        run("--concurrency", "1", *flags)
    prompts = [ask["prompt"] for ask in server.asked]
    assert prompts[:6] == prompts[6:12]
    assert not set(prompts[:6]) & set(prompts[12:])


def test_warmup_is_sent_and_not_counted(server: FakeServer, run: Run) -> None:
    _, result = run("--warmup", "4")
    assert len(server.asked) == 10
    assert result["summary"]["requests"] == 6


def test_key_is_sent_and_never_written(server: FakeServer, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "from-the-environment")
    _, result = run("--requests", "1")
    run("--requests", "1", "--api-key", "from-the-flag")
    assert server.keys == ["Bearer from-the-environment", "Bearer from-the-flag"]
    assert "from-the" not in json.dumps(result)


def test_times_of_a_slow_stream_are_at_least_what_the_server_waited(run: Run) -> None:
    _, result = run("--model", "slow", "--requests", "2")
    latency = result["summary"]["latency_ms"]
    assert latency["TTFT"]["p50"] >= 20
    # Less than the server waited: a delta that comes late shortens the next gap.
    assert latency["inter-token"]["p50"] == latency["delta gap"]["p50"] >= 15
    assert latency["request"]["p50"] >= 8 * 20  # five deltas, finish, usage, [DONE]


def test_json_has_settings_versions_and_a_row_for_each_request(run: Run) -> None:
    _, result = run("--seed", "3")
    assert result["settings"]["seed"] == 3
    assert result["model"] == "first-model"
    assert result["versions"]["server"].startswith("BaseHTTP")
    assert sorted(row["index"] for row in result["requests"]) == list(range(6))
    assert all(len(row["gaps_seconds"]) == 4 for row in result["requests"])


def test_json_to_stdout_leaves_nothing_else_there(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load.main(["--url", server.url + "/v1/", *SMALL, "--json", "-"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["summary"]["requests"] == 6
    assert "output tok/s" in shown.err


def test_connections_that_bind_an_open_loop_are_reported(run: Run) -> None:
    code, result = run("--model", "slow", "--rate", "1000", "--concurrency", "1", "--requests", "3")
    assert code == 0
    assert any("not an open loop: 2 arrivals" in note for note in result["summary"]["notes"])


def test_open_loop_with_connections_to_spare_reports_nothing_late(run: Run) -> None:
    _, result = run("--model", "slow", "--rate", "100", "--concurrency", "20", "--requests", "20")
    assert not any("open loop" in note for note in result["summary"]["notes"])
    assert len({row["sent_seconds"] for row in result["requests"]}) == 20


def test_arrivals_are_a_seeded_poisson_process() -> None:
    settings = load_options.Settings(rate=50.0, requests=4_000, prompt_tokens=1, seed=1)
    arrivals = [job.arrival_seconds for job in jobs.make_jobs(settings, "m")]
    gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 50, rel=0.05)
    # Exponential: the deviation equals the mean.
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.15)
    assert arrivals == [job.arrival_seconds for job in jobs.make_jobs(settings, "m")]


def test_percentiles_are_nearest_ranks() -> None:
    assert figures.percentiles(list(range(100, 0, -1))) == {
        "mean": 50.5,
        "p50": 50,
        "p90": 90,
        "p95": 95,
        "p99": 99,
        "max": 100,
    }
    assert figures.percentiles([1, 2, 3]) == {"mean": 2, "p50": 2, "p90": 3, "p95": 3, "p99": 3, "max": 3}
    assert figures.percentiles([]) == {}


@pytest.mark.parametrize(
    ("tokens", "chars", "expected"),
    [
        (4, [9, 1, 1, 1], 1.0),  # one token per delta, whatever its length
        (64, [50, 50, 50, 50], 16.0),  # rounds of 16
        (33, [4, 64, 64], 16.0),  # one token, then rounds of 16
        (3, [2, 2, 2, 2], 1.0),  # more deltas than tokens: held-back text came late
    ],
)
def test_tokens_of_later_deltas_are_worked_out_from_usage(
    tokens: int, chars: list[int], expected: float
) -> None:
    assert figures.tokens_per_gap(tokens, chars) == pytest.approx(expected)


def test_summary_of_rows_worked_out_by_hand() -> None:
    rows = [
        figures.Row(0, 1.0, 0.0, 2.0, None, "", 10, 33, 0.5, 16.0, [0.16, 0.32]),
        figures.Row(1, 2.0, 0.0, 3.0, None, "", 30, 67, 0.7, 1.0, []),
        figures.Row(2, 2.0, 0.0, 1.0, "timeout", "no end"),
    ]
    summary = figures.summarize(
        SimpleNamespace(rows=rows, is_interrupted=False, cpu_seconds=0.1), load_options.Settings()
    )
    assert (summary["wall_seconds"], summary["requests"], summary["failures"]) == (4.0, 3, 1)
    assert (summary["output_tokens_per_second"], summary["prompt_tokens_per_second"]) == (25.0, 10.0)
    assert summary["requests_per_second"] == 0.5  # the failed one does not count
    assert summary["tokens_per_delta"] == 25.0  # 100 tokens in 3 + 1 deltas
    assert summary["latency_ms"]["inter-token"] == pytest.approx(
        {"mean": 15.0, "p50": 10.0, "p90": 20.0, "p95": 20.0, "p99": 20.0, "max": 20.0}
    )
    assert summary["latency_ms"]["TTFT"] == pytest.approx(
        {"mean": 600.0, "p50": 500.0, "p90": 700.0, "p95": 700.0, "p99": 700.0, "max": 700.0}
    )
    assert summary["latency_ms"]["request"]["max"] == 3_000.0


@pytest.mark.parametrize("statuses", [[503, 503, 200], [503, 404]])
def test_wait_ready_waits_and_falls_back_to_the_models(
    server: FakeServer, run: Run, statuses: list[int]
) -> None:
    server.ready_statuses = statuses
    assert run("--wait-ready", "10")[0] == 0
    assert len(statuses) == 1


def test_server_that_is_never_ready_ends_the_run_with_one_line(server: FakeServer, run: Run) -> None:
    server.ready_statuses = [503]
    with pytest.raises(SystemExit, match="/readyz answers 503"):
        run("--wait-ready", "0.1")
    assert not server.asked


def test_no_server_at_all_is_one_line_or_failures() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    with pytest.raises(SystemExit, match="names no model"):
        load.main(["--url", url])
    assert load.main(["--url", url, "--model", "any", "--requests", "2"]) == 1


@pytest.mark.parametrize(
    "flags",
    [
        ["--requests", "0"],
        ["--rate", "nan"],
        ["--shared-prefix", "100"],
        ["--shared-prefix", "60", "--prompt-spread", "0.4"],
        ["--url", "localhost:8000"],
        ["--json", "/no/such/folder/x"],
        ["--endpoint", "embeddings"],
    ],
)
def test_impossible_flag_is_wrong_usage(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load.main(flags)
    assert caught.value.code == 2
    assert flags[0] in capsys.readouterr().err


def test_help_says_how_each_number_is_defined(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load.main(["--help"])
    shown = capsys.readouterr().out
    assert caught.value.code == 0
    assert all(
        name in shown
        for name in ("python bench/load.py", "TTFT", "inter-token", "nearest rank", "--no-ignore-eos")
    )


def start_program(flags: list[str]) -> subprocess.Popen[str]:
    # A test run started in the background may have SIGINT ignored, and the child would inherit that.
    script = (
        "import runpy, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        f"sys.argv = {['load.py', *flags]!r}; runpy.run_path({str(PROGRAM)!r}, run_name='__main__')"
    )
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)


def test_interrupt_prints_what_there_is(server: FakeServer) -> None:
    process = start_program(["--url", server.url, *SMALL, "--model", "hang", "--concurrency", "1"])
    assert server.is_hanging.wait(60)
    process.send_signal(signal.SIGINT)
    shown, _ = process.communicate(timeout=20)  # cut off, not waited for: that takes 30 s
    assert process.returncode == 130
    assert "interrupted when 2 of 6 requests had ended" in shown
    assert "output tokens           10" in shown


@pytest.mark.parametrize("endpoint", ["completions", "chat", "generate"])
def test_whole_answers_are_counted_like_streams_and_have_no_first_token(run: Run, endpoint: str) -> None:
    code, result = run("--endpoint", endpoint, "--no-stream")
    summary = result["summary"]
    assert (code, summary["output_tokens"], summary["prompt_tokens"]) == (0, 30, 60)
    assert summary["latency_ms"]["TTFT"] == summary["latency_ms"]["inter-token"] == {}
    assert summary["latency_ms"]["request"]["mean"] > 0


@pytest.mark.parametrize(
    ("rule", "kind"),
    [
        ("busy", "http_429"),
        ("hang-up", "connection"),
        ("fewer-tokens", "wrong_usage"),
        ("no-usage", "missing_usage"),
        ("no-finish", "finish"),
        ("no-text", "empty_text"),
        ("two-choices", "malformed"),
        ("not-an-answer", "malformed"),
    ],
)
def test_wrong_whole_answer_is_found_and_named(run: Run, rule: str, kind: str) -> None:
    code, result = run("--model", rule, "--no-stream")
    assert (code, result["summary"]["failures_by_kind"]) == (1, {kind: 6})


def test_generate_is_asked_for_batches_with_its_own_field_names(server: FakeServer, run: Run) -> None:
    code, result = run("--endpoint", "generate", "--batch", "8", "--requests", "2")
    ask = server.asked[0]
    assert len(set(ask.pop("prompts"))) == 8
    assert ask == {"model": "first-model", "max_tokens": 5, "temperature": 0}
    assert (code, result["summary"]["output_tokens"]) == (0, 2 * 8 * 5)


def test_completions_take_batches_too(server: FakeServer, run: Run) -> None:
    code, result = run("--batch", "3", "--no-stream", "--requests", "1")
    assert len(server.asked[0]["prompt"]) == 3 and "stream" not in server.asked[0]
    assert (code, result["summary"]["output_tokens"]) == (0, 15)


def test_sweep_runs_each_step_and_reports_them_together(
    server: FakeServer, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "sweep.png"
    code, result = run("--concurrency", "1,3,6", "--warmup", "1", "--plot", str(plot))
    assert code == 0 and len(server.asked) == 3 * 7
    assert [step["concurrency"] for step in result["steps"]] == [1, 3, 6]
    assert all(step["summary"]["requests"] == 6 for step in result["steps"])
    lines = [line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines() if "|" in line]
    assert lines == ["at a time", "---:", "1", "3", "6"]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_no_step_of_a_sweep_asks_what_another_asked(server: FakeServer, run: Run) -> None:
    run("--concurrency", "1,2", "--prompt-tokens", "20", "--warmup", "2")
    assert len({ask["prompt"] for ask in server.asked}) == 16


def test_rates_can_be_swept_as_well(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    code, result = run("--rate", "200,400", "--concurrency", "20")
    assert code == 0 and [step["rate"] for step in result["steps"]] == [200, 400]
    assert "arrivals/s" in capsys.readouterr().out


def test_failures_of_one_step_fail_the_sweep(server: FakeServer, run: Run) -> None:
    server.good_before_hang = 2
    code, result = run("--model", "hang", "--timeout", "0.2", "--requests", "2", "--concurrency", "1,2")
    assert code == 1
    assert [step["summary"]["failures"] for step in result["steps"]] == [0, 2]


def test_goodput_counts_requests_within_all_limits() -> None:
    rows = [
        figures.Row(0, 0.0, 0.0, 1.0, None, "", 1, 11, 0.1, 1.0, [0.05] * 10),
        figures.Row(1, 0.0, 0.0, 1.0, None, "", 1, 11, 0.3, 1.0, [0.05] * 10),  # first token too late
        figures.Row(2, 0.0, 0.0, 1.0, None, "", 1, 21, 0.1, 2.0, [0.3] * 10),  # 150 ms per token
        figures.Row(3, 0.0, 0.0, 2.0, None, "", 1, 1, 0.1, 1.0, []),  # one token is never slow
        figures.Row(4, 0.0, 0.0, 0.1, "timeout", "no end"),
    ]
    done = SimpleNamespace(rows=rows, is_interrupted=False, cpu_seconds=0.1)
    limits = load_options.Settings(goodput_ttft_ms=200, goodput_itl_ms=100)
    summary = figures.summarize(done, limits)
    assert (summary["good_requests"], summary["goodput_per_second"]) == (2, 1.0)
    summary = figures.summarize(done, load_options.Settings(goodput_request_ms=1_500))
    assert summary["good_requests"] == 3
    assert "good_requests" not in figures.summarize(done, load_options.Settings())


def test_goodput_is_in_the_table(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run("--goodput-ttft-ms", "60000", "--goodput-itl-ms", "60000")
    shown = capsys.readouterr().out
    assert "good requests            6" in shown and "goodput/s" in shown


def test_the_given_prompt_is_asked_each_time(server: FakeServer, run: Run) -> None:
    assert run("--prompt", "Once upon a time", small=GIVEN)[0] == 0
    assert [ask["prompt"] for ask in server.asked] == ["Once upon a time"] * 6


SHAREGPT = [
    {"id": "a", "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
    {
        "id": "b",
        "conversations": [
            {"from": "gpt", "value": "begun without a question"},
            {"from": "system", "value": "be short"},
            {"from": "human", "value": "who?"},
            {"from": "gpt", "value": "me"},
            {"from": "human", "value": "why?"},
        ],
    },
    {"id": "c", "conversations": []},
]


def test_sharegpt_turns_before_the_first_answer_are_asked(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps(SHAREGPT))
    read = prompts.read_dataset(str(path))
    assert [prompt.messages for prompt in read] == [
        (("user", "hi"),),
        (("system", "be short"), ("user", "who?")),
    ]
    assert read[1].text == "be short\n\nwho?"


def test_lines_of_json_are_texts_prompts_or_messages(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    messages = [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]
    lines = ["a", {"prompt": "b", "output_tokens": 3}, {"messages": messages}]
    path.write_text("\n\n".join(json.dumps(line) for line in lines))
    read = prompts.read_dataset(str(path))
    assert [(prompt.text, prompt.output_tokens) for prompt in read] == [
        ("a", None),
        ("b", 3),
        ("c\n\nd", None),
    ]
    assert read[2].as_chat() == messages


def test_dataset_is_asked_in_a_seeded_order_with_its_own_lengths(
    server: FakeServer, run: Run, tmp_path: Path
) -> None:
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": f"word{n} " * n, "output_tokens": n} for n in range(1, 7)]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    flags = ("--concurrency", "1", "--dataset", str(path), "--seed", "1")
    code, result = run(*flags, small=GIVEN)
    asked = [ask["max_tokens"] for ask in server.asked]
    assert code == 0 and sorted(asked) == [1, 2, 3, 4, 5, 6] and asked != sorted(asked)
    assert result["summary"]["output_tokens"] == 21 and not result["summary"]["notes"]
    server.asked.clear()
    _, result = run(*flags, "--requests", "7", small=GIVEN)
    assert [ask["max_tokens"] for ask in server.asked] == [*asked, asked[0]]
    assert "asked more than once" in result["summary"]["notes"][0]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "no prompts"),
        ("[]", "no prompts"),
        ("[1", "not JSON"),
        ('"fine"\n{broken', "line 2 is not JSON"),
        ('{"question": "?"}', "line 1 is not a prompt: it has none of prompt, messages and conversations"),
        ('[{"prompt": "a", "output_tokens": 0}]', "item 1 is not a prompt: output_tokens is 0"),
        ('{"messages": [{"role": "judge", "content": "x"}]}', "'judge' is not a known role"),
        ('{"messages": [{"role": "user", "content": []}]}', "not a text"),
        ("7", "line 1 is not a prompt"),
    ],
)
def test_unreadable_dataset_is_wrong_usage(
    text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(SystemExit) as caught:
        load.main(["--dataset", str(path)])
    assert caught.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        ["--concurrency", "1,0"],
        ["--concurrency", "1,,2"],
        ["--concurrency", "1,2", "--rate", "1,2"],
        ["--batch", "2"],
        ["--batch", "2", "--endpoint", "chat", "--no-stream"],
        ["--stream", "--endpoint", "generate"],
        ["--goodput-ttft-ms", "9", "--no-stream"],
        ["--goodput-itl-ms", "9", "--endpoint", "generate"],
        ["--prompt", ""],
        ["--prompt", "x", "--dataset", "y"],
        ["--shared-prefix", "8", "--prompt", "x"],
        ["--dataset", "/no/such/file"],
        ["--plot", "sweep.txt"],
        ["--plot", "/no/such/folder/x.png"],
    ],
)
def test_flags_that_contradict_each_other_are_wrong_usage(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        load.main(flags)
    assert caught.value.code == 2
    assert flags[0] in capsys.readouterr().err


def test_interrupted_sweep_prints_the_steps_it_has(server: FakeServer) -> None:
    flags = ["--url", server.url, *SMALL, "--requests", "2", "--model", "hang", "--concurrency", "1,2,3"]
    process = start_program(flags)
    assert server.is_hanging.wait(60)
    process.send_signal(signal.SIGINT)
    shown, _ = process.communicate(timeout=20)
    assert process.returncode == 130
    assert [line.split("|")[1].strip() for line in shown.splitlines() if "|" in line][2:] == ["1"]


def test_every_command_that_is_written_down_can_be_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ShareGPT_V3_unfiltered_cleaned_split.json").write_text('["hi"]')
    written = commands("load.py", load_options.EPILOG)
    assert len(written) > 6
    for flags in written:
        assert load_options.parse(flags, "")
