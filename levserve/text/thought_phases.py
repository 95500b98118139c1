"""Constrains thoughts and the answer after them.

The thoughts are free text up to the mark that ends them, no longer than a budget; then a constraint on the
answer applies.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from levserve.schedule.constraint import Constraint, Matcher
from levserve.text.mark import Mark
from levserve.text.phases import Started
from levserve.text.token_mask import all_bits, to_bits, to_mask
from levserve.text.tokenizer import Tokenizer

MAX_NEWLINES = 2
"""Newline tokens that may stand between the end of the thoughts and a constrained answer."""


class AfterThoughts:
    """Everything is allowed until the end mark has been read, then a few newlines, then `inner`, if any.

    - With an `opening`, the prompt has not begun a thought: the model may write that mark first, or begin
      with the answer.
    - After `budget` tokens of thought, `closing` must follow: the end mark, with the newlines that the model
      writes around it.
    - The text can end within the thoughts only where `inner` allows an empty answer.
    - A token that completes the end mark may carry the beginning of the answer; if that does not fit `inner`
      the token is not allowed.
    """

    def __init__(
        self,
        end: Mark,
        inner: Constraint | None,
        tokenizer: Tokenizer,
        vocab_rows: int,
        *,
        opening: Mark | None = None,
        budget: int | None = None,
        closing: str | None = None,
    ) -> None:
        self.end = end
        self.inner = inner
        self.opening = opening
        self.budget = budget
        self.closing = encode_marks(tokenizer, closing or end.text)
        self.eos_ids = tokenizer.eos_ids
        self.token_bytes = tokenizer.token_bytes
        self.vocab_rows = vocab_rows
        self.everything = all_bits(vocab_rows)
        self.newlines = _newline_tokens(tokenizer)
        self._started = None if inner is None else Started(inner, tokenizer)

    def start(self) -> AfterThoughtsMatcher:
        return AfterThoughtsMatcher(self)

    def begin(self, rest: bytes) -> Matcher:
        """The inner matcher after these bytes, which it allows."""
        assert self._started is not None
        matcher = self._started.after(rest.lstrip(b"\r\n"))
        assert matcher is not None
        return matcher

    def fits(self, rest: bytes) -> bool:
        return self._started is None or self._started.fits(rest.lstrip(b"\r\n"))


class _Phase(Enum):
    OPENING = auto()
    """The text so far is at most the beginning of the opening mark."""
    THINKING = auto()
    CLOSING = auto()
    """The budget is spent."""
    GAP = auto()
    """Newlines may follow, or the answer."""
    ANSWER = auto()


class AfterThoughtsMatcher(Matcher):
    def __init__(self, rule: AfterThoughts) -> None:
        self._rule = rule
        self._inner = None if rule.inner is None else rule.inner.start()
        self._phase = _Phase.THINKING if rule.opening is None else _Phase.OPENING
        self._num_matched = 0
        """Bytes of the awaited mark that have been read."""
        self._may_answer = True
        """Whether the text so far may be the beginning of an answer; only used in the phase OPENING."""
        self._num_thoughts = 0
        self._num_forced = 0
        self._num_newlines = 0
        self._check_budget()

    @property
    def is_over(self) -> bool:
        return self._phase is _Phase.ANSWER and self._inner is not None and self._inner.is_over

    @property
    def is_stuck(self) -> bool:
        return self._inner is not None and self._inner.is_stuck

    @property
    def is_free(self) -> bool:
        match self._phase:
            case _Phase.THINKING:
                return True
            case _Phase.OPENING | _Phase.ANSWER:
                return self._inner is None or self._inner.is_free
        return False

    def allows(self, token: int) -> bool:
        inner = self._inner
        match self._phase:
            case _Phase.CLOSING:
                return token == self._rule.closing[self._num_forced]
            case _ if inner is None:
                return True
            case _Phase.OPENING:
                return token in self._opening_tokens() or (self._may_answer and inner.allows(token))
            case _Phase.THINKING:
                if token in self._rule.eos_ids:
                    return inner.allows(token)
                rest = self._rule.end.overshoots(self._num_matched).get(token)
                return rest is None or self._rule.fits(rest)
            case _Phase.GAP:
                return token in self._rule.newlines or inner.allows(token)
        return inner.allows(token)

    def take(self, token: int) -> None:
        spelt = self._rule.token_bytes(token)
        match self._phase:
            case _Phase.OPENING:
                self._open(token, spelt)
            case _Phase.THINKING:
                self._num_thoughts += 1
                self._think(spelt)
            case _Phase.CLOSING:
                self._num_forced += 1
                if self._num_forced == len(self._rule.closing):
                    self._phase = _Phase.ANSWER
            case _Phase.GAP:
                self._pass_gap(token)
            case _ if self._inner is not None:
                self._inner.take(token)
        self._check_budget()

    def ends_with(self, token: int) -> bool:
        """In free text the request's own stop tokens end the answer."""
        if self._phase is _Phase.THINKING or self._inner is None:
            return False
        return self._inner.ends_with(token)

    def forced(self) -> Sequence[int]:
        if self._phase is _Phase.CLOSING:
            return self._rule.closing[self._num_forced :]
        if self._phase is _Phase.ANSWER and self._inner is not None:
            return self._inner.forced()
        return ()

    def mask(self) -> bytes:
        return to_mask(self._allowed_bits(), self._rule.vocab_rows)

    def _allowed_bits(self) -> int:
        rule, inner = self._rule, self._inner
        match self._phase:
            case _Phase.CLOSING:
                return 1 << rule.closing[self._num_forced]
            case _ if inner is None:
                return rule.everything
            case _Phase.OPENING if not self._may_answer:
                return to_bits(self._opening_tokens())
            case _Phase.OPENING:
                return to_bits(self._opening_tokens()) | _to_int(inner.mask())
            case _Phase.THINKING:
                overshoots = rule.end.overshoots(self._num_matched)
                refused = to_bits(token for token, rest in overshoots.items() if not rule.fits(rest))
                ends = to_bits(token for token in rule.eos_ids if not inner.allows(token))
                return rule.everything & ~refused & ~ends
            case _Phase.GAP:
                return to_bits(rule.newlines) | _to_int(inner.mask())
        return _to_int(inner.mask())

    def _opening_tokens(self) -> frozenset[int]:
        assert self._rule.opening is not None
        return self._rule.opening.continuations(self._num_matched)

    def _open(self, token: int, spelt: bytes) -> None:
        """Reads the text both as the mark and as the answer, until it can be only one of them."""
        assert self._rule.opening is not None
        left = self._rule.opening.spelt[self._num_matched :]
        is_opening = token in self._opening_tokens()
        if is_opening and len(spelt) >= len(left):
            self._phase, self._num_matched = _Phase.THINKING, 0
            self._inner = None if self._rule.inner is None else self._rule.inner.start()
            self._think(spelt[len(left) :])
            return
        if self._inner is not None and self._may_answer:
            self._may_answer = self._inner.allows(token)
            if self._may_answer:
                self._inner.take(token)
        if is_opening:
            self._num_matched += len(spelt)
        elif self._inner is not None or self._num_matched or spelt.strip():
            self._phase = _Phase.ANSWER  # else it is white space before the mark

    def _think(self, spelt: bytes) -> None:
        self._num_matched, rest = self._rule.end.read(self._num_matched, spelt)
        if rest is None:
            return
        self._phase = _Phase.ANSWER
        if self._inner is None:
            return
        if rest.strip(b"\r\n"):
            self._inner = self._rule.begin(rest)
        else:
            self._phase = _Phase.GAP

    def _pass_gap(self, token: int) -> None:
        """A newline with which the answer may begin belongs to the answer."""
        assert self._inner is not None
        if self._inner.allows(token):
            self._inner.take(token)
            self._phase = _Phase.ANSWER
            return
        self._num_newlines += 1
        if self._num_newlines == MAX_NEWLINES:
            self._phase = _Phase.ANSWER

    def _check_budget(self) -> None:
        budget = self._rule.budget
        if self._phase is _Phase.THINKING and budget is not None and self._num_thoughts >= budget:
            self._phase = _Phase.CLOSING


def encode_marks(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a span within a text, in which the strings of special tokens stand for those tokens."""
    tokens: list[int] = []
    for span in tokenizer.split_specials(text):
        if span in tokenizer.special_tokens:
            tokens += tokenizer.encode(span, add_special_tokens=False)
        elif span:
            tokens += tokenizer.encode_plain(span)
    return tokens


def _newline_tokens(tokenizer: Tokenizer) -> frozenset[int]:
    found = set()
    for text in ("\n", "\n\n"):
        tokens = tokenizer.encode_plain(text)
        if len(tokens) == 1 and tokenizer.token_bytes(tokens[0]) == text.encode():
            found.add(tokens[0])
    return frozenset(found)


def _to_int(mask: bytes) -> int:
    return int.from_bytes(mask, "little")
