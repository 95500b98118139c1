"""Decides what runs next for a model without a cache, which computes a whole text for every token.

Called by the device loop only, as `Scheduler` is for models with a KV cache. A sequence holds nothing but a
slot, so preemption costs nothing. What is scarce is work: the tokens that a round computes, padding included.
Running sequences take turns, the longest wait first, as many in a round as its work budget allows. A round is
read before the next one is planned: then all tokens are known, no text is computed for a sequence that has
ended, and equal texts are computed once.

A prompt that is scored by the chain rule takes as many texts as it has scored tokens; each round computes
some of them.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from levserve.schedule.background import is_resting, live_only
from levserve.schedule.commit import Jumps
from levserve.schedule.pace import Backlog
from levserve.schedule.pages import PagePool
from levserve.schedule.request import GenerationRequest
from levserve.schedule.sequence import Chunk, RoundPlan, Row, Sequence
from levserve.schedule.slot_scheduler import SlotScheduler
from levserve.schedule.slots import Slots
from levserve.schedule.speculation import Speculation

Text = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WorkBudget:
    """How much one round may do."""

    num_slots: int
    lengths: tuple[int, ...]
    """What texts are padded to, ascending."""
    round_tokens: int
    """Tokens in one round, padding included; one text is always computed, however long it is."""

    def padded(self, length: int) -> int:
        """The tokens that a text of this length takes, padding included."""
        return self.lengths[bisect_left(self.lengths, length)]


class _Work:
    """What one plan has spent, by text: a text that is computed already costs nothing more."""

    def __init__(self, budget: WorkBudget) -> None:
        self._budget = budget
        self._seen: set[Text] = set()
        self.prompts = 0
        self.answers = 0

    @property
    def left(self) -> int:
        return self._budget.round_tokens - self.prompts - self.answers

    def cost(self, text: Text) -> int:
        return 0 if text in self._seen else self._budget.padded(len(text))

    def fits(self, text: Text) -> bool:
        return self.cost(text) <= self.left or not self._seen

    def spend_on_answer(self, text: Text) -> None:
        self.answers += self.cost(text)
        self._seen.add(text)

    def spend_on_prompt(self, text: Text) -> None:
        self.prompts += self.cost(text)
        self._seen.add(text)


class WholeTextScheduler(SlotScheduler[Slots]):
    """Schedules models without a cache."""

    pool: PagePool | None = None
    speculation: Speculation | None = None
    is_speculating = False
    reads_first = True

    def __init__(self, budget: WorkBudget) -> None:
        self.budget = budget
        super().__init__(Slots(budget.num_slots), Jumps.ALWAYS)
        self._turn = 0

    @property
    def num_streams(self) -> int:
        """The number of streams once the waiting sequences run too, as far as there are slots."""
        return min(self.num_running + self.num_waiting, self.budget.num_slots)

    def backlog(self) -> Backlog:
        """Tokens still to compute if every sequence takes all it may."""
        prompts = answers = 0
        for sequence in (*self._slots.running, *self._slots.waiting):
            answers += _answer_tokens(sequence)
            prompts += len(_unscored(sequence)) * len(sequence.tokens)
        running = [_answer_tokens(sequence) for sequence in self._slots.running]
        return Backlog(prompts, answers, len(running) * min(running, default=0))

    def add(self, request: GenerationRequest) -> Sequence:
        """Puts a request in the queue, behind all others of its priority."""
        matcher = None if request.constraint is None else request.constraint.start()
        sequence = Sequence(request, list(request.prompt), matcher=matcher)
        self._slots.add(sequence)
        return sequence

    def plan(self, max_prefill: int | None = None) -> RoundPlan:
        """Chooses the next round's texts; the round before must have been committed.

        Beside running streams it computes `max_prefill` tokens for scores at most, but always one text.
        """
        preempted = self._slots.make_way()
        while self._slots.place_next() is not None:
            pass
        self._turn += 1
        rests = is_resting(self._slots) and not self._rest.takes_turn()
        running = live_only(self._slots.running) if rests else self._slots.running
        ready = [sequence for sequence in running if not self._waits_for_scores(sequence)]
        in_turn = sorted(ready, key=lambda sequence: (sequence.turn, *sequence.rank))
        is_busy = any(not _has_prompt_work(sequence) for sequence in in_turn)
        prompt_tokens = max_prefill if is_busy and max_prefill is not None else self.budget.round_tokens
        work = _Work(self.budget)
        chunks: list[Chunk] = []
        rows: list[Row] = []
        for sequence in in_turn:
            if _has_prompt_work(sequence):
                chunk = self._plan_chunk(sequence, work, prompt_tokens)
                if chunk is None:
                    continue
                chunks.append(chunk)
            else:
                if not work.fits(tuple(sequence.tokens)):
                    continue
                work.spend_on_answer(tuple(sequence.tokens))
                rows.append(self._plan_row(sequence))
            sequence.turn = self._turn
        planned = [chunk.sequence for chunk in chunks] + [row.sequence for row in rows]
        first_planned = [sequence for sequence in planned if not sequence.is_primed]
        for sequence in first_planned:
            sequence.is_primed = True
        return RoundPlan(
            tuple(chunks),
            tuple(rows),
            tuple(first_planned),
            tuple(preempted),
            work=Backlog(work.prompts, work.answers),
        )

    def forget_prefixes(self) -> None:
        """Does nothing: no part of a text is kept."""

    def _waits_for_scores(self, sequence: Sequence) -> bool:
        """Whether it shows the scores of a prompt that another sequence has not scored to the end."""
        scorer = sequence.request.shares_prompt_of
        found = None if scorer is None else self._slots.find(scorer)
        return found is not None and bool(_unscored(found))

    def _plan_row(self, sequence: Sequence) -> Row:
        assert sequence.slot is not None and sequence.num_pending == 0
        sequence.num_pending = 1
        is_masked = sequence.needs_mask
        sequence.has_misfit = False
        return Row(
            sequence, sequence.slot, len(sequence.tokens), 1, epoch=sequence.epoch, is_masked=is_masked
        )

    def _plan_chunk(self, sequence: Sequence, work: _Work, max_tokens: int) -> Chunk | None:
        """Plans as many of a prompt's texts as fit in the round; the last ones come with the next token."""
        assert sequence.slot is not None
        num_done = 0
        texts = _prompt_texts(sequence)
        for text in texts:
            is_over = work.prompts > 0 and work.prompts + work.cost(text) > max_tokens
            if is_over or not work.fits(text):
                break
            work.spend_on_prompt(text)
            num_done += 1
        if texts and not num_done:
            return None
        is_last = num_done == len(texts)
        if is_last and sequence.request.max_tokens:
            sequence.num_pending = 1
        start = _unscored(sequence).start - 1
        count = len(sequence.request.prompt) - start if is_last else num_done
        return Chunk(sequence, sequence.slot, start, count, is_last)


