"""How the server is: the phase of its life, and what anyone who reports on it may ask."""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol


class Phase(StrEnum):
    """Phases go loading -> ready -> draining, or to failed from anywhere, and never back."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class Health(Protocol):
    """What the engine tells of itself; every member may be read from any thread."""

    progress: str

    @property
    def phase(self) -> Phase: ...

    @property
    def is_stalled(self) -> bool: ...

    def heartbeat_age(self) -> float: ...
