"""Accepts the tokens that a round sampled for a sequence, once they are read.

Called by the scheduler only, on the device thread. Tokens after a stop token, after the limit, or after one
that does not fit the sequence's constraint are cut off here, and a sequence that is complete, stuck or
poisoned is ended.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from enum import Enum, auto
from typing import NamedTuple

from levserve.schedule.constraint import take_fitting
from levserve.schedule.request import FinishReason, PooledHidden, TokenBatch, TokenLogprob
from levserve.schedule.sequence import Chunk, Row, Sequence, SequenceUpdate
from levserve.schedule.slots import Slots

MIN_JUMP = 2
"""The fewest forced tokens that are worth a prefill; a single one costs no more as a decode step."""


class Jumps(Enum):
    """When the tokens that a constraint forces are prefilled, although others wait meanwhile.

    If a round is one step, the other sequences draw in that step in little more time than one of them alone.
    If it is several, a prefill of a few tokens takes less time than a round, and a sequence whose draw did
    not fit has lost a round already.
    """

    ALWAYS = auto()
    BESIDE_CONSTRAINED = auto()
    """If all other running sequences are constrained too: unconstrained ones never wait for forced tokens."""
    ALONE = auto()


class Sampled(NamedTuple):
    """What a round computed for one sequence."""

    tokens: Seq[int]
    logprobs: Seq[TokenLogprob] = ()
    prompt_logprobs: Seq[TokenLogprob] = ()
    """The scores of the chunk's `scored` positions."""
    hidden: PooledHidden | None = None
    is_poisoned: bool = False
    """Whether a value that is not finite followed `tokens`, or was among the prompt's scores and states."""
    num_drafted: int = 0
    """Tokens of a draft model that were checked; `num_accepted` of them were accepted."""
    num_accepted: int = 0


