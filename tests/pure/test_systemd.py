"""Under systemd: what the server tells its supervisor, the socket it is given, and the unit files."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from levserve.engine.engine import Engine
from levserve.errors import StartupError
from levserve.observe.metrics import Metrics
from levserve.observe.systemd import Notifier, Supervision, take_supervision
from levserve.settings.parse import parse_settings
from levserve.settings.settings import Settings
from tests.fake_server import ServerProcess
from tests.waiting import PATIENCE_SECONDS

UNITS = Path(__file__).parents[2] / "systemd"
WATCHDOG_SECONDS = 1.2


class Systemd:
    """The other end of the notify socket."""

    def __init__(self, folder: Path) -> None:
        self.address = str(folder / "notify")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.address)
        self._socket.settimeout(PATIENCE_SECONDS)
        self.heard: list[str] = []

    @property
    def environ(self) -> dict[str, str]:
        return {"NOTIFY_SOCKET": self.address, "WATCHDOG_USEC": str(round(WATCHDOG_SECONDS * 1e6))}

    def hear(self) -> list[str]:
        """The lines of the next message."""
        lines = self._socket.recv(4096).decode().split("\n")
        self.heard += lines
        return lines

    def wait_for(self, wanted: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while wanted not in self.hear():
            assert time.monotonic() < deadline, f"no {wanted}, but {self.heard}"

    def wait_for_silence(self, seconds: float) -> None:
        """Waits until nothing has come for `seconds`."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        self._socket.settimeout(seconds)
        with suppress(TimeoutError):
            while self.hear():
                assert time.monotonic() < deadline, f"it goes on: {self.heard}"
        self._socket.settimeout(PATIENCE_SECONDS)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[Systemd]:
    systemd = Systemd(tmp_path)
    yield systemd
    systemd.close()


def test_a_server_tells_of_its_start_its_readiness_and_its_end(systemd: Systemd) -> None:
    with ServerProcess(environ=systemd.environ) as server:
        systemd.wait_for("READY=1")
        # This request waits for the drain, and the device shows signs of life.
        client = server.start_completion("t3", max_tokens=3)
        systemd.wait_for("WATCHDOG=1")
        server.send_signal(signal.SIGTERM)
        assert client.receive().status == 200
        client.close()
        systemd.wait_for("STOPPING=1")
        assert server.wait_exit() == 0
    assert [line for line in systemd.heard if "READY" in line or "unicorn" in line] == ["READY=1"], (
        "gunicorn says nothing"
    )
    assert (
        systemd.heard.index("READY=1") < systemd.heard.index("WATCHDOG=1") < systemd.heard.index("STOPPING=1")
    )


def test_a_long_start_asks_for_time_and_is_not_ready(systemd: Systemd) -> None:
    with ServerProcess("--served-model-name", "endless", environ=systemd.environ) as server:
        assert systemd.hear() == ["STATUS=starting", "EXTEND_TIMEOUT_USEC=30000000"]
        assert systemd.hear() == ["EXTEND_TIMEOUT_USEC=30000000"]
        server.send_signal(signal.SIGTERM)
        systemd.wait_for("STOPPING=1")
        assert server.wait_exit() == 0
    assert not {"READY=1", "WATCHDOG=1"} & set(systemd.heard)


def test_the_watchdog_hears_nothing_while_the_device_thread_is_stuck(systemd: Systemd) -> None:
    """The idle fake device shows no sign of life, just like a stuck one."""
    with ServerProcess(environ=systemd.environ) as server:
        systemd.wait_for("READY=1")
        systemd.wait_for_silence(2 * WATCHDOG_SECONDS)
        client = server.start_completion("t6", max_tokens=3)  # waits; the device shows signs of life
        systemd.wait_for("WATCHDOG=1")
        began = time.monotonic()
        for _ in range(3):
            systemd.wait_for("WATCHDOG=1")
        assert time.monotonic() - began < 3 * WATCHDOG_SECONDS, "a ping every third of the interval"
        client.close()


def test_a_failed_device_is_told_and_pings_no_more(systemd: Systemd) -> None:
    engine = Engine(max_inflight=1, metrics=Metrics())
    notifier = Notifier(Supervision(systemd.address, WATCHDOG_SECONDS), engine)
    engine.fail()
    notifier.start()
    systemd.wait_for("STATUS=failed")
    notifier.stop()
    assert "WATCHDOG=1" not in systemd.heard


def test_a_notify_socket_that_is_gone_harms_nobody(tmp_path: Path) -> None:
    with ServerProcess(environ={"NOTIFY_SOCKET": str(tmp_path / "nowhere")}).wait_ready() as server:
        assert server.complete("t17").status == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait_exit() == 0


def test_a_socket_that_systemd_opened_is_served() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with ServerProcess(listener=listener).wait_ready() as server:
            assert server.url == f"http://127.0.0.1:{port}"
            assert server.complete("t17", max_tokens=1).json["choices"][0]["text"] == " t18"
            server.send_signal(signal.SIGTERM)
            assert server.wait_exit() == 0


