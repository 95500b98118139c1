"""Runs plans for a model that computes whole texts: finds equal texts, packs them, and dispatches programs.

Belongs to the device thread. Dispatching returns at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from levserve.device.model_runner import ModelRunner, mask_rows
from levserve.device.packing import SlotTable, pack_masks, pack_memory
from levserve.device.rules import Ints, needs_memory
from levserve.device.sampling import SlotMasks, make_masks, make_memory
from levserve.device.text_in_flight import Cell, ChunkCells, TextRound
from levserve.device.text_programs import Task, TextPrograms, TextShape
from levserve.device.text_rounds import LENGTH, TARGET, TOKENS, TextSkeleton, TextState
from levserve.device.text_sizing import TextSizes
from levserve.model.backend import Backend
from levserve.model.rules import Memory
from levserve.observe.metrics import Metrics
from levserve.schedule.sequence import Chunk, RoundPlan, Row, Sequence
from levserve.schedule.whole_text import Text

TRIES = 3
"""The fewest runs of each first program for one text; the quickest counts, as others may have been
disturbed."""


@dataclass(slots=True)
class _Draw:
    """A token to draw after a text, and a function that notes where its result will be."""

    row: Row
    note: Callable[[Cell], None]


@dataclass(slots=True)
class _Uses:
    """What a text is computed for."""

    draws: list[_Draw] = field(default_factory=list)
    scores: list[tuple[int, ChunkCells, int]] = field(default_factory=list)
    """Tokens to score after the text, each with its chunk's cells and its index among the chunk's scores."""
    pooled: list[ChunkCells] = field(default_factory=list)


class TextRunner(ModelRunner[TextShape, TextPrograms, TextState]):
    """Runs models that compute whole texts."""

    def __init__(
        self, model: eqx.Module, backend: Backend, vocab_size: int, sizes: TextSizes, metrics: Metrics
    ) -> None:
        leaves, tree = jax.tree.flatten(model)
        state = TextState(
            jnp.zeros((sizes.rows, vocab_size), jnp.float32),
            make_memory(sizes.rows, sizes.max_seq_len),
            make_masks(sizes.rows, vocab_size),
        )
        programs = TextPrograms(tuple(leaves), state, TextSkeleton(tree, backend), sizes, metrics)
        super().__init__(tuple(leaves), state, programs)
        self._slots = SlotTable(sizes.rows, 0)
        self._sizes = sizes
        self._traits = backend.traits
        self._set_memory: Callable[..., Memory] | None = None
        self._hold_slots: dict[int, Callable[..., SlotMasks]] = {}

    def compile_first(self, report: Callable[[str], None]) -> None:
        self.programs.compile_first(report)
        self._set_memory = self.programs.set_memory(self._state.memory)
        self._hold_slots = {rows: self.programs.hold_slots(rows) for rows in mask_rows(self._sizes.rows)}

    def warm_up(self, report: Callable[[str], None]) -> None:
        """Runs the first programs, and times them."""
        report("warming up")
        for shape in self.programs.first_shapes:
            self._warm(shape)

    def dispatch(self, plan: RoundPlan, *, may_mix: bool = False) -> TextRound:
        """Starts a planned round; a text that several sequences need is computed once."""
        for sequence in plan.placed:
            self._fill_slot(sequence)
        self._hold(plan)
        chunks = [ChunkCells() for _ in plan.chunks]
        rows: list[Cell | None] = [None] * len(plan.rows)
        uses: dict[Text, _Uses] = {}
        for chunk, cells in zip(plan.chunks, chunks):
            self._note_chunk(chunk, cells, uses)
        for number, row in enumerate(plan.rows):
            note = _setter(rows, number)
            uses.setdefault(tuple(row.sequence.tokens), _Uses()).draws.append(_Draw(row, note))
        texts = list(uses)
        for start in range(0, len(texts), self._sizes.rows):
            self._dispatch_batch(texts[start : start + self._sizes.rows], uses)
        return TextRound(plan, chunks, [cell for cell in rows if cell is not None])

    def _note_chunk(self, chunk: Chunk, cells: ChunkCells, uses: dict[Text, _Uses]) -> None:
        """Notes the texts of a chunk, or dispatches its one pass."""
        request, scored = chunk.sequence.request, chunk.scored
        prompt = request.prompt
        if request.scores_in_one_pass and scored:
            outputs = self._dispatch_pass(prompt)
            cells.scores = [Cell(outputs, place - 1) for place in scored]
        else:
            cells.scores = [Cell(self._state.logits, 0)] * len(scored)  # `_dispatch_batch` replaces each
            for number, place in enumerate(scored):
                uses.setdefault(prompt[:place], _Uses()).scores.append((prompt[place], cells, number))
        if not chunk.is_last:
            return
        if request.max_tokens:
            row = Row(chunk.sequence, chunk.slot, len(chunk.sequence.tokens), 1)
            uses.setdefault(prompt, _Uses()).draws.append(_Draw(row, _drawn_setter(cells)))
        if request.wants_hidden:
            uses.setdefault(prompt, _Uses()).pooled.append(cells)

    def _dispatch_batch(self, texts: Seq[Text], uses: dict[Text, _Uses]) -> None:
        """Runs at most as many texts as the buffer of logits has rows, then draws and scores after them."""
        by_length: dict[int, list[int]] = {}
        for target, text in enumerate(texts):
            length = min(one for one in self._sizes.lengths if one >= len(text))
            by_length.setdefault(length, []).append(target)
        for length, targets in by_length.items():
            self._dispatch_runs(length, targets, texts, uses)
        draws: list[tuple[int, _Draw]] = []
        scores: list[tuple[int, int, ChunkCells, int]] = []
        for target, text in enumerate(texts):
            draws += [(target, one) for one in uses[text].draws]
            scores += [(target, *one) for one in uses[text].scores]
        while scores:
            shape = self.programs.score(len(scores))
            group, scores = scores[: shape.rows], scores[shape.rows :]
            packed = np.zeros((shape.rows, 2), np.int32)
            packed[: len(group)] = [(target, token) for target, token, _, _ in group]
            outputs = self.programs[shape](self._state.logits, packed)
            outputs.copy_to_host_async()
            for row, (_, _, cells, number) in enumerate(group):
                cells.scores[number] = Cell(outputs, row)
        while draws:
            draws = self._dispatch_draws(draws)

    def _dispatch_runs(
        self, length: int, targets: list[int], texts: Seq[Text], uses: dict[Text, _Uses]
    ) -> None:
        while targets:
            shape = self.programs.run(len(targets), length)
            group, targets = targets[: shape.rows], targets[shape.rows :]
            packed = _pack_texts([texts[target] for target in group], group, shape, self._sizes.rows)
            logits, pooled = self.programs[shape](self._leaves, self._state.logits, packed)
            self._state = self._state._replace(logits=logits)
            for row, target in enumerate(group):
                for cells in uses[texts[target]].pooled:
                    cells.pooled = Cell(pooled, row)

    def _dispatch_draws(self, draws: list[tuple[int, _Draw]]) -> list[tuple[int, _Draw]]:
        """Draws after some of the texts; returns the draws that are left."""
        mode = self._slots.mode_of([draw.row for _, draw in draws])
        shape = self.programs.draw(len(draws), mode)
        group, rest = draws[: shape.rows], draws[shape.rows :]
        targets = np.zeros((shape.rows, 1), np.int32)
        targets[: len(group), 0] = [target for target, _ in group]
        rows = self._slots.pack_rows([draw.row for _, draw in group], shape.rows)
        packed = np.concatenate([rows, targets], axis=1)
        memory, outputs = self.programs[shape](*self._state, packed)
        self._state = self._state._replace(memory=memory)
        outputs.copy_to_host_async()
        for row, (_, draw) in enumerate(group):
            draw.note(Cell(outputs, row))
        return rest

    def _dispatch_pass(self, text: Text) -> jax.Array:
        shape = self.programs.one_pass(len(text))
        outputs: jax.Array = self.programs[shape](self._leaves, _pack_texts([text], [0], shape, 0))
        outputs.copy_to_host_async()
        return outputs

    def _fill_slot(self, sequence: Sequence) -> None:
        self._slots.take_rules(sequence)
        if needs_memory(sequence.request):
            assert self._set_memory is not None
            packed = pack_memory(sequence, self._sizes.max_seq_len)
            self._state = self._state._replace(memory=self._set_memory(self._state.memory, *packed))

    def _hold(self, plan: RoundPlan) -> None:
        """Gives the device the masks of the plan's constrained draws."""
        held = plan.held_sequences
        if not held:
            return
        rows = min(rows for rows in self._hold_slots if rows >= len(held))
        packed, words = pack_masks(held, rows, self._state.masks.words.shape[1], self._sizes.rows)
        masks = self._hold_slots[rows](self._state.masks, packed, words)
        self._state = self._state._replace(masks=masks)

    def _warm(self, shape: TextShape) -> float:
        """Also measures the speed of prefill with the first programs for one text."""
        is_timed = shape.task is Task.RUN and shape in self.programs.first_shapes
        times: list[float] = []
        for _ in range(max(self._traits.first_runs, TRIES if is_timed else 1)):
            start = time.monotonic()
            self._run_idle(shape)
            times.append(time.monotonic() - start)
        if is_timed:
            self.prefill_token_seconds = min(self.prefill_token_seconds, min(times) / shape.length)
        return times[-1]

    def _run_idle(self, shape: TextShape) -> None:
        """Runs a program while no sequence has a slot; nothing that it writes is read."""
        program, state = self.programs[shape], self._state
        match shape.task:
            case Task.RUN:
                packed = _pack_texts([(0,) * shape.length], [0], shape, self._sizes.rows)
                logits, pooled = program(self._leaves, state.logits, packed)
                self._state = state._replace(logits=logits)
                jax.block_until_ready(pooled)
            case Task.DRAW:
                rows = self._slots.pack_rows((), shape.rows)
                packed = np.concatenate([rows, np.zeros((shape.rows, 1), np.int32)], axis=1)
                memory, outputs = program(*state, packed)
                self._state = state._replace(memory=memory)
                jax.block_until_ready(outputs)
            case Task.SCORE:
                jax.block_until_ready(program(state.logits, np.zeros((shape.rows, 2), np.int32)))
            case Task.ONE_PASS:
                packed = _pack_texts([(0,)], [0], shape, 0)
                jax.block_until_ready(program(self._leaves, packed))


def _pack_texts(texts: Seq[Text], targets: Seq[int], shape: TextShape, nowhere: int) -> Ints:
    """[count, 2 + length]: see `text_rounds.TARGET`. Padding has the target `nowhere`."""
    packed = np.zeros((shape.rows, TOKENS + shape.length), np.int32)
    packed[:, TARGET] = nowhere
    for row, (text, target) in enumerate(zip(texts, targets, strict=True)):
        packed[row, TARGET], packed[row, LENGTH] = target, len(text)
        packed[row, TOKENS : TOKENS + len(text)] = text
    return packed


def _setter(cells: list[Cell | None], number: int) -> Callable[[Cell], None]:
    def note(cell: Cell) -> None:
        cells[number] = cell

    return note


def _drawn_setter(cells: ChunkCells) -> Callable[[Cell], None]:
    def note(cell: Cell) -> None:
        cells.drawn = cell

    return note
