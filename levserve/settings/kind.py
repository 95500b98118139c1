"""What a setting is: its names, the values it may take, and how they are read and shown.

`settings.py` declares the settings with these. A kind turns text into a value, so flags, environment
variables and the file accept the same values and refuse a bad one with the same sentence.
"""

from __future__ import annotations

import configparser
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Generic, TypeVar

from levserve.settings.credentials import without_credentials

T = TypeVar("T")
Number = TypeVar("Number", int, float)

ENV_PREFIX = "LEVSERVE_"
UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
MAX_SEED = 2**63 - 1
BEARER_KEY = re.compile(r"[!-~]+")
"""What a key may be: an Authorization header cannot carry spaces in it, nor reliably other characters."""
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/*]+")


@dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    """The values a setting may take.

    `words` completes the sentence "must be ..."; `read` raises ValueError or KeyError for any other text.
    `synonyms` are other servers' words for some of the values.
    """

    words: str
    metavar: str
    read: Callable[[str], T]
    show: Callable[[T], str] = str
    is_list: bool = False
    """Whether the flag takes several words, which mean the same as one text with spaces."""
    synonyms: Mapping[str, T] = field(default_factory=dict)


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
        """The value on one line, as a person would write it, with secrets and credentials masked."""
        text = without_credentials(self.kind.show(value))
        if self.secret and text:
            return "***"
        return (text if text.isprintable() else ascii(text)) or "(empty)"


def setting(section: str, kind: Kind[T], default: T, help: str, *, secret: bool = False) -> T:
    """Declares a dataclass field. The return type lets mypy compare the field's type with its kind's."""
    metadata = {"section": section, "kind": kind, "help": help, "secret": secret}
    return field(default=default, repr=not secret, metadata=metadata)


def integer(low: int, high: int | None = None) -> Kind[int]:
    return _bounded("an integer", "N", int, low, high)


def real(low: float, high: float | None = None, *, noun: str = "a number", metavar: str = "X") -> Kind[float]:
    return _bounded(noun, metavar, float, low, high, show=lambda value: str(value).removesuffix(".0"))


def seconds(low: float) -> Kind[float]:
    return real(low, noun="a number of seconds", metavar="SECONDS")


def milliseconds(low: float) -> Kind[float]:
    return real(low, noun="a number of milliseconds", metavar="MS")


def size(low: int) -> Kind[int]:
    """Bytes with an optional unit: k, M, G and T are powers of 1000; Ki, Mi, Gi and Ti are powers of 1024."""
    return _bounded("a size such as 512MiB, 1.5GB or 4096", "SIZE", _read_size, low, show=_show_size)


def one_of(*values: T, synonyms: Mapping[str, T] | None = None) -> Kind[T]:
    by_text = {str(value): value for value in values}
    words = f"one of {', '.join(by_text)}"
    if synonyms:
        words += f" ({', '.join(f'{word} means {value}' for word, value in synonyms.items())})"
    readable = {**by_text, **(synonyms or {})}
    return Kind(words, "|".join(by_text), lambda text: readable[text.lower()], synonyms=synonyms or {})


def _bounded(
    noun: str,
    metavar: str,
    read: Callable[[str], Number],
    low: Number,
    high: Number | None = None,
    show: Callable[[Number], str] = str,
) -> Kind[Number]:
    def read_bounded(text: str) -> Number:
        value = read(text)
        is_allowed = low <= value < math.inf and (high is None or value <= high)  # False for nan
        if not is_allowed:
            raise ValueError
        return value

    bounds = f", at least {low}" if high is None else f" from {low} to {high}"
    return Kind(noun + bounds, metavar, read_bounded, show)


def _optional(kind: Kind[T]) -> Kind[T | None]:
    return Kind(
        f"{kind.words}, or empty",
        kind.metavar,
        lambda text: kind.read(text) if text else None,
        lambda value: "" if value is None else kind.show(value),
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


def _read_key(text: str) -> str:
    key = text.strip()  # a file or a secret store often adds a line break
    if key and not BEARER_KEY.fullmatch(key):
        raise ValueError
    return key


def _read_origins(text: str) -> tuple[str, ...]:
    """Origins as browsers write them in the Origin header: lower case, without a path or a final slash."""
    origins = tuple(text.lower().replace(",", " ").split())
    if origins != ("*",) and not all(ORIGIN.fullmatch(origin) for origin in origins):
        raise ValueError
    return origins


def _read_pair(text: str) -> tuple[int, int] | None:
    """One number for both, or one for each."""
    numbers = [int(word) for word in text.replace(",", " ").split()]
    if not numbers:
        return None
    first, second = numbers * 2 if len(numbers) == 1 else numbers
    if min(first, second) < 1:
        raise ValueError
    return first, second


def _read_count(text: str) -> int:
    if text.lower() == "auto":
        return 0
    count = int(text)
    if count < 1:
        raise ValueError
    return count


def _read_names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text.split()))


def _read_switch(text: str) -> bool:
    return configparser.RawConfigParser.BOOLEAN_STATES[text.lower()]


TEXT = Kind("text", "TEXT", str)
NAME = Kind("text that is not empty", "NAME", _read_name)
PATH = Kind("a path or a name", "PATH", os.path.expanduser)  # no shell expands ~ in the file
KEY = Kind("visible ASCII characters without spaces, or empty", "KEY", _read_key)
SWITCH = Kind("true or false", "true|false", _read_switch, lambda value: str(value).lower())
ORIGINS = Kind(
    "* or origins such as https://example.org, separated by spaces or commas",
    "ORIGINS",
    _read_origins,
    " ".join,
    is_list=True,
)
NAMES = Kind("names, separated by spaces", "NAMES", _read_names, " ".join, is_list=True)
PAIR = Kind(
    "an integer of at least 1, two of them with a comma, or empty",
    "N[,N]",
    _read_pair,
    lambda pair: "" if pair is None else f"{pair[0]},{pair[1]}",
)
COUNT_OR_AUTO = Kind(
    "an integer, at least 1, or auto", "N|auto", _read_count, lambda count: str(count) if count else "auto"
)
TEMPERATURE = _optional(real(0, 2))
SEED = _optional(integer(0, MAX_SEED))
HOST_ID = _optional(integer(0))
