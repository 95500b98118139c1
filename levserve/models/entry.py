"""One model as the registry knows it: its status, the memory that it takes, or why it could not be loaded."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from levserve.engine.served_model import ServedModel
from levserve.errors import Unavailable

NOT_LOADABLE = "model_not_loadable"
"""The code of an error that says why a model could not be loaded."""
RETURN_SECONDS = 15.0
"""A model that batches gave up for a live request is kept free of them this long, so that it can be unloaded
when the client tries again."""


class Status(StrEnum):
    LOADABLE = "loadable"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"


class Counts(NamedTuple):
    """What a loaded model is doing."""

    running: int
    waiting: int
    pages_used: int | None = None
    pages_total: int | None = None
    """None for a model without a KV cache."""


@dataclass(frozen=True, slots=True)
class Reloaded:
    """What a reload did, and how far the new weights are from the old ones on the probe's text.

    What the old weights could not score, because they compute values that are not finite, is None.
    """

    model: str
    path: str
    load_seconds: float
    swap_seconds: float
    probe_tokens: int
    max_logprob_difference: float | None
    mean_logprob: float
    mean_logprob_before: float | None


@dataclass(frozen=True, slots=True)
class SwappedWeights:
    """What loading weights from memory took."""

    convert_seconds: float
    """Converting the arrays to the form that is served, in the host's memory; requests run meanwhile."""
    wait_seconds: float
    """Waiting until the work that had begun before was done."""
    swap_seconds: float
    """Copying to the device, while nothing runs."""
    mean_logprob: float
    """Of a fixed text's tokens; if far below that of other weights of the model, conversion went wrong."""
    mean_logprob_before: float | None

    @property
    def seconds(self) -> float:
        return self.convert_seconds + self.wait_seconds + self.swap_seconds


class Reloader(Protocol):
    """Swaps newer weights into a loaded model; see `reload.py`."""

    def load(
        self, arrays: Mapping[str, Any], hold_back: Callable[[], AbstractContextManager[None]]
    ) -> SwappedWeights: ...

    def reload(self, *, model: str = "", checkpoint_path: str = "", revision: str = "") -> Reloaded: ...

    def close(self) -> None:
        """Called when the model is unloaded: the cache may then delete its files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """A loaded model: what requests need of it, and the memory it takes."""

    model: ServedModel
    weight_bytes: int = 0
    kv_bytes: int = 0
    backend: str = ""
    """Which kernels compute it."""
    reloader: Reloader | None = None
    counts: Callable[[], Counts] | None = None

    @property
    def num_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes


class Failure(NamedTuple):
    """Why a model could not be loaded, for every request that waits for it."""

    message: str
    retry_at: float
    code: str | None

    def to_error(self) -> Unavailable:
        error = Unavailable(self.message, retry_after_seconds=max(self.retry_at - time.monotonic(), 1.0))
        error.code = self.code or error.code
        return error


@dataclass(slots=True, eq=False)
class Entry:
    """One known model; changed under the registry's lock."""

    name: str
    status: Status = Status.LOADABLE
    resident: Resident | None = None
    progress: str = ""
    failure: Failure | None = None
    num_handles: int = 0
    num_background: int = 0
    """How many of the handles belong to batches."""
    is_asked: bool = False
    """Whether it waits for the loader or is being loaded."""
    last_used: float | None = None
    last_live: float = -math.inf
    """When a request other than a batch's last used it."""
    given_up_until: float = -math.inf
    """Until then batches may not use it: a live request needs its memory for another model."""
    aliases: tuple[str, ...] = ()

    @property
    def is_background(self) -> bool:
        """Whether only batches use it or wait for it."""
        return 0 < self.num_handles == self.num_background

    def hold(self, *, is_background: bool) -> None:
        self.num_handles += 1
        self.num_background += is_background
        self._note_use(is_background)

    def release(self, *, is_background: bool) -> None:
        self.num_handles -= 1
        self.num_background -= is_background
        self._note_use(is_background)
        if self.given_up_until == math.inf and not self.num_background:
            self.given_up_until = time.monotonic() + RETURN_SECONDS

    def give_up(self) -> None:
        """Has batches leave it: they begin nothing on it until what they run has ended, and a while after."""
        self.given_up_until = math.inf

    def _note_use(self, is_background: bool) -> None:
        self.last_used = time.monotonic()
        if not is_background:
            self.last_live = self.last_used


class ModelInfo(NamedTuple):
    """A model at one moment, for lists of models."""

    name: str
    status: Status
    progress: str
    error: str | None
    resident: Resident | None
    num_handles: int
    idle_seconds: float | None
    aliases: tuple[str, ...]
