"""Batches around the fake device: bodies as over HTTP, any order, nothing lost or done twice after a kill."""

from __future__ import annotations

import json
import os
import resource
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from levserve.api.admission_queue import AdmissionQueue
from levserve.batch.done import DoneLines
from levserve.batch.endpoints import ENDPOINTS, Limits
from levserve.batch.line import InputLine, make_result, result_id
from levserve.batch.ordering import ReadyLine, order_lines
from levserve.batch.output import Output, open_output
from levserve.batch.results import ResultFile
from levserve.batch.runner import Interrupted, LineResult, Runner
from levserve.batch.seen import SeenIds
from levserve.batch.source import Source, split_lines
from levserve.batch.tally import Tally, show_seconds
from levserve.errors import ConfigError, StartupError
from levserve.settings.settings import Settings
from levserve.terminal.commands import run_command
from tests.fake_app import App, serving
from tests.waiting import wait_until

CHAT, TEXT, VECTORS, SCORES = ENDPOINTS
USER = [{"role": "user", "content": "t17 t18"}]
MAX_BODY = 10_000


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with serving() as app:
        yield app


@pytest.fixture
def own_app() -> Iterator[App]:
    """An app for tests that close it, or that count what reaches its device."""
    with serving() as app:
        yield app


def make_runner(app: App, **settings: Any) -> Runner:
    engine = app.engine
    limits = Limits(engine.admission, engine.max_inflight)
    return Runner(
        app.registry, Settings(**settings), AdmissionQueue(engine), limits, max_sequences=engine.max_inflight
    )


def make_line(number: int, url: str, body: Any, **fields: Any) -> bytes:
    line = {"custom_id": f"line {number}", "method": "POST", "url": url, "body": body} | fields
    return json.dumps(line).encode()


def ready(lines: Sequence[bytes], max_lines: int = 4096) -> Iterator[ReadyLine]:
    numbered = (InputLine(number, line, len(line) + 1) for number, line in enumerate(lines, start=1))
    return order_lines(numbered, MAX_BODY, max_lines)


def run(app: App, lines: Sequence[bytes], **settings: Any) -> list[LineResult]:
    return list(make_runner(app, **settings).run(ready(lines)))


def show(result: LineResult) -> Any:
    return json.loads(result.result.encode())


def compare(body: Any) -> Any:
    """A body without what differs between any two requests."""
    return {name: value for name, value in body.items() if name not in ("id", "created")}


SAME = [
    (CHAT, {"messages": USER, "temperature": 0, "max_tokens": 3}),
    (CHAT, {"messages": USER, "seed": 5, "n": 3, "max_tokens": 3, "logprobs": True, "top_logprobs": 2}),
    (CHAT, {"messages": USER, "seed": 5, "max_completion_tokens": 2, "prompt_logprobs": 1}),
    (CHAT, {"messages": USER, "seed": 1, "stop": "t13", "max_tokens": 20}),
    (CHAT, {"messages": USER, "temperature": 0, "tools": [{"type": "function", "function": {"name": "f"}}]}),
    (TEXT, {"prompt": ["t17 t18", "t30"], "seed": 3, "n": 2, "max_tokens": 3}),
    (TEXT, {"prompt": ["t17 t18", "t30"], "seed": 3, "n": 2, "max_tokens": 3, "return_token_ids": True}),
    (CHAT, {"messages": USER, "seed": 3, "n": 2, "max_tokens": 3, "return_token_ids": True}),
    (TEXT, {"prompt": [17, 18], "temperature": 0, "echo": True, "logprobs": 2, "max_tokens": 2}),
    (TEXT, {"prompt": "t17", "seed": 3, "best_of": 3, "n": 1, "max_tokens": 3}),
    (TEXT, {"prompt": "t7 t7 t20", "temperature": 0}),
    (TEXT, {"prompt": "t17 " * 90, "temperature": 0, "truncate_prompt_tokens": -1}),
    (VECTORS, {"input": ["t17 t18", "t30"]}),
    (VECTORS, {"input": [f"t{number}" for number in range(20, 60)], "encoding_format": "base64"}),
    (SCORES, {"prompts": ["t17 t18", "t30"], "continuations": [" t19", " t32 t33"], "details": True}),
    (SCORES, {"prompts": ["t17"] * 40, "continuations": [" t18 t19"] * 40}),
]
WRONG = [
    (CHAT, {"messages": []}),
    (CHAT, {"messages": USER, "temperature": 9}),
    (CHAT, {"messages": USER, "max_tokens": 1000}),
    (CHAT, {"messages": USER, "n": 100}),
    (CHAT, {"messages": [{"role": "king", "content": "t17"}]}),
    (CHAT, {"messages": USER, "model": "other"}),
    (CHAT, {"messages": USER, "audio": {}}),
    (TEXT, {"prompt": "t17", "logit_bias": {"9999999": 1}}),
    (TEXT, {"prompt": "t17 " * 90}),
    (TEXT, {"prompt": ""}),
    (TEXT, {}),
    (TEXT, {"prompt": ["t17"] * 5, "n": 2, "max_tokens": 60}),
    (VECTORS, {"input": []}),
    (VECTORS, {"input": "t17", "dimensions": 7}),
    (SCORES, {"prompts": ["t17"], "continuations": []}),
    (SCORES, {"prompts": ["t17"], "continuations": [""]}),
    (TEXT, {"prompt": "t4", "timeout": 0.05}),
]


