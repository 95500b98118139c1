"""One model as the library keeps it: how far it is, what it takes when it is loaded, and why it could not be."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from levserve.errors import Unavailable

if TYPE_CHECKING:
    from levserve.engine.engine import ServedModel
    from levserve.engine.reload import Reloader


class Status(StrEnum):
    LOADABLE = "loadable"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"


class Counts(NamedTuple):
    """What a loaded model is doing."""

    running: int
    waiting: int
    pages_used: int
    pages_total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """A loaded model: what requests need of it, and what it takes."""

    model: ServedModel
    max_tokens: int = 0
    """Of admitted requests, as far as this model goes."""
    weight_bytes: int = 0
    kv_bytes: int = 0
    reloader: Reloader | None = None
    counts: Callable[[], Counts] | None = None

    @property
    def num_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes


class Failure(NamedTuple):
    """Why a model did not get loaded, for everyone who waits for it."""

    message: str
    retry_at: float
    code: str | None

    def to_error(self) -> Unavailable:
        error = Unavailable(self.message, retry_after_seconds=max(self.retry_at - time.monotonic(), 1.0))
        error.code = self.code or error.code
        return error


@dataclass(slots=True, eq=False)
class Entry:
    """One known model; changes under the library's lock."""

    name: str
    status: Status = Status.LOADABLE
    resident: Resident | None = None
    progress: str = ""
    failure: Failure | None = None
    num_loans: int = 0
    is_asked: bool = False
    """Whether it waits for the loader, or is being loaded."""
    last_used: float | None = None


class Described(NamedTuple):
    """How a model is at one moment, for those who list them."""

    name: str
    status: Status
    progress: str
    error: str | None
    resident: Resident | None
    num_loans: int
    idle_seconds: float | None
