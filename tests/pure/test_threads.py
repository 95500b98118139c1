"""How many CPU threads compute."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from levserve.device import threads


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PJRT_NPROC", "NPROC"):
        monkeypatch.setenv(name, "")  # so that it is put back at the end


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("max 100000", None), ("200000 100000", 2), ("150000 100000", 2), ("1000 100000", 1), ("", None)],
)
def test_a_containers_limit_is_rounded_up_to_whole_cpus(tmp_path: Path, text: str, cpus: int | None) -> None:
    path = tmp_path / "cpu.max"
    path.write_text(text)
    assert threads.allowed_cpus(path) == cpus
    assert threads.allowed_cpus(tmp_path / "missing") is None


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
