"""The state of the server as health checks, metrics and systemd see it."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple, Protocol


class Phase(StrEnum):
    """A server goes loading -> ready -> draining, may fail in any phase, and never goes back.

    Of several hosts that serve a model only the first becomes ready; the others are following it then.
    """

    LOADING = "loading"
    READY = "ready"
    FOLLOWING = "following"
    DRAINING = "draining"
    FAILED = "failed"


class DeviceMemory(NamedTuple):
    """Bytes that jax may take of a device's own memory, and those of them that are free."""

    total: int
    free: int


class DeviceStatus(NamedTuple):
    """The device as its thread saw it a moment ago."""

    platform: str
    kind: str
    jax_version: str
    memory: DeviceMemory | None
    """None: the host's."""


class Health(Protocol):
    """What the engine says about itself; every member may be read from any thread."""

    progress: str

    @property
    def phase(self) -> Phase: ...

    @property
    def is_stalled(self) -> bool: ...

    def heartbeat_age(self) -> float: ...
