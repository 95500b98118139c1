"""Constraints on single tokens: a list of those that are allowed, and words that must not be written.

All of them are `schedule.constraint.Constraint`s. None ends a text: a request's own stop tokens do.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from levserve.schedule.constraint import Matcher
from levserve.text.token_mask import all_bits, to_bits, to_mask


class AllowedTokens(Matcher):
    """Nothing but these tokens. It is its own matcher, because what it allows never changes."""

    is_over = False
    is_stuck = False
    is_free = False

    def __init__(self, allowed: frozenset[int], vocab_rows: int) -> None:
        self._allowed = allowed
        self._mask = to_mask(to_bits(allowed), vocab_rows)

    def start(self) -> AllowedTokens:
        return self

    def allows(self, token: int) -> bool:
        return token in self._allowed

    def take(self, token: int) -> None:
        pass

    def mask(self) -> bytes:
        return self._mask


@dataclass(frozen=True, slots=True)
class BannedWords:
    """Forbids the words, each given as its tokens: the last token is banned after the others."""

    words: frozenset[tuple[int, ...]]
    vocab_rows: int

    def start(self) -> BannedWordsMatcher:
        return BannedWordsMatcher(self)


class BannedWordsMatcher(Matcher):
    is_over = False
    is_stuck = False
    is_free = False

    def __init__(self, rule: BannedWords) -> None:
        self._rule = rule
        self._recent: deque[int] = deque(maxlen=max(map(len, rule.words), default=1))

    def allows(self, token: int) -> bool:
        return token not in self._banned()

    def take(self, token: int) -> None:
        self._recent.append(token)

    def mask(self) -> bytes:
        rows = self._rule.vocab_rows
        return to_mask(all_bits(rows) & ~to_bits(self._banned()), rows)

    def _banned(self) -> set[int]:
        recent = tuple(self._recent)
        banned = set()
        for *beginning, last in self._rule.words:
            if not beginning or recent[-len(beginning) :] == tuple(beginning):
                banned.add(last)
        return banned
