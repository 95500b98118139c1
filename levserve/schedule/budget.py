"""How much one round may do, and what a token of a prompt counts as in it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Budget:
    """How much one round may do."""

    num_slots: int
    steps: int
    """Decode steps in one round."""
    chunk_sizes: tuple[int, ...]
    """Sizes that a chunk may count as, ascending; it counts as the smallest that holds it."""
    busy_tokens: int
    """Prefill tokens in a round that also decodes: what keeps running streams moving."""
    idle_tokens: int
    """Prefill tokens in a round with nothing to decode."""
    chunk_overhead: int = 0
    """What starting another chunk costs, in prefill tokens: a chunk of no more waits for a later round."""
    double_at: int | None = None
    """The context at which a token counts as two, because it attends to all before it; at twice as much as
    three, and so on."""

    @property
    def least_tokens(self) -> int:
        """What a round prefills at least if there is a prompt: the second size where there are several."""
        return self.chunk_sizes[0 if len(self.chunk_sizes) < 3 else 1]

    def weight_at(self, start: int) -> float:
        """What a token at this position counts as while streams wait."""
        return 1.0 if self.double_at is None else 1.0 + start / self.double_at
