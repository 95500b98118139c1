"""bench/soak.py detects damage where there is some."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

PROGRAM = Path(__file__).parents[2] / "bench" / "soak.py"


def import_program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_soak", PROGRAM)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


soak = import_program()


STREAM = soak.Act("stream", "/v1/completions", {"stream": True, "stream_options": {}, "n": 2}, num_tokens=4)
USAGE = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
GAUGES = dict.fromkeys(soak.ZERO, 0.0) | {"process_open_fds": 20.0, "process_resident_memory_bytes": 2.0**28}


def events(*chunks: object, done: bool = True) -> str:
    lines = [json.dumps(chunk) for chunk in chunks] + ["[DONE]"] * done
    return "".join(f"data: {line}\n\n" for line in lines)


def end(index: int, reason: str | None = "length") -> dict[str, object]:
    return {"choices": [{"index": index, "finish_reason": reason}]}


def test_a_complete_stream_is_right() -> None:
    soak.check_stream(
        STREAM, ": ping\n\n" + events(end(0, None), end(1), end(0), {"choices": [], "usage": USAGE})
    )


@pytest.mark.parametrize(
    "text",
    [
        events(end(0), end(1), {"choices": [], "usage": USAGE}, done=False),
        events(end(0), {"choices": [], "usage": USAGE}),
        events(end(0), end(0), end(1), {"choices": [], "usage": USAGE}),
        events(end(0), end(1), {"choices": [], "usage": USAGE | {"completion_tokens": 3, "total_tokens": 6}}),
        events(end(0), end(1), {"choices": [], "usage": USAGE | {"total_tokens": 6}}),
        events(end(0), {"error": {"message": "The device failed.", "code": None}}),
    ],
    ids=["no done", "one end", "two ends", "a token lost", "a wrong sum", "an error"],
)
def test_a_stream_that_is_not_complete_is_wrong(text: str) -> None:
    with pytest.raises(soak.Wrong):
        soak.check_stream(STREAM, text)


@pytest.mark.parametrize(
    "change, failed",
    [
        ({}, []),
        ({"process_open_fds": 29.0}, ["descriptors grown"]),
        ({"process_resident_memory_bytes": 2.0**28 + 2**26}, ["memory grown"]),
        ({"levserve_kv_pages_used": 1.0}, ["kv pages used at the end"]),
        (
            {'levserve_requests_total{route="/v1/completions",status="500"}': 1.0},
            ["5xx by the server's own count"],
        ),
        ({'levserve_requests_total{route="/v1/completions",status="504"}': 1.0}, []),
        ({'levserve_compiles_total{when="serving"}': 1.0}, ["compiles that a request waited for"]),
    ],
)
def test_what_is_left_behind_or_has_grown_is_seen(change: dict[str, float], failed: list[str]) -> None:
    traffic = soak.Soak("http://127.0.0.1:1", "toy", concurrency=1, seed=0)
    traffic.outcomes["answer", "200"] = 1
    rows = soak.judge(traffic, GAUGES, GAUGES | change)
    assert [what for what, _, holds in rows if not holds] == failed


MIB = 2.0**20


@pytest.mark.parametrize(
    "minutes, failed",
    [
        ([700 * MIB] * 5, []),
        ([600 * MIB, 700 * MIB, 800 * MIB, 900 * MIB, 1000 * MIB, 1029 * MIB, 900 * MIB], []),
        ([600 * MIB, 700 * MIB, 800 * MIB, 1000 * MIB, 960 * MIB, 1000 * MIB], []),
        ([1000 * MIB] * 6 + [1031 * MIB, 1000 * MIB], ["memory grown after minute 5"]),
    ],
    ids=["too short to tell", "level", "less at minute 5", "grown"],
)
def test_memory_that_grows_after_five_minutes_is_seen(minutes: list[float], failed: list[str]) -> None:
    assert [what for what, _, holds in soak.judge_memory(minutes) if not holds] == failed


def test_a_peak_beyond_the_plan_is_seen() -> None:
    lines = ["2026-11-17 07:38:51,350 INFO    memory      1.5 GiB at most, and so on\n"]
    planned = soak.planned_bytes(lines)
    assert planned == 1536 << 20
    assert soak.judge_memory([], planned, planned) == [
        ("memory at its peak", "1536 MiB of 1536 planned", True)
    ]
    ((_, _, holds),) = soak.judge_memory([], planned + 1, planned)
    assert not holds


def test_a_plan_of_a_gpus_memory_is_not_one_of_the_hosts() -> None:
    assert soak.planned_bytes(["INFO    memory      11 GiB of the device\n"]) is None


def test_a_server_that_does_not_start_is_told() -> None:
    command = [sys.executable, str(PROGRAM), "--minutes", "0.1", "--model", "/nowhere/at/all"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert (
        "/nowhere/at/all" in result.stderr
        and "did not start" in result.stderr
        and "Traceback" not in result.stderr
    )
