"""Every setting of the server, declared once, as a field of `Settings`.

A field gives its flag (`--max-running`), its key in the ini file (`max-running` under its section), its environment
variable (`LEVSERVE_MAX_RUNNING`), its lines in `--help` and its row in README's table. A flag wins over the environment,
the environment over the file, the file over the default. `parse_settings` is called once, before gunicorn forks, and
remembers where each value came from: every mistake ends the start with exit code 2 and one line that names the option,
the value and the source. Nothing else in levserve reads `os.environ`, but for what systemd puts there (`systemd.py`).
"""

from __future__ import annotations

import configparser
import difflib
import os
import re
import sys
from argparse import SUPPRESS, Namespace, RawDescriptionHelpFormatter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import configargparse

from levserve import __version__
from levserve.errors import ConfigError
from levserve.setting import (
    ENV_PREFIX, NAME, ORIGINS, PATH, SEED, SWITCH, TEMPERATURE, TEXT, Setting, integer, one_of, real, setting, size,
)  # fmt: skip

CONFIG_VARIABLE = f"{ENV_PREFIX}CONFIG"
FAULTS_VARIABLE = f"{ENV_PREFIX}FAULTS"  # for tests, so neither a flag nor a key of the file; see engine/faults.py
KEY_VARIABLE = f"{ENV_PREFIX}API_KEY"
OTHER_KEY_VARIABLE = "LEVANTER_API_KEY"  # what Levanter's own server reads
SECTIONS = {
    "server": "where it listens and who may call",
    "model": "what it serves",
    "engine": "how it runs on the device",
    "limits": "what it refuses",
    "log": "what it tells",
}
MODEL_SECTION = "model."
"""[model.NAME] is one of several models; what it does not set of SHARED_SETTINGS it has from [model] and the others."""
OWN_SETTINGS = (
    "model", "hf_checkpoint", "checkpoint_path", "model_config", "revision", "tokenizer", "chat_template", "served_model_name",
)  # fmt: skip
SHARED_SETTINGS = ("model_store", "dtype", "quantize", "max_seq_len", "load", "kv_memory", "kv_pages")
DESCRIPTION = """\
Serves a language model over the OpenAI HTTP API.

  levserve                                  the bundled model on 127.0.0.1:8000
  levserve --config serve.ini --port 9000   what the file says, on port 9000

Every setting is a flag, an environment variable and a key of the file:
--max-running 8, LEVSERVE_MAX_RUNNING=8, or "max-running = 8" under [engine].
Flags win over the environment, that over the file, that over the defaults.
"""
OTHER_FLAGS = ("--config", "--print-config", "--dry-run", "--version", "--help")


