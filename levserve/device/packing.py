"""A round's inputs as one int32 array: what the scheduler decided, laid out for the device.

Sampling rules and page tables are kept per slot and written only when they change, so packing a round is a few numpy
gathers whatever the number of rows. `unpack` takes the array apart inside the trace.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import jax
import numpy as np

from levserve.device.rules import RULE_PACKING, Ints, mode_for
from levserve.model.sampler import Mode, Rules
from levserve.schedule.request import GenerationRequest, Sampling
from levserve.schedule.sequence import Chunk, Row, Sequence

SLOT, POSITION, COUNT, SCORED = 0, 1, 2, 3
RULES = 4
NUM_COLUMNS = RULES + RULE_PACKING.num_columns


class RoundInput(NamedTuple):
    """A packed array taken apart: [row] each, and the page table [row, page]."""

    slots: jax.Array
    positions: jax.Array
    counts: jax.Array
    """Decode: steps to run. Prefill: tokens in the chunk. Drafts: their tokens and one. 0 for padding."""
    scored: jax.Array
    """Prefill: whether the log-probabilities of the chunk's tokens are wanted."""
    rules: Rules
    table: jax.Array


class SlotTable:
    """Every slot's rules and page table, as the device wants them."""

    def __init__(self, num_slots: int, table_width: int) -> None:
        self.num_slots = num_slots
        self.table_width = table_width
        self._rules = np.zeros((num_slots + 1, NUM_COLUMNS - RULES), np.int32)  # the last one is padding's
        self._rules[num_slots] = RULE_PACKING.pack(
            GenerationRequest("", (), 0, Sampling(temperature=0.0))
        )  # or all would be drawn for it
        self._pages = np.zeros((num_slots + 1, table_width), np.int32)
        self._num_pages = [0] * num_slots
        self._modes = [Mode.GREEDY] * num_slots

    def seat(self, sequence: Sequence) -> None:
        """Takes note of who has a slot now."""
        assert sequence.slot is not None
        self._rules[sequence.slot] = RULE_PACKING.pack(sequence.request)
        self._num_pages[sequence.slot] = 0
        self._modes[sequence.slot] = mode_for(sequence.request)

    def mode_of(self, rows: Seq[Row]) -> Mode:
        """The cheapest mode that serves them all."""
        return max({self._modes[row.slot] for row in rows}, key=tuple(Mode).index)

    def pack_rows(self, rows: Seq[Row], size: int) -> Ints:
        """[size, columns + table width] for a decode round."""
        return self._pack(
            [(row.slot, (row.slot, row.position, row.steps, 0), row.sequence) for row in rows], size
        )

    def pack_drafts(self, rows: Seq[Row], size: int, num_draft: int) -> Ints:
        """[size, columns + table width + num_draft] to verify drafts; rows without one may be among them."""
        draft = np.zeros((size, num_draft), np.int32)
        for index, row in enumerate(rows):
            draft[index, : len(row.draft)] = row.draft
        entries = [(row.slot, (row.slot, row.position, 1 + len(row.draft), 0), row.sequence) for row in rows]
        return np.concatenate([self._pack(entries, size), draft], axis=1)

    def pack_chunks(self, chunks: Seq[Chunk], rows: int, size: int) -> Ints:
        """[rows, columns + table width + size + 1] for prefill: each chunk and the token after it.

        A chunk that is not its prompt's last names no slot.
        """
        entries = [
            (
                chunk.slot,
                (
                    chunk.slot if chunk.is_last else self.num_slots,
                    chunk.start,
                    chunk.count,
                    len(chunk.scored),
                ),
                chunk.sequence,
            )
            for chunk in chunks
        ]
        tokens = np.zeros((rows, size + 1), np.int32)
        for row, chunk in enumerate(chunks):
            known = chunk.sequence.tokens[chunk.start : chunk.start + chunk.count + 1]
            tokens[row, : len(known)] = known
        return np.concatenate([self._pack(entries, rows), tokens], axis=1)

    def pack_mixed(self, rows: Seq[Row], chunks: Seq[Chunk], size: int) -> Ints:
        """[size, columns + table width + 1] for a decode round with prompts in it: rows, then each token of the chunks as if it were one.

        First come the rows and the last token of each prompt, in order, which are sampled after; the others name no slot. The
        last column is the token, or -1 for the newest of the slot.
        """
        entries = [(row.slot, (row.slot, row.position, 1, 0), row.sequence) for row in rows]
        fed = [-1] * len(rows)
        for is_sampled in (True, False):
            for chunk in chunks:
                end = chunk.start + chunk.count
                middle = end - 1 if chunk.is_last else end
                slot, places = (
                    (chunk.slot, range(middle, end))
                    if is_sampled
                    else (self.num_slots, range(chunk.start, middle))
                )
                entries += [(chunk.slot, (slot, position, 1, 0), chunk.sequence) for position in places]
                fed += chunk.sequence.tokens[places.start : places.stop]
        packed = np.full((size, NUM_COLUMNS + self.table_width + 1), -1, np.int32)
        packed[:, :-1] = self._pack(entries, size)
        packed[: len(fed), -1] = fed
        packed[packed[:, SLOT] == self.num_slots, RULES:NUM_COLUMNS] = self._rules[self.num_slots]
        return packed

    def _pack(self, entries: Seq[tuple[int, tuple[int, int, int, int], Sequence]], size: int) -> Ints:
        seats = np.full(size, self.num_slots)
        packed = np.zeros((size, NUM_COLUMNS + self._pages.shape[1]), np.int32)
        packed[:, SLOT] = self.num_slots
        if entries:
            seats[: len(entries)] = [seat for seat, _, _ in entries]
            packed[: len(entries), :RULES] = [columns for _, columns, _ in entries]
        for seat, _, sequence in entries:
            if len(sequence.pages) > self._num_pages[seat]:
                self._follow(seat, sequence.pages)
        packed[:, RULES:NUM_COLUMNS] = self._rules[seats]
        packed[:, NUM_COLUMNS:] = self._pages[seats]
        return packed

    def _follow(self, slot: int, pages: list[int]) -> None:
        """Copies the pages a sequence gained since the last look; while it has its slot it only gains."""
        known = self._num_pages[slot]
        if known == 0:
            # Entries without a page are read too, and what they hold is masked by a factor of 0. In a page of the row's own a
            # NaN, which no factor masks, can spoil nobody else.
            self._pages[slot] = pages[0]
        self._pages[slot, known : len(pages)] = pages[known:]
        self._num_pages[slot] = len(pages)


def unpack(packed: jax.Array, table_width: int) -> RoundInput:
    """Inside the trace: the columns by name. The tokens of prefill and of drafts are what follows the table."""
    return RoundInput(
        packed[:, SLOT],
        packed[:, POSITION],
        packed[:, COUNT],
        packed[:, SCORED],
        RULE_PACKING.unpack(packed[:, RULES:NUM_COLUMNS]),
        packed[:, NUM_COLUMNS : NUM_COLUMNS + table_width],
    )
