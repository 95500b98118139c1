"""The base of the readers of calls: a generator reads the text as far as its meaning is certain."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from levserve.text.parts import Part
from levserve.text.tools.body import Calls
from levserve.text.tools.scanner import Scanner, Steps


class StepwiseReader(ABC):
    """A `PartReader`. Its parts are collected in `Calls`."""

    def __init__(self, calls: Calls) -> None:
        self.is_thinking = False
        self._calls = calls
        self._scanner = Scanner()
        self._steps = self._read()
        self._is_done = False

    def add(self, text: str) -> Sequence[Part]:
        if not text:
            return ()
        self._scanner.text += text
        return self._advance()

    def flush(self) -> Sequence[Part]:
        self._scanner.is_ended = True
        return self._advance()

    @abstractmethod
    def _read(self) -> Steps[None]:
        """Reads the whole text, and yields wherever it needs more of it."""

    def _advance(self) -> list[Part]:
        if not self._is_done:
            self._is_done = next(self._steps, self) is self
        parts, self._calls.parts = self._calls.parts, []
        return parts
