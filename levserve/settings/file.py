"""The ini dialect of the settings file: each known key once, in its own section.

A `#` at the start of a line or after white space begins a comment; a `;` does so only at the start of a line. Elsewhere they
stand for themselves, as do `%` and `:`. Values are kept as text: `parse.py` checks them, for flags, environment and file alike.
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
    """Reads one file; `models` are its sections of single models, which are kept apart."""

    def __init__(self) -> None:
        super().__init__()
        self.models: dict[str, dict[str, str]] = {}

    def parse(self, stream: Path) -> dict[str, str]:
        # No header can be empty, so no section spreads its keys over the others as configparser's [DEFAULT] would.
        ini = configparser.RawConfigParser(
            delimiters=("=",), inline_comment_prefixes=("#",), default_section="", empty_lines_in_values=False
        )
        try:
            ini.read_string(stream.read_text("utf-8-sig"))
        except UnicodeDecodeError:
            raise ConfigError(f"{stream}: not UTF-8 text") from None
        except configparser.Error as error:
            raise ConfigError(f"{stream}, {_explain_ini(error)}") from None
        for section in ini.sections():
            name = section.removeprefix(MODEL_SECTION)
            if section not in SECTIONS and (name == section or not name.strip()):
                raise ConfigError(
                    f"{stream}: unknown section [{section}]{did_you_mean(section.lower(), SECTIONS)}"
                )
            for key, text in ini.items(section):
                _check_entry(f"{stream}, [{section}] {key}", section, key, text)
            if section not in SECTIONS:
                self.models[name] = dict(ini.items(section))
        return {
            key: text for section in ini.sections() if section in SECTIONS for key, text in ini.items(section)
        }


def did_you_mean(word: str, known: Iterable[str]) -> str:
    nearest = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {nearest[0]}?" if nearest else ""


def _explain_ini(error: configparser.Error) -> str:
    """What is wrong at which line; configparser's own words take several lines and may quote a secret."""
    match error:
        case configparser.DuplicateOptionError():
            return f"line {error.lineno}: {error.option} is given twice in [{error.section}]"
        case configparser.DuplicateSectionError():
            return f"line {error.lineno}: section [{error.section}] appears twice"
        case configparser.MissingSectionHeaderError():
            return f"line {error.lineno}: something stands before the first [section]"
        case configparser.ParsingError():
            return f"line {error.errors[0][0]}: neither a [section] nor key = value"
    return " ".join(str(error).split())


def _check_entry(place: str, section: str, key: str, text: str) -> None:
    if key not in BY_KEY:
        raise ConfigError(f"{place}: unknown key{did_you_mean(key.replace('_', '-'), BY_KEY)}")
    if section not in SECTIONS:
        if BY_KEY[key].name not in (*OWN_SETTINGS, *SHARED_SETTINGS):
            raise ConfigError(
                f"{place}: this key is for all models together and belongs in [{BY_KEY[key].section}]"
            )
    elif BY_KEY[key].section != section:
        raise ConfigError(f"{place}: this key belongs in [{BY_KEY[key].section}]")
    if "\n" in text:
        raise ConfigError(
            f"{place}: the value goes on over an indented line; begin each key at the left margin"
        )
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        raise ConfigError(f"{place}: write the value without quotes; they would become part of it")
