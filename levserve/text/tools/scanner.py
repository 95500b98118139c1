"""Reads a text that arrives in pieces, as if it were there at once.

A parser is a generator. It yields whenever it needs more text, and decides nothing before it has it, so the
result does not depend on how the text was cut into pieces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

Result = TypeVar("Result")
Steps = Generator[None, None, Result]
"""A parser; every yield waits for more text, or for its end."""

_NAME = re.compile(r"[A-Za-z0-9_.\-]+")
_JSON_STRUCTURE = re.compile(r'["{}\[\]]')
_STRING_END = re.compile(r'["\\]')


class Scanner:
    """The text so far, and how far it has been read."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.is_ended = False
        self.has_run_out = False
        """Whether the text ended where a parser wanted more of it."""

    def drop(self) -> None:
        """Forgets what has been read. Positions saved earlier are invalid after this."""
        self.text = self.text[self.at :]
        self.at = 0

    def peek(self) -> Steps[str]:
        """The next character, which is not taken; empty at the end."""
        while self.at >= len(self.text):
            if self.is_ended:
                self.has_run_out = True
                return ""
            yield
        return self.text[self.at]

    def skip_space(self) -> Steps[str]:
        """Takes white space, and returns the character after it."""
        while (found := (yield from self.peek())).isspace():
            self.at += 1
        return found

    def take(self, literal: str) -> Steps[bool]:
        """Takes this text if it comes next, ignoring white space; else the position does not change."""
        start = self.at
        for char in literal:
            if char.isspace():
                continue
            if (yield from self.skip_space()) != char:
                self.at = start
                return False
            self.at += 1
        return True

    def take_name(self) -> Steps[str]:
        """A name; empty if there is none, or if the text ends before it is certain where the name ends."""
        yield from self.skip_space()
        while True:
            found = _NAME.match(self.text, self.at)
            end = found.end() if found else self.at
            if end < len(self.text):
                self.at, name = end, self.text[self.at : end]
                return name
            if self.is_ended:
                self.has_run_out = True
                return ""
            yield

    def take_until(self, mark: str) -> Steps[str | None]:
        """The text before the mark, both taken; None at the end."""
        while True:
            found = self.text.find(mark, self.at)
            if found >= 0:
                before = self.text[self.at : found]
                self.at = found + len(mark)
                return before
            if self.is_ended:
                self.has_run_out = True
                return None
            yield

    def copy_object(self, emit: Callable[[str], None]) -> Steps[bool]:
        """Passes on a JSON object as it is written; returns whether it was complete."""
        depth = 0
        is_string = False
        while True:
            start = self.at
            is_complete = False
            while not is_complete:
                found = (_STRING_END if is_string else _JSON_STRUCTURE).search(self.text, self.at)
                if found is None:
                    self.at = len(self.text)
                    break
                if found[0] == "\\":
                    if found.end() == len(self.text) and not self.is_ended:
                        self.at = found.start()
                        break
                    self.at = min(found.end() + 1, len(self.text))
                    continue
                self.at = found.end()
                if found[0] == '"':
                    is_string = not is_string
                else:
                    depth += 1 if found[0] in "{[" else -1
                    is_complete = depth == 0
            if self.at > start:
                emit(self.text[start : self.at])
                self.drop()
            if is_complete or self.is_ended:
                return is_complete
            yield
