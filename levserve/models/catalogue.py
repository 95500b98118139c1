"""Which models requests may name, and the settings of each: sections [model.NAME], and a folder of models.

The folder, or address, of `--models-dir` is read again when models are listed or an unknown one is named, so
that a model put there while the server runs can be used at once. No jax here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath

from levserve.errors import ConfigError, StartupError
from levserve.gguf import parts
from levserve.settings.settings import Settings
from levserve.weights.source import check_source, has_checkpoints, local_problem
from levserve.weights.store import Store, check_address, is_address

log = logging.getLogger(__name__)

LOOK_SECONDS = 30.0
"""A store is listed at most this often."""


class Catalogue:
    """The known models. The default is that of `--model`, or the first section, or the folder's first."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._folder = settings.models_dir
        self._sections: Mapping[str, Settings] = settings.models
        everyone = (settings, *settings.models.values())
        self._most_devices = max(each.tensor_parallel for each in everyone)
        self._found: dict[str, Settings] = {}
        self._look_at = 0.0
        self._found = self._look()
        known = (*self._sections, *self._found)
        named = [name for name in (settings.model, settings.model.replace("/", "-")) if name in known]
        is_given = "model" in settings.sources or not settings.has_several
        if is_given and not named:
            names = settings.served_model_name or (_name_of(settings.model),)
            own = replace(settings, served_model_name=names)
            if own.main_name in self._sections:
                raise ConfigError(
                    f"--model {settings.model} would be served as {own.main_name}, and a section "
                    f"[model.{own.main_name}] serves another one: give it another --served-model-name"
                )
            self._sections = {own.main_name: own, **self._sections}
            self.default = own.main_name
        elif "model" in settings.sources:
            self.default = named[0]
        else:
            self.default = next(iter(known), "")
        if not self.default:
            raise ConfigError(
                f"--models-dir {self._folder!r} holds no model: "
                "no folder with config.json, a checkpoint or a brain, no .gguf file"
            )

    def names(self) -> list[str]:
        """Every known model, the default first."""
        try:
            self._found = self._look()
        except StartupError as error:
            log.warning("keeping the old list of models: %s", error)
        return list(dict.fromkeys((self.default, *self._sections, *self._found)))

    def aliases(self, name: str) -> tuple[str, ...]:
        """Further names of a model."""
        settings = self.find(name)
        return () if settings is None else settings.served_model_name[1:]

    def find(self, name: str) -> Settings | None:
        """The settings to load a model with."""
        found = self._sections.get(name) or self._found.get(name)
        return None if found is None else replace(found, most_devices=self._most_devices)

    def names_at_start(self) -> list[str]:
        """The models besides the default that are loaded at start, not on their first request."""
        names = []
        for name in self.names():
            settings = self.find(name)
            if name != self.default and settings is not None and settings.load == "start":
                names.append(name)
        return names

    def _look(self) -> dict[str, Settings]:
        """The models that the folder holds now."""
        if not self._folder or time.monotonic() < self._look_at:
            return self._found
        if is_address(self._folder):
            self._look_at = time.monotonic() + LOOK_SECONDS
            return self._look_in_store(self._folder.rstrip("/"))
        try:
            paths = sorted(Path(self._folder).iterdir())
        except OSError as error:
            raise ConfigError(f"--models-dir {self._folder!r}: {error.strerror}") from None
        found: dict[str, Settings] = {}
        for path in paths:
            name = parts.model_name(path.name)
            is_model = not (path.name.startswith(".") or parts.is_later_part(path.name))
            settings = self._settings_of(name, path) if is_model else None
            if settings is not None:
                found[name] = settings
        return found

    def _look_in_store(self, address: str) -> dict[str, Settings]:
        """Every folder and .gguf file there; whether a folder holds a model shows when it is loaded."""
        found: dict[str, Settings] = {}
        for entry, is_folder in Store(address).list_entries().items():
            if is_folder or (entry.endswith(parts.SUFFIX) and not parts.is_later_part(entry)):
                name = entry if is_folder else parts.model_name(entry)
                found[name] = self._settings.for_model(name, model=f"{address}/{entry}")
        return found

    def _settings_of(self, name: str, path: Path) -> Settings | None:
        is_gguf = path.suffix == parts.SUFFIX
        if (path.is_dir() or is_gguf) and local_problem(path) is None:
            return self._settings.for_model(name, model=str(path))
        if path.is_dir() and has_checkpoints(path):
            return self._settings.for_model(name, model=str(path), checkpoint_path=str(path))
        return None


def check_models(settings: Settings) -> None:
    """Refuses a default model that cannot be served, as far as that can be told without weights and network.

    For other models it only warns.
    """
    if is_address(settings.models_dir):
        check_address(settings.models_dir)
        return
    catalogue = Catalogue(settings)
    for name in catalogue.names():
        found = catalogue.find(name)
        assert found is not None
        try:
            check_source(found)
        except StartupError as error:
            if name == catalogue.default:
                raise
            log.warning("[model.%s]: %s", name, error)


def _name_of(model: str) -> str:
    """The last part of a path or address; a name on the Hub as it is."""
    if is_address(model) or Path(model).expanduser().exists():
        return parts.model_name(PurePosixPath(model.rstrip("/")).name)
    return model
