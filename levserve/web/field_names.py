"""Renames a chat's fields, in errors about it, to those of the body that the chat was made from.

Used on HTTP threads and by the relay.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from levserve.errors import BadRequest, ServeError

QUOTED = re.compile(r"'([\w.\[\]]+)'")


class FieldNames:
    """Patterns of a chat's field names, each with the field of the body that it was made from."""

    def __init__(self, *places: tuple[str, str]) -> None:
        self._places = [(re.compile(pattern), place) for pattern, place in places]

    @contextmanager
    def in_errors(self) -> Iterator[None]:
        """Makes a `BadRequest` raised inside name the fields of the body."""
        try:
            yield
        except BadRequest as error:
            self.rename(error)
            raise

    def rename(self, error: ServeError) -> None:
        error.message = self.rename_quoted(error.message)
        error.param = None if error.param is None else self._place_of(error.param)

    def rename_quoted(self, text: str) -> str:
        """The text, with the field names that it quotes renamed."""
        return QUOTED.sub(lambda found: f"'{self._place_of(found[1])}'", text)

    def _place_of(self, field: str) -> str:
        for pattern, place in self._places:
            if found := pattern.fullmatch(field):
                return found.expand(place)
        return field
