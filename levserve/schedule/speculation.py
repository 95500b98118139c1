"""Drafts the next tokens from the text of a sequence so far, and decides whether checking drafts pays.

A step that checks a draft computes all its tokens at once and keeps those that would have been drawn anyway,
and the one drawn after them: the text stays the same and comes sooner. Belongs to the device thread. Has no
arrays and no clock of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

NGRAMS = (4, 3, 2)
"""How many of the newest tokens are looked up, most first: the longer the match, the likelier it is that the
same follows."""
FIRST_GAIN = 1.0
"""Accepted tokens per step, assumed before any are counted: enough that the first sequence tries."""
GAIN_WEIGHT = 1 / 16
"""Weight of one step, so that the gain covers the last few dozen tokens."""
LEAST_GAIN = 0.1
"""Below this gain it does not pay to make the device wait for the host before every step, with a draft or
without."""
LEAST_DRAFT_GAIN = 0.5
"""Below this gain drafts are not even tried: checking one on a CPU rarely costs less than half a step."""
COST_WEIGHT = 1 / 8
TRIAL_TURNS = 4
"""Turns, over all rows, in which the gain of a draft model is measured whenever it is tried again."""
FRESH_ROUNDS = 40
"""A cost not measured for this many rounds of the other kind is forgotten and tried again: contexts and load
change."""
FRESH_STEPS = 320
"""The same for a draft model, in steps: trying one that is no use then costs about one percent."""


def num_accepted(draft: Sequence[int], drawn: Sequence[int]) -> int:
    """How many leading tokens of a draft were drawn."""
    return next((index for index, (one, other) in enumerate(zip(draft, drawn)) if one != other), len(draft))


class Drafter:
    """Drafts for one sequence: what followed the last time that its newest tokens occurred.

    It follows the sequence even while drafts are not checked, so that their possible gain is always known.
    """

    def __init__(self, num_draft: int) -> None:
        self._num_draft = num_draft
        self._after: dict[tuple[int, ...], int] = {}  # the place after the latest occurrence of some tokens
        self._num_indexed = 0
        self._num_followed = 0
        self._draft: list[int] = []
        self._accepted = 0

    def propose(self, tokens: Sequence[int], limit: int) -> tuple[int, ...]:
        """At most `limit` tokens that may follow; `tokens` must be those last passed to `follow`."""
        if self._accepted:  # it is in the middle of a draft that was not checked
            self._begin(tokens, len(tokens))
        return tuple(self._draft[: max(limit, 0)])

    def follow(self, tokens: Sequence[int]) -> list[int | None]:
        """Takes new tokens and gives, for each step that they complete, how many tokens of its draft it
        accepted or would have accepted; None for a step without a draft."""
        ended: list[int | None] = []
        if not self._num_followed:  # a prompt's tokens are no gain
            self._begin(tokens, len(tokens))
            self._num_followed = len(tokens)
        for place in range(self._num_followed, len(tokens)):
            if self._accepted < len(self._draft) and tokens[place] == self._draft[self._accepted]:
                self._accepted += 1
            else:  # the token that a step draws after what it accepts
                ended.append(self._accepted if self._draft else None)
                self._begin(tokens, place + 1)
        self._num_followed = len(tokens)
        return ended

    def _begin(self, tokens: Sequence[int], end: int) -> None:
        """Drafts what follows the first `end` tokens; a match that reaches their end is repeated."""
        self._index(tokens, end)
        self._accepted = 0
        for size in NGRAMS:
            start = self._after.get(tuple(tokens[end - size : end])) if end > size else None
            if start is not None:
                self._draft = [tokens[start + index % (end - start)] for index in range(self._num_draft)]
                return
        self._draft = []

    def _index(self, tokens: Sequence[int], end: int) -> None:
        """Indexes every run of tokens that has a successor among the first `end`."""
        for size in NGRAMS:
            first = max(self._num_indexed - size, 0)
            windows = zip(*(tokens[first + index : end] for index in range(size)))
            self._after.update(zip(windows, range(first + size, end)))
        self._num_indexed = end


class Speculation:
    """Decides for one model whether the next round should check drafts, from what was gained and what it
    cost.

    Both are measured as it goes: tokens accepted a step, and seconds of a round with and without drafts by
    the number of rows.
    """

    def __init__(self, num_draft: int, num_turns: int = 0) -> None:
        self.num_draft = num_draft
        self.num_turns = num_turns
        """How often a draft model drafts in a round; 0 if drafts are taken from the text so far."""
        self.max_rows = 0
        """Rows whose drafts can be checked together: 0 until such a program is compiled."""
        self.gain = FIRST_GAIN
        """Tokens accepted a step of a row."""
        self.draft_gain = FIRST_GAIN
        """The same for steps with a draft only: the others cost nothing."""
        self._num_tried = 0
        self._seconds: dict[tuple[int, bool], float] = {}
        self._ages: dict[tuple[int, bool], int] = {}

    @property
    def has_model(self) -> bool:
        return self.num_turns > 0

    @property
    def reach(self) -> int:
        """The most tokens that a row can gain in a round with a draft model."""
        return self.num_turns * (self.num_draft + 1)

    def note_drafted(self, num_gained: int, num_accepted: int) -> None:
        """Records what a row gained in a round with a draft model: in each turn the tokens that were right,
        and one more."""
        turns = num_gained - num_accepted
        if not turns:
            return
        self._num_tried += turns
        weight = max(turns / self._num_tried, GAIN_WEIGHT)
        self.gain += weight * (num_accepted / turns - self.gain)

    def note_steps(self, accepted: Sequence[int | None]) -> None:
        for count in accepted:
            self.gain += GAIN_WEIGHT * ((count or 0) - self.gain)
            if count is not None:
                self.draft_gain += GAIN_WEIGHT * (count - self.draft_gain)

    def note_round(self, num_rows: int, step_seconds: float, *, is_verify: bool, num_steps: int = 1) -> None:
        """Records the seconds per step of a round without prompts; checking drafts once is one step."""
        known = self._seconds.get((num_rows, is_verify), step_seconds)
        self._seconds[num_rows, is_verify] = known + COST_WEIGHT * (step_seconds - known)
        self._ages[num_rows, is_verify] = 0
        other = (num_rows, not is_verify)
        self._ages[other] = self._ages.get(other, 0) + (num_steps if self.has_model else 1)
        if self._ages[other] > (FRESH_STEPS if self.has_model else FRESH_ROUNDS):
            self._ages[other] = 0
            if self._seconds.pop(other, None) is not None and not is_verify:
                self._num_tried = 0

    def pays(self, num_rows: int) -> bool:
        """Whether this many rows gain tokens per second with drafts; tries what has not been measured.

        What a draft model gains is known only from trying it, so it is tried now and then.
        """
        if not 0 < num_rows <= self.max_rows:
            return False
        if not self.has_model and (self.gain < LEAST_GAIN or self.draft_gain < LEAST_DRAFT_GAIN):
            return False
        plain, verify = self._seconds.get((num_rows, False)), self._seconds.get((num_rows, True))
        if plain is None or verify is None:
            return plain is not None
        if self.has_model:
            return self._num_tried < TRIAL_TURNS or verify < plain * (1 + self.gain)
        return verify < plain * (1 + self.draft_gain)
