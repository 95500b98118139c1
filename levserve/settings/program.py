"""Settings that a Python program gives by name; they override the environment and the settings file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from levserve.errors import ConfigError
from levserve.settings.environment import Environment, read_environment
from levserve.settings.file import did_you_mean
from levserve.settings.parse import read_settings, resolve_model
from levserve.settings.settings import BY_NAME, Settings

SOURCE = "argument"
SERVER_SECTIONS = ("server", "log")
"""Settings that mean nothing without a server."""
FILES = ("config", "env_file")


def make_settings(values: Mapping[str, object], environ: Mapping[str, str] | None = None) -> Settings:
    """Reads each value as the text of a flag is read; raises `ConfigError`.

    Besides settings, `config` and `env_file` may be given: files that are read as for the server.
    """
    files = {name: str(values[name]) for name in FILES if values.get(name) is not None}
    argv = ["--config", files["config"]] if "config" in files else []
    settings = read_settings(argv, _environment(files.get("env_file"), environ))
    given: dict[str, Any] = {}
    for name, value in values.items():
        if name in FILES:
            continue
        setting = BY_NAME.get(name)
        if setting is None:
            raise ConfigError(f"unknown setting {name!r}{did_you_mean(name, [*BY_NAME, *FILES])}")
        if setting.section in SERVER_SECTIONS:
            raise ConfigError(f"{name} is a setting of the server, and there is none here")
        try:
            given[name] = setting.kind.read(_text(value))
        except (ValueError, KeyError):
            raise ConfigError(f"{name} must be {setting.kind.words}, not {value!r}") from None
    if given.keys() & {"kv_memory", "kv_pages"}:  # either one replaces both of the environment's
        settings = replace(settings, kv_memory=0, kv_pages=0)
    sources = {**settings.sources, **dict.fromkeys(given, SOURCE)}
    return resolve_model(replace(settings, **given, sources=sources), given.keys())


def _environment(path: str | None, environ: Mapping[str, str] | None) -> Environment:
    variables = os.environ if environ is None else environ
    if path is None:
        return Environment(variables, {}, "", ())
    environment = read_environment(path, variables)
    if environ is None:
        os.environ.update(environment.added)  # for libraries: HF_TOKEN, AWS_PROFILE and the like
    return environment


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value))
    return "" if value is None else str(value)
