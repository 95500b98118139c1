"""`levserve batch` as a user runs it, on a tiny model: killed in the middle, and run again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from levserve import cli
from tests.conftest import GOLDEN
from tests.engines import cache_folder
from tests.waiting import COMPILE_SECONDS, wait_until

CASES = json.loads((GOLDEN / "llama" / "golden.json").read_text())["cases"]
FLAGS = ["--model", str(GOLDEN / "llama"), "--served-model-name", "tiny", "--dtype", "float32"]
FLAGS += ["--page-size", "4", "--prefill-chunk", "16", "--kv-pages", "64", "--max-running", "4"]
FLAGS += ["--cache-dir", str(cache_folder())]
NUM_LINES = 200


def write_input(path: Path, count: int) -> None:
    with path.open("w") as file:
        for number in range(count):
            body: dict[str, Any] = {"model": "tiny", "prompt": CASES[number % len(CASES)]["prompt"]}
            body |= {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
            line = {"custom_id": f"{number}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")
        file.write('{"custom_id": "wrong"}\n')
        file.write(json.dumps(line) + "\n")  # repeats the last id


def test_a_batch_that_is_killed_goes_on_with_nothing_lost_and_nothing_done_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_input(source, NUM_LINES)
    command = [sys.executable, "-m", "levserve", "batch", str(source), str(target), *FLAGS]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)

    def has_results() -> bool:
        assert process.poll() is None, "it ended before it was killed"
        return target.exists() and target.read_bytes().count(b"\n") >= 5

    try:
        wait_until(has_results, COMPILE_SECONDS)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    num_before = target.read_bytes().count(b"\n")
    assert 5 <= num_before < NUM_LINES
    before = target.read_bytes().splitlines()[:num_before]
    assert cli.main(command[3:]) == 3
    told = capsys.readouterr().err
    assert f"{NUM_LINES + 2 - num_before} requests" in told
    assert f"{num_before} more were done before, 2 of them failed" in told  # lines that cannot run come first
    assert target.read_bytes().splitlines()[:num_before] == before
    results = [json.loads(line) for line in target.read_text().splitlines()]
    (wrong,) = (result for result in results if result["custom_id"] == "wrong")
    results.remove(wrong)
    (repeated,) = (result for result in results if result["response"]["status_code"] == 400)
    error = repeated["response"]["body"]["error"]
    assert (error["code"], error["param"]) == ("duplicate_custom_id", "custom_id")
    assert repeated["custom_id"] == str(NUM_LINES - 1)
    assert repeated["id"].startswith(f"batch_req_{NUM_LINES + 2:x}_")  # not the line that had the id first
    results.remove(repeated)
    assert sorted(int(result["custom_id"]) for result in results) == list(range(NUM_LINES))
    for result in results:
        case = CASES[int(result["custom_id"]) % len(CASES)]
        usage = result["response"]["body"]["usage"]
        assert usage["completion_tokens"] == len(case["greedy"])
    assert any(
        result["response"]["body"]["usage"]["prompt_tokens_details"]["cached_tokens"] for result in results
    )
    assert cli.main(command[3:]) == 3  # all is done, but a failed request is still a failed one
    assert "before, 2 of them failed" in capsys.readouterr().err


def test_with_settings_for_several_models_a_batch_uses_the_named_one_or_the_default(tmp_path: Path) -> None:
    source, settings = tmp_path / "in.jsonl", tmp_path / "serve.ini"
    lines = [
        {
            "custom_id": name,
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": name, "prompt": "a"},
        }
        for name in ("first", "second")
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    sections = (f"[model.{name}]\nmodel = {GOLDEN / 'llama'}\n" for name in ("first", "second"))
    settings.write_text("".join(sections))
    for name, more in (("first", []), ("second", ["--model", "second"])):
        target = tmp_path / f"{name}.jsonl"
        words = ["batch", str(source), str(target), "--config", str(settings), *FLAGS[4:], *more]
        assert cli.main(words) == 3  # the line for the other model fails
        results = [json.loads(line) for line in target.read_text().splitlines()]
        done = [result["custom_id"] for result in results if result["response"]["status_code"] == 200]
        assert done == [name]
