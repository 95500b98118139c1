"""The models that this server knows: which are loaded, which are loading, and which is unloaded for another.

HTTP threads borrow a model by its name and hold it until their answer is written; a model that is held is
never unloaded. The thread `levserve-loader` loads and unloads, one model at a time, while the device thread
serves the others. A server with one model has no loader: the device thread adds its model at start, and it
stays.

Batches borrow in the background. They hold a model for as long as they run, so they give it up when a live
request needs its room; and they take no room that live requests used a moment ago.

A lock guards the entries; nothing slow is done while it is held.
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
    RetryLater,
    ServeError,
    StartupError,
    Unavailable,
)
from levserve.models.entry import NOT_LOADABLE, Entry, Failure, ModelInfo, Reloaded, Resident, Status
from levserve.models.handle import ModelHandle
from levserve.models.names import ambiguous_model, model_not_found, similar_names
from levserve.observe.threads import LOADER_THREAD

log = logging.getLogger(__name__)

FAILED_SECONDS = 10.0
"""How long a model that failed to load is not tried again: else its clients would keep the disk busy."""
BUSY_SECONDS = 5.0
QUIET_SECONDS = 30.0
"""Batches have a model unloaded for another only if no live request used it for this long: else both would be
loaded again and again."""
MAX_SHARES = 4
"""The most models that memory is shared between, if --max-loaded-models does not say how many."""
JOIN_SECONDS = 1.0

Report = Callable[[str], None]
MakeRoom = Callable[[int, Callable[[], int]], int]
"""Takes the bytes that a model needs at least, and a function that returns the free bytes; returns the bytes
that the model may take."""


class Loader(Protocol):
    """Does the work on the loader's thread. `load` raises `StartupError`, or what `make_room` raises."""

    def names(self) -> Sequence[str]: ...

    def aliases(self, name: str) -> tuple[str, ...]: ...

    def load(self, name: str, report: Report, make_room: MakeRoom) -> Resident: ...

    def unload(self, resident: Resident) -> None: ...


