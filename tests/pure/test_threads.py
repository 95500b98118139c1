"""How many CPU threads are used for computing."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

import levserve
from levserve.device import threads
from levserve.observe import control_group
from levserve.observe.control_group import allowed_cpus, num_cpus

PACKAGE = Path(levserve.__file__).parent
COUNT = re.compile(r"sched_getaffinity|cpu_count")


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PJRT_NPROC", "NPROC"):
        monkeypatch.setenv(name, "")  # so that monkeypatch restores it at the end


def allowed(folder: Path, own: str, files: dict[str, str]) -> int | None:
    for name, text in ({"self/cgroup": own} | files).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return allowed_cpus(folder, folder)


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("max 100000", None), ("200000 100000", 2), ("150000 100000", 2), ("1000 100000", 1), ("", None)],
)
def test_a_containers_limit_is_rounded_up_to_whole_cpus(tmp_path: Path, text: str, cpus: int | None) -> None:
    assert allowed_cpus(tmp_path, tmp_path) is None
    assert allowed(tmp_path, "0::/\n", {"cpu.max": text}) == cpus


def test_of_groups_in_groups_the_tightest_limit_counts(tmp_path: Path) -> None:
    files = {
        "a.slice/cpu.max": "300000 100000",
        "a.slice/b.service/cpu.max": "max 100000",
        "a.slice/other/cpu.max": "100000 100000",
    }
    assert allowed(tmp_path, "0::/a.slice/b.service\n", files) == 3
    assert allowed(tmp_path, "0::/of/the/host/not/seen/here\n", {"cpu.max": "400000 100000"}) == 4


def test_limits_of_the_first_version_of_control_groups_count(tmp_path: Path) -> None:
    own = "4:memory:/m\n2:cpu,cpuacct:/docker/x\n0::/\n"
    files = {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}
    assert allowed(tmp_path, own, files) is None
    files = {"cpu/docker/x/cpu.cfs_quota_us": "250000\n", "cpu/docker/x/cpu.cfs_period_us": "100000\n"}
    assert allowed(tmp_path, own, files) == 3


def test_one_function_says_how_many_cpus_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(control_group, "_allowed_cpus", lambda: 2)
    assert num_cpus() == 2
    monkeypatch.setattr(control_group, "_allowed_cpus", lambda: None)
    assert num_cpus() == 64
    monkeypatch.setenv("NPROC", "5")
    assert num_cpus() == 5
    monkeypatch.setenv("PJRT_NPROC", "3")
    assert num_cpus() == 3
    asking = {path.name for path in PACKAGE.rglob("*.py") if COUNT.search(path.read_text())}
    assert asking == {"control_group.py", "threads.py"}, "threads.py sets the variable, and logs both numbers"


def test_the_number_that_is_asked_for_overrides_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_NPROC", "7")
    threads.set_threads(3)
    assert os.environ["PJRT_NPROC"] == "3"


@pytest.mark.parametrize("variable", ["PJRT_NPROC", "NPROC"])
def test_without_a_number_the_environment_stays(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "7")
    monkeypatch.setattr(threads, "allowed_cpus", lambda: 1)
    threads.set_threads(0)
    assert os.environ["PJRT_NPROC"] == ("7" if variable == "PJRT_NPROC" else "")


@pytest.mark.parametrize(("allowed", "chosen"), [(None, ""), (1, "1"), (10**6, "")])
def test_without_either_a_containers_limit_counts_if_it_is_lower(
    monkeypatch: pytest.MonkeyPatch, allowed: int | None, chosen: str
) -> None:
    monkeypatch.setattr(threads, "allowed_cpus", lambda: allowed)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    threads.set_threads(0)
    assert os.environ["PJRT_NPROC"] == chosen
