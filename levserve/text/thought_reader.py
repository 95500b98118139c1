"""Separates an answer's thoughts from its content while it streams; a `PartReader`.

Marks are looked for in the text, so they may be one token or several. Newlines next to a mark are dropped.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum, auto

from levserve.text.parts import Content, Part, PartReader, Thought

NEWLINES = "\r\n"


class _State(Enum):
    BEGINNING = auto()
    """So far there is only white space and perhaps the beginning of the mark that begins the thoughts."""
    THINKING = auto()
    GAP = auto()
    """The newlines after the thoughts."""
    ANSWER = auto()


class ThoughtReader:
    """Finds the thoughts at the beginning of an answer. With `is_open` the prompt has begun them.

    Text that does not begin with a thought is all content; after thoughts that do not end there is none. The
    text after the thoughts goes to `inner`, if there is one. The marks in `hidden`, which are special tokens,
    are left out of it.
    """

    def __init__(
        self,
        begin: str,
        end: str,
        *,
        is_open: bool,
        inner: PartReader | None = None,
        hidden: Sequence[str] = (),
    ) -> None:
        self._begin = begin
        self._end = end
        self._inner = inner
        self._hidden = hidden
        self._marks = re.compile("|".join(map(re.escape, hidden))) if hidden else None
        self._state = _State.THINKING if is_open else _State.BEGINNING
        self._is_first = True
        """Whether no thought has been shown, so that newlines are next to the first mark."""
        self._newlines: list[str] = []
        """Newlines within the thoughts that may turn out to stand before the end mark."""
        self._held = ""

    @property
    def is_thinking(self) -> bool:
        return self._state is _State.THINKING or (self._inner is not None and self._inner.is_thinking)

    def add(self, text: str) -> Sequence[Part]:
        parts: list[Part] = []
        text, self._held = self._held + text, ""
        if self._state is _State.BEGINNING:
            text = self._read_beginning(text)
        if self._state is _State.THINKING:
            text = self._read_thoughts(text, parts)
        if self._state is _State.GAP:
            text = text.lstrip(NEWLINES)
            if text:
                self._state = _State.ANSWER
        if self._state is _State.ANSWER:
            parts += self._read_answer(text)
        return parts

    def flush(self) -> Sequence[Part]:
        rest, self._held = self._held, ""
        if self._state is _State.THINKING:
            rest = "".join(self._newlines) + rest
            return [Thought(rest)] if rest else []
        parts = [*self._show(rest)]
        if self._inner is not None:
            parts += self._inner.flush()
        return parts

    def _read_beginning(self, text: str) -> str:
        """Returns what follows the mark, or the whole text if it does not begin with the mark."""
        seen = text.lstrip()
        if seen.startswith(self._begin):
            self._state = _State.THINKING
            return seen[len(self._begin) :]
        if self._begin.startswith(seen):
            self._held = text
            return ""
        self._state = _State.ANSWER
        return text

    def _read_thoughts(self, text: str, parts: list[Part]) -> str:
        """Adds the thoughts that are certain, and returns what follows their end."""
        before, end, after = text.partition(self._end)
        if end:
            self._state = _State.GAP
        else:
            split = len(text) - overlap(text, self._end)
            before, self._held = text[:split], text[split:]
        if self._is_first:
            before = before.lstrip(NEWLINES)
        thought = before.rstrip(NEWLINES)
        if thought:
            parts.append(Thought("".join(self._newlines) + thought))
            self._newlines = []
            self._is_first = False
        if not end and len(thought) < len(before):
            self._newlines.append(before[len(thought) :])
        return after

    def _read_answer(self, text: str) -> Sequence[Part]:
        *certain, last = self._marks.split(text) if self._marks else [text]
        split = len(last) - max((overlap(last, mark) for mark in self._hidden), default=0)
        self._held = last[split:]
        return self._show("".join(certain) + last[:split])

    def _show(self, text: str) -> Sequence[Part]:
        if not text:
            return []
        return [Content(text)] if self._inner is None else self._inner.add(text)


def overlap(text: str, mark: str) -> int:
    """How many characters at the end of the text may be the beginning of the mark."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
