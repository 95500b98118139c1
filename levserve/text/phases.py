"""Constraints that begin later: free text up to a mark, and from there another constraint.

They are `schedule.constraint.Constraint`s. Free text costs a comparison of bytes for each token.
"""

from __future__ import annotations

from collections.abc import Sequence

from levserve.schedule.constraint import Constraint, Matcher
from levserve.text.mark import Mark
from levserve.text.token_mask import all_bits, to_bits, to_mask
from levserve.text.tokenizer import Tokenizer


class Triggered:
    """Allows everything until the mark has been read, and from there only what the inner constraint allows.

    When the inner constraint is over, the text is free again. After `max_times` such runs nothing may follow.

    A token may complete the mark and carry bytes beyond it: then the inner constraint takes these as the
    first tokens of its text. If it does not allow them, the token is not allowed, so every complete mark is
    followed by text that fits. In free text the request's own stop tokens end the answer.
    """

    def __init__(
        self, mark: Mark, inner: Constraint, tokenizer: Tokenizer, vocab_rows: int, *, max_times: int
    ) -> None:
        self.mark = mark
        self.max_times = max_times
        self.token_bytes = tokenizer.token_bytes
        self.vocab_rows = vocab_rows
        self.everything = all_bits(vocab_rows)
        self._start = Started(inner, tokenizer)

    def start(self) -> TriggeredMatcher:
        return TriggeredMatcher(self)

    def begin(self, rest: bytes) -> Matcher:
        """The inner matcher after these bytes, which it allows."""
        matcher = self._start.after(rest)
        assert matcher is not None
        return matcher

    def fits(self, rest: bytes) -> bool:
        return self._start.fits(rest)


class TriggeredMatcher(Matcher):
    def __init__(self, rule: Triggered) -> None:
        self._rule = rule
        self._inner: Matcher | None = None
        self._num_matched = 0
        self._num_runs = 0

    @property
    def is_over(self) -> bool:
        return self._num_runs >= self._rule.max_times

    @property
    def is_stuck(self) -> bool:
        return self._inner is not None and self._inner.is_stuck

    @property
    def is_free(self) -> bool:
        return self._inner is None

    def allows(self, token: int) -> bool:
        if self._inner is not None:
            return self._inner.allows(token)
        rest = self._rule.mark.overshoots(self._num_matched).get(token)
        return rest is None or self._rule.fits(rest)

    def take(self, token: int) -> None:
        if self._inner is not None:
            self._inner.take(token)
        else:
            self._num_matched, rest = self._rule.mark.read(self._num_matched, self._rule.token_bytes(token))
            if rest is None:
                return
            self._inner = self._rule.begin(rest)
        if self._inner.is_over:
            self._inner = None
            self._num_runs += 1

    def ends_with(self, token: int) -> bool:
        return self._inner is not None and self._inner.ends_with(token)

    def forced(self) -> Sequence[int]:
        return () if self._inner is None else self._inner.forced()

    def mask(self) -> bytes:
        if self._inner is not None:
            return self._inner.mask()
        overshoots = self._rule.mark.overshoots(self._num_matched)
        refused = to_bits(token for token, rest in overshoots.items() if not self._rule.fits(rest))
        return to_mask(self._rule.everything & ~refused, self._rule.vocab_rows)


class Started:
    """A constraint whose text may begin within a token, after the end of a mark."""

    def __init__(self, constraint: Constraint, tokenizer: Tokenizer) -> None:
        self._constraint = constraint
        self._tokenizer = tokenizer
        self._fits: dict[bytes, bool] = {}

    def after(self, rest: bytes) -> Matcher | None:
        """A matcher that has taken these bytes; None if they do not fit, or are not whole characters."""
        matcher = self._constraint.start()
        if not rest:
            return matcher
        try:
            tokens = self._tokenizer.encode_plain(rest.decode())
        except UnicodeDecodeError:
            return None
        if b"".join(map(self._tokenizer.token_bytes, tokens)) != rest:
            return None  # some tokenizers put a space before the text
        for token in tokens:
            if matcher.is_over or not matcher.allows(token) or matcher.ends_with(token):
                return None
            matcher.take(token)
        return None if matcher.is_stuck else matcher

    def fits(self, rest: bytes) -> bool:
        found = self._fits.get(rest)
        if found is None:
            self._fits[rest] = found = self.after(rest) is not None
        return found
