"""Reads the settings from the command line, the environment and the ini file.

A flag overrides the environment, the environment overrides the file, and the file overrides the default.
`parse_settings` is called once, before gunicorn forks, and remembers where each value came from. A mistake
ends the process with exit code 2 and one line that names the option, the value and the source.
"""

from __future__ import annotations

import os
import sys
from argparse import SUPPRESS, Namespace, RawDescriptionHelpFormatter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import configargparse

from levserve import __version__
from levserve.errors import ConfigError
from levserve.settings.file import SettingsFile, did_you_mean
from levserve.settings.key_file import read_keys
from levserve.settings.kind import ENV_PREFIX, Setting
from levserve.settings.settings import (
    BY_KEY,
    FAULTS_VARIABLE,
    KEY_VARIABLE,
    MODEL_SECTION,
    OTHER_KEY_VARIABLE,
    OWN_SETTINGS,
    SECTIONS,
    SETTINGS,
    SHARED_SETTINGS,
    Settings,
    settings_of,
)

CONFIG_VARIABLE = f"{ENV_PREFIX}CONFIG"
DESCRIPTION = """\
Serves a language model over the OpenAI HTTP API.

  levserve                                  serves the bundled model on 127.0.0.1:8000
  levserve --config serve.ini --port 9000   takes settings from the file, except for the port

Every setting can be given as a flag, an environment variable or a key in the file:
--max-running 8, LEVSERVE_MAX_RUNNING=8, or "max-running = 8" under [engine].
A flag overrides the environment, and the environment overrides the file.
"""
OTHER_FLAGS = ("--config", "--print-config", "--dry-run", "--version", "--help")