@pytest.mark.parametrize(("url", "fields"), SAME + WRONG)
def test_a_line_has_the_status_and_the_body_that_http_gives(
    app: App, url: str, fields: dict[str, Any]
) -> None:
    body = {"model": "toy"} | fields
    over_http = app.post(url, body)
    (result,) = run(app, [make_line(1, url, body)])
    shown = show(result)
    assert shown["custom_id"] == "line 1" and shown["error"] is None
    assert shown["response"]["status_code"] == over_http.status_code
    assert over_http.json is not None
    assert compare(shown["response"]["body"]) == compare(over_http.json)
    is_wrong = (url, fields) in WRONG
    assert is_wrong == (over_http.status_code >= 400) == (result.error_code is not None)
    wait_until(lambda: app.engine.admission.room().free_requests == app.engine.max_inflight)


def test_the_operators_rules_hold_for_lines_too() -> None:
    rules = {"max_new_tokens": 2, "default_temperature": 0.0}
    body = {"model": "toy", "prompt": "t17", "max_tokens": 9}
    with serving(**rules) as app:
        over_http = app.complete("t17", max_tokens=9)
        (result,) = run(app, [make_line(1, TEXT, body)], **rules)
    assert compare(show(result)["response"]["body"]) == compare(over_http)
    assert over_http["warnings"]


def test_timings_are_told_where_they_are_asked_for(app: App) -> None:
    (result,) = run(app, [make_line(1, TEXT, {"model": "toy", "prompt": "t17", "timings": True})])
    timings = show(result)["response"]["body"]["timings"]
    phases = [timings[name] for name in ("prepare_ms", "queue_ms", "prefill_ms", "decode_ms")]
    assert all(phase >= 0 for phase in phases)
    assert sum(phases) == pytest.approx(timings["total_ms"], abs=0.01)


@pytest.mark.parametrize(
    ("line", "status", "param"),
    [
        (b"rubbish", 400, None),
        (b"[1]", 400, None),
        (b'{"custom_id": "line 1"}', 400, "method"),
        (make_line(1, TEXT, {"model": "toy", "prompt": "t17"}, method="GET"), 400, "method"),
        (make_line(1, "/v1/audio", {}), 404, "url"),
        (make_line(1, TEXT, [1]), 400, None),
        (make_line(1, TEXT, "text"), 400, None),
        (make_line(1, TEXT, {"model": "toy", "prompt": "t17", "stream": True}), 400, "stream"),
        (make_line(1, TEXT, {"model": "toy", "prompt": "t17 " * MAX_BODY}), 413, None),
        (make_line(1, TEXT, {}, custom_id=7), 400, "custom_id"),
        (make_line(1, TEXT, {}, custom_id="x" * 600), 400, "custom_id"),
        (b'{"custom_id": "line 1", "body": ' + b"[" * 5000, 400, None),
        (b'{"custom_id": "\xff"}', 400, None),
    ],
)
def test_a_line_that_cannot_be_run_gets_its_error_and_the_others_run(
    app: App, line: bytes, status: int, param: str | None
) -> None:
    good = make_line(2, TEXT, {"model": "toy", "prompt": "t17", "temperature": 0})
    results = {result.line.number: result for result in run(app, [line, good])}
    shown = show(results[1])
    assert (shown["response"]["status_code"], shown["response"]["body"]["error"]["param"]) == (status, param)
    assert results[2].status == 200


