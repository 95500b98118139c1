"""What jax says of the device that serves, asked on the device thread alone and left for others to read."""

from __future__ import annotations

import jax

from levserve.device.host import cpu_name
from levserve.device.platform import free_bytes
from levserve.observe.health import DeviceMemory, DeviceStatus


def read_status(device: jax.Device) -> DeviceStatus:
    """Takes microseconds: the allocator knows the numbers, and the device is not asked."""
    if device.platform == "cpu":
        return DeviceStatus("cpu", cpu_name(), jax.__version__, None)
    free = free_bytes(device)
    total = int(device.memory_stats()["bytes_limit"])
    return DeviceStatus(device.platform, device.device_kind, jax.__version__, DeviceMemory(total, free))
