"""How large everything is for a model that computes whole texts: rows, lengths and the work of a round.

Pure arithmetic, done once at start, as `sizing.py` is for models with a KV cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from levserve.device.sizing import TOKENS_PER_ROW, doublings, human, row_sizes
from levserve.model.traits import Traits

SHORTEST = 32
"""The shortest length that texts are padded to; each further length is twice the one before. All lengths are
multiples of it: a GPU's kernels keep keys and values in pages, and no page may belong to two texts."""
LENGTH_STEP = 256
"""Longer texts are padded to a multiple of this, so that their queries can be cut into equal blocks."""
ROUND_SECONDS = 0.25
"""How long a round may take at the measured speed: other models and new requests wait for it."""
HISTORY_TOKEN_BYTES = 4
"""Bytes of a token in a slot's history."""


@dataclass(frozen=True, slots=True)
class TextSizes:
    """The plan that `--dry-run` prints and the engine is built from."""

    rows: int
    """Sequences that run together, and texts whose logits are kept at a time."""
    max_seq_len: int
    lengths: tuple[int, ...]
    """What texts are padded to, ascending."""
    program_tokens: int
    """The most tokens that one program computes, except for a single text that is longer."""
    row_sizes: tuple[int, ...]
    """Rows of the programs that draw and score."""
    has_all_modes: bool
    # No program depends on the rest, and `repr` is part of a program's key.
    weight_bytes: int = field(default=0, repr=False)
    state_bytes: int = field(default=0, repr=False)
    overhead_bytes: int = field(default=0, repr=False)

    kv_bytes = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the requests that run together, as admission counts them: a long text for each row."""
        return self.rows * min(self.max_seq_len, TOKENS_PER_ROW)

    def text_counts(self, length: int) -> tuple[int, ...]:
        """How many texts the programs for this length take, ascending."""
        most = max(min(self.program_tokens // length, self.rows), 1)
        return doublings(1, most, by=4)

    def describe(self) -> list[str]:
        """The plan as lines for people."""
        total = self.weight_bytes + self.state_bytes + self.overhead_bytes
        return [
            f"weights     {human(self.weight_bytes)}",
            f"logits      {human(self.state_bytes)} for those of {self.rows} texts, and for sampling",
            f"memory      {human(total)} at most; there is no KV cache: every token computes its whole text",
            f"context     {self.max_seq_len} tokens; texts are padded to {', '.join(map(str, self.lengths))}",
            f"rows        {self.rows}; programs of {self.program_tokens} tokens at most",
        ]


def plan_text_sizes(
    traits: Traits, *, rows: int, max_seq_len: int, vocab_size: int, weight_bytes: int
) -> TextSizes:
    step = LENGTH_STEP if max_seq_len > LENGTH_STEP else SHORTEST
    longest = -(-max_seq_len // step) * step
    logit_bytes = rows * vocab_size * 4
    return TextSizes(
        rows=rows,
        max_seq_len=max_seq_len,
        lengths=doublings(SHORTEST, longest),
        program_tokens=traits.text_tokens,
        row_sizes=row_sizes(traits, rows),
        has_all_modes=traits.has_all_modes,
        weight_bytes=weight_bytes,
        state_bytes=logit_bytes + logit_bytes // 32 + rows * max_seq_len * HISTORY_TOKEN_BYTES,
        overhead_bytes=traits.host_overhead,
    )


def round_tokens(sizes: TextSizes, token_seconds: float) -> int:
    """Tokens that a round may compute, by the measured cost of one."""
    return max(int(ROUND_SECONDS / max(token_seconds, 1e-9)), sizes.lengths[0])
