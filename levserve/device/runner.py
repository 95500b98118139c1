"""Runs plans on the device: packs them, dispatches the programs, and reads a round's tokens when asked.

Belongs to the device thread. Dispatching returns at once; the device works through rounds in order while the host plans
the next one and hands out the tokens of the last.
"""

from __future__ import annotations

import math
import time
from array import array
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import count
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from levserve.device.packing import SlotTable
from levserve.device.programs import Programs, Shape
from levserve.device.rounds import Arrays, ChunkOutput, Skeleton, State
from levserve.device.rules import Ints, edits_for, mode_for, needs_memory
from levserve.device.sizing import Sizes
from levserve.model import cache
from levserve.model.decoder import Decoder
from levserve.model.sampler import MAX_EDITS, NUM_TOP, POISONED, Memory, Mode
from levserve.observe.metrics import Metrics
from levserve.schedule.request import GenerationRequest, PooledHidden, TokenLogprob
from levserve.schedule.scheduler import Sampled
from levserve.schedule.sequence import Chunk, Fork, RoundPlan, Row, Sequence
from levserve.schedule.speculation import num_accepted

TRIES = 8
TRY_TOKENS = 32
"""Of the first prefill program once it has run, and tokens of each: of the quickest one can tell what it takes."""


class Piece(NamedTuple):
    """A chunk, or a part of one, that was computed as one row of a prefill program."""

    chunk: Chunk
    output: ChunkOutput
    row: int


@dataclass(frozen=True, slots=True)
class InFlightRound:
    """A round on its way: what was asked, its rows in the order in which they are computed, and the arrays its tokens will be in.

    Chunks are computed in pieces that fit the programs, and rows in groups where no program was large enough.
    """

    plan: RoundPlan
    chunks: list[list[Piece]]
    rows: list[tuple[Seq[Row], jax.Array]]
    is_mixed: bool = False
    """Whether all of it was one program, so that nobody can tell what of its time was whose."""


