"""The models that this server knows: which are loaded, which are on their way, and which one goes to make room for another.

HTTP threads borrow a model by its name and hold it until their answer is written; what is held is never unloaded. The thread
`levserve-loader` loads and unloads, one model at a time, while the device thread goes on with those it has. With one model
given there is nothing to load: it is put here by the device thread and stays.

One lock guards the entries; nothing slow is done while it is held.
"""

from __future__ import annotations

import functools
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from levserve.device.sizing import human
from levserve.engine.engine import Engine
from levserve.engine.served_model import ServedModel
from levserve.errors import (
    BadRequest,
    Conflict,
    ModelNotFound,
    RetryLater,
    ServeError,
    StartupError,
    Unavailable,
)
from levserve.models.entry import Described, Entry, Failure, Reloaded, Resident, Status
from levserve.models.handle import ModelHandle
from levserve.observe.threads import LOADER_THREAD

log = logging.getLogger(__name__)

FAILED_SECONDS = 10.0
"""For so long a model that could not be loaded is not tried again: its clients would keep the disk busy for nothing."""
BUSY_SECONDS = 5.0
MAX_SHARES = 4
"""Into so many parts at most the memory for KV pages is planned, where nobody says how many models are to be loaded together."""
MAX_NAMES_TOLD = 20
JOIN_SECONDS = 1.0

Report = Callable[[str], None]
MakeRoom = Callable[[int, Callable[[], int]], int]
"""Takes the bytes a model needs at least and a way to ask how many are free; gives the bytes that it may take."""


class Loader(Protocol):
    """Does the work, on the loader's thread. `load` raises `StartupError`, or what `make_room` raises."""

    def names(self) -> Sequence[str]: ...

    def load(self, name: str, report: Report, make_room: MakeRoom) -> Resident: ...

    def unload(self, resident: Resident) -> None: ...


def model_not_found(name: str, known: Sequence[str]) -> ModelNotFound:
    told = ", ".join(f"'{one}'" for one in known[:MAX_NAMES_TOLD]) + (
        ", ..." if len(known) > MAX_NAMES_TOLD else ""
    )
    return ModelNotFound(f"The model '{name[:64]}' does not exist; this server has {told}.", param="model")


