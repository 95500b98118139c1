"""A round that the device is working on, and its results once they are ready.

Belongs to the device thread. Reading waits for the device; it copies what requests asked for and nothing
else.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from levserve.device.draft_rounds import NUM_TALLIES
from levserve.device.rounds import ChunkOutput
from levserve.model.rules import NUM_TOP, POISONED
from levserve.schedule.commit import Sampled
from levserve.schedule.request import PooledHidden, TokenLogprob
from levserve.schedule.sequence import Chunk, RoundPlan, Row, Sequence
from levserve.schedule.speculation import num_accepted


class PrefillRow(NamedTuple):
    """A chunk, or a part of one, that is computed as one row of a prefill program."""

    chunk: Chunk
    output: ChunkOutput
    row: int


@dataclass(frozen=True, slots=True)
class InFlightRound:
    """A dispatched plan, and the arrays that will hold its results.

    A chunk that does not fit one row of prefill takes several, and the plan's rows form several groups if no
    program was large enough. `plan` has the rows in the order in which they are computed.
    """

    plan: RoundPlan
    chunks: list[list[PrefillRow]]
    rows: list[tuple[Seq[Row], jax.Array]]
    is_mixed: bool = False
    """Whether all of it is one program, so that the times of prefill and decoding cannot be told apart."""

    def read(self) -> tuple[list[Sampled], list[Sampled]]:
        """Waits for the results of the chunks and of the rows."""
        return self.read_chunks(), self.read_rows()

    def read_chunks(self) -> list[Sampled]:
        """Waits for the chunks, which are computed first, even if no result is wanted: their end is timed."""
        if self.chunks:
            self.chunks[-1][-1].output.sampled.block_until_ready()
        return [_join([_read_prefill(row) for row in rows]) for rows in self.chunks]

    def read_rows(self) -> list[Sampled]:
        results: list[Sampled] = []
        for group, sampled in self.rows:
            outputs = np.asarray(sampled)  # [step, row, outputs]
            tokens: list[list[int]] = outputs[:, :, 0].T.tolist()
            for index, row in enumerate(group):
                kept = _kept(row, tokens[index])
                drawn = read_drawn(row.sequence, kept, outputs, index)
                if row.reach:
                    _, num_drafted, num_accepted = tokens[index][-NUM_TALLIES:]
                    drawn = drawn._replace(num_drafted=num_drafted, num_accepted=num_accepted)
                results.append(drawn)
        return results


def _join(parts: Seq[Sampled]) -> Sampled:
    """Joins the results of a chunk's rows: the scores of all, and what the last one sampled."""
    if len(parts) == 1:
        return parts[0]
    scores = [score for part in parts for score in part.prompt_logprobs]
    is_poisoned = any(part.is_poisoned for part in parts)
    return parts[-1]._replace(prompt_logprobs=scores, is_poisoned=is_poisoned)


def _read_prefill(prefill_row: PrefillRow) -> Sampled:
    chunk, output, row = prefill_row
    sequence = chunk.sequence
    sampled = Sampled(())
    if chunk.is_last:
        outputs = np.asarray(output.sampled)[None]
        sampled = read_drawn(sequence, outputs[:, row, 0].tolist(), outputs, row)
    if chunk.scored:
        first = chunk.scored.start - chunk.start - 1
        scores = np.asarray(output.scores)[row, first : first + len(chunk.scored)]
        is_poisoned = sampled.is_poisoned or bool(np.isnan(scores[:, 1].view(np.float32)).any())
        logprobs = read_logprobs(scores, sequence.request.sampling.num_logprobs or 0)
        sampled = sampled._replace(prompt_logprobs=logprobs, is_poisoned=is_poisoned)
    if sequence.request.wants_hidden:
        total, last = np.asarray(output.pooled)[row]
        if chunk.start > 0:
            total = total + np.frombuffer(sequence.hidden_sum, np.float32)
        sequence.hidden_sum = total.tobytes()
        if chunk.is_last:
            mean = total / (chunk.start + chunk.count)
            hidden = PooledHidden(array("f", mean.tobytes()), array("f", last.tobytes()))
            sampled = sampled._replace(hidden=hidden)
    return sampled


def _kept(row: Row, tokens: list[int]) -> list[int]:
    """The tokens of a row's steps, and those of its draft that were right."""
    if row.reach:
        return tokens[: tokens[-NUM_TALLIES]]
    return tokens[: row.steps + (num_accepted(row.draft, tokens) if row.draft else 0)]


def read_drawn(sequence: Sequence, tokens: list[int], outputs: npt.NDArray[np.int32], row: int) -> Sampled:
    """A sequence's tokens and log-probabilities from [token, row, outputs]; see `sampling.NUM_OUTPUTS`."""
    is_poisoned = POISONED in tokens
    if is_poisoned:
        tokens = tokens[: tokens.index(POISONED)]
    wanted = sequence.request.sampling.num_logprobs
    if wanted is None:
        return Sampled(tokens, is_poisoned=is_poisoned)
    return Sampled(tokens, read_logprobs(outputs[: len(tokens), row], wanted), is_poisoned=is_poisoned)


def read_logprobs(outputs: npt.NDArray[np.int32], num_top: int) -> list[TokenLogprob]:
    floats = outputs.view(np.float32)
    chosen = floats[:, 1].tolist()
    ids = outputs[:, 2 : 2 + num_top].tolist()
    values = floats[:, 2 + NUM_TOP : 2 + NUM_TOP + num_top].tolist()
    if len(outputs) and outputs[0, 1 + NUM_TOP] < 0:  # the vocabulary has fewer tokens
        ids = [[token for token in row if token >= 0] for row in ids]
    return [TokenLogprob(logprob, tuple(zip(*top))) for logprob, *top in zip(chosen, ids, values)]
