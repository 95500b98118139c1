"""The server's log: one line per request, as text or JSON, without forged lines or secrets."""

from __future__ import annotations

import json
import logging
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from levserve.errors import ConfigError
from levserve.observe.logging_file import configure_logging
from levserve.observe.logs import JsonFormatter, TextFormatter
from tests.fake_server import Client, ServerProcess, completion

KEY = "secret-key-12345"
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}
FLAGS = (
    "--log-format",
    "json",
    "--api-key",
    KEY,
    "--max-running",
    "2",
    "--max-waiting",
    "2",
    "--max-body-bytes",
    "2000",
)
FORGED = '%0A{"level": "critical", "message": "forged"}'
TIMES = ["queue_ms", "prefill_ms", "decode_ms"]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(*FLAGS).wait_ready() as process:
        yield process
    for line in process.log.seen:
        assert isinstance(json.loads(line), dict), f"a line that is no object: {line}"
        assert KEY not in line and "t333" not in line, "a secret or a prompt's text"
        assert json.loads(line)["level"] in ("info", "warning")


def line_of(server: ServerProcess, request_id: str) -> dict[str, Any]:
    line: dict[str, Any] = json.loads(
        server.log.wait_for(lambda line: json.loads(line).get("request_id") == request_id)
    )
    return line


def ask(
    server: ServerProcess, request_id: str, body: Any, path: str = "/v1/completions", **headers: str
) -> dict[str, Any]:
    """The log line of a request, which must be answered."""
    server.ask("POST", path, body, **{"X-Request-Id": request_id}, **AUTHORIZED, **headers)
    return line_of(server, request_id)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_leaves_one_line_that_says_what_became_of_it(server: ServerProcess, stream: bool) -> None:
    line = ask(server, f"whole-{stream}", completion("t17 t333", max_tokens=3, n=2, stream=stream))
    assert line["message"] == f"whole-{stream} POST /v1/completions 200 {line['ms']} ms"
    told = {
        name: line[name]
        for name in (
            "method",
            "path",
            "status",
            "model",
            "prompt_tokens",
            "completion_tokens",
            "finish_reason",
        )
    }
    assert told == {
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "model": "toy",
        "prompt_tokens": 2,
        "completion_tokens": 6,
        "finish_reason": "length",
    }
    assert all(line[name] >= 0 for name in TIMES) and sum(line[name] for name in TIMES) <= line["ms"] + 1
    assert "abort" not in line and "error" not in line


def test_scoring_leaves_a_line_too(server: ServerProcess) -> None:
    line = ask(
        server,
        "scored",
        {"prompts": ["t333", "t17"], "continuations": [" t25", " t19 t20"]},
        "/loglikelihood",
    )
    assert (line["status"], line["prompt_tokens"], line["completion_tokens"], line["decode_ms"]) == (
        200,
        5,
        0,
        0,
    )


@pytest.mark.parametrize(
    "name, body, status, error",
    [
        ("field", completion("t333", top_p=7), 400, "decimal_above_max_value"),
        ("json", b"{", 400, "invalid_request_error"),
        ("model", completion("t333") | {"model": "t333\n{}"}, 404, "model_not_found"),
        ("size", completion("t333 " * 1000), 413, "body_too_large"),
        ("deadline", completion("t4", max_tokens=1), 504, "deadline_exceeded"),
    ],
)
def test_a_refusal_is_told_with_its_code(
    server: ServerProcess, name: str, body: Any, status: int, error: str
) -> None:
    if name == "deadline":
        with ServerProcess("--log-format", "json", "--request-timeout", "0.2").wait_ready() as other:
            line = ask(other, name, body)
    else:
        line = ask(server, name, body)
    assert (line["status"], line["error"]) == (status, error)


@pytest.mark.parametrize("prompt, stream, status", [("t4", False, 499), ("t6", True, 200)])
def test_a_client_that_leaves_is_told_as_the_reason(
    server: ServerProcess, prompt: str, stream: bool, status: int
) -> None:
    with server.connect() as client:
        client.send(
            "POST",
            "/v1/completions",
            completion(prompt, stream=stream),
            **{"X-Request-Id": f"left-{prompt}"},
            **AUTHORIZED,
        )
        server.wait_event("submit")
        if stream:
            next(client.stream())
    line = line_of(server, f"left-{prompt}")
    assert (line["status"], line["abort"], line["finish_reason"]) == (status, "disconnected", None)