def _prompt_texts(sequence: Sequence) -> list[Text]:
    """The texts that a prompt's missing scores are computed from, and last the prompt if more is wanted."""
    prompt = sequence.request.prompt
    if sequence.request.scores_in_one_pass:
        return [prompt]
    texts = [prompt[:place] for place in _unscored(sequence)]
    if sequence.request.max_tokens or sequence.request.wants_hidden:
        texts.append(prompt)
    return texts


def _has_prompt_work(sequence: Sequence) -> bool:
    """Whether the next thing to compute is about the prompt itself, not a token after it."""
    request = sequence.request
    is_new = len(sequence.tokens) == len(request.prompt)
    return is_new and bool(_unscored(sequence) or request.wants_hidden or not request.max_tokens)


def _answer_tokens(sequence: Sequence) -> int:
    """Tokens still to compute for the answer: each of its tokens takes a pass over the whole text."""
    length, limit = len(sequence.tokens), sequence.max_length
    return (limit - length) * (length + limit) // 2


def _unscored(sequence: Sequence) -> range:
    """Positions of the prompt whose scores are wanted and not delivered yet."""
    request = sequence.request
    if request.score_from is None:
        return range(len(request.prompt), len(request.prompt))
    return range(request.score_from + sequence.num_scored, len(request.prompt))
