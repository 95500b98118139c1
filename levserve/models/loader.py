"""Loads and unloads models for the registry, on the calling thread, beside the device thread.

Messages hand a loaded model to the device thread and take it back; the device thread itself only adds a model
loop, or waits for the last round of one.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from levserve.engine.engine import Engine
from levserve.errors import StartupError
from levserve.models.catalogue import Catalogue
from levserve.models.entry import Resident
from levserve.models.load import load, resident_of
from levserve.models.registry import MakeRoom, Registry, Report
from levserve.settings.settings import Settings

if TYPE_CHECKING:
    from levserve.device.kind import RoundRunner
    from levserve.models.build import Loaded

DETACH_SECONDS = 60.0
"""How long the device thread may take to give a model back; it takes one round."""


class ModelLoader:
    """The registry's loader; the catalogue has the settings of each model."""

    def __init__(self, catalogue: Catalogue, engine: Engine) -> None:
        self._catalogue = catalogue
        self._engine = engine

    def names(self) -> Sequence[str]:
        return self._catalogue.names()

    def aliases(self, name: str) -> tuple[str, ...]:
        return self._catalogue.aliases(name)

    def load(self, name: str, report: Report, make_room: MakeRoom) -> Resident:
        gc.collect()  # frees what a failed load has left
        loaded = self.read(name, report, make_room)
        loaded.runner.programs.start_background()
        resident = resident_of(self._engine, loaded)
        self._engine.send(loaded.attach())  # before a request can be submitted to it
        return resident

    def read(self, name: str, report: Report, make_room: MakeRoom) -> Loaded:
        settings = self._catalogue.find(name)
        if settings is None:
            raise StartupError(f"{name} does not exist any more")
        return load(settings, self._engine.metrics, report=report, make_room=make_room)

    def unload(self, resident: Resident) -> None:
        from levserve.device.tasks import Detach  # imports jax

        done: Future[RoundRunner] = Future()
        self._engine.send(Detach(resident.model.name, done))
        done.result(DETACH_SECONDS).free()
        if resident.reloader is not None:
            resident.reloader.close()
        del done
        gc.unfreeze()  # see `server.freeze_loaded_objects`
        gc.collect()  # the compiled programs, which are in reference cycles


def open_catalogue(catalogue: Catalogue, settings: Settings, registry: Registry) -> ModelLoader:
    """Makes all models known; a request for one of them loads it."""
    loader = ModelLoader(catalogue, registry.engine)
    registry.set_loader(loader, budget=settings.models_memory, max_loaded=settings.max_loaded_models)
    return loader


def load_first(
    settings: Settings, registry: Registry, *, report: Callable[[str], None]
) -> tuple[Loaded, list[str]]:
    """Makes all models known and loads the default; returns it, and the names of those to load next."""
    catalogue = Catalogue(settings)
    loader = open_catalogue(catalogue, settings, registry)
    try:
        loaded = loader.read(
            catalogue.default, report, functools.partial(registry.make_room, catalogue.default)
        )
    except StartupError as error:
        raise type(error)(f"the default model {catalogue.default} cannot be loaded: {error}") from error
    return loaded, catalogue.names_at_start()