class Registry:
    """Any thread may call its methods; `publish`, `put`, `open` and `set_loader` are for the start."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._metrics = engine.metrics
        self._changed = threading.Condition()
        self._entries: dict[str, Entry] = {}
        self._default: str | None = None
        self._loader: Loader | None = None
        self._budget = 0
        self._max_loaded = 0
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue()  # loads and unloads
        self._thread: threading.Thread | None = None
        self._is_closed = False
        engine.on_drain(self.close)

    @property
    def default_name(self) -> str:
        """The name of the model for requests that omit `model`; empty until the server is ready."""
        return self._default or ""

    @property
    def default(self) -> ServedModel:
        """The model for requests that omit `model`; raises `Unavailable` until it is loaded."""
        self.engine.require_loaded()
        resident = self._entries[self.default_name].resident
        if resident is None:
            raise Unavailable(f"The model '{self.default_name}' is not loaded.", retry_after_seconds=1.0)
        return resident.model

    def set_loader(self, loader: Loader, *, budget: int = 0, max_loaded: int = 0) -> None:
        """Makes the loader's models known. `budget` is bytes for all; 0: nine tenths of what is free."""
        self._loader = loader
        self._budget = budget
        self._max_loaded = max_loaded
        self.refresh()

    def publish(self, resident: Resident) -> None:
        """Adds the first model; requests are accepted from here on."""
        self.put(resident)
        self.engine.mark_ready()

    def open(self, default: str) -> None:
        """Accepts requests before any model is loaded; `default` serves those that omit `model`."""
        self._default = default
        self.engine.mark_ready()

    def put(self, resident: Resident) -> None:
        """Adds a loaded model; the first one serves requests that omit `model`."""
        with self._changed:
            entry = self._entries.setdefault(resident.model.name, Entry(resident.model.name))
            entry.aliases = resident.model.aliases
            self._default = self._default or entry.name
            self._mark_loaded(entry, resident)

    def borrow(
        self,
        name: str | None = None,
        *,
        loads: bool = True,
        insists: bool = False,
        is_background: bool = False,
    ) -> ModelHandle:
        """Holds a model, by default the default one; with `loads`, has it loaded. Raises `ModelNotFound`.

        A model that failed to load a moment ago is not tried again, unless the caller `insists`. Batches
        borrow with `is_background`; for them, raises `Unavailable` while the model is given up.
        """
        asked = name or self._default or ""
        with self._changed:
            is_known = asked in self._entries or any(asked in one.aliases for one in self._entries.values())
        if not is_known:
            self.refresh()
        with self._changed:
            entry, served_name = self._find(asked)
            if is_background and time.monotonic() < entry.given_up_until:
                raise Unavailable(
                    f"The room of the model '{entry.name}' is needed for another one; please try again.",
                    retry_after_seconds=1.0,
                )
            if entry.status is not Status.LOADED:
                if not loads:
                    raise Conflict(f"The model '{entry.name}' is not loaded.")
                if insists or entry.failure is None or entry.failure.retry_at <= time.monotonic():
                    self._ask(entry)
            entry.hold(is_background=is_background)
        return ModelHandle(
            entry, served_name, self._changed, lambda: self._is_closed, is_background=is_background
        )

    def resolve(self, name: str) -> tuple[str, str]:
        """The main name of a requested model, and which of its names is meant; raises `ModelNotFound`."""
        with self._changed:
            entry, served_name = self._find(name)
            return entry.name, served_name

    def begin_load(self, name: str) -> None:
        """Has a model loaded, without waiting for it."""
        self.borrow(name).release()

    def unload(self, name: str) -> None:
        """Frees a model's memory, if it is loaded; raises `Conflict` if it is in use."""
        with self._changed:
            entry, _ = self._find(name)
            name = entry.name
            if self._loader is None:
                raise Conflict("This server was given one model, which stays loaded.")
            if entry.status is Status.LOADING:
                raise Conflict(f"The model '{name}' is loading ({entry.progress}); please wait for it.")
            if entry.num_handles:
                raise Conflict(
                    f"The model '{name}' has {entry.num_handles} requests running or waiting; "
                    "it is not unloaded."
                )
            if entry.status is Status.LOADED:
                entry.status = Status.UNLOADING
                self._put_job(functools.partial(self._unload, entry))
            self._changed.wait_for(lambda: entry.status is not Status.UNLOADING or self._is_closed)

    def refresh(self) -> None:
        """Reads the list of models again: the folder that holds them may have changed."""
        if self._loader is None:
            return
        names = self._loader.names()
        aliases = {name: self._loader.aliases(name) for name in names}
        with self._changed:
            for name in names:
                self._entries.setdefault(name, Entry(name)).aliases = aliases[name]
            for entry in list(self._entries.values()):
                is_idle = entry.status is Status.LOADABLE and not entry.num_handles
                if is_idle and entry.name not in names:
                    del self._entries[entry.name]

    def describe(self) -> list[ModelInfo]:
        """Every model, in the order in which they became known."""
        now = time.monotonic()
        with self._changed:
            return [
                ModelInfo(
                    entry.name,
                    entry.status,
                    entry.progress,
                    entry.failure.message if entry.failure is not None else None,
                    entry.resident,
                    entry.num_handles,
                    now - entry.last_used if entry.last_used is not None else None,
                    entry.aliases,
                )
                for entry in self._entries.values()
            ]

    def loaded_names(self) -> list[str]:
        with self._changed:
            return [entry.name for entry in self._entries.values() if entry.status is Status.LOADED]

    def reload(
        self, name: str = "", *, model: str = "", checkpoint_path: str = "", revision: str = ""
    ) -> Reloaded:
        """Reads weights on the calling thread and has them swapped in, or raises and changes nothing.

        `name` says which of the loaded models gets them, if there are several.
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
        """Reloads all loaded models on a new thread, for a signal; the outcome is in the log."""
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
        """Fails requests that wait for a model, and ends the loader's thread after its current job."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._jobs.put(None)

    def join(self) -> None:
        """Waits for the loader after `close`, but not long: it cannot stop in the middle of a compile."""
        if self._thread is not None:
            self._thread.join(JOIN_SECONDS)

    def make_room(self, name: str, needed: int, free_bytes: Callable[[], int]) -> int:
        """Unloads least recently used models until `needed` bytes fit; returns the bytes the model may take.

        Raises `StartupError` if it can never fit, and `Unavailable` if all models that could be unloaded are
        in use. Those that only batches use are then given up, unless only batches wait for the room.
        """
        while True:
            with self._changed:
                loaded = [entry for entry in self._entries.values() if entry.resident and entry.name != name]
                used = sum(entry.resident.num_bytes for entry in loaded if entry.resident)
                budget = self._budget or (free_bytes() + used) * 9 // 10
                if needed > budget:
                    asked = "--models-memory" if self._budget else "the machine"
                    raise StartupError(
                        f"it needs {human(needed)}, and {asked} has {human(budget)} for all models together"
                    )
                has_place = not self._max_loaded or len(loaded) < self._max_loaded
                if has_place and used + needed <= budget:
                    most = self._max_loaded or min(len(self._entries), MAX_SHARES)
                    return needed + (budget - used - needed) // max(most - len(loaded), 1)
                is_background = name in self._entries and self._entries[name].is_background
                idle = _idle(loaded, is_background)
                if not idle:
                    for entry in loaded:
                        if entry.is_background and not is_background:
                            entry.give_up()
                    names = ", ".join(entry.name for entry in loaded)
                    raise Unavailable(
                        f"There is no room for the model '{name}': {names} take {human(used)} of "
                        f"{human(budget)} and are in use; please try again.",
                        retry_after_seconds=BUSY_SECONDS,
                    )
                victim = min(idle, key=lambda entry: entry.last_used or -math.inf)
                victim.status = Status.UNLOADING
            log.info("%s: unloaded to make room for %s", victim.name, name)
            self._unload(victim)

    def _find(self, asked: str) -> tuple[Entry, str]:
        """The model that a name means, and which of its names is meant. Called with the lock held."""
        if asked in self._entries:
            return self._entries[asked], asked
        by_name = dict(self._entries)
        for entry in self._entries.values():
            for name in entry.aliases:
                by_name.setdefault(name, entry)
        if asked in by_name:
            return by_name[asked], asked
        similar = similar_names(asked, by_name)
        if not similar:
            raise model_not_found(asked, list(by_name))
        if len({by_name[name].name for name in similar}) > 1:
            raise ambiguous_model(asked, similar)
        return by_name[similar[0]], similar[0]

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
            failure = Failure(error.message, time.monotonic(), None)  # the next request tries again
        except StartupError as error:
            told = f"The model '{entry.name}' cannot be loaded: {error}."
            failure = Failure(told, time.monotonic() + FAILED_SECONDS, NOT_LOADABLE)
        except Exception:
            log.exception("%s: loading failed", entry.name)
            told = f"The model '{entry.name}' failed to load; the server's log says why."
            failure = Failure(told, time.monotonic() + FAILED_SECONDS, NOT_LOADABLE)
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
                self._mark_loaded(entry, resident)
            else:
                entry.status, entry.progress = Status.LOADABLE, ""
            self._changed.notify_all()

    def _mark_loaded(self, entry: Entry, resident: Resident) -> None:
        entry.status, entry.resident, entry.progress = Status.LOADED, resident, "ready"
        entry.last_used = time.monotonic()
        self._note_change()

    def _unload(self, entry: Entry) -> None:
        """Frees the memory of a model; its status is UNLOADING already, so that no request gets it."""
        assert self._loader is not None and entry.resident is not None
        try:
            self._loader.unload(entry.resident)
        except Exception:
            log.exception("%s: unloading failed; its memory may not be free", entry.name)
        self._metrics.model_unloads.inc()
        with self._changed:
            entry.resident = None
            entry.given_up_until = -math.inf
            entry.status = Status.LOADING if entry.is_asked else Status.LOADABLE
            entry.progress = entry.progress if entry.is_asked else ""
            self._note_change()
            self._changed.notify_all()

    def _note_change(self) -> None:
        models = [entry.resident.model for entry in self._entries.values() if entry.resident is not None]
        self._metrics.models_loaded.set(len(models))
        self.engine.note_models(models)


def _idle(loaded: Sequence[Entry], is_background: bool) -> list[Entry]:
    """The models that may be unloaded for another one, which only batches wait for if `is_background`."""
    idle = [entry for entry in loaded if entry.status is Status.LOADED and not entry.num_handles]
    if not is_background:
        return idle
    quiet_since = time.monotonic() - QUIET_SECONDS
    return [entry for entry in idle if entry.last_live <= quiet_since]
