"""What a device lacks is reported in words that a person can act on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from levserve.device import missing


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of jax plugins that replaces the installed ones."""
    folder = tmp_path / "jax_plugins"
    folder.mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "jax_plugins", raising=False)
    return folder


def add_plugin(folder: Path, name: str) -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").touch()


def test_a_gpu_without_jaxs_plugin_is_told_what_to_install(plugins: Path) -> None:
    add_plugin(plugins, "xla_rocm")
    assert "extra cuda13" in (missing.find_missing("gpu") or "")


def test_a_gpu_without_a_driver_is_told_how_a_container_gets_it(
    plugins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_plugin(plugins, "xla_cuda13")
    monkeypatch.setattr(missing, "CUDA_DRIVER", "libdriver-that-is-not-here.so.1")
    said = missing.find_missing("gpu") or ""
    assert "driver" in said and "--gpus all" in said


def test_nothing_is_said_where_plugin_and_driver_are_there(
    plugins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_plugin(plugins, "xla_cuda13")
    monkeypatch.setattr(missing, "CUDA_DRIVER", "libc.so.6")
    assert missing.find_missing("gpu") is None


@pytest.mark.parametrize("device", ["auto", "cpu", "rocm", "tpu"])
def test_other_devices_are_left_to_jax(plugins: Path, device: str) -> None:
    assert missing.find_missing(device) is None


def test_a_lock_that_libtpu_cannot_write_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "The TPU is already in use by another process."
    monkeypatch.setattr(missing, "TPU_LOCK_FOLDER", str(tmp_path))
    assert missing.explain("tpu", said) == said
    monkeypatch.setattr(missing, "TPU_LOCK_FOLDER", str(tmp_path / "nowhere"))
    assert "lock" in missing.explain("tpu", said) and missing.explain("gpu", said) == said
