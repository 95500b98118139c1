"""Sets up Python's logging from a standard file: YAML or JSON for dictConfig, ini for fileConfig."""

from __future__ import annotations

import configparser
import logging.config
from pathlib import Path

import yaml

from levserve.errors import ConfigError

DICT_SUFFIXES = (".yaml", ".yml", ".json")  # JSON is YAML too
INI_SUFFIXES = (".ini", ".conf", ".cfg")


def configure_logging(name: str) -> None:
    """Raises `ConfigError` with the file and, where there is one, the key that is wrong."""
    path = Path(name)
    suffix = path.suffix.lower()
    if suffix not in (*DICT_SUFFIXES, *INI_SUFFIXES):
        expected = ", ".join((*DICT_SUFFIXES, *INI_SUFFIXES))
        raise ConfigError(f"--logging-config {name}: the file's name must end in one of {expected}")
    try:
        text = path.read_text("utf-8-sig")
        if suffix in DICT_SUFFIXES:
            _apply_dict(text)
        else:
            _apply_ini(text)
    except UnicodeDecodeError:
        raise ConfigError(f"--logging-config {name}: not UTF-8 text") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 1
        raise ConfigError(f"--logging-config {name}, line {line}: {error.problem}") from None
    except Exception as error:  # a class or a level that the file names may raise anything
        raise ConfigError(f"--logging-config {name}: {_explain(error)}") from None


def _apply_dict(text: str) -> None:
    config = yaml.safe_load(text)
    if not isinstance(config, dict):
        raise ValueError("expected a mapping with version, handlers and loggers")
    # Python's own default would turn off the loggers that exist already, which are ours.
    logging.config.dictConfig({"disable_existing_loggers": False, **config})


def _apply_ini(text: str) -> None:
    ini = configparser.RawConfigParser()  # without interpolation: formats have % in them
    ini.read_string(text)
    logging.config.fileConfig(ini, disable_existing_loggers=False)


def _explain(error: BaseException) -> str:
    """One line with the error and its causes: the first often names only the handler, the last the reason."""
    reasons = []
    cause: BaseException | None = error
    while cause is not None:
        text = str(cause.strerror) if isinstance(cause, OSError) and cause.strerror else str(cause)
        kind = "missing key" if isinstance(cause, KeyError) else ""
        reason = " ".join(f"{kind} {text}".split()) or type(cause).__name__
        if isinstance(cause, OSError) and cause.filename:
            reason += f": {cause.filename}"
        reasons.append(reason)
        cause = cause.__cause__
    return ": ".join(reasons)
