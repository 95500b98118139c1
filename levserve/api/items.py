"""The items of a call, such as its prompts, as a program gives them: texts, token ids and arrays of them.

A list may be of any length and may be an iterator, so each item is read only when its job is made.
"""

from __future__ import annotations

import operator
import re
import reprlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from levserve.errors import BadRequest, DeadlineExceeded, Poisoned, ServeError

Tokens = Sequence[int]
Prompt = str | Tokens
"""A text, or the ids of its tokens."""

BYTES = (bytes, bytearray, memoryview)
"""Sequences of numbers that are no token ids."""
OF_AN_ITEM = (BadRequest, DeadlineExceeded, Poisoned)
"""Errors that one item has and the others of its call need not have."""


class Items(NamedTuple):
    """What a call was given, item by item."""

    each: Iterable[Any]
    argument: str = ""
    """The argument's name; empty for a single item, which needs no number."""

    def name_in(self, error: Exception, number: int, fields: Collection[str]) -> None:
        """Begins the message with the item's place, unless a field is wrong, which all items share."""
        if not self.argument or not isinstance(error, OF_AN_ITEM):
            return
        field = re.split(r"[.\[]", error.param or "")[0]
        if field not in fields:
            _prepend(error, f"{self.argument}[{number}]: ")


def read_prompts(given: object, argument: str) -> Items:
    """A text or a list of token ids is a single prompt; any other list has several."""
    if isinstance(given, str):
        return Items([given])
    listed = read_items(given, argument, "a text or a list").each
    if isinstance(listed, Sequence) and listed and not hasattr(listed[0], "__iter__"):
        return Items([read_prompt(listed, argument)])
    return Items(listed, argument)


def read_items(given: object, argument: str, wanted: str = "a list") -> Items:
    """The items of a list or another iterable; raises `BadRequest` for what is none."""
    listed = _listed(given)
    if isinstance(listed, (str, Mapping, set, frozenset, *BYTES)) or not isinstance(listed, Iterable):
        raise _wrong_type(argument, wanted, given)
    return Items(listed, argument)


def read_prompt(given: object, argument: str) -> str | list[int]:
    """A text, or token ids as Python's integers; raises `BadRequest` for anything else."""
    if isinstance(given, str):
        return given
    listed = _listed(given)
    if isinstance(listed, BYTES) or not isinstance(listed, Sequence):
        raise _wrong_type(argument, "a text or a list of token ids", given)
    if set(map(type, listed)) <= {int}:
        return list(listed)
    return [_read_token(token, argument) for token in listed]


def read_pair(given: object) -> tuple[str | list[int], str | list[int]]:
    """A prompt and its continuation."""
    listed = _listed(given)
    if isinstance(listed, (str, *BYTES)) or not isinstance(listed, Sequence) or len(listed) != 2:
        shown = reprlib.repr(given)
        raise BadRequest(f"A pair is a prompt and its continuation, not {shown}.", param="pairs")
    prompt, continuation = listed
    return read_prompt(prompt, "prompt"), read_prompt(continuation, "continuation")


def _read_token(token: Any, argument: str) -> int:
    kind = type(token).__name__
    if kind != "bool":  # Python's and NumPy's count as 0 and 1
        with suppress(TypeError):
            return operator.index(token)
    raise BadRequest(
        f"Invalid type for '{argument}': token ids are integers, and one of them is a {kind}.",
        param=argument,
        code="invalid_type",
    )


def _listed(given: object) -> object:
    """An array as a list."""
    is_array = hasattr(given, "tolist") and not isinstance(given, memoryview)
    return given.tolist() if is_array else given  # type: ignore[attr-defined]


def _wrong_type(argument: str, wanted: str, given: object) -> BadRequest:
    return BadRequest(
        f"Invalid type for '{argument}': expected {wanted}, but got {type(given).__name__}.",
        param=argument,
        code="invalid_type",
    )


def _prepend(error: ServeError, words: str) -> None:
    error.message = words + error.message
    error.args = (error.message,)
