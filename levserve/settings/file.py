"""Reads the settings file, which is an ini file with each key at most once and in its own section.

A `#` at the start of a line or after white space starts a comment; a `;` does so only at the start of a line.
Elsewhere they are ordinary characters, as are `%` and `:`. Values stay text here; `parse.py` checks them.
"""

from __future__ import annotations

import configparser
import difflib
from collections.abc import Iterable
from pathlib import Path

import configargparse

from levserve.errors import ConfigError
from levserve.settings.settings import BY_KEY, MODEL_SECTION, OWN_SETTINGS, SECTIONS, SHARED_SETTINGS


class SettingsFile(configargparse.ConfigFileParser):  # type: ignore[misc]
    """Reads one file. `models` holds the [model.NAME] sections; `parse` returns all other keys."""

    def __init__(self) -> None:
        super().__init__()
        self.models: dict[str, dict[str, str]] = {}

    def parse(self, stream: Path) -> dict[str, str]:
        # No section can be named "", so none is like configparser's [DEFAULT], whose keys apply everywhere.
        ini = configparser.RawConfigParser(
            delimiters=("=",), inline_comment_prefixes=("#",), default_section="", empty_lines_in_values=False
        )
        try:
            ini.read_string(stream.read_text("utf-8-sig"))
        except UnicodeDecodeError:
            raise ConfigError(f"{stream}: not UTF-8 text") from None
        except configparser.Error as error:
            raise ConfigError(f"{stream}, {_explain_ini(error)}") from None
        found: dict[str, str] = {}
        for section in ini.sections():
            name = section.removeprefix(MODEL_SECTION)
            if section not in SECTIONS and (name == section or not name.strip()):
                hint = did_you_mean(section.lower(), SECTIONS)
                raise ConfigError(f"{stream}: unknown section [{section}]{hint}")
            entries = dict(ini.items(section))
            for key, text in entries.items():
                _check_entry(f"{stream}, [{section}] {key}", section, key, text)
            if section in SECTIONS:
                found.update(entries)
            else:
                self.models[name] = entries
        return found


def did_you_mean(word: str, known: Iterable[str]) -> str:
    nearest = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {nearest[0]}?" if nearest else ""


def _explain_ini(error: configparser.Error) -> str:
    """One line that names the mistake; configparser's own message has several and may quote a secret."""
    match error:
        case configparser.DuplicateOptionError():
            return f"line {error.lineno}: {error.option} is given twice in [{error.section}]"
        case configparser.DuplicateSectionError():
            return f"line {error.lineno}: section [{error.section}] appears twice"
        case configparser.MissingSectionHeaderError():
            return f"line {error.lineno}: there is text before the first [section]"
        case configparser.ParsingError():
            return f"line {error.errors[0][0]}: expected [section] or key = value"
    return " ".join(str(error).split())


def _check_entry(place: str, section: str, key: str, text: str) -> None:
    if key not in BY_KEY:
        raise ConfigError(f"{place}: unknown key{did_you_mean(key.replace('_', '-'), BY_KEY)}")
    setting = BY_KEY[key]
    if section not in SECTIONS:
        if setting.name not in (*OWN_SETTINGS, *SHARED_SETTINGS):
            raise ConfigError(f"{place}: this key applies to all models and belongs in [{setting.section}]")
    elif setting.section != section:
        raise ConfigError(f"{place}: this key belongs in [{setting.section}]")
    if "\n" in text:
        raise ConfigError(f"{place}: the value continues on an indented line; start each key in column 1")
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        raise ConfigError(f"{place}: write the value without quotes; they would be part of it")