class Described(NamedTuple):
    """One setting of a running server, fit for a log: secrets are masked."""

    name: str
    value: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the operator asked for; 0 and empty stand for "sized from the machine" where the help says so.

    `sources` names the origin of every value that is not a default; `file_keys` and `admin_file_keys` are what the key files
    hold. Made by `parse_settings`, which checks; a test may make its own.
    """

    host: str = setting("server", NAME, "127.0.0.1", "Address to listen on.")
    port: int = setting("server", integer(0, 65535), 8000, "Port to listen on; 0 lets the system choose.")
    api_key: str = setting(
        "server", TEXT, "", f"Bearer key that clients must send, else ${OTHER_KEY_VARIABLE}; no key lets everyone in.", secret=True
    )
    api_key_file: str = setting("server", PATH, "", "File with more keys that let in, one a line; # begins a comment.")
    admin_key: str = setting("server", TEXT, "", "Bearer key of the /admin endpoints; with no admin key they are off.", secret=True)
    admin_key_file: str = setting("server", PATH, "", "File with more admin keys, one a line; # begins a comment.")
    open_metrics: bool = setting("server", SWITCH, False, "Let /metrics be read without a key.")
    cors_origins: tuple[str, ...] = setting("server", ORIGINS, (), "Origins whose web pages may call; empty: none, *: all.")
    drain_seconds: float = setting("server", real(0), 30.0, "How long running requests may go on after SIGTERM.")
    keep_alive: float = setting(
        "server", real(0), 75.0, "Seconds that an idle connection is kept; longer than the proxy in front keeps it (nginx: 60)."
    )
    sse_heartbeat: float = setting("server", real(0), 15.0, "Seconds between comment lines that keep a waiting stream alive; 0: none.")

    model: str = setting(
        "model", NAME, "smollm2-135m", "Bundled name, Hugging Face folder, .gguf file, org/name on the hub, or gs://, s3://, http(s)://."
    )
    hf_checkpoint: str = setting("model", PATH, "", "Another name for --model; give one of them.")
    checkpoint_path: str = setting("model", PATH, "", "Levanter checkpoint, or folder of them (the newest), in place of --model.")
    model_config: str = setting("model", PATH, "", "The Levanter run's config.yaml; empty: in the checkpoint or up to two folders above.")
    model_store: str = setting("model", PATH, "", "Folder or address where --model names are looked up; org/name is org-name there.")
    revision: str = setting("model", TEXT, "", "Branch, tag or commit on the hub; empty: the main branch.")
    tokenizer: str = setting("model", PATH, "", "Folder, .gguf file or hub name of a tokenizer to use in place of the model's own.")
    chat_template: str = setting("model", PATH, "", "Jinja file to use in place of the model's own chat template.")
    served_model_name: str = setting("model", TEXT, "", "Name that /v1/models tells; empty: the model's own.")
    dtype: str = setting("model", one_of("auto", "float32", "bfloat16"), "auto", "Number format to compute in.")
    quantize: str = setting("model", one_of("none", "int8"), "none", "Keep the matrices in eight bits; for CPUs.")
    max_seq_len: int = setting("model", integer(0), 0, "Most tokens in prompt and answer; 0: the model's own limit, or what memory allows.")
    default_max_tokens: int = setting(
        "model", integer(0), 0, "Tokens for a request that names no limit; 0: OpenAI's, 16 for a completion, all that fit for a chat."
    )
    default_temperature: float | None = setting("model", TEMPERATURE, None, "For a request that names none; empty: OpenAI's, which is 1.")
    models_dir: str = setting("model", PATH, "", "Folder, or address, of which every model can be asked for by its name.")
    load: str = setting(
        "model", one_of("first-use", "start"), "first-use", "When one of several models is loaded; the default one is at the start."
    )
    cache_dir: str = setting(
        "model", PATH, "", "Where downloads and compiled programs are kept; empty: $XDG_CACHE_HOME/levserve or ~/.cache/levserve."
    )
    cache_size: int = setting("model", size(0), 0, "Most that models fetched from stores may take in the cache; 0: no limit.")

    device: str = setting("engine", one_of("auto", "cpu", "gpu", "tpu"), "auto", "Kind of device to run on.")
    max_running: int = setting("engine", integer(0), 0, "Requests decoded together (rows); 0: sized from the machine.")
    page_size: int = setting("engine", one_of(4, 8, 16, 32, 64, 128, 256), 32, "Tokens in one page of the KV cache.")
    kv_memory: int = setting("engine", size(0), 0, "Memory for the KV cache; 0: sized from the machine.")
    kv_pages: int = setting("engine", integer(0), 0, "Pages of the KV cache, instead of --kv-memory; 0: sized from the machine.")
    models_memory: int = setting("engine", size(0), 0, "Most that several models may take, weights and KV; 0: 9/10 of what is free.")
    max_loaded_models: int = setting("engine", integer(0), 0, "Most models loaded at a time; 0: as many as there is memory for.")
    round_steps: int = setting("engine", integer(0), 0, "Decode steps in one device round; 0: 1 on CPU, 8 on an accelerator.")
    prefill_chunk: int = setting("engine", integer(0), 0, "Most prompt tokens in a device call; 0: 128 on CPU, 4096 on an accelerator.")
    inter_token_goal_ms: float = setting(
        "engine", real(1), 100.0, "Milliseconds that a running stream may wait for other requests' prompts in one round."
    )
    seed: int | None = setting("engine", SEED, None, "Base of the seeds of requests that bring none; empty: fresh entropy.")
    compile_cache: bool = setting("engine", SWITCH, True, "Keep compiled programs on disk for the next start.")

    max_waiting: int = setting("limits", integer(0), 0, "Requests that may wait for a row; 0: four times the rows.")
    max_inflight_tokens: int = setting(
        "limits", integer(0), 0, "Tokens (prompt and max_tokens) of all that run or wait; 0: sized from the KV cache and the queue."
    )
    max_body_bytes: int = setting("limits", size(1), 4 * 2**20, "Largest request body or WebSocket message.")
    max_sockets: int = setting("limits", integer(0), 16, "WebSockets open at a time; each holds a thread of its own.")
    request_timeout: float = setting("limits", real(0), 600.0, "Seconds that a request may take; 0 for no limit.")
    header_timeout: float = setting("limits", real(0.1), 10.0, "Seconds until a request's head must be here.")
    body_timeout: float = setting("limits", real(0.1), 30.0, "Seconds from a request's head to the end of its body.")
    send_timeout: float = setting("limits", real(0.1), 30.0, "Seconds that a client may take none of what it is sent.")
    stall_seconds: float = setting(
        "limits", real(0), 30.0, "Seconds that the device may have work and not move before the server counts as stalled; 0: never."
    )

    log_level: str = setting("log", one_of("debug", "info", "warning", "error"), "info", "Least severity that is logged.")
    log_format: str = setting("log", one_of("text", "json"), "text", "Lines for people, or one JSON object a line.")
    vllm_metrics: bool = setting("log", SWITCH, False, "Export metrics under vLLM's names too, for dashboards made for it.")
    tracing: str = setting("log", one_of("off", "otlp", "console"), "off", "Where OpenTelemetry spans go; OTEL_ variables apply.")

    models: Mapping[str, Settings] = field(default_factory=dict)
    """Of the sections [model.NAME], by the name that requests call the model."""
    dry_run: bool = False
    faults: str = ""
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    file_keys: tuple[str, ...] = field(default=(), repr=False)
    admin_file_keys: tuple[str, ...] = field(default=(), repr=False)

    @property
    def api_keys(self) -> tuple[str, ...]:
        """Every key that lets in; none lets everyone in."""
        return (self.api_key, *self.file_keys) if self.api_key else self.file_keys

    @property
    def admin_keys(self) -> tuple[str, ...]:
        """Every key that lets in to /admin; none closes it."""
        return (self.admin_key, *self.admin_file_keys) if self.admin_key else self.admin_file_keys

    @property
    def has_several(self) -> bool:
        """Whether requests may choose between models."""
        return bool(self.models or self.models_dir)

    def for_model(self, name: str, **own: Any) -> Settings:
        """The settings of one of several models: nothing that was meant for another model, and what is given here."""
        fresh = {s.name: s.default for s in SETTINGS if s.name in OWN_SETTINGS}
        return replace(self, **{**fresh, "served_model_name": name, **own, "models": {}, "models_dir": ""})

    @property
    def cache_path(self) -> Path:
        if self.cache_dir:
            return Path(self.cache_dir)
        base = Path(os.environ.get("XDG_CACHE_HOME", ""))
        return (base if base.is_absolute() else Path.home() / ".cache") / "levserve"  # XDG: a relative path is to be ignored

    def describe(self) -> list[Described]:
        """Every setting in order of declaration, with its source: "default", "command line", "environment X" or "file PATH"."""
        return [Described(s.name, s.show(getattr(self, s.name)), self.sources.get(s.name, "default")) for s in SETTINGS]


SETTINGS = tuple(Setting(f.name, f.default, **f.metadata) for f in fields(Settings) if f.metadata)
BY_KEY = {s.key: s for s in SETTINGS}


def parse_settings(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> Settings:
    """The settings of this start. Exits as argparse does: 0 after --help, --version and --print-config, 2 after a mistake."""
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


def settings_table() -> str:
    """README's table of the settings, in Markdown."""
    lines = ["| option | environment | value | default | meaning |", "|---|---|---|---|---|"]
    for section, title in SECTIONS.items():
        lines.append(f"| **`[{section}]`** | | | | *{title}* |")
        for s in _settings_of(section):
            lines.append(f"| `{s.flag}` | `{s.variable}` | {s.kind.words} | `{s.show(s.default)}` | {s.help} |")
    return "\n".join(lines) + "\n"


