"""A round's inputs as one int32 array: what the scheduler decided, laid out for the device.

Sampling rules and page tables are kept per slot and written only when they change, so that packing a round
takes a few numpy gathers for any number of rows. `unpack` takes the array apart inside the trace.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from levserve.device.masks import fill_masks, mask_executor
from levserve.device.rules import RULE_PACKING, Ints, edits_for, mode_for
from levserve.model.rules import Mode, Rules
from levserve.schedule.request import GenerationRequest, Sampling
from levserve.schedule.sequence import Chunk, Row, Sequence

SLOT, POSITION, COUNT, SCORED = 0, 1, 2, 3
RULES = 4
NUM_COLUMNS = RULES + RULE_PACKING.num_columns

Entry = tuple[int, tuple[int, int, int, int], Sequence]
"""One row to pack: the slot whose rules and pages it has, the columns before `RULES`, and the slot's
sequence."""


class RoundInput(NamedTuple):
    """A packed array taken apart: [row] each, and the page table [row, page]."""

    slots: jax.Array
    positions: jax.Array
    counts: jax.Array
    """Decode: steps to run. Prefill: tokens in the chunk. Verification: draft tokens plus 1. Padding: 0."""
    scored: jax.Array
    """Prefill: how many places at the chunk's end may need the next token's log-probability."""
    rules: Rules
    table: jax.Array


class SlotTable:
    """Every slot's rules and page table, as the device reads them, followed by those of padding."""

    def __init__(self, num_slots: int, table_width: int) -> None:
        self.num_slots = num_slots
        self.table_width = table_width
        self._rules = np.zeros((num_slots + 1, NUM_COLUMNS - RULES), np.int32)
        # Greedy: a single row that is not greedy makes the device draw random numbers for all rows.
        self._rules[num_slots] = RULE_PACKING.pack(GenerationRequest("", (), 0, Sampling(temperature=0.0)))
        self._pages = np.zeros((num_slots + 1, table_width), np.int32)
        self._num_pages = [0] * num_slots
        self._modes = [Mode.GREEDY] * num_slots

    def take_rules(self, sequence: Sequence) -> None:
        """Takes the rules of a sequence that has just been given its slot."""
        assert sequence.slot is not None
        self._rules[sequence.slot] = RULE_PACKING.pack(sequence.request)
        self._num_pages[sequence.slot] = 0
        self._modes[sequence.slot] = mode_for(sequence.request)

    def mode_of(self, rows: Seq[Row]) -> Mode:
        """The cheapest mode that serves them all."""
        return max({self._modes[row.slot] for row in rows}, key=tuple(Mode).index)

    def pack_rows(self, rows: Seq[Row], size: int) -> Ints:
        """[size, columns + table width] for a decode round."""
        entries = [(row.slot, (row.slot, row.position, row.steps, 0), row.sequence) for row in rows]
        return self._pack(entries, size)

    def pack_drafts(self, rows: Seq[Row], size: int, num_draft: int) -> Ints:
        """[size, columns + table width + num_draft] to verify drafts; some rows may have none."""
        draft = np.zeros((size, num_draft), np.int32)
        for index, row in enumerate(rows):
            draft[index, : len(row.draft)] = row.draft
        entries = [(row.slot, (row.slot, row.position, 1 + len(row.draft), 0), row.sequence) for row in rows]
        return np.concatenate([self._pack(entries, size), draft], axis=1)

    def pack_drafted(self, rows: Seq[Row], size: int) -> Ints:
        """[size, columns + table width + 1] for rows that a draft model drafts for.

        A row's count is how many tokens it may gain. The last column is the token before the newest one,
        if the host knows it.
        """
        prior = np.zeros((size, 1), np.int32)
        entries: list[Entry] = []
        for index, row in enumerate(rows):
            count = max(row.steps, row.reach)
            entries.append((row.slot, (row.slot, row.position, count, 0), row.sequence))
            if row.reach:
                prior[index] = row.sequence.tokens[row.position - 1]
        return np.concatenate([self._pack(entries, size), prior], axis=1)

    def pack_chunks(self, chunks: Seq[Chunk], rows: int, size: int) -> Ints:
        """[rows, columns + table width + size + 1] for prefill: each chunk and the token after it.

        A chunk that is not its prompt's last names no slot.
        """
        entries: list[Entry] = []
        tokens = np.zeros((rows, size + 1), np.int32)
        for row, chunk in enumerate(chunks):
            slot = chunk.slot if chunk.is_last else self.num_slots
            num_scored = chunk.start + chunk.count + 1 - chunk.scored.start if chunk.scored else 0
            columns = (slot, chunk.start, chunk.count, num_scored)
            entries.append((chunk.slot, columns, chunk.sequence))
            known = chunk.sequence.tokens[chunk.start : chunk.start + chunk.count + 1]
            tokens[row, : len(known)] = known
        return np.concatenate([self._pack(entries, rows), tokens], axis=1)

    def pack_mixed(self, rows: Seq[Row], chunks: Seq[Chunk], size: int) -> Ints:
        """[size, columns + table width + 1] for a decode round that also prefills: each token is a row.

        The rows that are sampled come first: those that decode, then the last token of each prompt. The other
        tokens of the chunks name no slot. The last column is the token, or -1 for the newest one of the slot.
        """
        entries: list[Entry] = [(row.slot, (row.slot, row.position, 1, 0), row.sequence) for row in rows]
        fed = [-1] * len(rows)
        for chunk in chunks:
            if chunk.is_last:
                position = chunk.start + chunk.count - 1
                entries.append((chunk.slot, (chunk.slot, position, 1, 0), chunk.sequence))
                fed.append(chunk.sequence.tokens[position])
        for chunk in chunks:
            end = chunk.start + chunk.count - int(chunk.is_last)
            for position in range(chunk.start, end):
                entries.append((chunk.slot, (self.num_slots, position, 1, 0), chunk.sequence))
            fed += chunk.sequence.tokens[chunk.start : end]
        packed = np.full((size, NUM_COLUMNS + self.table_width + 1), -1, np.int32)
        packed[:, :-1] = self._pack(entries, size)
        packed[: len(fed), -1] = fed
        packed[packed[:, SLOT] == self.num_slots, RULES:NUM_COLUMNS] = self._rules[self.num_slots]
        return packed

    def _pack(self, entries: Seq[Entry], size: int) -> Ints:
        slots = np.full(size, self.num_slots)
        packed = np.zeros((size, NUM_COLUMNS + self._pages.shape[1]), np.int32)
        packed[:, SLOT] = self.num_slots
        if entries:
            slots[: len(entries)] = [slot for slot, _, _ in entries]
            packed[: len(entries), :RULES] = [columns for _, columns, _ in entries]
        for slot, _, sequence in entries:
            if len(sequence.pages) > self._num_pages[slot]:
                self._copy_new_pages(slot, sequence.pages)
        packed[:, RULES:NUM_COLUMNS] = self._rules[slots]
        packed[:, NUM_COLUMNS:] = self._pages[slots]
        return packed

    def _copy_new_pages(self, slot: int, pages: list[int]) -> None:
        """Copies the pages that a sequence gained since the last call; while it has a slot it loses none."""
        known = self._num_pages[slot]
        if known == 0:
            # Entries without a page are read as well, and masked by a factor of 0, which does not mask NaN.
            # So they name one of the row's own pages: a NaN in another row's page would poison this one.
            self._pages[slot] = pages[0]
        self._pages[slot, known : len(pages)] = pages[known:]
        self._num_pages[slot] = len(pages)


