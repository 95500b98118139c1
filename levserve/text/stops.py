"""Cuts text at stop strings as it streams, without ever showing a part of one.

Used by `generation.py` after the detokenizer, on the HTTP thread of the request. Stops are matched on
characters, so they may begin and end anywhere inside tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from levserve.errors import BadRequest


class StopStrings:
    """Passes text through until a stop string is complete; belongs to one HTTP thread.

    The match that is complete first wins; of those complete at the same character, the longest, which starts
    first. So the text shown depends on the text alone and not on how it was cut into pieces, and no match
    waits for a later one. After a match `add` has returned everything before it (with `include` also the stop
    itself) and `matched` names the stop; whatever is added later is dropped.
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
        """Takes more text and gives what may be shown: all but the longest tail that could begin a stop
        string."""
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
        """Gives the held text: no more is coming, so it is not a stop."""
        held, self._held = self._held, ""
        return held

    def _finish(self, text: str, stop: str) -> str:
        self._held = ""
        self.matched = stop
        return text if self._include else text.removesuffix(stop)


class _Matcher:
    """Knuth-Morris-Pratt for one stop string: clients choose its length, so the cost per character must not
    depend on it."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = (
            0  # characters at the end of the text that are the start of `stop`; never all of it between calls
        )
        self._fallbacks = _fallbacks(stop)

    def advance(self, char: str) -> bool:
        """Takes the next character of the text; true if it completes the stop, after which the matcher is
        spent."""
        length = self.num_matched
        while length and self.stop[length] != char:
            length = self._fallbacks[length - 1]
        if self.stop[length] == char:
            length += 1
        self.num_matched = length
        return length == len(self.stop)


def _fallbacks(stop: str) -> list[int]:
    """For each end of a prefix of `stop`, how many characters at its end are also the start of `stop`."""
    lengths = [0] * len(stop)
    for end in range(1, len(stop)):
        length = lengths[end - 1]
        while length and stop[length] != stop[end]:
            length = lengths[length - 1]
        lengths[end] = length + 1 if stop[length] == stop[end] else 0
    return lengths