def test_a_socket_that_cannot_be_served_ends_the_start_with_one_line(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        with ServerProcess(listener=listener) as server:
            assert server.wait_exit() == 1
    assert [line for line in server.log.seen if "not a listening TCP socket" in line] == server.log.seen


@pytest.mark.parametrize(
    "environ, watchdog_seconds",
    [
        ({}, None),
        ({"WATCHDOG_USEC": "2500000"}, 2.5),
        ({"WATCHDOG_USEC": "2500000", "WATCHDOG_PID": str(os.getpid())}, 2.5),
        ({"WATCHDOG_USEC": "2500000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "soon", "LISTEN_FDS": "1", "LISTEN_PID": "1"}, None),
        ({"LISTEN_FDS": "0", "LISTEN_PID": str(os.getpid())}, None),
    ],
)
def test_only_what_is_meant_for_this_process_is_taken(
    environ: dict[str, str], watchdog_seconds: float | None
) -> None:
    left = environ | {"HOME": "/"}
    assert take_supervision(left) == Supervision("", watchdog_seconds, None)
    assert left == {"HOME": "/"}


def test_two_sockets_are_one_too_many() -> None:
    with pytest.raises(StartupError, match="passed 2 sockets"):
        take_supervision({"LISTEN_FDS": "2", "LISTEN_PID": str(os.getpid())})


@pytest.mark.systemd
@pytest.mark.parametrize("drop_in", [None, "gpu.conf", "hosts.conf"])
@pytest.mark.parametrize(
    "service, other", [("levserve", "levserve.socket"), ("levserve@", "levserve.target")]
)
def test_the_units_have_no_mistakes_and_a_small_surface(
    tmp_path: Path, service: str, other: str, drop_in: str | None
) -> None:
    """`systemd-analyze verify` exits 0 for unknown keys and bad values; it only complains."""
    for name in (f"{service}.service", other):
        (tmp_path / name).write_text(
            (UNITS / name).read_text().replace("/opt/levserve/bin/levserve", "/bin/true")
        )
    if drop_in:
        (tmp_path / f"{service}.service.d").mkdir()
        shutil.copy(UNITS / drop_in, tmp_path / f"{service}.service.d")
    started = "levserve@3" if service.endswith("@") else service
    units = [str(tmp_path / name) for name in (f"{started}.service", other)]
    verified = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *units], capture_output=True, text=True
    )
    assert (verified.returncode, verified.stderr) == (0, "")
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=25", "--no-pager", units[0]]
    secured = subprocess.run(command, capture_output=True, text=True)
    assert secured.returncode == 0, secured.stdout[-200:]


def read_unit(name: str) -> set[str]:
    lines = (UNITS / name).read_text().splitlines()
    return {line for line in lines if line and not line.startswith("#")}


def test_the_unit_for_many_devices_differs_in_nothing_but_its_instance() -> None:
    one, many = read_unit("levserve.service"), read_unit("levserve@.service")
    assert {line.partition("=")[0] for line in one ^ many} == {
        "Description",
        "PartOf",
        "ExecStart",
        "Environment",
        "User",
        "StateDirectory",
        "WantedBy",
    }
    assert one - many == {line for line in one - many if "multi-user" in line or "levserve" in line}


def test_ports_of_devices_are_counted_up() -> None:
    """Runs the unit's own shell line, as systemd passes it on for device 2."""
    (start,) = (line for line in read_unit("levserve@.service") if line.startswith("ExecStart="))
    script = start.partition("-c '")[2].removesuffix("'").replace("%i", "2").replace("$$", "$")
    script = script.replace("/opt/levserve/bin/levserve", "echo")
    told = subprocess.run(["/bin/sh", "-c", script], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["--config", "/etc/levserve/serve.ini", "--port", "8002"]


def test_the_unit_allows_what_xla_needs() -> None:
    settings = [
        line for line in (UNITS / "levserve.service").read_text().splitlines() if not line.startswith("#")
    ]
    assert "Type=notify" in settings and "NotifyAccess=all" in settings
    assert not any(line.startswith("MemoryDenyWriteExecute") for line in settings)


@pytest.mark.parametrize("unit", ["levserve.service", "levserve@.service"])
def test_the_unit_allows_the_sockets_that_collectives_need(unit: str) -> None:
    """NCCL and gloo list the network interfaces with getifaddrs(), which opens a netlink socket."""
    (families,) = [line for line in read_unit(unit) if line.startswith("RestrictAddressFamilies=")]
    allowed = set(families.partition("=")[2].split())
    assert allowed == {"AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK"}


def test_several_hosts_start_again_after_one_ended_in_order() -> None:
    """It ends the others with 0. Waiting for it must not use up the starts that the unit allows."""
    unit = read_unit("levserve.service")
    assert "Restart=always" in read_unit("hosts.conf") and "RestartPreventExitStatus=2" in unit
    limits = {
        key: int(value) for key, _, value in (line.partition("=") for line in unit) if "StartLimit" in key
    }
    assert Settings().hosts_timeout * limits["StartLimitBurst"] > limits["StartLimitIntervalSec"]


def test_the_example_settings_are_settings() -> None:
    settings = parse_settings(["--config", str(UNITS / "serve.ini")], {})
    assert (settings.log_format, settings.port) == ("json", 8000)