def test_many_lines_run_side_by_side_and_each_gets_its_own_answer(app: App) -> None:
    lines = [
        make_line(
            number, TEXT, {"model": "toy", "prompt": f"t{20 + number}", "temperature": 0, "max_tokens": 2}
        )
        for number in range(200)
    ]
    results = run(app, lines)
    assert len(results) == 200
    for result in results:
        shown = show(result)
        first = 21 + int(shown["custom_id"].removeprefix("line "))
        assert shown["response"]["body"]["choices"][0]["text"] == f" t{first} t{first + 1}"
    assert (results[0].prompt_tokens, results[0].completion_tokens) == (1, 2)
    assert app.engine.admission.room().free_requests == app.engine.max_inflight


def test_lines_that_begin_alike_come_together_inside_a_window() -> None:
    lines = [make_line(number, TEXT, {"prompt": f"{'ab'[number % 2]} {number}"}) for number in range(8)]
    assert [one.line.number for one in ready(lines)] == [1, 3, 5, 7, 2, 4, 6, 8]
    assert [one.line.number for one in ready(lines, max_lines=4)] == [1, 3, 2, 4, 5, 7, 6, 8]


def test_a_line_without_a_seed_has_the_same_text_whenever_it_is_run(app: App) -> None:
    lines = [make_line(number, TEXT, {"model": "toy", "prompt": "t17 t18"}) for number in range(1, 9)]

    def texts(chosen: list[bytes], first: int = 1) -> dict[str, str]:
        numbered = (InputLine(number, line, 0) for number, line in enumerate(chosen, start=first))
        results = make_runner(app, seed=3).run(order_lines(numbered, MAX_BODY))
        shown = [show(result) for result in results]
        return {one["custom_id"]: one["response"]["body"]["choices"][0]["text"] for one in shown}

    whole = texts(lines)
    assert texts(lines[4:], 5).items() <= whole.items()
    assert len(set(whole.values())) > 1


def test_leaving_the_results_cancels_what_runs(own_app: App) -> None:
    app = own_app
    waiting = [make_line(number, TEXT, {"model": "toy", "prompt": "t6"}) for number in range(1, 4)]
    done = make_line(9, TEXT, {"model": "toy", "prompt": "t17", "temperature": 0})
    with closing(make_runner(app).run(ready([*waiting, done]))) as results:
        next(results)
    wait_until(lambda: app.engine.admission.room().free_requests == app.engine.max_inflight)
    wait_until(lambda: sum(event == "cancel" for event, _ in list(app.device.events.queue)) == 3)


def test_a_runner_that_is_stopped_or_whose_engine_drains_leaves_lines_without_a_result(own_app: App) -> None:
    app = own_app
    waiting = make_line(1, TEXT, {"model": "toy", "prompt": "t6"})
    runner = make_runner(app)
    threading.Timer(0.1, runner.stop).start()
    with pytest.raises(Interrupted):
        list(runner.run(ready([waiting])))
    threading.Timer(0.1, app.engine.begin_drain, (0.0,)).start()
    with pytest.raises(Interrupted):
        list(make_runner(app).run(ready([waiting, waiting])))
    with pytest.raises(Interrupted):
        list(make_runner(app).run(ready([waiting])))


@given(st.lists(st.binary(max_size=30)), st.integers(1, 9), st.integers(1, 20))
def test_lines_do_not_depend_on_where_blocks_end(parts: list[bytes], size: int, limit: int) -> None:
    whole = b"\n".join(parts)
    blocks = [whole[start : start + size] for start in range(0, len(whole), size)]
    found = list(split_lines(blocks, limit))
    whole = whole.removeprefix(b"\xef\xbb\xbf") if size >= 3 else whole
    lines = whole.split(b"\n")
    wanted = [
        (number, line[:limit].strip(), len(line) > limit)
        for number, line in enumerate(lines, start=1)
        if line[:limit].strip() or len(line) > limit
    ]
    assert [(line.number, line.data, line.is_too_long) for line in found] == wanted


