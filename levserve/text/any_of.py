"""A text that fits one of several constraints; which one shows as it goes on."""

from __future__ import annotations

from collections.abc import Sequence

from levserve.schedule.constraint import Constraint, Matcher, take_each


class AnyOf:
    """A `schedule.constraint.Constraint`."""

    def __init__(self, constraints: Sequence[Constraint]) -> None:
        self._constraints = constraints

    def start(self) -> AnyOfMatcher:
        return AnyOfMatcher([constraint.start() for constraint in self._constraints])


class AnyOfMatcher:
    """Follows every constraint that the text still fits."""

    def __init__(self, matchers: Sequence[Matcher]) -> None:
        self._open = matchers

    @property
    def is_over(self) -> bool:
        return all(matcher.is_over for matcher in self._open)

    @property
    def is_stuck(self) -> bool:
        return all(matcher.is_stuck for matcher in self._open)

    @property
    def is_free(self) -> bool:
        return any(matcher.is_free for matcher in self._open)

    def allows(self, token: int) -> bool:
        return any(matcher.allows(token) for matcher in self._open)

    def take(self, token: int) -> None:
        self._open = [matcher for matcher in self._open if not matcher.is_over and matcher.allows(token)]
        for matcher in self._open:
            matcher.take(token)

    def take_many(self, tokens: Sequence[int]) -> int:
        return take_each(self, tokens)

    def ends_with(self, token: int) -> bool:
        return any(matcher.ends_with(token) for matcher in self._open)

    def forced(self) -> Sequence[int]:
        return self._open[0].forced() if len(self._open) == 1 else ()

    def mask(self) -> bytes:
        masks = [matcher.mask() for matcher in self._open]
        allowed = 0
        for mask in masks:
            allowed |= int.from_bytes(mask, "little")
        return allowed.to_bytes(len(masks[0]), "little")
