"""A request while it is being served, and one round's worth of decisions about such requests.

All of it belongs to the device thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from levserve.schedule.pages import ROOT
from levserve.schedule.request import FinishReason, GenerationRequest, TokenBatch


@dataclass(slots=True, eq=False)
class Sequence:
    """One request's progress.

    `tokens` are known on the host: the prompt and what was read back. `num_pending` more were sampled by rounds that are
    still in flight; their number is known, their values are not. `num_computed` positions have their KV written by rounds
    already dispatched.
    """

    request: GenerationRequest
    tokens: list[int]
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_pending: int = 0
    num_cached: int | None = None
    """Prompt tokens found in the prefix cache on first admission; None before it."""
    num_remembered: int = 0
    """Pages, from the first, that the pool can find again."""
    serial: int = ROOT
    """The pool's serial of the last remembered page."""
    is_primed: bool = False
    """Whether the device holds its newest token, so that decode steps can follow; until then it prefills."""
    is_ended: bool = False

    @property
    def length(self) -> int:
        """Tokens there are, counting those still in flight."""
        return len(self.tokens) + self.num_pending

    @property
    def max_length(self) -> int:
        return len(self.request.prompt) + self.request.max_tokens


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start` to `start + count` of a sequence to compute; the last chunk samples the next token."""

    sequence: Sequence
    slot: int
    start: int
    count: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class Row:
    """A sequence that decodes `steps` tokens, the first of them fed at `position`."""

    sequence: Sequence
    slot: int
    position: int
    steps: int


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """What the device does next: chunks in order, then one decode round over the rows."""

    chunks: tuple[Chunk, ...]
    rows: tuple[Row, ...]
    admitted: tuple[Sequence, ...]
    preempted: tuple[tuple[Sequence, int], ...]
    """Sequences that lost their pages, each with the computed tokens that were lost."""

    @property
    def is_empty(self) -> bool:
        return not self.chunks and not self.rows


@dataclass(frozen=True, slots=True)
class Progress:
    """News for one request's stream."""

    sequence: Sequence
    batch: TokenBatch

    @property
    def finish(self) -> FinishReason | None:
        return self.batch.finish
