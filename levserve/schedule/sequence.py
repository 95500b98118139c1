"""A request while it is being served, and one round's worth of decisions about such requests.

All of it belongs to the device thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from levserve.schedule.constraint import Matcher
from levserve.schedule.pace import Backlog
from levserve.schedule.pages import ROOT
from levserve.schedule.request import FinishReason, GenerationRequest, TokenBatch
from levserve.schedule.speculation import Drafter


@dataclass(slots=True, eq=False)
class Sequence:
    """One request and how far it has come.

    `tokens` are known on the host: the prompt and what was read back. `num_pending` more were sampled by
    rounds that are still in flight; their number is known, their values are not. `num_computed` positions
    have their KV written by rounds already dispatched.
    """

    request: GenerationRequest
    tokens: list[int]
    number: int = 0
    """Its place in the order of arrival."""
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_pending: int = 0
    num_cached: int | None = None
    """Prompt tokens found in the prefix cache when it first got a slot; None before that."""
    num_scored: int = 0
    """Prompt tokens whose log-probabilities were delivered."""
    num_remembered: int = 0
    """Pages, from the first, that the pool can find again."""
    serial: int = ROOT
    """The pool's serial of the last remembered page."""
    hidden_sum: bytes = b""
    """Written by the runner: float32 sums over the prompt's hidden states so far, if they are wanted."""
    is_primed: bool = False
    """Whether the device holds its newest token, so that decode steps can follow; until then it prefills."""
    is_stale: bool = False
    """Whether some of its KV is from replaced weights: it goes on, but no other sequence may use that KV."""
    is_ended: bool = False
    matcher: Matcher | None = None
    """Where its known tokens stand in its constraint, if it has one."""
    epoch: int = 0
    """How often tokens in flight became void because one of them did not fit the constraint."""
    has_misfit: bool = False
    """Whether the token drawn after its known ones did not fit, and has to be drawn again."""
    drafter: Drafter | None = None
    is_verifying: bool = False
    """Whether a draft is in flight, so that not even the number of its tokens is known."""
    num_drafted: int = 0
    """Leading positions whose tokens the draft model has seen, if there is one."""
    turn: int = 0
    """The last round that computed it, where sequences take turns."""
    max_length: int = field(init=False)
    priority: int = field(init=False)
    """That of the request, until the sequence has waited too long."""

    def __post_init__(self) -> None:
        self.priority = self.request.priority
        self.max_length = len(self.request.prompt) + self.request.max_tokens

    @property
    def rank(self) -> tuple[int, int]:
        """Sequences of a smaller rank are served first and lose their pages last."""
        return self.priority, self.number

    @property
    def length(self) -> int:
        """Number of tokens, including those in flight."""
        return len(self.tokens) + self.num_pending

    @property
    def num_reusable(self) -> int:
        """Leading tokens whose results are not wanted, so that their KV may come from the prefix cache."""
        if self.request.wants_hidden:
            return 0
        first_scored = self.request.score_from
        return len(self.tokens) - 1 if first_scored is None else first_scored - 1

    @property
    def needs_mask(self) -> bool:
        """Whether a draw after its known tokens is held to its constraint's mask."""
        return self.matcher is not None and (self.has_misfit or not self.matcher.is_free)

    @property
    def may_jump(self) -> bool:
        """Whether forced tokens may be appended without being drawn: then they have no log-probabilities, and
        penalties do not see them."""
        sampling = self.request.sampling
        is_penalised = sampling.presence_penalty or sampling.frequency_penalty
        return sampling.num_logprobs is None and not is_penalised and sampling.repetition_penalty == 1

    @property
    def can_fork(self) -> bool:
        """Whether it may start from another sequence's prompt: no results of the prompt are wanted."""
        request = self.request
        is_new = len(self.tokens) == len(request.prompt)
        return is_new and request.max_tokens > 0 and request.score_from is None and not request.wants_hidden


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start` to `start + count` of a sequence to compute; the last chunk samples the next token."""

    sequence: Sequence
    slot: int
    start: int
    count: int
    is_last: bool

    @property
    def scored(self) -> range:
        """Prompt positions that this chunk scores: each position scores the next one."""
        request = self.sequence.request
        if request.score_from is None:
            return range(0)
        first = max(self.start + 1, request.score_from)
        return range(first, min(self.start + self.count + 1, len(request.prompt)))


class Row(NamedTuple):
    """A sequence that decodes `steps` tokens from `position` on, or one token and as many of its draft as are
    right."""

    sequence: Sequence
    slot: int
    position: int
    steps: int
    draft: tuple[int, ...] = ()
    epoch: int = 0
    """The sequence's when this was planned; the row's tokens are void if it has changed since."""
    is_masked: bool = False
    """Whether the first draw is held to the sequence's constraint, which is possible if all tokens before it
    are known."""
    reach: int = 0
    """If a draft model drafts for it: the most tokens that it can gain."""
    missed: range = range(0)
    """Positions whose tokens the draft model must see first."""


@dataclass(frozen=True, slots=True)
class Fork:
    """A sequence that takes over a computed prompt: it shares full pages, copies the last, and decodes."""

    sequence: Sequence
    slot: int
    source_page: int
    target_page: int


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """What the device does next: chunks in order, then forks of what they computed, then one decode round
    over the rows."""

    chunks: tuple[Chunk, ...]
    rows: tuple[Row, ...]
    placed: tuple[Sequence, ...]
    """Sequences that got a slot."""
    preempted: tuple[tuple[Sequence, int], ...]
    """Sequences that lost their pages, each with the number of computed tokens that were lost."""
    forks: tuple[Fork, ...] = ()
    tainted: tuple[int, ...] = ()
    """Free pages to clear first: masked positions must hold finite numbers, because zero times NaN is NaN."""
    work: Backlog | None = None
    """Tokens that are computed for prompts and for answers; None: those of the chunks, and one for each token
    gained."""

    @property
    def is_verify(self) -> bool:
        """Whether its rows check drafts, one step each, rather than decode."""
        return any(row.draft or row.reach for row in self.rows)

    @property
    def num_prefill(self) -> int:
        return sum(chunk.count for chunk in self.chunks)

    @property
    def held_sequences(self) -> list[Sequence]:
        """The sequences whose next draw is held to a mask."""
        held = [row.sequence for row in self.rows if row.is_masked]
        return held + [chunk.sequence for chunk in self.chunks if chunk.is_last and chunk.sequence.needs_mask]

    @property
    def num_tokens(self) -> int:
        """Tokens that the round computes."""
        if self.work is not None:
            return sum(self.work)
        return self.num_prefill + sum(max(row.reach, row.steps + len(row.draft)) for row in self.rows)

    def work_done(self, num_gained: int) -> Backlog:
        """The work that the round has done once the rows have gained this many tokens."""
        return Backlog(self.num_prefill, num_gained) if self.work is None else self.work

    @property
    def is_empty(self) -> bool:
        return not self.chunks and not self.rows and not self.forks and not self.tainted


class SequenceUpdate(NamedTuple):
    """What one round gained for one sequence."""

    sequence: Sequence
    batch: TokenBatch

    @property
    def finish(self) -> FinishReason | None:
        return self.batch.finish
