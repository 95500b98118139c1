"""The options of the commands: their own, those of sampling, and every setting of the server that applies."""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from levserve.api.model import Model
from levserve.errors import ConfigError
from levserve.models.catalogue import Catalogue
from levserve.settings.environment import DEFAULT_FILE
from levserve.settings.kind import SWITCH
from levserve.settings.program import SERVER_SECTIONS, make_settings
from levserve.settings.settings import SETTINGS, Settings
from levserve.terminal.screen import has_escapes, redraw
from levserve.terminal.streams import as_utf8

SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop")
ROWS = 4
"""One conversation needs one row; programs for fewer rows than a server has compile sooner."""
EPILOG = """\
Settings of the server work here too: --dtype, --max-seq-len, --threads and so on, --config FILE and
--env-file FILE; see levserve --help.
"""


class Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def make_parser(command: str, description: str) -> Parser:
    """A parser that knows every setting which means something without a server."""
    parser = Parser(
        prog=f"levserve {command}",
        description=description,
        epilog=EPILOG,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for setting in SETTINGS:
        if setting.section not in SERVER_SECTIONS and setting.name not in ("model", "seed"):
            # A switch may be given without a value, as for the server.
            more: dict[str, Any] = {"nargs": "?", "const": "true"} if setting.kind is SWITCH else {}
            parser.add_argument(
                setting.flag, dest=f"setting:{setting.name}", default=SUPPRESS, help=SUPPRESS, **more
            )
    for flag in ("--config", "--env-file"):
        parser.add_argument(flag, default=None, help=SUPPRESS)
    return parser


def text(word: str) -> str:
    """The type of an option that a model reads."""
    try:
        return as_utf8(word)
    except ValueError:
        raise ArgumentTypeError("is not UTF-8 text") from None


def add_model(parser: Parser, words: str) -> None:
    """Adds the model as a positional argument, or with --model as for the server."""
    parser.add_argument("model", nargs="?", metavar="MODEL", default=SUPPRESS, help=words)
    parser.add_argument("--model", default=SUPPRESS, help=SUPPRESS)


def add_sampling(parser: Parser, *, max_tokens: str) -> None:
    """`max_tokens` is what the help gives as the default of --max-tokens."""
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens", type=int, metavar="N", help=f"Maximum tokens of an answer. [default {max_tokens}]"
    )
    group.add_argument(
        "--temperature", type=float, metavar="X", help="0 always takes the likeliest token. [default 1]"
    )
    group.add_argument(
        "--top-p",
        type=float,
        metavar="X",
        help="Draw from the likeliest tokens whose probabilities add up to X.",
    )
    group.add_argument("--top-k", type=int, metavar="N", help="Draw from the N likeliest tokens.")
    group.add_argument(
        "--min-p",
        type=float,
        metavar="X",
        help="Draw from tokens that are at least X times as likely as the likeliest.",
    )
    group.add_argument("--seed", type=int, metavar="N", help="Same seed, same answer.")
    group.add_argument(
        "--stop",
        type=text,
        action="append",
        metavar="TEXT",
        help="Text that ends an answer; may be given several times.",
    )


def sampling_of(options: Namespace) -> dict[str, Any]:
    """The sampling fields that were given."""
    given = {name: getattr(options, name) for name in SAMPLING}
    return {name: value for name, value in given.items() if value is not None}


def settings_of(options: Namespace) -> dict[str, object]:
    """The settings that were given, by name, and the files with others."""
    prefix = "setting:"
    given = {name.removeprefix(prefix): value for name, value in vars(options).items() if prefix in name}
    given |= {"config": options.config, "env_file": options.env_file}
    if options.env_file is None and Path(DEFAULT_FILE).is_file():
        given["env_file"] = DEFAULT_FILE
    model = getattr(options, "model", None)
    return given | ({"model": model} if model else {})


def read_settings(options: Namespace, **others: object) -> Settings:
    """The settings for one model: of several, the one that was named, or else the server's default.

    `others` are settings that a flag may override.
    """
    settings = make_settings(others | settings_of(options))
    if not settings.has_several:
        return settings
    catalogue = Catalogue(settings)
    found = catalogue.find(catalogue.default)
    assert found is not None
    return replace(found, models={}, models_dir="")


@contextmanager
def open_with_progress(options: Namespace) -> Iterator[Model]:
    """Loads the model and shows the progress; leaving the `with` block closes the model."""
    from levserve.api.opening import open_with

    with show_loading() as report:
        model = open_with(read_settings(options, max_running=ROWS), report)
    with closing_unless_interrupted(model.close):
        yield model


@contextmanager
def closing_unless_interrupted(close: Callable[[], None]) -> Iterator[None]:
    """Closes a model at the end of the block. Ctrl-C does not: it would wait for programs that compile."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException:
        close()
        raise
    close()


@contextmanager
def show_loading() -> Iterator[Callable[[str], None]]:
    """Yields a function that shows the progress of loading, in a terminal on one line that goes away."""
    is_shown = has_escapes()

    def report(line: str) -> None:
        if is_shown:
            redraw(line)

    try:
        yield report
    finally:
        if is_shown:
            redraw("")