class Committer:
    """Commits what rounds sampled to the sequences in slots, round by round in the order of dispatch."""

    def __init__(self, slots: Slots, jumps: Jumps) -> None:
        self._slots = slots
        self._jumps = jumps
        self._tainted: list[int] = []
        self._num_misfits = 0
        self._num_forced = 0

    def take_chunk(self, chunk: Chunk, sampled: Sampled) -> SequenceUpdate | None:
        """Gives no update for a chunk before the last, unless it has wanted scores not given before."""
        sequence = chunk.sequence
        skipped = max(0, (sequence.request.score_from or 0) + sequence.num_scored - chunk.scored.start)
        scores = sampled.prompt_logprobs[skipped:]
        sequence.num_scored += len(scores)
        if chunk.is_last or sampled.is_poisoned:
            return self._take(sequence, sampled._replace(prompt_logprobs=scores))
        if not scores or sequence.is_ended:
            return None
        return SequenceUpdate(
            sequence, TokenBatch((), num_cached=sequence.num_cached or 0, prompt_logprobs=tuple(scores))
        )

    def take_row(self, row: Row, sampled: Sampled) -> SequenceUpdate | None:
        """Accepted tokens of a draft count as if they had been planned."""
        sequence = row.sequence
        has_draft = bool(row.draft or row.reach)
        if has_draft:
            sequence.is_verifying = False
        if row.epoch != sequence.epoch:
            return None
        if has_draft:
            num_more = max(len(sampled.tokens) - row.steps, 0)
            sequence.num_pending += num_more
            if sequence.is_primed:  # else it was preempted meanwhile
                sequence.num_computed += num_more
                # A draft model sees the newest token, and the one before it once more, when it drafts.
                sequence.num_drafted = sequence.num_computed - 1 if row.reach else sequence.num_drafted
        return self._take(sequence, sampled)

    def take_tainted(self) -> list[int]:
        """The free pages, new since the last call, that hold values which are not finite."""
        tainted, self._tainted = self._tainted, []
        return tainted

    def take_constraint_counts(self) -> tuple[int, int]:
        """Since the last call: tokens that did not fit their constraint, and forced tokens not drawn."""
        counts = self._num_misfits, self._num_forced
        self._num_misfits = self._num_forced = 0
        return counts

    def _take(self, sequence: Sequence, sampled: Sampled) -> SequenceUpdate | None:
        if sequence.is_ended:
            return None  # cancelled, or it had stopped when this round was already dispatched
        sequence.num_pending -= len(sampled.tokens)
        if sequence.matcher is None:
            kept, finish = _trim(sequence, sampled.tokens)
        else:
            kept, finish = _hold(sequence, sampled.tokens)
        if sampled.is_poisoned and (finish is None or not sequence.request.max_tokens):
            return self._fail(sequence)
        sequence.tokens += kept
        if sequence.matcher is not None and finish is None:
            if len(kept) < len(sampled.tokens):
                self._void_pending(sequence)
            kept = [*kept, *self._jump(sequence)]
            if sequence.matcher.is_over:
                finish = FinishReason.STOP
        self._slots.remember(sequence)
        if finish is not None:
            self._slots.drop(sequence)
        logprobs = tuple(sampled.logprobs[: len(kept)]) if sampled.logprobs else ()
        scores, hidden = tuple(sampled.prompt_logprobs), sampled.hidden
        return SequenceUpdate(
            sequence, TokenBatch(tuple(kept), logprobs, finish, sequence.num_cached or 0, scores, hidden)
        )

    def _void_pending(self, sequence: Sequence) -> None:
        """Goes back to the last known token. What rounds in flight write after it is overwritten, or lies in
        pages that were given up."""
        self._num_misfits += 1
        sequence.has_misfit = True
        sequence.epoch += 1
        sequence.num_pending = 0
        if sequence.is_primed:  # else it was preempted meanwhile
            sequence.num_computed = len(sequence.tokens) - 1
            sequence.num_drafted = min(sequence.num_drafted, sequence.num_computed)

    def _jump(self, sequence: Sequence) -> list[int]:
        """Appends the tokens that must follow, to be prefilled rather than drawn one at a time.

        Does nothing while drawn tokens are in flight, which are mostly the same, or if other sequences would
        lose pages, or beside sequences that must not wait for a prefill.
        """
        if sequence.num_pending or not sequence.is_primed or not sequence.may_jump:
            return []
        if self._num_delayed() > 0:
            return []
        assert sequence.matcher is not None
        forced = list(sequence.matcher.forced())[: sequence.max_length - len(sequence.tokens) - 1]
        if len(forced) < MIN_JUMP:
            return []
        if not self._slots.extend(sequence, len(sequence.tokens) + len(forced) + 1):
            return []
        sequence.num_computed = len(sequence.tokens) - 1
        sequence.is_primed = False
        for token in forced:
            sequence.matcher.take(token)
        sequence.tokens += forced
        self._num_forced += len(forced)
        return forced

    def _num_delayed(self) -> int:
        """Running sequences that must not wait for another one's forced tokens."""
        if self._jumps is Jumps.ALWAYS:
            return 0
        running = self._slots.running
        return running.num_free if self._jumps is Jumps.BESIDE_CONSTRAINED else len(running) - 1

    def _fail(self, sequence: Sequence) -> SequenceUpdate:
        """Ends a sequence whose results are not finite; its pages cannot be found again, and are cleared
        before reuse."""
        self._tainted += self._slots.discard(sequence)
        self._slots.drop(sequence)
        return SequenceUpdate(sequence, TokenBatch((), finish=FinishReason.POISONED))


def _trim(sequence: Sequence, tokens: Seq[int]) -> tuple[Seq[int], FinishReason | None]:
    """The tokens up to the first stop token or the limit. A stop token cannot come too early: the sampler
    bans it."""
    if sequence.request.max_tokens == 0:
        return (), FinishReason.LENGTH
    stop_ids = sequence.request.stop_ids
    if not stop_ids.isdisjoint(tokens):
        first = next(index for index, token in enumerate(tokens) if token in stop_ids)
        return tokens[:first], FinishReason.STOP
    is_full = len(sequence.tokens) + len(tokens) >= sequence.max_length
    return tokens, FinishReason.LENGTH if is_full else None


def _hold(sequence: Sequence, tokens: Seq[int]) -> tuple[Seq[int], FinishReason | None]:
    """The tokens up to the first that does not fit the constraint, to its end, or to the limit."""
    assert sequence.matcher is not None
    fit = take_fitting(sequence.matcher, tokens, sequence.request.stop_ids)
    kept = tokens[: fit.num_fitting]
    if fit.is_end:
        return kept, FinishReason.STOP
    if sequence.matcher.is_stuck:
        return kept, FinishReason.STUCK
    is_full = len(sequence.tokens) + len(kept) >= sequence.max_length
    return kept, FinishReason.LENGTH if is_full else None