class Runner:
    """Owns the weights and every array that changes on the device."""

    def __init__(self, model: Decoder, sizes: Sizes, storage: jnp.dtype, metrics: Metrics) -> None:
        leaves, tree = jax.tree.flatten(model)
        self._leaves: Arrays = tuple(leaves)
        self._state = make_state(model, sizes, storage)
        self._slots = SlotTable(sizes.rows, sizes.table_width)
        self._sizes = sizes
        self._traits = model.backend.traits
        self.programs = Programs(
            self._leaves, self._state, Skeleton(tree, sizes.table_width, model.backend), sizes, metrics
        )
        self.prefill_token_seconds = math.inf
        """What a token of a prompt takes in the best of the programs that have run, when they were tried."""
        self._set_memory: Callable[..., Memory] | None = None
        self._fork_slot: Callable[[State, object], State] | None = None
        self._fill_pages: Callable[[Arrays, object, object], Arrays] | None = None

    def warm_up(self, report: Callable[[str], None]) -> None:
        """Compiles and runs the first programs."""
        self.programs.compile_first(report)
        self._set_memory = self.programs.set_memory()
        self._fork_slot = self.programs.fork_slot()
        self._fill_pages = self.programs.fill_pages()
        report("warming up")
        first = self.programs.first_shapes
        for shape in (*first, *[first[0]] * TRIES):
            self._warm(shape, TRY_TOKENS)  # nobody has a page yet

    def swap(self, leaves: Seq[jax.Array]) -> None:
        """Serves with other weights, now on the host, from here on; one array at a time, for there is no room for two sets."""
        assert [(leaf.shape, leaf.dtype) for leaf in leaves] == [
            (leaf.shape, leaf.dtype) for leaf in self._leaves
        ]
        served = list(self._leaves)
        self._leaves = ()
        for index, leaf in enumerate(leaves):
            served[index] = jax.device_put(leaf, served[index].sharding).block_until_ready()
        self._leaves = tuple(served)

    def free(self) -> None:
        """Gives back all that it has on the device; nothing may be in in_flight, and nothing may be asked of it any more."""
        self.programs.stop()
        for leaf in jax.tree.leaves((self._leaves, self._state)):
            leaf.delete()
        self._leaves = ()

    def warm_one(self) -> None:
        """Gives one program its first run; for when there is nothing else to do."""
        shape = self.programs.next_cold()
        if shape is not None:
            self._warm(shape)

    def dispatch(self, plan: RoundPlan, *, may_mix: bool = False) -> InFlightRound:
        """Starts a planned round behind whatever the device is doing; prompts beside the rows in one program, if that may be."""
        if self._sizes.takes_longest_first:
            plan = replace(plan, rows=tuple(sorted(plan.rows, key=lambda row: row.position, reverse=True)))
        if plan.tainted:
            self.fill_pages(plan.tainted, 0.0)
        for sequence in plan.admitted:
            self._seat(sequence)
        mixed = self._mixed_shape(plan) if may_mix else None
        if mixed is not None:
            return self._dispatch_mixed(plan, mixed)
        chunks = self._dispatch_chunks(plan.chunks)
        for fork in plan.forks:
            self._dispatch_fork(fork)
        return InFlightRound(
            plan,
            chunks,
            [(group, self._dispatch_rows(group, plan.is_verify)) for group in self._groups(plan)],
        )

    def read(self, in_flight: InFlightRound) -> tuple[list[Sampled], list[Sampled]]:
        """Waits for a round's results: of its chunks, and of its rows."""
        return self.read_chunks(in_flight), self.read_rows(in_flight)

    def read_chunks(self, in_flight: InFlightRound) -> list[Sampled]:
        """Waits for the chunks, which are computed first, also if nothing of them is wanted: then it is known when they were there."""
        if in_flight.chunks:
            in_flight.chunks[-1][-1].output.sampled.block_until_ready()
        return [_join([_read_piece(piece) for piece in pieces]) for pieces in in_flight.chunks]

    def read_rows(self, in_flight: InFlightRound) -> list[Sampled]:
        rows: list[Sampled] = []
        for group, sampled in in_flight.rows:
            outputs = np.asarray(sampled)  # [step, row, outputs]
            tokens: list[list[int]] = outputs[:, :, 0].T.tolist()
            rows += [
                _sampled(row.sequence, _kept(row, mine), outputs, index)
                for index, (row, mine) in enumerate(zip(group, tokens))
            ]
        return rows

    def fill_pages(self, pages: Seq[int], value: float) -> None:
        """Overwrites pages behind whatever the device is doing."""
        assert self._fill_pages is not None
        dtype = self._state.pools[0].dtype
        stored = np.asarray(value, cache.NUMBERS.get(dtype, dtype)).view(dtype)
        width = self._slots.table_width
        for start in range(0, len(pages), width):
            part = np.full(width, self._state.pools[0].shape[0], np.int32)  # nowhere
            part[: len(pages[start : start + width])] = pages[start : start + width]
            self._state = self._state._replace(pools=self._fill_pages(self._state.pools, part, stored))

    def _cut(self, chunk: Chunk) -> list[Chunk]:
        """The chunk in parts that a program's row holds."""
        size = self._sizes.piece_tokens or self.programs.prefill(chunk.count, can_split=True).size
        end = chunk.start + chunk.count
        starts = range(chunk.start, end, size)
        return [
            Chunk(chunk.sequence, chunk.slot, at, min(size, end - at), chunk.is_last and at + size >= end)
            for at in starts
        ]

    def _groups(self, plan: RoundPlan) -> list[Seq[Row]]:
        """The rows, or as many of them together as the widest program takes."""
        rows = plan.rows
        size = (
            len(rows)
            if plan.is_verify or not rows
            else self.programs.decode(len(rows), self._slots.mode_of(rows)).size
        )
        return [rows[start : start + size] for start in range(0, len(rows), size or 1)]

    def _seat(self, sequence: Sequence) -> None:
        self._slots.seat(sequence)
        if not needs_memory(sequence.request):
            return
        assert self._set_memory is not None
        history = np.zeros(self._sizes.max_seq_len, np.int32)
        history[: len(sequence.tokens)] = sequence.tokens
        edits = edits_for(sequence.request)
        memory = self._set_memory(
            self._state.memory, np.int32(sequence.slot or 0), history, edits.ids, edits.values, edits.until
        )
        self._state = self._state._replace(memory=memory)

    def _dispatch_chunks(self, chunks: Seq[Chunk]) -> list[list[Piece]]:
        """Pieces keep their order, also within a program: all of it is written before any of it is read."""
        cut = [self._cut(chunk) for chunk in chunks]
        waiting = deque(piece for pieces in cut for piece in pieces)
        done: deque[Piece] = deque()
        is_sample_only = all(map(_is_sample_only, chunks))
        while waiting:
            piece_tokens = self._sizes.piece_tokens
            if piece_tokens is None:
                shape = self.programs.prefill(waiting[0].count, is_sample_only=is_sample_only)
            else:
                shape = self.programs.prefill(
                    len(waiting) * piece_tokens, can_split=True, is_sample_only=is_sample_only
                )
            rows, size = self._sizes.prefill_rows(shape.size)
            group = [waiting.popleft() for _ in range(min(rows, len(waiting)))]
            self._state, arrays = self.programs[shape](
                self._leaves, self._state, self._slots.pack_chunks(group, rows, size)
            )
            output = ChunkOutput(*arrays)
            if any(piece.is_last for piece in group):
                output.sampled.copy_to_host_async()
            done.extend(Piece(piece, output, row) for row, piece in enumerate(group))
        return [[done.popleft() for _ in pieces] for pieces in cut]

    def _mixed_shape(self, plan: RoundPlan) -> Shape | None:
        """The program that does all of a plan at once, if there is one: it knows no forks, no drafts and no scores of prompts."""
        if not plan.chunks or not plan.rows or plan.forks or plan.is_verify:
            return None
        most = self._sizes.mixed_context
        if any(
            chunk.scored or chunk.sequence.request.wants_hidden or chunk.start >= most
            for chunk in plan.chunks
        ):
            return None
        ending = [chunk for chunk in plan.chunks if chunk.is_last]
        mode = max(
            {self._slots.mode_of(plan.rows), *(mode_for(chunk.sequence.request) for chunk in ending)},
            key=tuple(Mode).index,
        )
        return self.programs.mixed(len(plan.rows) + len(ending), plan.num_prefill, mode)

    def _dispatch_mixed(self, plan: RoundPlan, shape: Shape) -> InFlightRound:
        packed = self._slots.pack_mixed(plan.rows, plan.chunks, shape.size + self._sizes.mixed_tokens)
        self._state, (of_rows, of_all) = self.programs[shape](self._leaves, self._state, packed)
        of_rows.copy_to_host_async()
        of_all.copy_to_host_async()
        output, places = ChunkOutput(of_all), count(len(plan.rows))
        chunks = [[Piece(chunk, output, next(places) if chunk.is_last else 0)] for chunk in plan.chunks]
        return InFlightRound(plan, chunks, [(plan.rows, of_rows)], is_mixed=True)

    def _dispatch_fork(self, fork: Fork) -> None:
        assert self._fork_slot is not None
        token = fork.sequence.tokens[-1]
        self._state = self._fork_slot(
            self._state, np.array([fork.slot, token, fork.source_page, fork.target_page], np.int32)
        )

    def _dispatch_rows(self, rows: Seq[Row], is_verify: bool) -> jax.Array:
        shape = (
            self.programs.verify(len(rows))
            if is_verify
            else self.programs.decode(len(rows), self._slots.mode_of(rows))
        )
        self._state, arrays = self.programs[shape](self._leaves, self._state, self._pack_rows(rows, shape))
        outputs: jax.Array = arrays[0] if shape.is_mixed else arrays
        outputs.copy_to_host_async()
        return outputs

    def _pack_rows(self, rows: Seq[Row], shape: Shape) -> Ints:
        if shape.is_verify:
            return self._slots.pack_drafts(rows, shape.size, self._sizes.num_draft)
        if shape.is_mixed:
            return self._slots.pack_mixed(rows, (), shape.size + self._sizes.mixed_tokens)
        return self._slots.pack_rows(rows, shape.size)

    def _warm(self, shape: Shape, num_tokens: int = 0) -> None:
        """Gives a program the runs it needs before it has its full speed, and times prefill."""
        num_tokens = min(num_tokens, shape.size) if self._sizes.leaves_out_padding else 0
        for _ in range(self._traits.first_runs):
            seconds = self._run_idle(shape, num_tokens)
        is_timed = self._traits.times_all_prefill or shape == self.programs.first_shapes[0]
        if shape.is_prefill and is_timed:
            self.prefill_token_seconds = min(self.prefill_token_seconds, seconds / (num_tokens or shape.size))

    def _run_idle(self, shape: Shape, num_tokens: int) -> float:
        """Runs a program while no sequence has a slot, and returns its seconds; the KV of prefilled tokens goes to the first pages."""
        tokens = [0] * max(num_tokens, 1)
        nobody = Sequence(
            GenerationRequest("", tuple(tokens), 1),
            tokens,
            pages=list(range(-(-num_tokens // self._sizes.page_size))),
        )
        chunk = Chunk(nobody, slot=0, start=0, count=num_tokens, is_last=True)
        rows, size = self._sizes.prefill_rows(shape.size)
        packed = (
            self._slots.pack_chunks([chunk], rows, size) if shape.is_prefill else self._pack_rows((), shape)
        )
        start = time.monotonic()
        self._state, outputs = self.programs[shape](self._leaves, self._state, packed)
        jax.block_until_ready(outputs)
        return time.monotonic() - start


def make_state(model: Decoder, sizes: Sizes, storage: jnp.dtype) -> State:
    """An empty pool and memory, on the device."""
    pools = cache.make_pool(model.config, sizes.num_pages, sizes.page_size, storage)
    memory = Memory(
        history=jnp.zeros((sizes.rows, sizes.max_seq_len), jnp.int32),
        edit_ids=jnp.zeros((sizes.rows, MAX_EDITS), jnp.int32),
        edit_values=jnp.zeros((sizes.rows, MAX_EDITS), jnp.float32),
        edit_until=jnp.zeros((sizes.rows, MAX_EDITS), jnp.int32),
    )
    return State(pools, jnp.zeros(sizes.rows, jnp.int32), memory)


def _is_sample_only(chunk: Chunk) -> bool:
    """Whether no more than the next token is wanted of it, if that, and no more than a plain draw."""
    request = chunk.sequence.request
    return (
        not chunk.scored
        and not request.wants_hidden
        and not (chunk.is_last and mode_for(request) is Mode.FULL)
    )


def _join(pieces: Seq[Sampled]) -> Sampled:
    """What a chunk's pieces found out together; the last one sampled."""
    if len(pieces) == 1:
        return pieces[0]
    scores = [score for piece in pieces for score in piece.prompt_logprobs]
    return pieces[-1]._replace(prompt_logprobs=scores, is_poisoned=any(piece.is_poisoned for piece in pieces))


def _read_piece(piece: Piece) -> Sampled:
    """Copies what somebody asked for, and nothing else."""
    chunk, output, row = piece
    sequence = chunk.sequence
    sampled = Sampled(())
    if chunk.is_last:
        outputs = np.asarray(output.sampled)[None]
        sampled = _sampled(sequence, outputs[:, row, 0].tolist(), outputs, row)
    if chunk.scored:
        first = chunk.scored.start - chunk.start - 1
        scores = np.asarray(output.scores)[row, first : first + len(chunk.scored)]
        is_poisoned = sampled.is_poisoned or bool(np.isnan(scores[:, 1].view(np.float32)).any())
        sampled = sampled._replace(
            prompt_logprobs=_logprobs(scores, sequence.request.sampling.num_logprobs or 0),
            is_poisoned=is_poisoned,
        )
    if sequence.request.wants_hidden:
        total, last = np.asarray(output.pooled)[row]
        if chunk.start > 0:
            total = total + np.frombuffer(sequence.hidden_sum, np.float32)
        sequence.hidden_sum = total.tobytes()
        if chunk.is_last:
            mean = total / (chunk.start + chunk.count)
            sampled = sampled._replace(
                hidden=PooledHidden(array("f", mean.tobytes()), array("f", last.tobytes()))
            )
    return sampled


def _kept(row: Row, tokens: list[int]) -> list[int]:
    """Those of a row's tokens that count: its steps', and as many more as its draft was right."""
    return tokens[: row.steps + (num_accepted(row.draft, tokens) if row.draft else 0)]


def _sampled(sequence: Sequence, tokens: list[int], outputs: npt.NDArray[np.int32], row: int) -> Sampled:
    """One sequence's tokens and what its row of the outputs [token, row, outputs] tells of them; see `rounds.NUM_OUTPUTS`."""
    is_poisoned = POISONED in tokens
    if is_poisoned:
        tokens = tokens[: tokens.index(POISONED)]
    wanted = sequence.request.sampling.num_logprobs
    if wanted is None and not is_poisoned:
        return Sampled(tokens)
    return Sampled(
        tokens,
        () if wanted is None else _logprobs(outputs[: len(tokens), row], wanted),
        is_poisoned=is_poisoned,
    )


def _logprobs(outputs: npt.NDArray[np.int32], num_top: int) -> list[TokenLogprob]:
    floats = outputs.view(np.float32)
    chosen = floats[:, 1].tolist()
    ids = outputs[:, 2 : 2 + num_top].tolist()
    values = floats[:, 2 + NUM_TOP : 2 + NUM_TOP + num_top].tolist()
    return [TokenLogprob(logprob, tuple(zip(*top))) for logprob, *top in zip(chosen, ids, values)]
