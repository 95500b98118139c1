"""What the server runs on, for /health and /admin/stats. HTTP threads answer without asking the device."""

from __future__ import annotations

from msgspec import Struct

from levserve import __version__
from levserve.device.host import free_memory, total_memory
from levserve.models.registry import Registry


class DeviceMemory(Struct, frozen=True):
    """In bytes; on a CPU the host's memory, or its control group's if that has less."""

    total: int
    free: int


class DeviceReport(Struct, frozen=True):
    platform: str
    """cpu, gpu or tpu."""
    kind: str
    """The device's name, as its maker gives it."""
    memory: DeviceMemory


class ServerReport(Struct, frozen=True):
    """Fields that are not known until the first model is loaded are null until then."""

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
    # A CPU's memory is the host's, which any thread may read; a GPU's or TPU's was read by the device thread.
    memory = status.memory or (total_memory(), free_memory())
    device = DeviceReport(status.platform, status.kind, DeviceMemory(*memory))
    return ServerReport(__version__, status.jax_version, device, backend)
