"""Names the fields of a response in errors about the chat that it is run as."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from levserve.errors import BadRequest

# A chat's fields, each with its place in a response.
NAMES = (
    (re.compile(r"messages(\[\d+\].*)?"), "input"),
    (re.compile(r"max(_completion)?_tokens"), "max_output_tokens"),
    (re.compile(r"response_format(\.json_schema)?(?P<rest>.*)"), r"text.format\g<rest>"),
    (re.compile(r"(?P<tool>tools\[\d+\])\.function(?P<rest>.*)"), r"\g<tool>\g<rest>"),
    (re.compile(r"reasoning_effort"), "reasoning.effort"),
)
QUOTED = re.compile(r"'([\w.\[\]]+)'")


@contextmanager
def response_names() -> Iterator[None]:
    """Errors from inside name the fields of a response."""
    try:
        yield
    except BadRequest as error:
        rename(error)
        raise


def rename(error: BadRequest) -> None:
    if error.param is not None:
        error.param = name_in_response(error.param)
    error.message = rename_quoted(error.message)


def rename_quoted(text: str) -> str:
    """A sentence with the fields that it quotes renamed."""
    return QUOTED.sub(lambda found: f"'{name_in_response(found[1])}'", text)


def name_in_response(field: str) -> str:
    for pattern, name in NAMES:
        if found := pattern.fullmatch(field):
            return found.expand(name)
    return field
