"""Names the fields of a message in errors about the chat that it is run as."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from levserve.errors import BadRequest, ServeError

# The fields of a chat, each with its place in the body of a message.
NAMES = (
    (re.compile(r"messages\[\d+\].*"), "messages"),
    (re.compile(r"response_format(\.json_schema)?(?P<rest>.*)"), r"output_config.format\g<rest>"),
    (
        re.compile(r"(?P<tool>tools\[\d+\])\.function\.parameters(?P<rest>.*)"),
        r"\g<tool>.input_schema\g<rest>",
    ),
    (re.compile(r"(?P<tool>tools\[\d+\])\.function(?P<rest>.*)"), r"\g<tool>\g<rest>"),
    (re.compile(r"stop"), "stop_sequences"),
    (re.compile(r"thinking_token_budget"), "thinking.budget_tokens"),
)
QUOTED = re.compile(r"'([\w.\[\]]+)'")


@contextmanager
def message_names() -> Iterator[None]:
    """Errors from inside name the fields of a message."""
    try:
        yield
    except BadRequest as error:
        rename(error)
        raise


def rename(error: ServeError) -> None:
    error.message = QUOTED.sub(lambda found: f"'{_name(found[1])}'", error.message)
    error.param = None if error.param is None else _name(error.param)


def _name(field: str) -> str:
    for pattern, name in NAMES:
        if found := pattern.fullmatch(field):
            return found.expand(name)
    return field
