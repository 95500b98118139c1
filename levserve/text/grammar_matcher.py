"""Follows one sequence's text in a compiled grammar; see `grammar.py`.

Belongs to the device thread. The round waits for it, so it calls llguidance as rarely as possible. Most
expensive is the tokenizer, which llguidance calls for the tokens of forced text; masks come next.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import takewhile

from llguidance import LLMatcher


class GrammarMatcher:
    """A `schedule.constraint.Matcher`.

    Forced text has only one tokenization. It is computed where the text becomes forced, and kept in `_forced`
    until it has been taken, so that what is allowed depends only on the tokens before it.
    """

    is_free = False

    def __init__(self, matcher: LLMatcher, eos_ids: frozenset[int], num_tokens: int, vocab_rows: int) -> None:
        self._matcher = matcher
        self._eos_ids = eos_ids
        self._num_tokens = num_tokens
        self._vocab_rows = vocab_rows
        self._mask_bytes = -(-vocab_rows // 32) * 4
        self._forced: list[int] = []
        self._forces_other = False
        """Whether the next token is forced and is one that the model has no row for."""

    @property
    def is_over(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def is_stuck(self) -> bool:
        return self._forces_other or self._matcher.is_error()

    def allows(self, token: int) -> bool:
        """The same as the token's bit in `mask`."""
        if token in self._eos_ids:
            return self._matcher.is_accepting()
        if token >= self._num_tokens:
            return False  # a row of the model without a token; llguidance would give up
        if self._find_forced():
            return token == self._forced[0]
        return self._matcher.validate_tokens([token]) == 1

    def take(self, token: int) -> None:
        self._matcher.consume_token(token)
        del self._forced[:1]

    def take_many(self, tokens: Seq[int]) -> int:
        count = 0
        while count < len(tokens):
            if self._find_forced():
                num_right = _num_equal(self._forced, tokens[count:])
                self._matcher.consume_tokens(self._forced[:num_right])
                del self._forced[:num_right]
            else:
                num_right = self._try(tokens[count])
            if num_right == 0:
                break
            count += num_right
        return count

    def ends_with(self, token: int) -> bool:
        return token in self._eos_ids

    def forced(self) -> Seq[int]:
        self._find_forced()
        return tuple(self._forced)

    def mask(self) -> bytes:
        """Models may have more rows than tokens; llguidance's mask covers the tokens, rounded up."""
        if self._find_forced():
            return (1 << self._forced[0]).to_bytes(self._mask_bytes, "little")
        if self._forces_other:
            return bytes(self._mask_bytes)
        return self._matcher.compute_bitmask()[: self._mask_bytes].ljust(self._mask_bytes, b"\0")

    @property
    def mask_maker(self) -> LLMatcher:
        """Makes the mask where no token is forced; for callers that make several masks at once."""
        return self._matcher

    @property
    def num_mask_words(self) -> int:
        """Words of 32 bits that `mask_maker` writes."""
        return -(-self._num_tokens // 32)

    def _find_forced(self) -> bool:
        """Whether only one token may follow. Asking for forced bytes is cheaper than for forced tokens."""
        if not self._forced and self._matcher.compute_ff_bytes():
            found = self._matcher.compute_ff_tokens()
            self._forced = list(takewhile(lambda token: token < self._vocab_rows, found))
            self._forces_other = bool(found) and not self._forced
        return bool(self._forced)

    def _try(self, token: int) -> int:
        if token in self._eos_ids or token >= self._num_tokens:
            return 0
        return self._matcher.try_consume_tokens([token])


def _num_equal(first: Seq[int], second: Seq[int]) -> int:
    """The number of tokens in their common prefix."""
    count = 0
    for one, other in zip(first, second):
        if one != other:
            break
        count += 1
    return count
