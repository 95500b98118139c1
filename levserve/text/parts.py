"""What an answer consists of: content, thoughts and calls of tools, found in its text while it streams.

A `PartReader` belongs to one choice. It is used after the stop strings were cut off, by one thread at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol


class Content(NamedTuple):
    """Text for the user."""

    text: str


class Thought(NamedTuple):
    """Text that the model wrote to itself before the answer."""

    text: str


class CallStart(NamedTuple):
    """A call of a tool, whose name is complete. The arguments follow, before the next call begins."""

    number: int
    """Which call of the answer this is, from 0."""
    id: str
    name: str


class CallArguments(NamedTuple):
    """More of a call's arguments: a piece of JSON text. The pieces of one call join to one object."""

    number: int
    text: str


Part = Content | Thought | CallStart | CallArguments


def join_content(parts: Iterable[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Content))


def join_thoughts(parts: Iterable[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Thought))


def join_calls(parts: Sequence[Part]) -> list[tuple[CallStart, str]]:
    """The calls of tools, each with all of its arguments."""
    calls = []
    for start in parts:
        if isinstance(start, CallStart):
            own = (part for part in parts if isinstance(part, CallArguments) and part.number == start.number)
            calls.append((start, "".join(part.text for part in own)))
    return calls


def is_json_object(arguments: str) -> bool:
    """Whether a call's arguments are complete: those of a call that was cut off are not a JSON object."""
    try:
        return isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        return False


class PartReader(Protocol):
    """Splits the text of one answer. How the text was cut into pieces does not change the joined parts."""

    @property
    def is_thinking(self) -> bool:
        """Whether the text read so far ends within the thoughts."""

    def add(self, text: str) -> Sequence[Part]:
        """Takes more text and returns the parts that are now certain; no part is empty."""

    def flush(self) -> Sequence[Part]:
        """Returns the rest at the end of the text."""
