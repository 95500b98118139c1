"""A round of whole texts that the device is working on, and its results once they are ready.

Belongs to the device thread. Reading waits for the device; it copies what requests asked for and nothing
else.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from levserve.device.in_flight import read_drawn, read_logprobs
from levserve.schedule.commit import Sampled
from levserve.schedule.request import PooledHidden
from levserve.schedule.sequence import RoundPlan, Sequence


class Cell(NamedTuple):
    """Where one result will be."""

    outputs: jax.Array
    row: int

    def read(self) -> npt.NDArray[np.generic]:
        """Waits for the device. jax keeps the host's copy of an array, so reading many rows copies once."""
        row: npt.NDArray[np.generic] = np.asarray(self.outputs)[self.row]
        return row


@dataclass(slots=True)
class ChunkCells:
    """Where the results of a chunk will be; None for what is not wanted."""

    scores: list[Cell] = field(default_factory=list)
    drawn: Cell | None = None
    pooled: Cell | None = None


@dataclass(frozen=True, slots=True)
class TextRound:
    """A dispatched plan, and where its results will be: cells for each chunk and each row."""

    plan: RoundPlan
    chunks: list[ChunkCells]
    rows: list[Cell]
    is_mixed: bool = False

    def read(self) -> tuple[list[Sampled], list[Sampled]]:
        """Waits for the results of the chunks and of the rows."""
        return self.read_chunks(), self.read_rows()

    def read_chunks(self) -> list[Sampled]:
        return [_read_chunk(chunk.sequence, cells) for chunk, cells in zip(self.plan.chunks, self.chunks)]

    def read_rows(self) -> list[Sampled]:
        return [_read_row(row.sequence, cell) for row, cell in zip(self.plan.rows, self.rows)]


def _read_row(sequence: Sequence, cell: Cell) -> Sampled:
    outputs = cell.read().astype(np.int32, copy=False)[None, None]  # [token, row, outputs]
    return read_drawn(sequence, [int(outputs[0, 0, 0])], outputs, 0)


def _read_chunk(sequence: Sequence, cells: ChunkCells) -> Sampled:
    sampled = Sampled(()) if cells.drawn is None else _read_row(sequence, cells.drawn)
    if cells.scores:
        scores = np.stack([cell.read() for cell in cells.scores]).astype(np.int32, copy=False)
        is_poisoned = sampled.is_poisoned or bool(np.isnan(scores[:, 1].view(np.float32)).any())
        logprobs = read_logprobs(scores, sequence.request.sampling.num_logprobs or 0)
        sampled = sampled._replace(prompt_logprobs=logprobs, is_poisoned=is_poisoned)
    if cells.pooled is not None:
        mean, last = cells.pooled.read()
        is_poisoned = sampled.is_poisoned or not bool(np.isfinite(mean).all())
        hidden = PooledHidden(array("f", mean.tobytes()), array("f", last.tobytes()))
        sampled = sampled._replace(hidden=hidden, is_poisoned=is_poisoned)
    return sampled