def _settings_of(section: str) -> list[Setting]:
    return [s for s in SETTINGS if s.section == section]


class _Parser(configargparse.ArgumentParser):  # type: ignore[misc]
    def error(self, message: str) -> NoReturn:
        # Only what argparse itself finds comes here; all values are plain text to it, so it is about the command line.
        raise ConfigError(f"{message} (command line)")


class _SettingsFile(configargparse.ConfigFileParser):  # type: ignore[misc]
    """The ini dialect: each known key once, in its own section; `%`, `#` and `:` inside a value stand for themselves.

    `models` are the sections of single models, which are kept apart.
    """

    def __init__(self) -> None:
        super().__init__()
        self.models: dict[str, dict[str, str]] = {}

    def parse(self, stream: Path) -> dict[str, str]:
        # No header can be empty, so no section spreads its keys over the others as configparser's [DEFAULT] would.
        ini = configparser.RawConfigParser(delimiters=("=",), default_section="", empty_lines_in_values=False)
        try:
            ini.read_string(stream.read_text("utf-8-sig"))
        except UnicodeDecodeError:
            raise ConfigError(f"{stream}: not UTF-8 text") from None
        except configparser.Error as error:
            raise ConfigError(f"{stream}, {_explain_ini(error)}") from None
        for section in ini.sections():
            name = section.removeprefix(MODEL_SECTION)
            if section not in SECTIONS and (name == section or not name.strip()):
                raise ConfigError(f"{stream}: unknown section [{section}]{_hint(section.lower(), SECTIONS)}")
            for key, text in ini.items(section):
                _check_entry(f"{stream}, [{section}] {key}", section, key, text)
            if section not in SECTIONS:
                self.models[name] = dict(ini.items(section))
        return {key: text for section in ini.sections() if section in SECTIONS for key, text in ini.items(section)}


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
        raise ConfigError(f"{place}: unknown key{_hint(key.replace('_', '-'), BY_KEY)}")
    if section not in SECTIONS:
        if BY_KEY[key].name not in (*OWN_SETTINGS, *SHARED_SETTINGS):
            raise ConfigError(f"{place}: this key is for all models together and belongs in [{BY_KEY[key].section}]")
    elif BY_KEY[key].section != section:
        raise ConfigError(f"{place}: this key belongs in [{BY_KEY[key].section}]")
    if "\n" in text:
        raise ConfigError(f"{place}: the value goes on over an indented line; begin each key at the left margin")
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        raise ConfigError(f"{place}: write the value without quotes; they would become part of it")