def test_a_line_of_any_length_takes_no_more_memory_than_a_body() -> None:
    blocks = (b"x" * 1_000_000 for _ in range(50))
    (line,) = split_lines(blocks, 1000)
    assert line.is_too_long and len(line.data) == 1000 and line.num_bytes == 50_000_000


class TestResume:
    def write_input(self, folder: Path, count: int = 40) -> Path:
        path = folder / "in.jsonl"
        lines = [
            make_line(number, TEXT, {"model": "toy", "prompt": f"t{20 + number}", "temperature": 0})
            for number in range(1, count + 1)
        ]
        path.write_bytes(b"\n".join(lines) + b"\n")
        return path

    def go_on(self, app: App, source: Path, target: Path, most: int = 1000) -> int:
        """Runs up to `most` of the lines without a result; returns how many it ran."""
        with Output(target) as output:
            lines = (line for line in Source(source).lines(MAX_BODY) if not output.done.has(line))
            count = 0
            with closing(make_runner(app).run(order_lines(lines, MAX_BODY))) as results:
                for result in results:
                    output.write(result.result)
                    count += 1
                    if count == most:
                        break
        return count

    @pytest.mark.parametrize(
        "torn",
        [
            b"",
            b"{",
            b'{"id":"batch_req_',
            b'{"id":"batch_req_28_0',
            b'{"id":"batch_req_28_00000000","custom',
            bytes(100),
            b'{"id":"bat' + bytes(100),
        ],
    )
    def test_nothing_is_lost_and_nothing_is_done_twice(
        self, own_app: App, tmp_path: Path, torn: bytes
    ) -> None:
        app = own_app
        source, target = self.write_input(tmp_path), tmp_path / "out.jsonl"
        assert self.go_on(app, source, target, 7) == 7
        with target.open("ab") as file:
            file.write(torn)
        assert self.go_on(app, source, target, 13) == 13
        assert self.go_on(app, source, target) == 20
        assert self.go_on(app, source, target) == 0
        shown = [json.loads(line) for line in target.read_text().splitlines()]
        assert sorted(one["custom_id"] for one in shown) == sorted(f"line {n}" for n in range(1, 41))
        assert all(one["response"]["status_code"] == 200 for one in shown)

    def test_results_of_another_file_are_refused(self, app: App, tmp_path: Path) -> None:
        source, target = self.write_input(tmp_path), tmp_path / "out.jsonl"
        self.go_on(app, source, target, 7)
        source.write_bytes(source.read_bytes().replace(b"toy", b"boy"))
        with pytest.raises(ConfigError, match="has changed"):
            self.go_on(app, source, target)

    @pytest.mark.parametrize(
        "content",
        [
            b"text\n",
            b"{}\n",
            b'{"id": "x", "response": null}\n',
            b"text",
            b"{}",
            b'{"id":"batch_req_wnaDys","custom_id":"1"}',
        ],
    )
    @pytest.mark.parametrize("num_before", [0, 3])
    def test_a_file_that_is_no_output_is_left_alone(
        self, app: App, tmp_path: Path, content: bytes, num_before: int
    ) -> None:
        source, target = self.write_input(tmp_path), tmp_path / "out.jsonl"
        if num_before:
            self.go_on(app, source, target, num_before)
        before = (target.read_bytes() if num_before else b"") + content
        target.write_bytes(before)
        with pytest.raises(ConfigError, match="is not the beginning"):
            Output(target)
        assert target.read_bytes() == before

    def test_two_processes_do_not_write_one_file(self, tmp_path: Path) -> None:
        with Output(tmp_path / "out.jsonl"), pytest.raises(ConfigError, match="another process"):
            ResultFile(tmp_path / "out.jsonl", DoneLines())

    def test_old_results_stay_until_the_first_new_one_is_written(self, app: App, tmp_path: Path) -> None:
        source, target = self.write_input(tmp_path), tmp_path / "out.jsonl"
        target.write_bytes(b"old")
        with Output(target, overwrites=True) as output:
            assert output.results.num_results == 0
        assert target.read_bytes() == b"old"
        with Output(target, overwrites=True) as output:
            for line in Source(source).lines(MAX_BODY):
                output.write(make_result(line, "new", 200, b"{}"))
                break
        assert self.go_on(app, source, target) == 39
        target.write_bytes(b"old")
        with Output(target, overwrites=True) as output:
            output.finish()  # the input has no requests
        assert target.read_bytes() == b""

    def test_a_disk_that_is_full_is_one_line_and_the_batch_goes_on_later(
        self, app: App, tmp_path: Path
    ) -> None:
        source, target = self.write_input(tmp_path), tmp_path / "out.jsonl"
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        try:
            with pytest.raises(StartupError, match="cannot write .*/out.jsonl: File too large"):
                self.go_on(app, source, target)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        num_before = target.read_bytes().count(b"\n")
        assert num_before > 0
        assert self.go_on(app, source, target) == 40 - num_before

    def test_a_place_that_cannot_be_written_is_one_line(self, tmp_path: Path) -> None:
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        for overwrites in (False, True):
            for place in (tmp_path, tmp_path / "missing" / "out.jsonl", pipe, "/dev/full", "/dev/null"):
                with pytest.raises(ConfigError, match="cannot write"):
                    open_output(f"{place}", tmp_path, overwrites=overwrites)
        for place in (tmp_path, tmp_path / "missing", pipe, "/dev/null"):
            with pytest.raises(ConfigError, match="cannot read"):
                Source(place)

    @pytest.mark.parametrize("places", [["-", "out.jsonl"], ["in.jsonl", "-"]])
    def test_standard_input_and_output_are_refused(
        self, places: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run_command("batch", places) == 2
        assert "'-' is no file" in capsys.readouterr().err


@given(st.sets(st.integers(1, 3000)))
def test_what_is_done_is_known_by_number(numbers: set[int]) -> None:
    done = DoneLines()
    for number in numbers:
        assert done.add(result_id(InputLine(number, b"x", 1)))
        assert not done.add(result_id(InputLine(number, b"x", 1)))
    assert {number for number in range(1, 3100) if done.has(InputLine(number, b"x", 1))} == numbers
    assert done.num_done == len(numbers)


@settings(max_examples=20)
@given(st.lists(st.text(max_size=3) | st.integers(0, 99).map(str), max_size=60), st.sampled_from((0, 5000)))
def test_ids_that_a_file_had_before_are_known(ids: list[str], num_others: int) -> None:
    seen, known = SeenIds(), set()
    for number in range(num_others):
        assert seen.add(f"other {number}")
    for custom_id in ids:
        assert seen.add(custom_id) is (custom_id not in known)
        known.add(custom_id)
    assert not any(seen.add(f"other {number}") for number in range(0, num_others, 97))


def test_a_tally_tells_rates_time_left_and_errors(app: App) -> None:
    good = [make_line(n, TEXT, {"model": "toy", "prompt": "t17", "temperature": 0}) for n in range(1, 4)]
    lines = [*good, make_line(4, TEXT, {}), make_line(5, TEXT, {"model": "none", "prompt": "x"})]
    now = [0.0]
    tally = Tally(2 * sum(len(line) + 1 for line in lines), lambda: now[0])
    results = run(app, lines)
    now[0] = 10.0
    for result in results:
        tally.add(result)
    assert (
        tally.describe_progress() == "50%, 5 requests, 2 failed, 5 tok/s generated, 0 tok/s read, 10 s left"
    )
    first, *errors = tally.describe_end()
    assert first == "5 requests in 10 s, 2 of them failed; 3 tokens read, 48 generated (5 tok/s)"
    assert sorted(errors) == ["  1 x 400 missing_required_parameter", "  1 x 404 model_not_found"]
    assert [show_seconds(seconds) for seconds in (3, 61, 3700)] == ["3 s", "1 min 01 s", "1 h 01 min"]
