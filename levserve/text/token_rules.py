"""Constraints on single tokens: a list of those that are allowed, and words that must not be written.

They can be combined with each other and with a grammar. All of them are `schedule.constraint.Constraint`s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from levserve.schedule.constraint import Constraint, Matcher, take_each
from levserve.text.token_mask import all_bits, to_bits, to_mask


class AllowedTokens:
    """Nothing but these tokens. It is its own matcher, because what it allows never changes."""

    is_over = False
    is_stuck = False
    is_free = False

    def __init__(self, allowed: frozenset[int], eos_ids: frozenset[int], vocab_rows: int) -> None:
        self._allowed = allowed
        self._eos_ids = eos_ids
        self._mask = to_mask(to_bits(allowed), vocab_rows)

    def start(self) -> AllowedTokens:
        return self

    def allows(self, token: int) -> bool:
        return token in self._allowed

    def take(self, token: int) -> None:
        pass

    def take_many(self, tokens: Sequence[int]) -> int:
        return take_each(self, tokens)

    def ends_with(self, token: int) -> bool:
        return token in self._eos_ids

    def forced(self) -> Sequence[int]:
        return ()

    def mask(self) -> bytes:
        return self._mask


class BannedWords:
    """No sequence of tokens that spells one of the words: the last token of each is banned after the rest."""

    def __init__(self, words: frozenset[tuple[int, ...]], eos_ids: frozenset[int], vocab_rows: int) -> None:
        self.words = words
        self.eos_ids = eos_ids
        self.vocab_rows = vocab_rows

    def start(self) -> BannedWordsMatcher:
        return BannedWordsMatcher(self)


class BannedWordsMatcher:
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

    def take_many(self, tokens: Sequence[int]) -> int:
        return take_each(self, tokens)

    def ends_with(self, token: int) -> bool:
        return token in self._rule.eos_ids

    def forced(self) -> Sequence[int]:
        return ()

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


class AllOf:
    """Several constraints at once."""

    def __init__(self, constraints: Sequence[Constraint]) -> None:
        self._constraints = constraints

    def start(self) -> AllOfMatcher:
        return AllOfMatcher([constraint.start() for constraint in self._constraints])


class AllOfMatcher:
    """It tells of no forced tokens: what one constraint forces, another may forbid."""

    def __init__(self, matchers: Sequence[Matcher]) -> None:
        self._matchers = matchers
        self._has_no_token = False

    @property
    def is_over(self) -> bool:
        return any(matcher.is_over for matcher in self._matchers)

    @property
    def is_stuck(self) -> bool:
        return self._has_no_token or any(matcher.is_stuck for matcher in self._matchers)

    @property
    def is_free(self) -> bool:
        return all(matcher.is_free for matcher in self._matchers)

    def allows(self, token: int) -> bool:
        return all(matcher.allows(token) for matcher in self._matchers)

    def take(self, token: int) -> None:
        for matcher in self._matchers:
            matcher.take(token)

    def take_many(self, tokens: Sequence[int]) -> int:
        return take_each(self, tokens)

    def ends_with(self, token: int) -> bool:
        return any(matcher.ends_with(token) for matcher in self._matchers)

    def forced(self) -> Sequence[int]:
        return ()

    def mask(self) -> bytes:
        masks = [matcher.mask() for matcher in self._matchers]
        common = int.from_bytes(masks[0], "little")
        for mask in masks[1:]:
            common &= int.from_bytes(mask, "little")
        self._has_no_token = common == 0
        return common.to_bytes(len(masks[0]), "little")