class Registry:
    """Every method may be called from any thread, but `put` and `stock` belong to the start."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._metrics = engine.metrics
        self._changed = threading.Condition()
        self._entries: dict[str, Entry] = {}
        self._default: str | None = None
        self._loader: Loader | None = None
        self._budget = 0
        self._max_loaded = 0
        self._jobs: queue.Queue[Callable[[], None] | None] = (
            queue.Queue()
        )  # one for each model that is asked for, and for each unload
        self._thread: threading.Thread | None = None
        self._is_closed = False
        engine.on_drain(self.close)

    @property
    def default(self) -> ServedModel:
        """The model that was loaded first, which serves requests that omit `model`; raises `Unavailable` until it is ready."""
        self.engine.require_loaded()
        resident = self._entries[self._default or ""].resident
        assert resident is not None
        return resident.model

    def stock(self, loader: Loader, *, budget: int = 0, max_loaded: int = 0) -> None:
        """Makes the loader's models known. All together may take `budget` bytes (0: nine tenths of what is free)."""
        self._loader = loader
        self._budget = budget
        self._max_loaded = max_loaded
        self.refresh()

    def publish(self, resident: Resident) -> None:
        """The first model is loaded: requests may come."""
        self.put(resident)
        self.engine.mark_ready()

    def put(self, resident: Resident) -> None:
        """Adds a model that is loaded already; the first one serves requests that omit `model`."""
        with self._changed:
            entry = self._entries.setdefault(resident.model.name, Entry(resident.model.name))
            self._default = self._default or entry.name
            self._shelve(entry, resident)

    def borrow(self, name: str | None = None, *, loads: bool = True, insists: bool = False) -> ModelHandle:
        """Holds a model, by default the first, and has it loaded if it is not; raises `ModelNotFound`.

        One that has just failed to load is not tried again unless the caller insists.
        """
        entry = self._entries.get(name or self._default or "")
        if entry is None:
            self.refresh()
        with self._changed:
            entry = self._entries.get(name or self._default or "")
            if entry is None:
                raise model_not_found(name or "", list(self._entries))
            if entry.status is not Status.LOADED:
                if not loads:
                    raise Conflict(f"The model '{entry.name}' is not loaded.")
                if insists or entry.failure is None or entry.failure.retry_at <= time.monotonic():
                    self._ask(entry)
            entry.num_handles += 1
            entry.last_used = time.monotonic()
        return ModelHandle(entry, self._changed, lambda: self._is_closed)

    def begin_load(self, name: str) -> None:
        """Has a model loaded that nobody waits for."""
        self.borrow(name).release()

    def unload(self, name: str) -> None:
        """Frees a model's memory; raises `Conflict` where it is in use, and does nothing where it is not loaded."""
        with self._changed:
            entry = self._entries.get(name)
            if entry is None:
                raise model_not_found(name, list(self._entries))
            if self._loader is None:
                raise Conflict("This server was given one model, which stays loaded.")
            if entry.status is Status.LOADING:
                raise Conflict(f"The model '{name}' is loading ({entry.progress}); please wait for it.")
            if entry.num_handles:
                raise Conflict(
                    f"The model '{name}' has {entry.num_handles} requests running or waiting; it is not unloaded."
                )
            if entry.status is Status.LOADED:
                entry.status = Status.UNLOADING
                self._put_job(functools.partial(self._unload, entry))
            self._changed.wait_for(lambda: entry.status is not Status.UNLOADING or self._is_closed)

    def refresh(self) -> None:
        """Looks again which models there are: a folder of them may have changed."""
        names = list(self._loader.names()) if self._loader is not None else []
        with self._changed:
            for name in names:
                self._entries.setdefault(name, Entry(name))
            gone = [
                entry
                for entry in self._entries.values()
                if entry.name not in names and self._loader is not None
            ]
            for entry in gone:
                if entry.status is Status.LOADABLE and not entry.num_handles:
                    del self._entries[entry.name]

    def describe(self) -> list[Described]:
        """Every model, as they became known."""
        now = time.monotonic()
        with self._changed:
            return [
                Described(
                    entry.name,
                    entry.status,
                    entry.progress,
                    entry.failure.message if entry.failure is not None else None,
                    entry.resident,
                    entry.num_handles,
                    now - entry.last_used if entry.last_used is not None else None,
                )
                for entry in self._entries.values()
            ]

    def loaded_names(self) -> list[str]:
        with self._changed:
            return [entry.name for entry in self._entries.values() if entry.status is Status.LOADED]

    def reload(
        self, name: str = "", *, model: str = "", checkpoint_path: str = "", revision: str = ""
    ) -> Reloaded:
        """Reads weights on the calling thread and has them swapped in; raises and changes nothing if they do not fit.

        `name` says which of the loaded models gets them, where there are several.
        """
        self.engine.require_ready()
        loaded = self.loaded_names()
        if not name and len(loaded) > 1:
            names = ", ".join(loaded)
            raise BadRequest(
                f"Several models are loaded; say in 'name' which one to reload: {names}.", param="name"
            )
        with self.borrow(name or next(iter(loaded), None), loads=False) as handle:
            reloader = handle.resident.reloader
            if reloader is None:
                raise Unavailable("This server cannot reload.", retry_after_seconds=60.0)
            return reloader.reload(model=model, checkpoint_path=checkpoint_path, revision=revision)

    def begin_reload(self) -> threading.Thread:
        """Reloads everything that is loaded on a thread of its own, for a signal; the outcome is in the log."""
        thread = threading.Thread(target=self._reload_all, name="levserve-reload", daemon=True)
        thread.start()
        return thread

    def _reload_all(self) -> None:
        for name in self.loaded_names() or [""]:
            try:
                self.reload(name)
            except StartupError:
                pass  # the reloader has logged it
            except ServeError as error:
                log.warning("reload: %s", error)
            except Exception:
                log.exception("the reload failed")

    def close(self) -> None:
        """Wakes everyone who waits for a model, with an error, and lets the loader leave after what it is doing."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._jobs.put(None)

    def join(self) -> None:
        """Waits for the loader after `close`, but not long: one that is inside a compile cannot be told to stop."""
        if self._thread is not None:
            self._thread.join(JOIN_SECONDS)

    def make_room(self, name: str, needed: int, free_bytes: Callable[[], int]) -> int:
        """Unloads the least recently used until `needed` bytes fit; gives how many the model may take, of what is left its share.

        Raises `StartupError` for what never fits, and `Unavailable` where all that could go is in use.
        """
        while True:
            with self._changed:
                held = [
                    entry
                    for entry in self._entries.values()
                    if entry.resident is not None and entry.name != name
                ]
                used = sum(entry.resident.num_bytes for entry in held if entry.resident is not None)
                budget = self._budget or (free_bytes() + used) * 9 // 10
                if needed > budget:
                    asked = "--models-memory" if self._budget else "the machine"
                    raise StartupError(
                        f"it needs {human(needed)}, and {asked} has {human(budget)} for all models together"
                    )
                if used + needed <= budget and (not self._max_loaded or len(held) < self._max_loaded):
                    shares = max((self._max_loaded or min(len(self._entries), MAX_SHARES)) - len(held), 1)
                    return needed + (budget - used - needed) // shares
                idle = [entry for entry in held if entry.status is Status.LOADED and not entry.num_handles]
                if not idle:
                    raise Unavailable(
                        f"There is no room for the model '{name}': {', '.join(entry.name for entry in held)} "
                        f"take {human(used)} of {human(budget)} and have requests running or waiting; please try again.",
                        retry_after_seconds=BUSY_SECONDS,
                    )
                victim = min(idle, key=lambda entry: entry.last_used or -math.inf)
                victim.status = Status.UNLOADING
            log.info("%s: unloaded to make room for %s", victim.name, name)
            self._unload(victim)

    def _ask(self, entry: Entry) -> None:
        if entry.is_asked or self._is_closed or self._loader is None:
            return
        entry.is_asked = True
        entry.failure = None
        entry.progress = "waiting for the loader"
        if entry.status is Status.LOADABLE:
            entry.status = Status.LOADING
        self._put_job(functools.partial(self._load, entry))

    def _put_job(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=LOADER_THREAD, daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None and not self._is_closed:
            job()

    def _load(self, entry: Entry) -> None:
        def report(progress: str) -> None:
            entry.progress = progress
            log.info("%s: %s", entry.name, progress)

        assert self._loader is not None
        start = time.monotonic()
        resident, failure = None, None
        try:
            resident = self._loader.load(entry.name, report, functools.partial(self.make_room, entry.name))
        except RetryLater as error:
            failure = Failure(error.message, time.monotonic(), None)  # whoever asks next may be luckier
        except StartupError as error:
            told = f"The model '{entry.name}' cannot be loaded: {error}."
            failure = Failure(told, time.monotonic() + FAILED_SECONDS, "model_not_loadable")
        except Exception:
            log.exception("%s: loading failed", entry.name)
            told = f"The model '{entry.name}' failed to load; the server's log says why."
            failure = Failure(told, time.monotonic() + FAILED_SECONDS, "model_not_loadable")
        self._metrics.model_loads.labels("done" if failure is None else "failed").inc()
        if failure is not None:
            log.error("%s", failure.message)
        with self._changed:
            entry.is_asked = False
            entry.failure = failure
            if resident is not None:
                log.info(
                    "%s: loaded in %.1f s, %s",
                    entry.name,
                    time.monotonic() - start,
                    human(resident.num_bytes),
                )
                self._shelve(entry, resident)
            else:
                entry.status, entry.progress = Status.LOADABLE, ""
            self._changed.notify_all()

    def _shelve(self, entry: Entry, resident: Resident) -> None:
        entry.status, entry.resident, entry.progress = Status.LOADED, resident, "ready"
        entry.last_used = time.monotonic()
        self._note_change()

    def _unload(self, entry: Entry) -> None:
        """The entry says UNLOADING already, so nobody is given the model any more."""
        assert self._loader is not None and entry.resident is not None
        try:
            self._loader.unload(entry.resident)
        except Exception:
            log.exception("%s: unloading failed; its memory may not be free", entry.name)
        self._metrics.model_unloads.inc()
        with self._changed:
            entry.resident = None
            entry.status = Status.LOADING if entry.is_asked else Status.LOADABLE
            entry.progress = entry.progress if entry.is_asked else ""
            self._note_change()
            self._changed.notify_all()

    def _note_change(self) -> None:
        models = [entry.resident.model for entry in self._entries.values() if entry.resident is not None]
        self._metrics.models_loaded.set(len(models))
        self.engine.note_models(models)
