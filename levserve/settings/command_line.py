"""The command line: its flags, its help, and the forms in which a flag may be written.

Every value is plain text here; `parse.py` reads it and knows where it came from.
"""

from __future__ import annotations

import textwrap
from argparse import SUPPRESS, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import configargparse

from levserve import __version__
from levserve.errors import ConfigError
from levserve.settings import alias as aliases
from levserve.settings.alias import FLAG_ALIASES
from levserve.settings.file import SettingsFile
from levserve.settings.kind import ENV_PREFIX, SWITCH
from levserve.settings.settings import SECTIONS, SETTINGS, settings_of

CONFIG_VARIABLE = f"{ENV_PREFIX}CONFIG"
DESCRIPTION = """\
Serves a language model over the OpenAI HTTP API.

  levserve                                  serves the bundled model on http://127.0.0.1:8000
  levserve Qwen/Qwen3-0.6B                  serves a model of the Hugging Face Hub
  levserve ./model.gguf --host 0.0.0.0      serves a file, to the whole network
  levserve --config serve.ini --port 9000   takes settings from the file, except for the port

Other commands, each with its own --help:

  levserve chat [MODEL]                     a conversation in the terminal
  levserve generate "PROMPT"                writes the continuation of a text
  levserve batch IN.jsonl OUT.jsonl         answers a file of requests
  levserve models                           lists what can be served
  levserve fetch NAME                       downloads a model
  levserve eval --tasks NAMES               evaluates a model with lm-evaluation-harness

Every setting below can be given in three ways: as a flag (--max-running 8), as an environment
variable, which is LEVSERVE_ and its name in capitals (LEVSERVE_MAX_RUNNING=8), or as a key in its
section of the file (max-running = 8 under [engine]). A flag overrides the environment, and the
environment overrides the file. A flag that is true or false may stand alone, which means true.

[aliases ...] are other servers' names for the same setting.
"""
MAX_METAVAR = 60
OTHER_FLAGS = ("--config", "--env-file", "--print-config", "--dry-run", "--version", "--help")


class Parser(configargparse.ArgumentParser):  # type: ignore[misc]
    def error(self, message: str) -> NoReturn:
        # Every value is plain text to argparse, so the mistakes it finds are in the command line's syntax.
        raise ConfigError(f"{message} (command line)")


class _HelpFormatter(RawDescriptionHelpFormatter):
    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)  # a flag stays in one piece


def find_env_file(argv: Sequence[str]) -> str | None:
    """The value of --env-file, which has to be known before the rest of the command line is read."""
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--env-file")
    path: str | None = parser.parse_known_args(list(argv), env_vars={})[0].env_file
    return path


def is_question(argv: Sequence[str]) -> bool:
    """Whether the user asks for help or the version, which must work despite mistakes elsewhere."""
    return not {"-h", "--help", "--version"}.isdisjoint(argv)


def complete(argv: Sequence[str]) -> list[str]:
    """The command line with exactly one value for each setting's flag, as the parser wants it.

    `levserve serve MODEL` is the same as `levserve MODEL`, for people who know it from other servers.
    """
    words = argv[1:] if argv and argv[0] == "serve" else argv
    return _join_lists(_complete_switches(words))


def build_parser(file: SettingsFile) -> Parser:
    parser = Parser(
        prog="levserve",
        usage="levserve [MODEL] [--config FILE] [--OPTION VALUE ...]",
        description=DESCRIPTION,
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
        add_config_file_help=False,
        add_env_var_help=False,
        config_file_parser_class=file,
        config_file_open_func=Path,  # SettingsFile.parse opens the file and words the error
    )
    config_help = (
        f"Read settings from this ini file, or YAML if it ends in .yaml or .yml. [env {CONFIG_VARIABLE}]"
    )
    parser.add_argument(
        "--config", metavar="FILE", is_config_file_arg=True, env_var=CONFIG_VARIABLE, help=config_help
    )
    parser.add_argument(
        "--env-file",
        metavar="FILE",
        help="Read variables that the environment does not set from this file. [default .env, if present]",
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
            metavar, text = s.kind.metavar, s.help
            if len(metavar) > MAX_METAVAR:
                metavar, text = "NAME", f"{text} It is {s.kind.words}."
            if s.kind.show(s.default):
                text += f" [default {s.show(s.default)}]"
            if others := aliases.names_of(s.name):
                text += f" [aliases {', '.join(others)}]"
            if s.kind.synonyms:
                meanings = (f"{word} means {value}" for word, value in s.kind.synonyms.items())
                text += f" [{', '.join(meanings)}]"
            # No type and no default here: `_make_settings` reads the values and knows their sources.
            group.add_argument(
                s.flag,
                dest=s.name,
                metavar=metavar,
                env_var=s.variable,
                default=SUPPRESS,
                help=text.replace("%", "%%"),
            )
    for alias in FLAG_ALIASES.values():
        parser.add_argument(alias.flag, dest=alias.dest, default=SUPPRESS, help=SUPPRESS)
    return parser


def _complete_switches(argv: Sequence[str]) -> list[str]:
    """The command line with `--open-metrics` written as `--open-metrics=true`, and so on."""
    switches = [s.flag for s in SETTINGS if s.kind is SWITCH]
    switches += [FLAG_ALIASES[name].flag for name in aliases.SWITCH_ALIASES]
    completed = []
    for index, word in enumerate(argv):
        is_alone = index + 1 == len(argv) or argv[index + 1].startswith("-")
        completed.append(f"{word}=true" if word in switches and is_alone else word)
    return completed


def _join_lists(argv: Sequence[str]) -> list[str]:
    """The command line with the words after a flag that takes several joined into one.

    With `nargs`, configargparse would take an empty variable for one that is not set.
    """
    lists = {s.flag for s in SETTINGS if s.kind.is_list}
    joined: list[str] = []
    is_in_list = False
    for word in argv:
        if word.startswith("-"):
            is_in_list = word in lists
            joined.append(word)
        elif is_in_list and joined[-1] not in lists:
            joined[-1] += f" {word}"
        else:
            joined.append(word)
    return joined
