"""The life and death of the server process: start, drain, signals and exit codes."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time

import pytest

from levserve.wire.arbiter import REPEAT_SECONDS
from tests.conftest import HEAVY
from tests.fake_server import ServerProcess, completion

SMALL = ("--max-running", "2", "--max-waiting", "2")
AT_ONCE_SECONDS = 20
"""Enough on a machine of any speed, but less than a drain's time."""


HEED_INTERRUPTS = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background has them ignored
runpy.run_module("levserve", run_name="__main__")
"""


def test_an_interrupt_while_the_command_is_being_imported_ends_it_without_a_traceback() -> None:
    command = [sys.executable, "-X", "importtime", "-c", HEED_INTERRUPTS]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        told = ""
        while "levserve.errors" not in told:  # one of the first modules that the command needs
            told += process.stderr.readline()
        process.send_signal(signal.SIGINT)
        told += process.stderr.read()
    assert process.returncode == 130
    assert "Traceback" not in told


@pytest.mark.parametrize(("flag", "code"), [("--help", 0), ("--print-config", 1)])
def test_output_that_nobody_reads_is_no_fault_of_the_command(flag: str, code: int) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "levserve", flag]
    ended = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True)
    os.close(write_end)
    assert (ended.returncode, ended.stderr) == (code, "")


def test_a_full_disk_behind_the_output_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "levserve", "--print-config"]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stderr) == (1, "levserve: error: No space left on device\n")


def test_a_drain_lets_running_requests_finish_and_exits_0() -> None:
    with ServerProcess(*SMALL).wait_ready() as server:
        streaming = server.start_completion("t3", max_tokens=3, stream=True)
        events = streaming.stream()
        first = json.loads(next(events))
        blocking = server.start_completion("t3", max_tokens=3)
        server.send_signal(signal.SIGTERM)
        rest = list(events)
        assert (
            first["choices"][0]["text"]
            + "".join(json.loads(event)["choices"][0]["text"] for event in rest[:-1])
            == " t4 t5 t6"
        )
        assert rest[-1] == "[DONE]"
        reply = blocking.receive()
        assert (reply.status, reply.json["choices"][0]["text"]) == (200, " t4 t5 t6")
        streaming.close()
        blocking.close()
        assert server.wait_exit() == 0


def test_a_drain_refuses_new_work_and_ends_the_rest_at_its_deadline() -> None:
    with ServerProcess(*SMALL, "--drain-seconds", "1").wait_ready() as server, server.connect() as idle:
        idle.send("GET", "/readyz")
        assert idle.receive().status == 200
        streaming = server.start_completion("t6", stream=True)
        events = streaming.stream()
        next(events)
        blocking = server.start_completion("t4")
        server.send_signal(signal.SIGTERM)
        server.wait_event("drain")
        idle.send("POST", "/v1/completions", completion("t17"))
        refused = idle.receive()
        assert (refused.status, refused.headers["retry-after"]) == (503, "10")
        error, done = events
        assert json.loads(error)["error"]["type"] == "server_error"
        assert done == "[DONE]"
        assert blocking.receive().status == 503
        streaming.close()
        blocking.close()
        assert server.wait_exit() == 0


def test_who_comes_during_a_drain_is_told_to_go_elsewhere_and_after_it_finds_nobody() -> None:
    with ServerProcess(*SMALL).wait_ready() as server:
        streaming = server.start_completion("t6", stream=True)
        events = streaming.stream()
        next(events)
        with server.connect() as idle:
            idle.send("GET", "/readyz")
            assert idle.receive().status == 200
            server.send_signal(signal.SIGTERM)
            server.wait_event("drain")
            for client in (idle, server.connect()):
                with client:
                    client.send("POST", "/v1/completions", completion("t17"))
                    refused = client.receive()
                    assert (
                        refused.status,
                        refused.headers["retry-after"],
                        refused.headers["connection"],
                    ) == (503, "10", "close")
        assert server.ask("GET", "/healthz").status == 200
        assert server.ask("GET", "/readyz").json["status"] == "draining"
        streaming.close()  # the last request
        assert server.wait_exit() == 0
        with pytest.raises(ConnectionRefusedError):
            server.ask("GET", "/healthz")


def test_a_second_signal_ends_the_drain_but_not_the_same_one_heard_twice() -> None:
    with ServerProcess(*SMALL, "--drain-seconds", "600").wait_ready() as server:
        streaming = server.start_completion("t6", stream=True)
        events = streaming.stream()
        next(events)
        # As with timeout(1) and, by default, systemd: the process and its whole group get the signal.
        server.send_signal(signal.SIGTERM)
        time.sleep(0.05)
        server.send_signal(signal.SIGTERM, to_group=True)
        server.wait_event("drain")
        assert not select.select([streaming], [], [], 2 * REPEAT_SECONDS)[0], "it is still running"
        started = time.monotonic()
        server.send_signal(signal.SIGTERM)
        error, done = events  # the client would complain if the last chunk were missing
        assert json.loads(error)["error"]["type"] == "server_error" and done == "[DONE]"
        streaming.close()
        assert server.wait_exit() == 0
        assert time.monotonic() - started < AT_ONCE_SECONDS


def test_a_worker_that_dies_while_it_drains_is_a_fault() -> None:
    with ServerProcess(*SMALL).wait_ready() as server:
        client = server.start_completion("t4")
        server.send_signal(signal.SIGTERM)
        server.wait_event("drain")
        os.kill(server.worker_pid, signal.SIGKILL)
        assert server.wait_exit() == 70
        client.close()


@pytest.mark.parametrize("seconds", [0, 0.02, 0.1])
def test_a_start_can_be_stopped_at_any_moment(seconds: float) -> None:
    with ServerProcess("--served-model-name", "endless") as server:
        server.log.wait_for(lambda line: "listening on" in line)
        time.sleep(seconds)
        started = time.monotonic()
        server.send_signal(signal.SIGTERM)
        assert server.wait_exit() == 0
        assert time.monotonic() - started < AT_ONCE_SECONDS


def test_health_is_answered_before_anything_heavy_could_have_been_loaded() -> None:
    """Takes under 1 s on a quiet machine; 3 s allow for a busy one, or one that compiles bytecode first."""
    started = time.monotonic()
    with ServerProcess("--served-model-name", "endless", is_fresh=True) as server:
        server.log.wait_for(lambda line: "listening on" in line)
        assert server.ask("GET", "/healthz").status == 200
        assert min(time.monotonic() - started, server.cpu_seconds()) < 3


def test_nothing_heavy_is_loaded_when_health_is_first_answered() -> None:
    with ServerProcess("--served-model-name", "endless", is_fresh=True) as server:
        server.log.wait_for(lambda line: "listening on" in line)
        assert server.ask("GET", "/healthz").status == 200
        loaded = server.native_packages()
    assert "msgspec" in loaded, "the list is read"
    assert loaded.isdisjoint(HEAVY)


def test_too_few_files_for_its_threads_are_one_line_and_exit_code_1() -> None:
    with ServerProcess("--max-running", "100", files_limit=300) as server:
        assert server.wait_exit() == 1
    (line,) = server.log.seen
    assert line.startswith("levserve: error: ") and "532 HTTP threads" in line and "300" in line


def test_clients_that_keep_their_connections_open_do_not_hold_up_the_exit() -> None:
    with ServerProcess("--max-running", "8").wait_ready() as server:
        clients = [server.start_completion("t3", max_tokens=2) for _ in range(8)]
        server.send_signal(signal.SIGTERM)
        assert [client.receive().status for client in clients] == [200] * 8
        # All together take 2 s; one after the other they would take 16 s, which is more than we wait.
        assert server.wait_exit() == 0
        for client in clients:
            client.close()


def test_a_worker_whose_arbiter_is_gone_leaves_even_if_a_thread_is_stuck() -> None:
    with ServerProcess(*SMALL, "--drain-seconds", "600").wait_ready() as server:
        client = server.start_completion("t8")
        server.send_signal(signal.SIGKILL)
        server.wait_end()
        client.close()


def test_an_interrupt_ends_running_requests_at_once() -> None:
    with ServerProcess(*SMALL).wait_ready() as server:
        blocking = server.start_completion("t4")
        server.send_signal(signal.SIGINT)
        assert blocking.receive().status == 503
        blocking.close()
        assert server.wait_exit() == 0


def test_a_server_that_still_loads_says_so_and_leaves_when_told() -> None:
    with ServerProcess("--served-model-name", "endless") as server:
        server.log.wait_for(lambda line: "listening on" in line)
        assert server.ask("GET", "/healthz").status == 200
        ready = server.ask("GET", "/readyz")
        assert (ready.status, ready.json) == (503, {"status": "loading", "progress": "starting"})
        refused = server.complete("t17")
        assert (refused.status, refused.headers["retry-after"]) == (503, "5")
        assert server.ask("GET", "/v1/models").status == 503
        server.send_signal(signal.SIGTERM)
        assert server.wait_exit() == 0


def test_a_device_that_dies_tells_its_clients_and_ends_the_process_with_70() -> None:
    with ServerProcess(*SMALL).wait_ready() as server:
        streaming = server.start_completion("t6", stream=True)
        events = streaming.stream()
        next(events)
        assert server.complete("t5").status == 500
        started = time.monotonic()
        health = server.ask("GET", "/healthz")
        assert (health.status, health.json) == (503, {"status": "failed"})
        error, done = events
        assert json.loads(error)["error"]["type"] == "server_error"
        assert done == "[DONE]"
        assert server.wait_exit() == 70
        assert time.monotonic() - started < AT_ONCE_SECONDS
        streaming.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_worker_that_is_killed_ends_the_server_with_70(number: signal.Signals) -> None:
    with ServerProcess(*SMALL).wait_ready() as server:
        os.kill(server.worker_pid, number)
        assert server.wait_exit() == 70


@pytest.mark.parametrize("to_group", [False, True])
def test_signals_that_would_start_a_second_worker_are_ignored(to_group: bool) -> None:
    with ServerProcess(*SMALL).wait_ready() as server:
        worker = server.worker_pid
        for number in (signal.SIGHUP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGUSR1):
            server.send_signal(number, to_group=to_group)
            server.log.wait_for(lambda line: "signal ignored" in line)
        server.send_signal(signal.SIGWINCH, to_group=to_group)
        assert server.complete("t17", max_tokens=1).json["choices"][0]["text"] == " t18"
        assert server.worker_pid == worker


@pytest.mark.parametrize("name, code", [("broken", 2), ("missing", 1)])
def test_a_model_that_cannot_start_ends_the_server_with_one_line(name: str, code: int) -> None:
    with ServerProcess("--served-model-name", name) as server:
        assert server.wait_exit() == code
    lines = [line for line in server.log.seen if "listening on" not in line and "settings: " not in line]
    assert lines == [f"levserve: error: the model is {name}"]


def test_a_port_in_use_is_one_line_and_exit_code_1() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with ServerProcess("--port", str(port)) as server:
            assert server.wait_exit() == 1
    assert server.log.seen == [f"levserve: error: cannot listen on 127.0.0.1:{port}: Address already in use"]


def test_a_model_that_is_nowhere_is_found_out_before_anything_starts() -> None:
    with ServerProcess("--model", "/nowhere/at/all") as server:
        assert server.wait_exit() == 2
    (line,) = server.log.seen
    assert line.startswith("levserve: error: ") and "/nowhere/at/all" in line


def test_a_ready_server_shows_a_curl_line_that_works() -> None:
    with ServerProcess(*SMALL, "--api-key", "secret-key-123").wait_ready() as server:
        line = server.log.wait_for(lambda line: " curl " in line)
        command = "curl " + line.partition(" curl ")[2]
        environ = os.environ | {"LEVSERVE_API_KEY": "secret-key-123"}
        output = subprocess.run(
            ["bash", "-c", f"{command} -s"], env=environ, capture_output=True, check=True, timeout=15
        ).stdout
        assert json.loads(output)["choices"][0]["message"]["role"] == "assistant"
        assert not any("secret-key-123" in line for line in server.log.seen)
