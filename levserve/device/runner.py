"""Runs plans on the device: packs them and dispatches the programs.

Belongs to the device thread. Dispatching returns at once. The device works through rounds in order while the
host plans the next one and delivers the tokens of the one before.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import count, islice
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from levserve.device.executor import Executor
from levserve.device.in_flight import InFlightRound, PrefillRow
from levserve.device.model_runner import mask_rows
from levserve.device.packing import SlotTable, pack_masks, pack_memory
from levserve.device.programs import Edit, EditKind, Programs, Shape
from levserve.device.rounds import ChunkOutput, Skeleton, State
from levserve.device.rules import Ints, mode_for, needs_memory
from levserve.device.sampling import SlotMasks, make_masks, make_memory
from levserve.device.sizing import Sizes
from levserve.model import cache
from levserve.model.config import ModelConfig
from levserve.model.decoder import Blueprint
from levserve.model.placement import BY_HEADS, WHOLE, mesh_of
from levserve.model.rules import Memory, Mode
from levserve.observe.metrics import Metrics
from levserve.schedule.request import GenerationRequest
from levserve.schedule.sequence import Chunk, Fork, RoundPlan, Row, Sequence

TIMED_TOKENS = 32
TRIES = 8
"""The tokens of each timed run of the first prefill program, and the most such runs; the quickest counts."""
SAME_TIME = 1.03
"""If the two quickest runs differ by less than this factor, neither was disturbed and no more are needed."""


class DraftModel(NamedTuple):
    """A smaller model that drafts for another one."""

    blueprint: Blueprint
    arrays: Mapping[str, jax.Array]
    storage: jnp.dtype
    """The type that its KV pages are stored in."""


class Runner(Executor):
    """An executor that runs plans; it keeps the rules and pages of each slot."""

    def __init__(
        self,
        blueprint: Blueprint,
        arrays: Mapping[str, jax.Array],
        sizes: Sizes,
        storage: jnp.dtype,
        metrics: Metrics,
        draft: DraftModel | None = None,
    ) -> None:
        names = tuple(sorted(arrays))  # a reload may read them in another order
        leaves = tuple(arrays[name] for name in names)
        state = make_state(blueprint.config, sizes, storage, mesh_of(leaves[0]), draft)
        skeleton = Skeleton(blueprint, names, sizes.table_width)
        if draft is not None:
            draft_names = tuple(sorted(draft.arrays))
            leaves += tuple(draft.arrays[name] for name in draft_names)
            skeleton = skeleton._replace(draft=draft.blueprint, draft_names=draft_names)
        super().__init__(leaves, state, Programs(leaves, state, skeleton, sizes, metrics))
        self._slots = SlotTable(sizes.rows, sizes.table_width)
        self._sizes = sizes
        self._traits = blueprint.backend.traits

    def warm_up(self, report: Callable[[str], None]) -> None:
        """Runs the first programs, and times prefill."""
        report("warming up")
        first = self.programs.first_shapes
        for shape in first:
            self._warm(shape, TIMED_TOKENS)  # writes to pages, which no sequence holds yet
        times: list[float] = []
        while len(times) < TRIES and not has_settled(times):
            times.append(self._warm(first[0], TIMED_TOKENS))

    def dispatch(self, plan: RoundPlan, *, may_mix: bool = False) -> InFlightRound:
        """Queues a planned round behind the device's current work; `may_mix` allows a single program."""
        if self._sizes.takes_longest_first:
            plan = replace(plan, rows=tuple(sorted(plan.rows, key=lambda row: row.position, reverse=True)))
        if plan.tainted:
            self.fill_pages(plan.tainted, 0.0)
        for sequence in plan.placed:
            self._fill_slot(sequence)
        self._mask(plan)
        mixed = self._mixed_shape(plan) if may_mix else None
        if mixed is not None:
            return self._dispatch_mixed(plan, mixed)
        chunks = self._dispatch_chunks(plan.chunks)
        for fork in plan.forks:
            self._dispatch_fork(fork)
        rows = [(group, self._dispatch_rows(group, plan.is_verify)) for group in self._groups(plan)]
        return InFlightRound(plan, chunks, rows)

    def fill_pages(self, pages: Seq[int], value: float) -> None:
        """Overwrites pages once the device has done its current work."""
        pool = self._state.pools[0]
        stored, num_pages = cache.filling(pool, value), pool.shape[0]
        width = self._slots.table_width
        for start in range(0, len(pages), width):
            named = pages[start : start + width]
            part = np.full(width, num_pages, np.int32)  # pages that do not exist
            part[: len(named)] = named
            self.run(Edit(EditKind.FILL), part, stored)

    def _cut(self, chunk: Chunk, is_draft: bool) -> list[Chunk]:
        """The chunk in parts that fit a row of a prefill program."""
        size = self._sizes.prefill_row_tokens
        size = size or self.programs.prefill(chunk.count, can_split=True, is_draft=is_draft).size
        end = chunk.start + chunk.count
        parts = []
        for start in range(chunk.start, end, size):
            is_last = chunk.is_last and start + size >= end
            parts.append(Chunk(chunk.sequence, chunk.slot, start, min(size, end - start), is_last))
        return parts

    def _groups(self, plan: RoundPlan) -> list[Seq[Row]]:
        """The rows in as few groups as the programs allow."""
        rows = plan.rows
        if plan.is_verify or not rows:
            return [rows] if rows else []
        size = self.programs.decode(len(rows), self._slots.mode_of(rows)).size
        return [rows[start : start + size] for start in range(0, len(rows), size)]

    def _fill_slot(self, sequence: Sequence) -> None:
        self._slots.take_rules(sequence)
        if not needs_memory(sequence.request):
            return
        self.run(Edit(EditKind.MEMORY), *pack_memory(sequence, self._sizes.max_seq_len))

    def _mask(self, plan: RoundPlan) -> None:
        """Gives the device the masks of the plan's constrained draws."""
        held = plan.held_sequences
        if not held:
            return
        rows = min(rows for rows in mask_rows(self._sizes.rows) if rows >= len(held))
        packed, words = pack_masks(held, rows, self._state.masks.words.shape[1], self._sizes.rows)
        self.run(Edit(EditKind.MASKS, rows), packed, words)

    def _dispatch_chunks(self, chunks: Seq[Chunk], *, is_draft: bool = False) -> list[list[PrefillRow]]:
        """Dispatches chunks; returns the rows of each.

        A program writes all KV before it reads any, so that rows of one prompt may share a program.
        With `is_draft`, the chunks are computed by the draft model alone.
        """
        cut = [self._cut(chunk, is_draft) for chunk in chunks]
        waiting = deque(part for parts in cut for part in parts)
        dispatched: list[PrefillRow] = []
        is_sample_only = not is_draft and all(map(_is_sample_only, chunks))
        while waiting:
            row_tokens = self._sizes.prefill_row_tokens
            num_tokens = len(waiting) * row_tokens if row_tokens else waiting[0].count
            shape = self.programs.prefill(
                num_tokens,
                can_split=row_tokens is not None,
                is_sample_only=is_sample_only,
                is_draft=is_draft,
            )
            rows, size = self._sizes.prefill_rows(shape.size)
            group = [waiting.popleft() for _ in range(min(rows, len(waiting)))]
            packed = self._slots.pack_chunks(group, rows, size)
            output = ChunkOutput(*self.run(shape, packed))
            if any(part.is_last for part in group):
                output.sampled.copy_to_host_async()
            dispatched += [PrefillRow(part, output, row) for row, part in enumerate(group)]
        rest = iter(dispatched)
        return [list(islice(rest, len(parts))) for parts in cut]

    def _mixed_shape(self, plan: RoundPlan) -> Shape | None:
        """The program that does all of a plan at once, if one can."""
        if not plan.chunks or not plan.rows or plan.forks or plan.is_verify:
            return None
        for chunk in plan.chunks:
            is_early = chunk.start < self._sizes.mixed_context
            if chunk.scored or chunk.sequence.request.wants_hidden or not is_early:
                return None
        ending = [chunk for chunk in plan.chunks if chunk.is_last]
        modes = {self._slots.mode_of(plan.rows), *(mode_for(chunk.sequence.request) for chunk in ending)}
        mode = max(modes, key=tuple(Mode).index)
        return self.programs.mixed(len(plan.rows) + len(ending), plan.num_prefill, mode)

    def _dispatch_mixed(self, plan: RoundPlan, shape: Shape) -> InFlightRound:
        packed = self._slots.pack_mixed(plan.rows, plan.chunks, shape.size + self._sizes.mixed_tokens)
        of_rows, of_all = self.run(shape, packed)
        of_rows.copy_to_host_async()
        of_all.copy_to_host_async()
        output, ends = ChunkOutput(of_all), count(len(plan.rows))
        chunks = [[PrefillRow(chunk, output, next(ends) if chunk.is_last else 0)] for chunk in plan.chunks]
        return InFlightRound(plan, chunks, [(plan.rows, of_rows)], is_mixed=True)

    def _dispatch_fork(self, fork: Fork) -> None:
        token = fork.sequence.tokens[-1]
        self.run(
            Edit(EditKind.FORK), np.array([fork.slot, token, fork.source_page, fork.target_page], np.int32)
        )

    def _dispatch_rows(self, rows: Seq[Row], is_verify: bool) -> jax.Array:
        if is_verify and self._sizes.draft_turns:
            self._catch_up(rows)
            shape = self.programs.verify(len(rows), self._slots.mode_of(rows))
        elif is_verify:
            shape = self.programs.verify(len(rows))
        else:
            shape = self.programs.decode(len(rows), self._slots.mode_of(rows))
        arrays = self.run(shape, self._pack_rows(rows, shape))
        outputs: jax.Array = arrays[0] if shape.is_mixed else arrays
        outputs.copy_to_host_async()
        return outputs

    def _catch_up(self, rows: Seq[Row]) -> None:
        """Shows the draft model the tokens of these rows that it has not seen."""
        missed = [row for row in rows if row.missed]
        chunks = [Chunk(row.sequence, row.slot, row.missed.start, len(row.missed), False) for row in missed]
        self._dispatch_chunks(chunks, is_draft=True)

    def _pack_rows(self, rows: Seq[Row], shape: Shape) -> Ints:
        if shape.is_verify and shape.is_draft:
            return self._slots.pack_drafted(rows, shape.size)
        if shape.is_verify:
            return self._slots.pack_drafts(rows, shape.size, self._sizes.num_draft)
        if shape.is_mixed:
            return self._slots.pack_mixed(rows, (), shape.size + self._sizes.mixed_tokens)
        return self._slots.pack_rows(rows, shape.size)

    def _warm(self, shape: Shape, num_tokens: int = 0) -> float:
        """Also measures the speed of prefill programs."""
        num_tokens = min(num_tokens, shape.size) if self._sizes.leaves_out_padding else 0
        for _ in range(self._traits.first_runs):
            seconds = self._run_idle(shape, num_tokens)
        is_timed = self._traits.times_all_prefill or shape == self.programs.first_shapes[0]
        if shape.is_prefill and is_timed and not shape.is_draft:
            self.prefill_token_seconds = min(self.prefill_token_seconds, seconds / (num_tokens or shape.size))
        return seconds

    def _run_idle(self, shape: Shape, num_tokens: int) -> float:
        """Times a program while no sequence has a slot. The KV of its tokens goes to the first pages."""
        tokens = [0] * max(num_tokens, 1)
        pages = list(range(-(-num_tokens // self._sizes.page_size)))
        sequence = Sequence(GenerationRequest("", tuple(tokens), 1), tokens, pages=pages)
        chunk = Chunk(sequence, slot=0, start=0, count=num_tokens, is_last=True)
        if shape.is_prefill:
            packed = self._slots.pack_chunks([chunk], *self._sizes.prefill_rows(shape.size))
        else:
            packed = self._pack_rows((), shape)
        start = time.monotonic()
        jax.block_until_ready(self.run(shape, packed))
        return time.monotonic() - start


def has_settled(times: Seq[float]) -> bool:
    """Whether the two quickest of some runs took about the same time."""
    if len(times) < 2:
        return False
    quickest, second, *_ = sorted(times)
    return second < SAME_TIME * quickest


def make_state(
    config: ModelConfig,
    sizes: Sizes,
    storage: jnp.dtype,
    mesh: Mesh | None = None,
    draft: DraftModel | None = None,
) -> State:
    """An empty state, on the device; each device of a mesh makes its own part, which `config` describes."""
    num_draft_layers = 0 if draft is None else draft.blueprint.config.num_layers

    def make() -> State:
        pool = cache.make_pool(config, sizes.num_pages, sizes.page_size, storage)
        last_tokens, memory, masks = make_slots(sizes.rows, sizes.max_seq_len, config.vocab_size)
        return State(pool, last_tokens, memory, masks, make_draft_pools())

    def make_draft_pools() -> tuple[jax.Array, ...]:
        if draft is None:
            return ()
        return cache.make_pool(draft.blueprint.config, sizes.num_pages, sizes.page_size, draft.storage)

    if mesh is None:
        return make()
    pools, draft_pools = (BY_HEADS,) * config.num_layers, (BY_HEADS,) * num_draft_layers
    specs = State._make((pools, WHOLE, WHOLE, WHOLE, draft_pools))
    state: State = jax.jit(jax.shard_map(make, mesh=mesh, in_specs=(), out_specs=specs, check_vma=False))()
    return state


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def make_slots(num_slots: int, max_seq_len: int, vocab_size: int) -> tuple[jax.Array, Memory, SlotMasks]:
    """The newest token, the memory and the masks of each slot, all empty.

    One program makes them all: compiling one for each of their shapes takes 0.15 s.
    """
    return (
        jnp.zeros(num_slots, jnp.int32),
        make_memory(num_slots, max_seq_len),
        make_masks(num_slots, vocab_size),
    )


def _is_sample_only(chunk: Chunk) -> bool:
    """Whether at most the next token is wanted, and not drawn in full mode."""
    request = chunk.sequence.request
    if chunk.scored or request.wants_hidden:
        return False
    return not chunk.is_last or mode_for(request) is not Mode.FULL