def _hint(word: str, known: Iterable[str]) -> str:
    nearest = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {nearest[0]}?" if nearest else ""


def _build_parser(file: _SettingsFile) -> _Parser:
    parser = _Parser(
        prog="levserve",
        usage="levserve [--config FILE] [--OPTION VALUE ...]",
        description=DESCRIPTION,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_config_file_help=False,
        add_env_var_help=False,
        config_file_parser_class=file,
        config_file_open_func=Path,  # the file is read in `parse`; configargparse would word a failure to open its own way
    )
    config_help = f"Read settings from this ini file. [env {CONFIG_VARIABLE}]"
    parser.add_argument("--config", metavar="FILE", is_config_file_arg=True, env_var=CONFIG_VARIABLE, help=config_help)
    parser.add_argument("--print-config", action="store_true", help="Show every setting with its source, and exit.")
    parser.add_argument("--dry-run", action="store_true", help="Load, compile, generate one token, show the memory plan, and exit.")
    parser.add_argument("--version", action="version", version=f"levserve {__version__}", help="Show the version, and exit.")
    for section, title in SECTIONS.items():
        group = parser.add_argument_group(f"[{section}] {title}")
        for s in _settings_of(section):
            text = f"{s.help} [default {s.show(s.default)}; env {s.variable}]".replace("%", "%%")
            # No type and no default here: values are read in `_make_settings`, where the source of each is known.
            group.add_argument(s.flag, dest=s.name, metavar=s.kind.metavar, env_var=s.variable, default=SUPPRESS, help=text)
    return parser


