"""What the server runs on, for /health and /admin/stats. HTTP threads answer without asking the device."""

from __future__ import annotations

from msgspec import Struct

from levserve import __version__
from levserve.device.host import free_memory, total_memory
from levserve.models.registry import Registry


class DeviceMemory(Struct, frozen=True):
    """Bytes; on a CPU the host's, or its control group's if that has less."""

    total: int
    free: int


class DeviceReport(Struct, frozen=True):
    platform: str
    """cpu, gpu or tpu."""
    kind: str
    """The device by its maker's name."""
    memory: DeviceMemory


class ServerReport(Struct, frozen=True):
    """Null where nothing is known before the first model is loaded."""

    version: str
    jax_version: str | None
    device: DeviceReport | None
    backend: str | None
    """Which kernels compute the first loaded model."""


def report_server(registry: Registry) -> ServerReport:
    status = registry.engine.device
    residents = [one.resident for one in registry.describe() if one.resident is not None]
    backend = residents[0].backend or None if residents else None
    if status is None:
        return ServerReport(__version__, None, None, backend)
    # A CPU's memory is the host's, which any thread may look at; a device's was noted by its own thread.
    memory = status.memory or (total_memory(), free_memory())
    device = DeviceReport(status.platform, status.kind, DeviceMemory(*memory))
    return ServerReport(__version__, status.jax_version, device, backend)
