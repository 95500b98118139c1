"""Reads the settings from the command line, the environment and the settings file.

A flag overrides the environment, the environment overrides the file, and the file overrides the default.
`alias.py` has other servers' names for the settings, `environment.py` reads the environment file.
`parse_settings` is called once, before gunicorn forks, and remembers where each value came from. A mistake
ends the process with exit code 2 and one line that names the option, the value and the source.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from levserve.errors import ConfigError
from levserve.settings import alias as aliases
from levserve.settings.alias import BUCKET, FLAG_ALIASES, PREFIX, Alias, Given
from levserve.settings.command_line import (
    CONFIG_VARIABLE,
    OTHER_FLAGS,
    Parser,
    build_parser,
    complete,
    find_env_file,
    is_question,
)
from levserve.settings.elsewhere import ADVICE
from levserve.settings.environment import Environment, read_environment
from levserve.settings.file import SettingsFile, did_you_mean, find_setting
from levserve.settings.hosts import resolve_hosts
from levserve.settings.key_file import read_keys
from levserve.settings.kind import ENV_PREFIX, Setting
from levserve.settings.revision import split_revision
from levserve.settings.settings import (
    BY_NAME,
    FAULTS_VARIABLE,
    MODEL_SECTION,
    OWN_SETTINGS,
    SECTIONS,
    SETTINGS,
    SHARED_SETTINGS,
    Settings,
    settings_of,
)

FOR_SEVERAL_MODELS = {"models_memory", "max_loaded_models", "load"}


def parse_settings(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> Settings:
    """Exits as argparse does: with 0 after --help, --version and --print-config, with 2 after a mistake."""
    argv = complete(sys.argv[1:] if argv is None else argv)
    try:
        return read_settings(argv, _environment(argv, environ))
    except ConfigError as error:
        print(f"levserve: error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None


def read_settings(argv: Sequence[str], environment: Environment) -> Settings:
    """Reads the settings from a completed command line; raises `ConfigError` for a mistake."""
    options, sources, notes = _read_options(argv, environment)
    settings = _make_settings(options, sources, notes)
    faults = _read_faults(environment.variables, options.config)
    settings = resolve_hosts(settings, environment.variables, notes)
    settings = replace(settings, faults=faults, notes=tuple(notes))
    if options.print_config:
        print(_format_settings(settings))
        raise SystemExit(0)
    return settings


def _environment(argv: Sequence[str], environ: Mapping[str, str] | None) -> Environment:
    if is_question(argv):
        return Environment(os.environ if environ is None else environ, {}, "", ())
    if environ is not None:
        return read_environment(find_env_file(argv), environ)
    environment = read_environment(find_env_file(argv), os.environ)
    os.environ.update(environment.added)  # for libraries: HF_TOKEN, AWS_PROFILE and the like
    return environment


def _read_options(
    argv: Sequence[str], environment: Environment
) -> tuple[Namespace, dict[str, str], list[str]]:
    """The given settings, as text, the source of each, and notes for the log.

    A setting that was not given is in neither.
    """
    file = SettingsFile()
    parser = build_parser(file)
    try:
        options, unknown = parser.parse_known_args(list(argv), env_vars=dict(environment.variables))
    except OSError as error:
        source = _sources(parser, "", environment).get("config", "command line")
        raise ConfigError(f"--config: cannot read {error.filename!r}: {error.strerror} ({source})") from None
    sources = dict.fromkeys(vars(options), "command line") | _sources(parser, options.config, environment)
    if unknown:
        _take_model(unknown, options, sources)
    if options.config == "":
        raise ConfigError(f"--config: the path is empty ({sources['config']})")
    _check_environment(environment)
    notes = [*environment.notes, *_apply_aliases(options, sources, environment)]
    options.models = file.models
    return options, sources, notes


def _take_model(words: Sequence[str], options: Namespace, sources: dict[str, str]) -> None:
    """Takes a word that belongs to no flag as the model; raises `ConfigError` for anything else."""
    word = words[0].partition("=")[0]  # the value may be a secret
    if word in ADVICE:
        raise ConfigError(f"unknown option {word!r}; instead: {ADVICE[word]} (command line)")
    if word.startswith("-") or "=" in words[0]:
        known = [*OTHER_FLAGS, *(s.flag for s in SETTINGS), *(alias.flag for alias in FLAG_ALIASES.values())]
        hint = did_you_mean(word.replace("_", "-"), known)
        raise ConfigError(f"unknown option {word!r}{hint} (command line)")
    given = [*words, options.model] if sources.get("model") == "command line" else words
    if len(given) > 1:
        raise ConfigError(f"one model can be given, not {' and '.join(given)} (command line)")
    options.model, sources["model"] = word, "command line"


def _apply_aliases(options: Namespace, sources: dict[str, str], environment: Environment) -> list[str]:
    """Sets the settings that were given under other names; returns notes about them for the log."""
    notes = []
    found = aliases.variables_given(environment.variables, environment.describe)
    for name in aliases.OTHER_MODELS:
        if hasattr(options, name) and "model" in found:
            (given,) = found.pop("model")
            notes.append(f"{given.name} is overridden by {BY_NAME[name].flag} ({sources[name]})")
    if PREFIX in environment.variables and not environment.variables.get(BUCKET):
        notes.append(f"{PREFIX} is not used without {BUCKET}")
    for alias in FLAG_ALIASES.values():
        if hasattr(options, alias.dest):
            given = _alias_value(alias, options, sources)
            found.setdefault(alias.setting, []).append(given)
    for name, others in found.items():
        setting = BY_NAME[name]
        own = [_own_value(setting, options, sources)] if hasattr(options, name) else []
        chosen = aliases.choose(setting, [*own, *others])
        setattr(options, name, chosen.text)
        sources[name] = chosen.source
        notes += [aliases.note(setting, other, chosen) for other in others]
    return notes


def _alias_value(alias: Alias, options: Namespace, sources: Mapping[str, str]) -> Given:
    source, strength = sources[alias.dest], aliases.FROM_FLAG
    place = f"{source}, as {alias.flag}"
    if source != "command line":
        place, strength = f"{source}, [{BY_NAME[alias.setting].section}] {alias.name}", aliases.FROM_FILE
    text = aliases.translate(alias, getattr(options, alias.dest), place)
    assert text is not None  # only a variable may translate to None
    return Given(alias.flag, text, place, strength, alias)


def _own_value(setting: Setting, options: Namespace, sources: Mapping[str, str]) -> Given:
    text, source = getattr(options, setting.name), sources[setting.name]
    strength = aliases.FROM_FILE
    if source == "command line":
        strength = aliases.FROM_FLAG
    elif source.startswith("environment "):
        strength = aliases.FROM_VARIABLE if text else aliases.FROM_EMPTY_VARIABLE
    return Given(setting.flag, text, source, strength)


def _check_environment(environment: Environment) -> None:
    known = [CONFIG_VARIABLE, FAULTS_VARIABLE, *(s.variable for s in SETTINGS)]
    for variable in environment.variables:
        if not variable.startswith(ENV_PREFIX) or variable in known:
            continue
        key = variable.removeprefix(ENV_PREFIX).lower().replace("_", "-")
        alias = FLAG_ALIASES.get(key)
        hint = did_you_mean(variable, known)
        if alias is not None:
            hint = f"; did you mean {BY_NAME[alias.setting].variable}?"
        where = f" ({environment.path})" if variable in environment.added else ""
        raise ConfigError(f"unknown environment variable {variable}{hint}{where}")


def _read_faults(environ: Mapping[str, str], config: str | None) -> str:
    faults = environ.get(FAULTS_VARIABLE, "")
    if faults and config is not None:
        raise ConfigError(
            f"{FAULTS_VARIABLE} breaks the server on purpose, for tests, and excludes --config {config}"
        )
    return faults


def _sources(parser: Parser, config: str, environment: Environment) -> dict[str, str]:
    """The sources of the options that configargparse found in the environment or the file."""
    found = {}
    for origin, entries in parser.get_source_to_settings_dict().items():
        for variable, (action, _) in entries.items():
            if origin == "environment_variables":
                found[action.dest] = environment.describe(variable)
            elif origin.startswith("config_file|"):
                found[action.dest] = f"file {config}"
    return found


def _make_settings(options: Namespace, sources: dict[str, str], notes: list[str]) -> Settings:
    given = {}
    for s in SETTINGS:
        if not hasattr(options, s.name):
            continue
        text = getattr(options, s.name)
        given[s.name] = _read_value(s, text, sources[s.name])
        if text.lower() in s.kind.synonyms:
            notes.append(f"{s.flag} {text} is taken as {s.flag} {s.show(given[s.name])}")
    sources = {name: sources[name] for name in given}  # without --config and other flags that are no settings
    settings = Settings(**given, dry_run=options.dry_run, sources=sources)
    if not (options.models or settings.models_dir or settings.lazy):
        for name in FOR_SEVERAL_MODELS & given.keys():
            notes.append(
                f"{BY_NAME[name].flag} ({sources[name]}) is not used: it applies only to several models"
            )
    if settings.api_key_file:
        keys = read_keys("--api-key-file", settings.api_key_file, sources["api_key_file"])
        settings = replace(settings, file_keys=keys)
    if settings.admin_key_file:
        keys = read_keys("--admin-key-file", settings.admin_key_file, sources["admin_key_file"])
        settings = replace(settings, admin_file_keys=keys)
    if settings.cors_credentials and "*" in settings.cors_origins:
        raise ConfigError(
            f"--cors-credentials true ({sources['cors_credentials']}) needs the origins by name: "
            "browsers refuse credentials where --cors-origins is *"
        )
    settings = resolve_model(settings, given.keys())
    return replace(settings, models=_make_models(options.models, settings, f"file {options.config}"))


def _make_models(
    sections: Mapping[str, Mapping[str, str]], settings: Settings, source: str
) -> dict[str, Settings]:
    """The settings of each [model.NAME]; NAME is also its `model` unless the section sets one."""
    models: dict[str, Settings] = {}
    for name, texts in sections.items():
        place = f"{source}, [{MODEL_SECTION}{name}]"
        given: dict[str, Any] = {}
        for key, text in texts.items():
            s = find_setting(key)
            assert s is not None  # the file's keys are checked
            value = _read_value(s, text, f"{place} {key}")
            if given.setdefault(s.name, value) != value:
                raise ConfigError(
                    f"{place} {key}: another name of {s.key}, which the section sets differently"
                )
        if "kv_memory" in given or "kv_pages" in given:  # either one replaces both of the shared settings
            given = {"kv_memory": 0, "kv_pages": 0, **given}
        own = settings.for_model(name, **{"model": name, **given})
        own = replace(own, sources={**settings.sources, **dict.fromkeys(given, place)})
        own = resolve_model(own, given.keys())
        if not own.main_name:
            own = replace(own, served_model_name=(name,))
        taken = {other for one in models.values() for other in one.served_model_name}
        for served in own.served_model_name:
            if served in taken:
                raise ConfigError(f"{place}: another model already has the name {served!r}")
        models[own.main_name] = own
    return models


def resolve_model(settings: Settings, given: Collection[str]) -> Settings:
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
    return split_revision(settings)


def _read_value(s: Setting, text: str, source: str) -> Any:
    try:
        return s.kind.read(text)
    except (ValueError, KeyError):
        names_key = not source.startswith("file ") or ", [" in source
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
