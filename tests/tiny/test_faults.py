"""What clients see of each fault of LEVSERVE_FAULTS, and that no fault leaves anything behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest

from levserve.device.faults import Fault, install, parse_faults
from levserve.device.runner import Runner
from levserve.errors import ConfigError
from levserve.schedule.request import FinishReason
from tests.conftest import GOLDEN, QUICK_COMPILE
from tests.engines import ask, cache_folder, live_bytes, running_engine
from tests.servers import Server, running_server
from tests.waiting import wait_until

# The same sizes for all, so that they compile the same programs. The pool holds one request of the longest
# kind and no more.
SIZES = ("--page-size", "8", "--kv-pages", "32", "--prefill-chunk", "32", "--round-steps", "2")
TOY = (
    "--model",
    str(GOLDEN / "llama"),
    "--served-model-name",
    "toy",
    "--dtype",
    "float32",
    "--max-running",
    "4",
    *SIZES,
)


def body(prompt: list[int], max_tokens: int = 8, **fields: Any) -> dict[str, Any]:
    return {
        "model": "toy",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    } | fields


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("oom", [Fault("oom")]),
        ("raise:20, stall:30:5,nan:2", [Fault("raise", 20), Fault("stall", 30, 5), Fault("nan", 2)]),
        ("slow-tokenizer:0.5", [Fault("slow-tokenizer", seconds=0.5)]),
    ],
)
def test_faults_are_read(text: str, wanted: list[Fault]) -> None:
    assert parse_faults(text) == wanted


@pytest.mark.parametrize(
    "text", ["fire", "raise", "raise:x", "raise:-1", "raise:1:2", "oom:1", "oom,", "stall:1"]
)
def test_what_is_no_fault_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="LEVSERVE_FAULTS must be a comma-separated list of raise:ROUND"):
        parse_faults(text)


@pytest.mark.parametrize("source", ["--config", "LEVSERVE_CONFIG"])
def test_faults_are_refused_with_a_file_of_settings(tmp_path: Path, source: str) -> None:
    path = tmp_path / "serve.ini"
    path.write_text("[server]\nport = 0\n")
    given = ([source, str(path)], {}) if source == "--config" else ([], {source: str(path)})
    ended = start(*given[0], LEVSERVE_FAULTS="oom", **given[1])
    assert ended.returncode == 2
    words = f"LEVSERVE_FAULTS breaks the server on purpose, for tests, and excludes --config {path}"
    assert ended.stderr == f"levserve: error: {words}\n"


def test_a_wrong_fault_ends_the_start_with_one_line() -> None:
    ended = start(*TOY, LEVSERVE_FAULTS="fire")
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert "not 'fire'" in ended.stderr


def test_too_little_memory_is_one_line_that_says_what_was_asked_what_is_there_and_what_to_lower() -> None:
    ended = start(*TOY, LEVSERVE_FAULTS="oom")
    assert ended.returncode == 1
    (line,) = [
        line for line in ended.stderr.splitlines() if not line.startswith("20")
    ]  # lines of the log begin with their time
    assert line.startswith("levserve: error: out of memory: ") and "32 KV pages were asked for" in line
    assert "GiB are free; lower --kv-memory, --kv-pages or --max-running" in line
    assert "FAULT INJECTION IS ON" in ended.stderr and "Traceback" not in ended.stderr


def test_too_little_memory_for_jax_is_one_line_as_well() -> None:
    script = 'ulimit -v 262144; exec "$@"'  # jax's library alone takes more
    program = ["bash", "-c", script, "bash", sys.executable, "-m", "levserve", "--dry-run", *TOY]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    (line,) = [line for line in ended.stderr.splitlines() if not line.startswith("20")]
    assert line.startswith("levserve: error: out of memory: 700 MiB for jax and its libraries were asked for")
    assert "raise the limit on memory (ulimit -v" in line


def test_a_poisoned_row_fails_alone_and_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[number, 9, 8, 7, 6, 5, 4, 3, number] for number in range(20, 24)]
    monkeypatch.setattr(Runner, "dispatch", Runner.dispatch)  # so that what `install` replaces is put back
    with running_engine(GOLDEN / "llama", *SIZES, compiles_all=True) as running:
        programs = running.loaded.runner.programs
        running.wait_compiled()
        wait_until(lambda: not programs.has_cold)  # a program's first run replaces the pages
        wanted = [running.run(ask(prompt, 12))[0].tokens for prompt in prompts]
        running.wait_idle()
        held = live_bytes()
        install([Fault("nan", at) for at in (3, 12, 20)])
        for _ in range(3):
            answers = running.run(*(ask(prompt, 12, num_logprobs=1) for prompt in prompts))
            failed = [answer for answer in answers if answer.finish is FinishReason.POISONED]
            assert [answer.tokens for answer in answers if answer not in failed] == [
                tokens for tokens, answer in zip(wanted, answers) if answer not in failed
            ]
            for answer in failed:
                assert answer.tokens == wanted[answers.index(answer)][: len(answer.tokens)]
        running.wait_idle()
        assert running.metric("finished_total", reason="poisoned") == 3
        assert running.metric("kv_pages_used") == 0
        for _ in range(2):  # every page is used again, and poisoned prompts must not be in the prefix cache
            assert [
                answer.tokens for answer in running.run(*(ask(prompt, 12) for prompt in prompts))
            ] == wanted
            running.run(*(ask([40 + number] * 20, 10) for number in range(4)))
        running.loaded.scheduler.check()
        running.wait_idle()
        assert live_bytes() <= held, "a fault keeps memory"


@pytest.fixture(scope="module")
def solo() -> dict[int, str]:
    """The text of the answer to each prompt when it is alone."""
    with running_engine(GOLDEN / "llama", *SIZES) as running:
        tokens = {number: running.run(ask([number] * 30, 200))[0].tokens for number in range(10, 18)}
        return {
            number: running.loaded.model.tokenizer.detokenizer(continues=True).add(found)
            for number, found in tokens.items()
        }


@pytest.fixture(scope="module")
def faulty() -> Iterator[Server]:
    faults = "nan:3,stall:15:6,slow-tokenizer:0.3"  # leaves five seconds for requests after the stall is seen
    with running_server(
        *TOY, "--stall-seconds", "1", "--max-inflight-tokens", "4000", LEVSERVE_FAULTS=faults, **QUICK_COMPILE
    ) as server:
        yield server


def test_a_faulty_server_fails_only_what_it_must_and_then_serves_as_ever(
    faulty: Server, solo: dict[int, str]
) -> None:
    """One test for all, because faults come in fixed rounds: a poisoned row, a stall, and work after both."""
    assert any("FAULT INJECTION IS ON" in line for line in faulty.lines)
    descriptors, threads = resources(faulty)

    poisoned = faulty.call("/v1/completions", body([5, 6, 7]))
    assert (poisoned.status, poisoned.headers["x-should-retry"]) == (500, "false")
    assert (poisoned.body["error"]["type"], poisoned.body["error"]["code"]) == (
        "server_error",
        "non_finite_output",
    )
    name = poisoned.headers["x-request-id"]
    wait_until(lambda: any(name in line and "not finite" in line for line in faulty.lines))

    with ThreadPoolExecutor(2) as pool:
        stalled = pool.submit(faulty.call, "/v1/completions", body([8, 9], 40))
        wait_until(lambda: faulty.call("/healthz").status == 503)
        health = faulty.call("/healthz").body
        assert health["status"] == "stalled" and health["heartbeat_age_seconds"] >= 1
        refused = faulty.call("/v1/completions", body([8]))
        assert (
            refused.status == 503
            and "not moved" in refused.body["error"]["message"]
            and refused.headers["Retry-After"]
        )
        assert stalled.result().status == 200
    assert faulty.call("/healthz").body == {"status": "ok"} and faulty.call("/readyz").status == 200

    began = time.monotonic()
    slow = faulty.call("/v1/completions", body([3]) | {"prompt": "t17 t18", "timeout": 0.2})
    assert slow.status == 504 and time.monotonic() - began >= 0.3, "tokenizing took all its time"
    assert faulty.metric("prefill_tokens_total") == faulty.metric("prompt_tokens_total") - 2, (
        "it never reached the device's work"
    )

    with ThreadPoolExecutor(len(solo)) as pool:
        answers = list(
            pool.map(lambda number: faulty.call("/v1/completions", body([number] * 30, 200)), solo)
        )
    assert [answer.body["choices"][0]["text"] for answer in answers] == list(solo.values())
    assert faulty.metric("preemptions_total") > 0

    wait_until(lambda: faulty.metric("requests_running") + faulty.metric("requests_waiting") == 0)
    assert faulty.metric("kv_pages_used") == 0
    last = faulty.call("/v1/completions", body([4], 1)).headers
    for kind in ("requests", "tokens"):
        assert last[f"x-ratelimit-remaining-{kind}"] == last[f"x-ratelimit-limit-{kind}"]
    wait_until(lambda: resources(faulty)[0] <= descriptors)
    assert resources(faulty)[1] <= threads + len(solo) + 1, (
        "more threads than gunicorn's pool needed for so many at a time"
    )


def resources(server: Server) -> tuple[int, int]:
    """The numbers of descriptors and threads of the worker."""
    pid = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()[0]
    return len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))


def test_a_round_that_raises_tells_every_client_and_ends_the_process_with_70_within_two_seconds() -> None:
    # The stall gives all three requests time to come before the round that raises.
    with running_server(
        *TOY, "--stall-seconds", "60", LEVSERVE_FAULTS="stall:20:5,raise:40", **QUICK_COMPILE
    ) as server:
        began = threading.Event()
        ends: list[list[str]] = []

        def stream() -> None:
            request = urllib.request.Request(
                f"{server.url}/v1/completions",
                json.dumps(body([5], 200, stream=True)).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=60) as response:
                events = []
                for line in response:
                    events.append(line.decode().removeprefix("data: ").strip())
                    began.set()
            ends.append([event for event in events if event])

        streams = [threading.Thread(target=stream) for _ in range(2)]
        for thread in streams:
            thread.start()
        assert began.wait(60)
        blocking = server.call("/v1/completions", body([6], 200))
        failed_at = time.monotonic()
        assert (blocking.status, blocking.body["error"]["type"]) == (500, "server_error")
        with suppress(OSError, HTTPException):  # too late on a busy machine: the process ends after a second
            assert server.call("/healthz").body == {"status": "failed"}
        assert server.process.wait(timeout=60) == 70
        assert time.monotonic() - failed_at < 20, "1.2 s on a quiet machine; a drain would take 30"
        for thread in streams:
            thread.join()
        for *_, error, done in ends:
            assert (
                json.loads(error)["error"]["message"] == "The device failed while the request was running."
                and done == "[DONE]"
            )
        assert len(ends) == 2


def start(*flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a start that must end by itself."""
    command = [
        sys.executable,
        "-m",
        "levserve",
        "--port",
        "0",
        "--cache-dir",
        str(cache_folder()),
        *flags,
    ]
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith(("LEVSERVE_", "LEVANTER_"))
    }
    return subprocess.run(command, env=environ | variables, capture_output=True, text=True, timeout=120)


def test_a_stream_of_a_device_that_hangs_ends_properly_when_the_server_is_told_to_stop() -> None:
    arguments = (*TOY, "--stall-seconds", "60", "--drain-seconds", "1")
    with running_server(*arguments, LEVSERVE_FAULTS="stall:10:600", **QUICK_COMPILE) as server:
        request = urllib.request.Request(
            f"{server.url}/v1/completions",
            json.dumps(body([5], 200, stream=True)).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            assert response.readline().startswith(b"data:")
            server.process.terminate()
            events = [line for line in response.read().decode().split("\n") if line]
        assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "unavailable"
        assert events[-1] == "data: [DONE]"
        assert server.process.wait(timeout=60) == 0