def _read_options(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[Namespace, dict[str, str]]:
    """What was given, as text, and the source of each; a setting that nobody gave is in neither."""
    file = _SettingsFile()
    parser = _build_parser(file)
    is_other_key = not environ.get(KEY_VARIABLE) and bool(environ.get(OTHER_KEY_VARIABLE))
    env_vars = {**environ, KEY_VARIABLE: environ[OTHER_KEY_VARIABLE]} if is_other_key else environ
    try:
        options, unknown = parser.parse_known_args(list(argv), env_vars=env_vars)
    except OSError as error:
        source = _sources(parser, "").get("config", "command line")
        raise ConfigError(f"--config: cannot read {error.filename!r}: {error.strerror} ({source})") from None
    sources = dict.fromkeys(vars(options), "command line") | _sources(parser, options.config)
    if is_other_key and sources["api_key"] == f"environment {KEY_VARIABLE}":
        sources["api_key"] = f"environment {OTHER_KEY_VARIABLE}"
    if unknown:
        word = unknown[0].partition("=")[0]  # what follows may be a secret
        hint = _hint(word.replace("_", "-"), [*OTHER_FLAGS, *(s.flag for s in SETTINGS)])
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
            raise ConfigError(f"unknown environment variable {variable}{_hint(variable, known)}")


def _read_faults(environ: Mapping[str, str], config: str | None) -> str:
    faults = environ.get(FAULTS_VARIABLE, "")
    if faults and config is not None:
        raise ConfigError(f"{FAULTS_VARIABLE} breaks the server on purpose and is for tests: it is refused with --config {config}")
    return faults


def _sources(parser: _Parser, config: str) -> dict[str, str]:
    """The options that the environment or the file gave, as configargparse kept them."""
    found = {}
    for origin, entries in parser.get_source_to_settings_dict().items():
        for variable, (action, _) in entries.items():
            if origin == "environment_variables":
                found[action.dest] = f"environment {variable}"
            elif origin.startswith("config_file|"):
                found[action.dest] = f"file {config}"
    return found


def _make_settings(options: Namespace, sources: dict[str, str]) -> Settings:
    given = {s.name: _read_value(s, getattr(options, s.name), sources[s.name]) for s in SETTINGS if hasattr(options, s.name)}
    sources = {name: sources[name] for name in given}  # less --config and its like
    settings = Settings(**given, dry_run=options.dry_run, sources=sources)
    if settings.api_key_file:
        settings = replace(settings, file_keys=_read_keys("--api-key-file", settings.api_key_file, sources["api_key_file"]))
    if settings.admin_key_file:
        keys = _read_keys("--admin-key-file", settings.admin_key_file, sources["admin_key_file"])
        settings = replace(settings, admin_file_keys=keys)
    settings = _settle(settings, given.keys())
    return replace(settings, models=_make_models(options.models, settings, f"file {options.config}")) if options.models else settings


def _make_models(sections: Mapping[str, Mapping[str, str]], settings: Settings, source: str) -> dict[str, Settings]:
    """The settings of each [model.NAME]. One that does not say where its model is has it under its own name."""
    models: dict[str, Settings] = {}
    for name, texts in sections.items():
        place = f"{source}, [{MODEL_SECTION}{name}]"
        given = {BY_KEY[key].name: _read_value(BY_KEY[key], text, f"{place} {key}") for key, text in texts.items()}
        if "kv_memory" in given or "kv_pages" in given:
            given = {"kv_memory": 0, "kv_pages": 0, **given}
        own = settings.for_model(name, **{"model": name, **given})
        own = _settle(replace(own, sources={**settings.sources, **dict.fromkeys(given, place)}), given.keys())
        if own.served_model_name in models:
            raise ConfigError(f"{place}: another model is called {own.served_model_name!r} already")
        models[own.served_model_name] = own
    return models


def _settle(settings: Settings, given: Collection[str]) -> Settings:
    """One name for where the model is; raises `ConfigError` for settings that exclude each other."""
    sources = settings.sources
    if settings.kv_memory and settings.kv_pages:
        raise ConfigError(_both("kv_memory", "kv_pages", settings))
    for other in ("model", "hf_checkpoint"):
        if settings.checkpoint_path and other in given:
            raise ConfigError(_both(other, "checkpoint_path", settings))
    if settings.checkpoint_path:
        settings = replace(settings, model=settings.checkpoint_path, sources={**sources, "model": sources["checkpoint_path"]})
    if settings.hf_checkpoint:
        if "model" in given:
            raise ConfigError(_both("model", "hf_checkpoint", settings))
        return replace(settings, model=settings.hf_checkpoint, sources={**sources, "model": sources["hf_checkpoint"]})
    return settings


def _read_value(s: Setting, text: str, source: str) -> Any:
    try:
        return s.kind.read(text)
    except (ValueError, KeyError):
        is_placed = not source.startswith("file ") or f", [{MODEL_SECTION}" in source
        place = source if is_placed else f"{source}, [{s.section}] {s.key}"
        raise ConfigError(f"{s.flag} must be {s.kind.words}, not {'***' if s.secret else repr(text)} ({place})") from None


def _read_keys(flag: str, path: str, source: str) -> tuple[str, ...]:
    place = f"{flag} {path} ({source})"
    try:
        lines = Path(path).read_text("utf-8-sig").splitlines()
    except OSError as error:
        raise ConfigError(f"{place}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{place}: not UTF-8 text") from None
    keys = [re.split(r"(?:^|\s)#", line)[0].split() for line in lines]  # a # inside a key is part of it
    for number, words in enumerate(keys, start=1):
        if len(words) > 1:
            raise ConfigError(f"{place}: line {number} has more than one word; a key has no spaces")
    if not any(keys):
        raise ConfigError(f"{place}: there is no key in it")
    return tuple(key for words in keys for key in words)


def _both(first: str, second: str, settings: Settings) -> str:
    one, other = (f"--{d.name.replace('_', '-')} {d.value} ({d.source})" for d in settings.describe() if d.name in (first, second))
    return f"{one} and {other} exclude each other; give one of them"


def _format_settings(settings: Settings) -> str:
    described = {row.name: row for row in settings.describe()}
    key_width = max(len(s.key) for s in SETTINGS)
    value_width = max(len(row.value) for row in described.values())
    lines = []
    for section in SECTIONS:
        lines.append(f"[{section}]")
        for s in _settings_of(section):
            _, value, source = described[s.name]
            lines.append(f"{s.key:{key_width}} = {value:{value_width}}  ({source})")
    for name, model in settings.models.items():
        lines.append(f"[{MODEL_SECTION}{name}]")
        for s in SETTINGS:
            if s.name in (*OWN_SETTINGS, *SHARED_SETTINGS) and getattr(model, s.name) != getattr(settings, s.name):
                lines.append(f"{s.key:{key_width}} = {s.show(getattr(model, s.name))}")
    return "\n".join(lines)
