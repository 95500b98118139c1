"""Decides, before every round, which sequences run, on which pages, and which have to wait.

Called by the device loop only. Plain Python over numbers: no arrays, no clock of its own, no threads. The
order is by priority, and first come, first served among equals, also after a preemption: a sequence that lost
its pages keeps its tokens and its place. A waiting sequence that outranks a running one takes its slot or its
pages where none are free. No sequence waits forever: each time `RAISE_EVERY` slots were given out, the
waiting sequence that arrived first is raised to the highest priority present, and keeps it. Background work
rests while there is other work that it would slow down noticeably; see `background.py`.

A round may be planned before the last one has been read back. The number of tokens in flight is known and
only their values are not, so positions and pages can be assigned ahead; a sequence that turns out to have
stopped ran one round for nothing. Its pages can still be reused at once: programs run in the order of
dispatch, because each takes the KV pool that the one before returned, so a stray write lands before the next
holder's own. How many tokens a draft in flight will yield is not known either, so its sequence waits until it
has been read.

A sequence with a constraint is planned ahead like any other. If a token does not fit when it is read, the
tokens after it are void, also those of the round in flight, and the next round draws in its place under the
constraint's mask; see `constraint.py`.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from levserve.schedule.background import NOTHING, Allowance, is_resting, live_only
from levserve.schedule.budget import Budget
from levserve.schedule.commit import Jumps
from levserve.schedule.pace import Backlog
from levserve.schedule.paged_slots import PagedSlots
from levserve.schedule.pages import PagePool
from levserve.schedule.request import BACKGROUND, GenerationRequest
from levserve.schedule.sequence import Chunk, Fork, RoundPlan, Row, Sequence, SequenceUpdate
from levserve.schedule.slot_scheduler import SlotScheduler
from levserve.schedule.speculation import Drafter, Speculation

DEEP_TOKENS = 256
"""From this context on a prompt's token costs so much that a busy round may compute fewer of them."""