def test_health_checks_and_files_of_the_page_are_not_told(server: ServerProcess) -> None:
    server.ask("GET", "/healthz", **{"X-Request-Id": "quiet"})
    server.ask("GET", "/static/style.css", **{"X-Request-Id": "quiet-too"})
    ask(server, "after", completion("t17"))
    assert not any("quiet" in line for line in server.log.seen)


def test_no_header_and_no_path_can_forge_a_line(server: ServerProcess) -> None:
    """The fixture checks all lines when the tests are over; this test sends what could forge one."""
    hostile = {"User-Agent": f"curl\t{FORGED}", "Referer": FORGED}
    assert (
        ask(server, "nowhere", None, f"/v1/{FORGED.replace(' ', '%20')}", **hostile)["path"]
        == f"/v1/{FORGED.replace('%0A', chr(10))}"
    )
    server.ask("GET", "/v1/models", **{"X-Request-Id": "bad id\t{}"}, **hostile)
    port = int(server.url.rpartition(":")[2])
    for rubbish in (
        b'GET / HTTP/1.1\r\n{"level": "critical"}\r\n\r\n',
        b'{"level": "critical"}\n\n',
        b"\x16\x03\x01\n\n",
    ):
        with socket.create_connection(("127.0.0.1", port)) as raw:
            raw.sendall(rubbish)
            raw.recv(1000)
    ask(server, "last", completion("t17"))
    assert not any(json.loads(line)["level"] == "critical" for line in server.log.seen)


def test_gunicorn_speaks_through_the_same_formatter(server: ServerProcess) -> None:
    server.send_signal(signal.SIGHUP)
    line = json.loads(server.log.wait_for(lambda line: json.loads(line)["logger"] == "gunicorn.error"))
    assert line["level"] == "warning" and "signal ignored" in line["message"]


def test_the_settings_are_told_with_their_sources_and_without_secrets(server: ServerProcess) -> None:
    told = next(json.loads(line) for line in server.log.seen if "settings" in json.loads(line))["settings"]
    assert told["max_running"] == {"value": "2", "source": "command line"}
    assert told["api_key"] == {"value": "***", "source": "command line"}
    assert told["host"] == {"value": "127.0.0.1", "source": "default"}


def test_people_are_told_the_settings_that_are_no_defaults() -> None:
    with ServerProcess("--max-running", "2", "--api-key", KEY).wait_ready() as server:
        (line,) = (line for line in server.log.seen if "settings: " in line)
    assert "max_running = 2 (command line)" in line and "api_key = *** (command line)" in line
    assert "host" not in line and KEY not in line


def test_a_start_that_fails_is_one_object_too() -> None:
    with ServerProcess("--log-format", "json", "--served-model-name", "broken") as server:
        assert server.wait_exit() == 2
    last = json.loads(server.log.seen[-1])
    assert (last["level"], last["message"], last["exit_code"]) == ("critical", "the model is broken", 2)


def test_only_what_is_severe_enough_is_told() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        ServerProcess("--log-level", "warning", listener=listener) as server,
    ):
        with Client(listener.getsockname()[1]) as client:
            client.send("POST", "/v1/completions", completion("t17"))
            client.receive()
    assert server.log.seen == []


def make_record(text: str, value: str, error: Exception | None) -> logging.LogRecord:
    info = None
    if error is not None:
        try:
            raise error
        except Exception:
            info = sys.exc_info()
    record = logging.LogRecord("levserve.test", logging.ERROR, __file__, 1, "%s failed", (text,), info)
    record.message_fields = {"text": text}
    record.fields = {"value": value}
    return record


@given(st.text(), st.text(), st.text())
def test_json_is_one_line_that_says_exactly_what_was_logged(text: str, value: str, error: str) -> None:
    line = JsonFormatter().format(make_record(text, value, ValueError(error)))
    assert len(line.splitlines()) == 1 and line.isascii()
    entry = json.loads(line)
    assert (entry["message"], entry["text"], entry["value"]) == (f"{text} failed", text, value)
    assert entry["exception"].startswith("Traceback")


@given(st.text(), st.text(), st.text())
def test_text_begins_a_line_only_with_a_time_and_shows_no_control_characters(
    text: str, value: str, error: str
) -> None:
    first, *rest = TextFormatter().format(make_record(text, value, ValueError(error))).split("\n")
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ERROR   ", first)
    assert first.isprintable() and all(line.startswith("    ") and line.isprintable() for line in rest)


