"""A request's hold on a model, until its answer is written; a model that is held is never unloaded."""

from __future__ import annotations

import threading
from collections.abc import Callable

from levserve.engine.served_model import ServedModel
from levserve.errors import Unavailable
from levserve.models.entry import Entry, Resident, Status

LOADING_SECONDS = 5.0


class ModelHandle:
    """Belongs to one HTTP thread; any thread may call `abandon`. `changed` is the registry's lock."""

    def __init__(
        self,
        entry: Entry,
        name: str,
        changed: threading.Condition,
        is_closed: Callable[[], bool],
        *,
        is_background: bool = False,
    ) -> None:
        self.name = name
        """The name of the model that the request means, which may be an alias."""
        self._entry = entry
        self._changed = changed
        self._is_closed = is_closed
        self._is_background = is_background
        self._is_held = True
        self.is_abandoned = False

    def wait(self, timeout_seconds: float | None) -> bool:
        """Waits until the model is loaded or will not be; whether that was decided in time."""
        with self._changed:
            return self._changed.wait_for(self._is_decided, timeout_seconds)

    @property
    def model(self) -> ServedModel:
        """The model; raises `Unavailable` while it is loading or if it could not be loaded."""
        return self.resident.model

    @property
    def resident(self) -> Resident:
        entry, failure = self._entry, self._entry.failure
        if entry.resident is not None and entry.status is Status.LOADED:
            return entry.resident
        if self._is_closed():
            raise Unavailable(
                "The server is shutting down; please try another one.", retry_after_seconds=10.0
            )
        if failure is not None:
            raise failure.to_error()
        raise Unavailable(
            f"The model '{entry.name}' is still loading ({entry.progress}).",
            retry_after_seconds=LOADING_SECONDS,
        )

    def abandon(self) -> None:
        """Wakes the thread that waits, because its client has gone."""
        with self._changed:
            self.is_abandoned = True
            self._changed.notify_all()

    def release(self) -> None:
        with self._changed:
            if self._is_held:
                self._is_held = False
                self._entry.release(is_background=self._is_background)

    def __enter__(self) -> ModelHandle:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def _is_decided(self) -> bool:
        return not self._entry.is_asked or self.is_abandoned or self._is_closed()
