"""The environment that settings are read from: the process's variables and those of an environment file.

The file is `--env-file PATH`, or `.env` in the working folder if there is one. The process's own variables
override the file's. The variables that Kubernetes sets for a Service named levserve look like settings; they
are left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from levserve.errors import ConfigError
from levserve.settings.kind import ENV_PREFIX

DEFAULT_FILE = ".env"
# NAME=value, where `export` may come first; a value in quotes may have several lines and a comment after it.
ENTRY = re.compile(
    r"""
    [ \t]* (?:export[ \t]+)? (?P<name>[A-Za-z_][A-Za-z0-9_.]*) [ \t]*
    (?: = [ \t]* '(?P<raw>[^']*)' [ \t]* (?:\#[^\n]*)? (?=\n|\Z)
      | = [ \t]* "(?P<quoted>(?:[^"\\]|\\.)*)" [ \t]* (?:\#[^\n]*)? (?=\n|\Z)
      | = (?P<plain>(?![ \t]*['"])[^\n]*)
      | (?:\#[^\n]*)? (?=\n|\Z)
    )
    """,
    re.VERBOSE | re.DOTALL,
)
SKIPPED = re.compile(r"(?:\s|#[^\n]*)*")  # blank lines and comments
COMMENT = re.compile(r"\s#.*")  # a # within a value belongs to it
ESCAPE = re.compile(r"\\(.)", re.DOTALL)
# The variables that Kubernetes sets for a Service whose name is levserve or begins with levserve-.
SERVICE_NAME = re.compile(
    rf"{ENV_PREFIX}(?:\w+_)?(?:SERVICE_(?:HOST|PORT\w*)|PORT_\d+_(?:TCP|UDP|SCTP)(?:_(?:ADDR|PORT|PROTO))?)"
)
SERVICE_PORT = re.compile(rf"{ENV_PREFIX}(?:\w+_)?PORT")
SERVICE_ADDRESS = re.compile(r"(?:tcp|udp|sctp)://.*")


@dataclass(frozen=True, slots=True)
class Environment:
    """All variables; `added` are those that only the file at `path` sets. `notes` are for the log."""

    variables: Mapping[str, str]
    added: Mapping[str, str]
    path: str
    notes: tuple[str, ...]

    def describe(self, variable: str) -> str:
        """Where a variable comes from."""
        source = f"environment {variable}"
        return f"{source} from {self.path}" if variable in self.added else source


def read_environment(path: str | None, environ: Mapping[str, str]) -> Environment:
    """`path` is the value of --env-file. Raises `ConfigError` for a file that cannot be read."""
    found, added, notes = "", {}, []
    if path is not None or Path(DEFAULT_FILE).is_file():
        found = DEFAULT_FILE if path is None else path
        entries = _read_file(found)
        added = {name: value for name, value in entries.items() if name not in environ}
        line = f"read {_count(len(added))} from {found}"
        if len(added) < len(entries):
            line += f"; {len(entries) - len(added)} more in it are set in the environment, which wins"
        notes.append(line)
    variables = {**added, **environ}
    services = [name for name, value in variables.items() if _is_of_kubernetes(name, value)]
    if services:
        notes.append(f"ignored variables that Kubernetes sets for a Service: {', '.join(sorted(services))}")
    variables = {name: value for name, value in variables.items() if name not in services}
    return Environment(variables, added, found, tuple(notes))


def _count(number: int) -> str:
    return "1 variable" if number == 1 else f"{number} variables"


def _is_of_kubernetes(name: str, value: str) -> bool:
    if SERVICE_NAME.fullmatch(name):
        return True
    return bool(SERVICE_PORT.fullmatch(name) and SERVICE_ADDRESS.fullmatch(value))


def _read_file(path: str) -> dict[str, str]:
    try:
        text = Path(path).expanduser().read_text("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"--env-file: cannot read {path!r}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--env-file {path}: not UTF-8 text") from None
    found = {}
    position = _skip(text, 0)
    while position < len(text):
        entry = ENTRY.match(text, position)
        if entry is None:  # the line is not shown: it may hold a secret
            line = text.count("\n", 0, position) + 1
            raise ConfigError(f"--env-file {path}, line {line}: expected NAME=value")
        value = _value(entry)
        if value is not None:  # a name alone means the process's variable, as in docker's --env-file
            found[entry["name"]] = value
        position = _skip(text, entry.end())
    return found


def _skip(text: str, position: int) -> int:
    skipped = SKIPPED.match(text, position)
    assert skipped is not None  # it also matches the empty string
    return skipped.end()


def _value(entry: re.Match[str]) -> str | None:
    if entry["raw"] is not None:
        return entry["raw"]
    if entry["quoted"] is not None:
        return ESCAPE.sub(_unescape, entry["quoted"])
    if entry["plain"] is not None:
        return COMMENT.sub("", entry["plain"]).strip()
    return None


def _unescape(escape: re.Match[str]) -> str:
    return {"n": "\n", "t": "\t", "r": "\r"}.get(escape[1], escape[1])