def test_the_beginning_of_a_request_is_told_at_debug_level_and_its_end_with_its_speed() -> None:
    with ServerProcess("--log-format", "json", "--log-level", "debug").wait_ready() as server:
        server.ask("POST", "/v1/completions", completion("t17", max_tokens=3), **{"X-Request-Id": "seen"})
        first, last = line_of(server, "seen"), line_of(server, "seen")
    assert (first["level"], first["message"]) == ("debug", "seen POST /v1/completions started")
    assert (last["level"], last["status"]) == ("info", 200) and last["tokens_per_second"] > 0


def test_signal_drain_and_exit_are_told() -> None:
    with ServerProcess("--log-format", "json").wait_ready() as server:
        server.send_signal(signal.SIGTERM)
        assert server.wait_exit() == 0
    told = [json.loads(line)["message"] for line in server.log.seen]
    lines = (
        "SIGTERM: shutting down",
        "draining for at most 30 s; requests running: 0",
        "drained in 0",
        "exit with code 0",
    )
    places = [next(place for place, one in enumerate(told) if one.startswith(line)) for line in lines]
    assert places == sorted(places)


def test_the_lines_of_requests_can_be_turned_off() -> None:
    with ServerProcess("--access-log", "false").wait_ready() as server:
        assert server.complete("t17").status == 200
        server.send_signal(signal.SIGTERM)
        server.wait_exit()
    assert not any("/v1/completions 200" in line for line in server.log.seen)


YAML_LOGGING = """\
version: 1
formatters:
  mine: {format: "mine %(levelname)s %(message)s"}
handlers:
  file: {class: logging.FileHandler, filename: FOLDER/levserve.log, formatter: mine}
loggers:
  levserve: {level: INFO, handlers: [file]}
"""
INI_LOGGING = """\
[loggers]
keys=root
[handlers]
keys=file
[formatters]
keys=mine
[logger_root]
level=INFO
handlers=file
[handler_file]
class=FileHandler
args=("FOLDER/levserve.log",)
formatter=mine
[formatter_mine]
format=mine %(levelname)s %(message)s
"""


@pytest.mark.parametrize(("name", "text"), [("logging.yaml", YAML_LOGGING), ("logging.ini", INI_LOGGING)])
def test_a_standard_logging_file_decides_where_lines_go(tmp_path: Path, name: str, text: str) -> None:
    file = tmp_path / name
    file.write_text(text.replace("FOLDER", str(tmp_path)))
    program = (
        "import sys; from levserve.observe.logs import start_logging; start_logging('', 'text', file=sys.argv[1]);"
        "import logging; logging.getLogger('levserve.cli').info('hello'); logging.getLogger('levserve.cli').debug('no')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(file)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "levserve.log").read_text() == "mine INFO hello\n"


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("logging.yaml", "version: 1\nhandlers: {file: {class: logging.NoHandler}}\n", ["'file'", "NoHandler"]),
        (
            "logging.yaml",
            "version: 1\nhandlers: {file: {class: logging.FileHandler, filename: /no/where/a.log}}\n",
            ["'file'", "No such file or directory", "/no/where/a.log"],
        ),
        ("logging.yaml", "version: 1\nloggers: {levserve: {level: LOUD}}\n", ["'levserve'", "LOUD"]),
        ("logging.yaml", "handlers: {}\n", ["version"]),
        ("logging.yaml", "- version\n", ["expected a mapping"]),
        ("logging.yaml", "version: [\n", ["line 2"]),
        ("logging.json", '{"version": 2}', ["Unsupported version: 2"]),
        ("logging.ini", "[loggers]\nkeys=root\n", ["formatters"]),
        ("logging.ini", "version: 1\n", ["no section headers"]),
        ("logging.toml", "", [".yaml"]),
        ("missing.yaml", None, ["No such file or directory"]),
    ],
)  # fmt: skip
def test_a_mistake_in_the_logging_file_is_named_with_file_and_key(
    tmp_path: Path, name: str, text: str | None, named: list[str]
) -> None:
    file = tmp_path / name
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        configure_logging(str(file))
    line = str(refused.value)
    assert line.startswith(f"--logging-config {file}") and "\n" not in line
    assert all(word in line for word in named)
