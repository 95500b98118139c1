"""What the scheduler asks of a constraint on a request's text, such as a grammar; see `text/grammar.py`.

Tokens are drawn first and checked afterwards: the device draws without knowing the grammar, several steps
and a round ahead, and the host keeps what fits. A token that does not fit is drawn again under a mask of
what may stand in its place. Tokens that fit are those that a draw under the mask would have given, so the
text depends on the request and its seed alone, not on the length of rounds or on other requests.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol


class Matcher(Protocol):
    """How far one sequence has come in its constraint. Belongs to the device thread."""

    @property
    def is_over(self) -> bool:
        """Whether the text is complete, so that nothing may follow."""

    @property
    def is_stuck(self) -> bool:
        """Whether it cannot go on: no token is left, or the constraint has become too costly to follow."""

    @property
    def is_free(self) -> bool:
        """Whether nearly every token may come next, so that a mask is made only after one that may not."""

    def allows(self, token: int) -> bool:
        """Whether the token may come next; an end token may if the text may end here."""

    def take(self, token: int) -> None:
        """Moves on by a token that it allows and that is not an end token."""

    def take_many(self, tokens: Seq[int]) -> int:
        """Moves on by as many of the tokens as it allows in succession, but not by an end token nor beyond
        the end of the text; gives their number."""
        for count, token in enumerate(tokens):
            if not self.allows(token) or self.ends_with(token):
                return count
            self.take(token)
            if self.is_over:
                return count + 1
        return len(tokens)

    def ends_with(self, token: int) -> bool:
        """Whether the token ends the text here, whatever the request says about end tokens."""
        return False

    def forced(self) -> Seq[int]:
        """Tokens that must follow, as far as they are known; no others are allowed in their places."""
        return ()

    def mask(self) -> bytes:
        """A bit for every token that it allows, the first token in the lowest bit of the first byte."""


class Constraint(Protocol):
    """What a request's text is held to. Any thread may make one, and sequences may share it."""

    def start(self) -> Matcher:
        """A matcher at the beginning of the text."""


class Fit(NamedTuple):
    """How many of some drawn tokens fit, and whether the sequence ends after them."""

    num_fitting: int
    is_end: bool


def take_fitting(matcher: Matcher, tokens: Seq[int], stop_ids: frozenset[int]) -> Fit:
    """Moves the matcher on by the drawn tokens up to the first that does not fit.

    A stop token that fits ends the sequence and does not count.
    """
    run = tokens
    if not stop_ids.isdisjoint(tokens):
        first_stop = next(index for index, token in enumerate(tokens) if token in stop_ids)
        run = tokens[:first_stop]
    count = matcher.take_many(run)
    if matcher.is_over:
        return Fit(count, is_end=True)
    if count == len(tokens):
        return Fit(count, is_end=False)
    token = tokens[count]
    may_end = token in stop_ids or matcher.ends_with(token)
    return Fit(count, is_end=may_end and matcher.allows(token))