def parse_settings(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> Settings:
    """Exits as argparse does: with 0 after --help, --version and --print-config, with 2 after a mistake."""
    argv = sys.argv[1:] if argv is None else argv
    environ = os.environ if environ is None else environ
    try:
        options, sources = _read_options(argv, environ)
        settings = replace(_make_settings(options, sources), faults=_read_faults(environ, options.config))
    except ConfigError as error:
        print(f"levserve: error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    if options.print_config:
        print(_format_settings(settings))
        raise SystemExit(0)
    return settings


class _Parser(configargparse.ArgumentParser):  # type: ignore[misc]
    def error(self, message: str) -> NoReturn:
        # Every value is plain text to argparse, so the mistakes it finds are in the command line's syntax.
        raise ConfigError(f"{message} (command line)")


def _build_parser(file: SettingsFile) -> _Parser:
    parser = _Parser(
        prog="levserve",
        usage="levserve [--config FILE] [--OPTION VALUE ...]",
        description=DESCRIPTION,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_config_file_help=False,
        add_env_var_help=False,
        config_file_parser_class=file,
        config_file_open_func=Path,  # SettingsFile.parse opens the file and words the error
    )
    config_help = f"Read settings from this ini file. [env {CONFIG_VARIABLE}]"
    parser.add_argument(
        "--config", metavar="FILE", is_config_file_arg=True, env_var=CONFIG_VARIABLE, help=config_help
    )
    parser.add_argument(
        "--print-config", action="store_true", help="Show every setting with its source and exit."
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="Load the model, compile it, generate one token, show the memory plan and exit.",
    )
    parser.add_argument(
        "--version", action="version", version=f"levserve {__version__}", help="Show the version and exit."
    )
    for section, title in SECTIONS.items():
        group = parser.add_argument_group(f"[{section}] {title}")
        for s in settings_of(section):
            text = f"{s.help} [default {s.show(s.default)}; env {s.variable}]".replace("%", "%%")
            # Without a type or a default: `_make_settings` reads the values and knows their sources.
            group.add_argument(
                s.flag, dest=s.name, metavar=s.kind.metavar, env_var=s.variable, default=SUPPRESS, help=text
            )
    return parser


def _read_options(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[Namespace, dict[str, str]]:
    """The given settings, as text, and the source of each; a setting that was not given is in neither."""
    file = SettingsFile()
    parser = _build_parser(file)
    is_other_key = not environ.get(KEY_VARIABLE) and bool(environ.get(OTHER_KEY_VARIABLE))
    env_vars = dict(environ)
    if is_other_key:
        env_vars[KEY_VARIABLE] = environ[OTHER_KEY_VARIABLE]
    try:
        options, unknown = parser.parse_known_args(list(argv), env_vars=env_vars)
    except OSError as error:
        source = _sources(parser, "").get("config", "command line")
        raise ConfigError(f"--config: cannot read {error.filename!r}: {error.strerror} ({source})") from None
    sources = dict.fromkeys(vars(options), "command line") | _sources(parser, options.config)
    if is_other_key and sources["api_key"] == f"environment {KEY_VARIABLE}":
        sources["api_key"] = f"environment {OTHER_KEY_VARIABLE}"
    if unknown:
        word = unknown[0].partition("=")[0]  # the value may be a secret
        hint = did_you_mean(word.replace("_", "-"), [*OTHER_FLAGS, *(s.flag for s in SETTINGS)])
        raise ConfigError(f"unknown option {word!r}{hint} (command line)")
    if options.config == "":
        raise ConfigError(f"--config: the path is empty ({sources['config']})")
    _check_environment(environ)
    options.models = file.models
    return options, sources


def _check_environment(environ: Mapping[str, str]) -> None:
    known = [CONFIG_VARIABLE, FAULTS_VARIABLE, *(s.variable for s in SETTINGS)]
    for variable in environ:
        if variable.startswith(ENV_PREFIX) and variable not in known:
            raise ConfigError(f"unknown environment variable {variable}{did_you_mean(variable, known)}")


def _read_faults(environ: Mapping[str, str], config: str | None) -> str:
    faults = environ.get(FAULTS_VARIABLE, "")
    if faults and config is not None:
        raise ConfigError(
            f"{FAULTS_VARIABLE} breaks the server on purpose, for tests, and excludes --config {config}"
        )
    return faults


def _sources(parser: _Parser, config: str) -> dict[str, str]:
    """The sources of the options that configargparse found in the environment or the file."""
    found = {}
    for origin, entries in parser.get_source_to_settings_dict().items():
        for variable, (action, _) in entries.items():
            if origin == "environment_variables":
                found[action.dest] = f"environment {variable}"
            elif origin.startswith("config_file|"):
                found[action.dest] = f"file {config}"
    return found


def _make_settings(options: Namespace, sources: dict[str, str]) -> Settings:
    given = {}
    for s in SETTINGS:
        if hasattr(options, s.name):
            given[s.name] = _read_value(s, getattr(options, s.name), sources[s.name])
    sources = {name: sources[name] for name in given}  # without --config and other flags that are no settings
    settings = Settings(**given, dry_run=options.dry_run, sources=sources)
    if settings.api_key_file:
        keys = read_keys("--api-key-file", settings.api_key_file, sources["api_key_file"])
        settings = replace(settings, file_keys=keys)
    if settings.admin_key_file:
        keys = read_keys("--admin-key-file", settings.admin_key_file, sources["admin_key_file"])
        settings = replace(settings, admin_file_keys=keys)
    settings = _resolve_model(settings, given.keys())
    return replace(settings, models=_make_models(options.models, settings, f"file {options.config}"))


def _make_models(
    sections: Mapping[str, Mapping[str, str]], settings: Settings, source: str
) -> dict[str, Settings]:
    """The settings of each [model.NAME]; NAME is also its `model` unless the section sets that."""
    models: dict[str, Settings] = {}
    for name, texts in sections.items():
        place = f"{source}, [{MODEL_SECTION}{name}]"
        given: dict[str, Any] = {}
        for key, text in texts.items():
            given[BY_KEY[key].name] = _read_value(BY_KEY[key], text, f"{place} {key}")
        if "kv_memory" in given or "kv_pages" in given:  # either one replaces both of the shared settings
            given = {"kv_memory": 0, "kv_pages": 0, **given}
        own = settings.for_model(name, **{"model": name, **given})
        own = replace(own, sources={**settings.sources, **dict.fromkeys(given, place)})
        own = _resolve_model(own, given.keys())
        if own.served_model_name in models:
            raise ConfigError(f"{place}: another model already has the name {own.served_model_name!r}")
        models[own.served_model_name] = own
    return models


def _resolve_model(settings: Settings, given: Collection[str]) -> Settings:
    """Copies the path of an alias to `model`; raises `ConfigError` for settings that exclude each other."""
    if settings.kv_memory and settings.kv_pages:
        raise ConfigError(_both("kv_memory", "kv_pages", settings))
    for alias in ("checkpoint_path", "hf_checkpoint"):
        path = getattr(settings, alias)
        if not path:
            continue
        for other in ("model", "hf_checkpoint"):
            if other != alias and other in given:
                raise ConfigError(_both(other, alias, settings))
        sources = {**settings.sources, "model": settings.sources[alias]}
        settings = replace(settings, model=path, sources=sources)
    return settings


def _read_value(s: Setting, text: str, source: str) -> Any:
    try:
        return s.kind.read(text)
    except (ValueError, KeyError):
        names_key = not source.startswith("file ") or f", [{MODEL_SECTION}" in source
        place = source if names_key else f"{source}, [{s.section}] {s.key}"
        shown = "***" if s.secret else repr(text)
        raise ConfigError(f"{s.flag} must be {s.kind.words}, not {shown} ({place})") from None


def _both(first: str, second: str, settings: Settings) -> str:
    shown = [row for row in settings.describe() if row.name in (first, second)]
    one, other = (f"--{name.replace('_', '-')} {value} ({source})" for name, value, source in shown)
    return f"{one} and {other} exclude each other; give only one of them"


def _format_settings(settings: Settings) -> str:
    described = {row.name: row for row in settings.describe()}
    key_width = max(len(s.key) for s in SETTINGS)
    value_width = max(len(row.value) for row in described.values())
    lines = []
    for section in SECTIONS:
        lines.append(f"[{section}]")
        for s in settings_of(section):
            _, value, source = described[s.name]
            lines.append(f"{s.key:{key_width}} = {value:{value_width}}  ({source})")
    for name, model in settings.models.items():
        lines.append(f"[{MODEL_SECTION}{name}]")
        for s in SETTINGS:
            value = getattr(model, s.name)
            if s.name in (*OWN_SETTINGS, *SHARED_SETTINGS) and value != getattr(settings, s.name):
                lines.append(f"{s.key:{key_width}} = {s.show(value)}")
    return "\n".join(lines)
