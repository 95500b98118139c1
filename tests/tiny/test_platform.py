"""The device that is asked for is the one that serves, or the server does not start."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from levserve.device.platform import open_device
from levserve.errors import StartupError
from levserve.settings.parse import parse_settings


@pytest.fixture(autouse=True)
def platforms(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What jax is told to look for; the process of these tests has only a CPU, and jax is set up already."""
    told: list[Any] = []
    monkeypatch.setattr(jax.config, "update", lambda name, value: told.append(value))
    return told


@pytest.mark.parametrize("device", ["gpu", "rocm", "tpu"])
def test_a_device_that_is_missing_is_refused_by_name(device: str, platforms: list[str]) -> None:
    settings = parse_settings(["--device", device, "--compile-cache", "false"], {})
    with pytest.raises(StartupError, match=f"--device {device}: no such device here"):
        open_device(settings)
    assert len(platforms) == 1 and platforms[0].endswith(",cpu")


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_a_cpu_is_found_where_it_will_do(device: str) -> None:
    settings = parse_settings(["--device", device, "--compile-cache", "false"], {})
    assert open_device(settings).platform == "cpu"
