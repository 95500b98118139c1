"""Reads the sections of an ini file; values stay text.

A `#` at the start of a line or after white space starts a comment; a `;` does so only at the start of a line.
Elsewhere they are ordinary characters, as are `%` and `:`.
"""

from __future__ import annotations

import configparser

from levserve.errors import ConfigError


def read_ini(name: str, text: str) -> dict[str, dict[str, str]]:
    """`name` is the file's name, for error messages."""
    # No section can be named "", so none acts like configparser's [DEFAULT], whose keys apply everywhere.
    ini = configparser.RawConfigParser(
        delimiters=("=",), inline_comment_prefixes=("#",), default_section="", empty_lines_in_values=False
    )
    try:
        ini.read_string(text)
    except configparser.Error as error:
        raise ConfigError(f"{name}, {_explain(error)}") from None
    sections = {}
    for section in ini.sections():
        sections[section] = dict(ini.items(section))
        for key, value in sections[section].items():
            _check_value(f"{name}, [{section}] {key}", value)
    return sections


def _check_value(place: str, text: str) -> None:
    if "\n" in text:
        raise ConfigError(f"{place}: the value continues on an indented line; start each key in column 1")
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        raise ConfigError(f"{place}: write the value without quotes; they would be part of it")


def _explain(error: configparser.Error) -> str:
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
