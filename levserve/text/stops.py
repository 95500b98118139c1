"""Cuts text at stop strings as it streams, without ever showing part of one.

`generation.py` uses it after the detokenizer. Stops are matched by characters, so they may start and end
anywhere within tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from levserve.errors import BadRequest


class StopStrings:
    """Passes text through until a stop string is complete; used by one thread at a time.

    The stop string that is complete first wins; of several that end at the same character, the longest. So
    the shown text does not depend on how the text was split. After a match, `add` has returned everything
    before it (with `include` also the stop string), `matched` is the stop string, and further text is
    dropped.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        if "" in stops:
            raise BadRequest("A stop string must have at least one character.", param="stop")
        self._matchers = [_Matcher(stop) for stop in dict.fromkeys(stops)]
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def __bool__(self) -> bool:
        """Whether there are stop strings."""
        return bool(self._matchers)

    @property
    def is_matched(self) -> bool:
        return self.matched is not None

    def add(self, text: str) -> str:
        """Takes more text and returns what may be shown: all but an end that may be the start of a stop."""
        if self.is_matched:
            return ""
        seen = self._held + text
        for position, char in enumerate(text, start=len(self._held)):
            completed = [matcher.stop for matcher in self._matchers if matcher.advance(char)]
            if completed:
                return self._finish(seen[: position + 1], max(completed, key=len))
        shown = len(seen) - max((matcher.num_matched for matcher in self._matchers), default=0)
        self._held = seen[shown:]
        return seen[:shown]

    def flush(self) -> str:
        """Returns the held text at the end, when it can no longer become a stop."""
        held, self._held = self._held, ""
        return held

    def _finish(self, text: str, stop: str) -> str:
        self._held = ""
        self.matched = stop
        return text if self._include else text.removesuffix(stop)


class _Matcher:
    """Knuth-Morris-Pratt for one stop string, so that the cost per character does not grow with its length.

    `num_matched` characters at the end of the text are the start of `stop`.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        self._fallbacks = find_fallbacks(stop)

    def advance(self, char: str) -> bool:
        """Takes the next character; True if it completes the stop, after which the matcher is used up."""
        length = self.num_matched
        while length and self.stop[length] != char:
            length = self._fallbacks[length - 1]
        if self.stop[length] == char:
            length += 1
        self.num_matched = length
        return length == len(self.stop)


def find_fallbacks(stop: str | bytes) -> list[int]:
    """For each prefix of `stop`, how many characters or bytes at its end are also the start of `stop`."""
    lengths = [0] * len(stop)
    for end in range(1, len(stop)):
        length = lengths[end - 1]
        while length and stop[length] != stop[end]:
            length = lengths[length - 1]
        lengths[end] = length + 1 if stop[length] == stop[end] else 0
    return lengths