def pack_memory(sequence: Sequence, max_seq_len: int) -> tuple[Any, ...]:
    """The arguments of `set_memory` for a sequence that has a slot: its tokens and its logit edits."""
    history = np.zeros(max_seq_len, np.int32)
    history[: len(sequence.tokens)] = sequence.tokens
    edits = edits_for(sequence.request)
    return np.int32(sequence.slot or 0), history, edits.ids, edits.values, edits.until


def pack_masks(
    held: Seq[Sequence], rows: int, num_words: int, num_slots: int
) -> tuple[Ints, npt.NDArray[np.uint32]]:
    """The arguments of programs that set masks: the constrained draws, and the tokens that they may draw."""
    words = np.zeros((rows, num_words), np.uint32)
    packed = np.full((rows, 3), num_slots, np.int32)
    matchers = []
    for index, sequence in enumerate(held):
        assert sequence.matcher is not None and sequence.slot is not None
        matchers.append(sequence.matcher)
        packed[index] = sequence.slot, len(sequence.tokens), sequence.tokens[-1]
    fill_masks(words, matchers, mask_executor())
    return packed, words


def unpack(packed: jax.Array, table_width: int) -> RoundInput:
    """The columns by name, inside the trace. Tokens of prefill and of drafts follow the table."""
    return RoundInput(
        packed[:, SLOT],
        packed[:, POSITION],
        packed[:, COUNT],
        packed[:, SCORED],
        RULE_PACKING.unpack(packed[:, RULES:NUM_COLUMNS]),
        packed[:, NUM_COLUMNS : NUM_COLUMNS + table_width],
    )
