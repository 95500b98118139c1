"""What a setting is: the names it goes by, the values it may take, and how they are read and shown.

`config.py` declares the settings themselves with these words. A kind turns text into a value, whichever of flag,
environment or file the text came from, so that all three accept the same and are refused with the same sentence.
"""

from __future__ import annotations

import configparser
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Number = TypeVar("Number", int, float)

ENV_PREFIX = "LEVSERVE_"
UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
MAX_SEED = 2**63 - 1
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/*]+")


@dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    """The values a setting may take: `words` completes "must be"; `read` raises ValueError or KeyError for other text."""

    words: str
    metavar: str
    read: Callable[[str], T]
    show: Callable[[T], str] = str


@dataclass(frozen=True, slots=True)
class Setting:
    """One declared setting."""

    name: str
    default: object
    section: str
    kind: Kind[Any]
    help: str
    secret: bool

    @property
    def key(self) -> str:
        return self.name.replace("_", "-")

    @property
    def flag(self) -> str:
        return f"--{self.key}"

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.name.upper()

    def show(self, value: object) -> str:
        """The value on one line, as a person would write it; a secret that is set is masked."""
        text = self.kind.show(value)
        if self.secret and text:
            return "***"
        return (text if text.isprintable() else ascii(text)) or "(empty)"


def setting(section: str, kind: Kind[T], default: T, help: str, *, secret: bool = False) -> T:
    """Declares a dataclass field; mypy holds the field's type against what its kind reads."""
    return field(
        default=default,
        repr=not secret,
        metadata={"section": section, "kind": kind, "help": help, "secret": secret},
    )


def integer(low: int, high: int | None = None) -> Kind[int]:
    return _bounded("an integer", "N", int, low, high)


def real(low: float) -> Kind[float]:
    return replace(_bounded("a number", "X", float, low), show=lambda value: str(value).removesuffix(".0"))


def size(low: int) -> Kind[int]:
    """Bytes, with or without a unit; k, M, G, T count in thousands, Ki, Mi, Gi, Ti in 1024s."""
    return replace(_bounded("a size such as 512MiB, 1.5GB or 4096", "SIZE", _read_size, low), show=_show_size)


def one_of(*values: T) -> Kind[T]:
    by_text = {str(value): value for value in values}
    return Kind(f"one of {', '.join(by_text)}", "|".join(by_text), lambda text: by_text[text.lower()])


def _bounded(
    noun: str, metavar: str, read: Callable[[str], Number], low: Number, high: Number | None = None
) -> Kind[Number]:
    def read_bounded(text: str) -> Number:
        value = read(text)
        if not low <= value < math.inf or (
            high is not None and value > high
        ):  # this way round nan is refused too
            raise ValueError
        return value

    return Kind(
        f"{noun} from {low} to {high}" if high is not None else f"{noun}, at least {low}",
        metavar,
        read_bounded,
    )


def _read_size(text: str) -> int:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([kmgt]i?)?b?", text.lower())
    if match is None:
        raise ValueError
    amount, unit = match.groups()
    return int(Decimal(amount) * UNITS[unit]) if unit else int(amount)


def _show_size(num_bytes: int) -> str:
    for unit in ("Ti", "Gi", "Mi", "Ki"):
        scale = UNITS[unit.lower()]
        if num_bytes and num_bytes % scale == 0:
            return f"{num_bytes // scale}{unit}B"
    return str(num_bytes)


def _read_name(text: str) -> str:
    if not text.strip():  # what `--model "$MODEL"` gives when MODEL is not set
        raise ValueError
    return os.path.expanduser(text)


def _read_origins(text: str) -> tuple[str, ...]:
    """As browsers write them in the header Origin: lower case, no path, not even a slash."""
    origins = tuple(text.lower().split())
    if origins != ("*",) and not all(ORIGIN.fullmatch(origin) for origin in origins):
        raise ValueError
    return origins


def _read_switch(text: str) -> bool:
    return configparser.RawConfigParser.BOOLEAN_STATES[text.lower()]


TEXT = Kind("text", "TEXT", str)
NAME = Kind("text that is not empty", "NAME", _read_name)
PATH = Kind(
    "a path or a name", "PATH", os.path.expanduser
)  # the shell expands ~ for a flag, nobody does for the file
SWITCH = Kind("true or false", "true|false", _read_switch, lambda value: str(value).lower())
ORIGINS = Kind(
    "* or origins such as https://example.org, separated by spaces", "ORIGINS", _read_origins, " ".join
)
TEMPERATURE: Kind[float | None] = Kind(
    "a number from 0 to 2, or empty",
    "X",
    lambda text: _bounded("a number", "X", float, 0.0, 2.0).read(text) if text else None,
    lambda value: "" if value is None else str(value),
)
SEED: Kind[int | None] = Kind(
    f"an integer from 0 to {MAX_SEED}, or empty",
    "N",
    lambda text: integer(0, MAX_SEED).read(text) if text else None,
    lambda value: "" if value is None else str(value),
)
