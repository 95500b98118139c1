"""Several constraints as one: a text that fits all of them, or one of them. Both are `Constraint`s."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from levserve.schedule.constraint import Constraint, Matcher


@dataclass(frozen=True, slots=True)
class AnyOf:
    """One of several constraints; which one becomes clear as the text goes on."""

    constraints: Sequence[Constraint]

    def start(self) -> AnyOfMatcher:
        return AnyOfMatcher([constraint.start() for constraint in self.constraints])


class AnyOfMatcher(Matcher):
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


@dataclass(frozen=True, slots=True)
class AllOf:
    """Several constraints at once."""

    constraints: Sequence[Constraint]

    def start(self) -> AllOfMatcher:
        return AllOfMatcher([constraint.start() for constraint in self.constraints])


class AllOfMatcher(Matcher):
    """Reports no forced tokens: what one constraint forces, another may forbid."""

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

    def ends_with(self, token: int) -> bool:
        return any(matcher.ends_with(token) for matcher in self._matchers)

    def mask(self) -> bytes:
        masks = [matcher.mask() for matcher in self._matchers]
        common = int.from_bytes(masks[0], "little")
        for mask in masks[1:]:
            common &= int.from_bytes(mask, "little")
        self._has_no_token = common == 0
        return common.to_bytes(len(masks[0]), "little")