class Scheduler(SlotScheduler[PagedSlots]):
    """Schedules models that have a KV cache."""

    def __init__(self, pool: PagePool, budget: Budget, speculation: Speculation | None = None) -> None:
        self.pool = pool
        self.budget = budget
        self.speculation = speculation
        jumps = Jumps.BESIDE_CONSTRAINED if budget.steps > 1 else Jumps.ALONE
        super().__init__(PagedSlots(pool, budget.num_slots), jumps)

    @property
    def is_speculating(self) -> bool:
        """Whether the next plan should draft; everything in flight must be read first."""
        return self.speculation is not None and self.speculation.pays(
            sum(sequence.is_primed for sequence in self._active(self._slots.running))
        )

    @property
    def reads_first(self) -> bool:
        """Whether the next plan gains by waiting for the round in flight: in rounds of one step with nothing
        but constrained rows every draw can then have its mask, and no round is void."""
        if self.budget.steps > 1 or not self.num_running:
            return False
        return all(
            sequence.matcher is not None and not sequence.matcher.is_free
            for sequence in self._active(self._slots.running)
        )

    @property
    def num_streams(self) -> int:
        """The number of streams once the waiting sequences run too, as far as there are slots."""
        sequences = (*self._slots.running, *self._slots.waiting)
        return min(sum(1 for _ in self._active(sequences)), self.budget.num_slots)

    def backlog(self) -> Backlog:
        """Tokens still to compute if every sequence takes all it may; looks at each of them.

        Background work is not counted: no other work waits for it.
        """
        sequences = [*live_only(self._slots.running), *live_only(self._slots.waiting)]
        prefill = sum(
            len(sequence.tokens) - sequence.num_computed for sequence in sequences if not sequence.is_primed
        )
        decode = sum(sequence.max_length - sequence.length for sequence in sequences)
        running = [sequence.max_length - sequence.length for sequence in live_only(self._slots.running)]
        first_end = len(running) * min(running, default=0)
        return Backlog(prefill, max(decode, 0), max(first_end, 0))

    def fits(self, request: GenerationRequest) -> bool:
        """Whether the request could run if it were alone."""
        return self._slots.pages_for(len(request.prompt) + request.max_tokens) <= self.pool.num_pages

    def add(self, request: GenerationRequest) -> Sequence:
        """Puts a request that `fits` in the queue, behind all others of its priority."""
        matcher = None if request.constraint is None else request.constraint.start()
        drafter = None
        if self.speculation is not None and not self.speculation.has_model and matcher is None:
            drafter = Drafter(self.speculation.num_draft)
        sequence = Sequence(request, list(request.prompt), matcher=matcher, drafter=drafter)
        self._slots.add(sequence)
        return sequence

    def plan(self, max_prefill: int | None = None) -> RoundPlan:
        """Chooses the next round's work and counts it as done, so that the round after can be planned before
        it is read.

        Beside running streams it prefills no more than the budget and `max_prefill` allow.
        """
        preempted = self._slots.make_way()
        if not is_resting(self._slots) or self._rest.takes_turn():
            return self._plan(max_prefill, preempted, None)
        num_live = sum(sequence.is_primed for sequence in live_only(self._slots.running))
        beside = NOTHING if self.is_speculating else self._share.next(num_live, max_prefill)
        plan = self._plan(max_prefill, preempted, beside)
        if plan.is_empty:  # the last tokens of live work are in flight
            return self._plan(max_prefill, preempted, None)
        return plan

    def forget_prefixes(self) -> None:
        """Called when the weights have changed: running sequences keep their KV, later ones compute anew."""
        self.pool.forget()
        for sequence in self._slots.running:
            sequence.is_stale = True

    def _gained(self, updates: Seq[SequenceUpdate | None]) -> list[SequenceUpdate]:
        """The updates that are not None. Their new tokens show what drafts would have gained."""
        gained = super()._gained(updates)
        if self.speculation is not None:
            for sequence, batch in gained:
                if batch.tokens and sequence.drafter is not None:
                    self.speculation.note_steps(sequence.drafter.follow(sequence.tokens))
        return gained

    def _active(self, sequences: Iterable[Sequence]) -> Iterable[Sequence]:
        """The sequences that do not rest; ignores the rare rounds in which all run."""
        return live_only(sequences) if is_resting(self._slots) else sequences

    def _plan(
        self, max_prefill: int | None, preempted: list[tuple[Sequence, int]], beside: Allowance | None
    ) -> RoundPlan:
        """`beside` is what background work may do; None if it runs like any other."""
        rows = self._plan_rows(preempted, beside)
        placed: list[Sequence] = []
        forks: list[Fork] = []
        busy_tokens = self.budget.busy_tokens
        if max_prefill is not None:
            busy_tokens = min(busy_tokens, max_prefill)
        rests = beside is not None
        chunks = self._plan_chunks(busy_tokens if rows else None, placed, forks, rests=rests)
        if beside is not None and rows and not chunks and beside.tokens >= self.budget.least_tokens:
            chunks = self._plan_chunks(beside.tokens, placed, forks, rests=False)
        tainted = self._committer.take_tainted()
        return RoundPlan(
            tuple(chunks), tuple(rows), tuple(placed), tuple(preempted), tuple(forks), tuple(tainted)
        )

    def _plan_rows(self, preempted: list[tuple[Sequence, int]], beside: Allowance | None) -> list[Row]:
        """Gives every decoding sequence its pages for the round, in order; the last ones lose theirs if there
        are too few."""
        rows: list[Row] = []
        # If all background work runs, there may be more rows than drafts can be checked for.
        has_all = beside is None and is_resting(self._slots)
        is_speculating = self.is_speculating and not has_all
        has_model = is_speculating and self.speculation is not None and self.speculation.has_model
        drafts = self._draft() if is_speculating else {}
        num_beside = 0
        max_steps = 1 if drafts or has_model else self.budget.steps
        page_size = self.pool.page_size
        for sequence in list(self._slots.running):
            is_background = sequence.priority >= BACKGROUND
            if beside is not None and is_background and num_beside >= beside.rows:
                break  # all after it are background work too
            if sequence.slot is None or not sequence.is_primed or sequence.is_verifying:
                continue  # preempted a moment ago, or still prefilling
            steps = min(max_steps, sequence.max_length - sequence.length)
            if steps <= 0:
                continue  # its last tokens are in flight
            position = sequence.num_computed
            has_pages = position + steps <= len(sequence.pages) * page_size
            if not has_pages and not self._grow(sequence, position + steps, preempted):
                break  # it was the last itself, so none is left after it
            is_masked = sequence.num_pending == 0 and sequence.needs_mask
            rows.append(
                Row(sequence, sequence.slot, position, steps, epoch=sequence.epoch, is_masked=is_masked)
            )
            num_beside += is_background
            sequence.has_misfit = False
            sequence.num_computed += steps
            sequence.num_pending += steps
        if has_model:
            return [self._with_reach(row) for row in rows]
        if not drafts:
            return rows
        return [self._with_draft(row, drafts.get(row.sequence.request.request_id, ())) for row in rows]

    def _draft(self) -> dict[str, tuple[int, ...]]:
        """Drafts for the sequences whose tokens are all known."""
        drafts = {}
        for sequence in self._slots.running:
            if sequence.is_primed and not sequence.num_pending and sequence.drafter is not None:
                drafts[sequence.request.request_id] = sequence.drafter.propose(
                    sequence.tokens, sequence.max_length - sequence.length - 1
                )
        return {request_id: draft for request_id, draft in drafts.items() if draft}

    def _with_draft(self, row: Row, draft: tuple[int, ...]) -> Row:
        """The row with its draft, if there are free pages for it: no sequence is preempted for a draft."""
        missing = self._slots.pages_for(row.position + row.steps + len(draft)) - len(row.sequence.pages)
        pages = self.pool.take(max(missing, 0)) if draft else None
        if pages is None:
            return row
        row.sequence.pages += pages
        row.sequence.is_verifying = True
        return row._replace(draft=draft)

    def _with_reach(self, row: Row) -> Row:
        """The row with the reach of a draft model, as far as pages are free, if all its tokens are known."""
        assert self.speculation is not None
        sequence = row.sequence
        if sequence.num_pending > row.steps:
            return row
        reach = min(self.speculation.reach, row.steps + sequence.max_length - sequence.length)
        missing = self._slots.pages_for(row.position + reach) - len(sequence.pages)
        sequence.pages += self.pool.take(max(missing, 0)) or []
        reach = min(reach, len(sequence.pages) * self.pool.page_size - row.position)
        if reach <= row.steps:
            return row
        sequence.is_verifying = True
        return row._replace(reach=reach, missed=range(sequence.num_drafted, row.position - 1))

    def _grow(self, sequence: Sequence, length: int, preempted: list[tuple[Sequence, int]]) -> bool:
        """Gives the sequence its missing pages for `length` positions, preempting the last of those that run;
        False if it was preempted itself."""
        missing = self._slots.pages_for(length) - len(sequence.pages)
        while (pages := self.pool.take(missing)) is None:
            victim = self._slots.running.last()
            assert victim is not None  # `sequence` runs
            preempted.append((victim, victim.num_computed))
            self._slots.preempt(victim)
            if victim is sequence:
                return False
        sequence.pages += pages
        return True

    def _plan_chunks(
        self, busy_tokens: int | None, placed: list[Sequence], forks: list[Fork], *, rests: bool
    ) -> list[Chunk]:
        """Spends the prefill budget on sequences that prefill already, then on the queue; at least one small
        chunk.

        A sequence whose prompt another one has computed costs nothing. `busy_tokens` is None if no stream has
        to wait.
        """
        sizes, overhead = self.budget.chunk_sizes, self.budget.chunk_overhead
        chunks: list[Chunk] = []
        running = live_only(self._slots.running) if rests else self._slots.running
        prefilling = [sequence for sequence in running if not sequence.is_primed]
        is_deep = bool(prefilling) and prefilling[0].num_computed >= DEEP_TOKENS
        budget = self.budget.idle_tokens if busy_tokens is None else busy_tokens
        left = max(budget, sizes[0] if is_deep else self.budget.least_tokens)
        while left >= sizes[0] and (left > overhead or not chunks):
            if not prefilling:
                head = self._slots.waiting.first()
                if rests and head is not None and head.priority >= BACKGROUND:
                    break
                sequence = self._slots.place_next()
                if sequence is None:
                    break
                placed.append(sequence)
                fork = self._fork(sequence)
                if fork is not None:
                    forks.append(fork)
                    continue
                prefilling.append(sequence)
            weight = 1.0 if busy_tokens is None else self.budget.weight_at(prefilling[0].num_computed)
            if chunks and left < weight * sizes[0]:
                break
            chunk = self._next_chunk(prefilling[0], sizes[max(bisect_right(sizes, left / weight) - 1, 0)])
            chunks.append(chunk)
            left -= math.ceil(weight * sizes[bisect_left(sizes, chunk.count)]) + overhead
            if chunk.is_last:
                prefilling.pop(0)
        return chunks

    def _next_chunk(self, sequence: Sequence, limit: int) -> Chunk:
        assert sequence.slot is not None
        start = sequence.num_computed
        count = min(len(sequence.tokens) - start, limit)
        sequence.num_computed += count
        if sequence.num_drafted >= start:
            sequence.num_drafted = start + count
        is_last = sequence.num_computed == len(sequence.tokens)
        if is_last:
            sequence.is_primed = True
            sequence.num_pending = 1
        self._slots.remember(sequence)
        return Chunk(sequence, sequence.slot, start, count, is_last)

    def _fork(self, sequence: Sequence) -> Fork | None:
        """Lets a sequence with a new slot start from the computed prompt of a running one that shares it.

        The last token of the prompt is decoded, not prefilled: its KV exists, but each sequence draws its own
        next token.
        """
        source = self._slots.running.get(sequence.request.shares_prompt_of or "")
        tail = (len(sequence.tokens) - 1) // self.pool.page_size
        if source is None or source.is_stale or not source.is_primed:
            return None
        if not sequence.can_fork or sequence.num_remembered < tail:
            return None
        assert sequence.slot is not None
        sequence.num_computed = sequence.num_cached = len(sequence.tokens) - 1
        # The pages before the last were found, and need not be the source's own.
        if sequence.num_drafted >= tail * self.pool.page_size:
            sequence.num_drafted = min(source.num_drafted, sequence.num_computed)
        sequence.is_primed = True
        return Fork(sequence, sequence.slot, source.pages[tail], sequence.pages[tail])
