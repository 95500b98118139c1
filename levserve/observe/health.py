"""The state of the server as health checks, metrics and systemd see it."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple, Protocol


class Phase(StrEnum):
    """A server goes loading -> ready -> draining, may fail in any phase, and never goes back.

    When several hosts serve one model, only the first becomes ready; the others then follow it.
    """

    LOADING = "loading"
    READY = "ready"
    FOLLOWING = "following"
    DRAINING = "draining"
    FAILED = "failed"


class DeviceMemory(NamedTuple):
    """The bytes of a device's own memory that jax may take, and how many of them are free."""

    total: int
    free: int


class DeviceStatus(NamedTuple):
    """The device as its thread saw it a moment ago."""

    platform: str
    kind: str
    jax_version: str
    memory: DeviceMemory | None
    """None if the device uses the host's memory."""


class Health(Protocol):
    """What the engine says about itself; every member may be read from any thread."""

    progress: str

    @property
    def phase(self) -> Phase: ...

    @property
    def is_stalled(self) -> bool: ...

    def heartbeat_age(self) -> float: ...
