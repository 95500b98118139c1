"""Reads the settings file: ini, or YAML by its suffix, with each key at most once and in its own section.

Values stay text here; `parse.py` checks them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

import configargparse

from levserve.errors import ConfigError
from levserve.settings.alias import FLAG_ALIASES
from levserve.settings.ini_file import read_ini
from levserve.settings.kind import Setting
from levserve.settings.settings import (
    BY_KEY,
    BY_NAME,
    MODEL_SECTION,
    OWN_SETTINGS,
    SECTIONS,
    SHARED_SETTINGS,
)

YAML_SUFFIXES = (".yaml", ".yml")


class SettingsFile(configargparse.ConfigFileParser):  # type: ignore[misc]
    """Reads one file. `models` holds the [model.NAME] sections; `parse` returns all other keys."""

    def __init__(self) -> None:
        super().__init__()
        self.models: dict[str, dict[str, str]] = {}

    def parse(self, stream: Path) -> dict[str, str]:
        try:
            text = stream.read_text("utf-8-sig")
        except UnicodeDecodeError:
            raise ConfigError(f"{stream}: not UTF-8 text") from None
        if stream.suffix.lower() in YAML_SUFFIXES:
            # Imported here, because importing yaml would delay every start.
            from levserve.settings.yaml_file import read_yaml

            sections = read_yaml(str(stream), text)
        else:
            sections = read_ini(str(stream), text)
        found: dict[str, str] = {}
        for section, entries in sections.items():
            name = section.removeprefix(MODEL_SECTION)
            if section not in SECTIONS and (name == section or not name.strip()):
                hint = did_you_mean(section.lower(), SECTIONS)
                raise ConfigError(f"{stream}: unknown section [{section}]{hint}")
            for key in entries:
                _check_key(f"{stream}, [{section}] {key}", section, key)
            if section in SECTIONS:
                found.update(entries)
            else:
                self.models[name] = entries
        return found


def find_setting(key: str) -> Setting | None:
    """The setting of this key or alias."""
    alias = FLAG_ALIASES.get(key)
    return BY_KEY.get(key) if alias is None else BY_NAME[alias.setting]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    nearest = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {nearest[0]}?" if nearest else ""


def _check_key(place: str, section: str, key: str) -> None:
    setting = find_setting(key)
    if setting is None:
        hint = did_you_mean(key.replace("_", "-"), [*BY_KEY, *FLAG_ALIASES])
        raise ConfigError(f"{place}: unknown key{hint}")
    if section not in SECTIONS:
        if setting.name not in (*OWN_SETTINGS, *SHARED_SETTINGS):
            raise ConfigError(f"{place}: this key applies to all models and belongs in [{setting.section}]")
    elif setting.section != section:
        raise ConfigError(f"{place}: this key belongs in [{setting.section}]")
