"""What the device thread notes of its device, for health checks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax

from levserve.device.platform import read_status


def test_a_device_with_memory_of_its_own_tells_what_jax_may_take_and_what_is_free() -> None:
    stats = {"bytes_limit": 100, "bytes_in_use": 60}
    device: Any = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", memory_stats=lambda: stats)
    status = read_status(device)
    assert (status.platform, status.kind, status.memory) == ("gpu", "NVIDIA H200", (100, 40))


def test_a_cpu_shares_the_hosts_memory() -> None:
    status = read_status(jax.devices("cpu")[0])
    assert (status.platform, status.jax_version, status.memory) == ("cpu", jax.__version__, None)
    assert status.kind
