"""How much one round may do, and how much of that a prompt's token takes."""

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
    """The most prefill tokens in a round that also decodes, which keeps running streams moving."""
    idle_tokens: int
    """The most prefill tokens in a round with nothing to decode."""
    chunk_overhead: int = 0
    """What starting another chunk costs, in prefill tokens; with no more than that left, the chunk waits."""
    double_at: int | None = None
    """The context at which a token counts as two, because it attends to all before it; at twice this context
    it counts as three, and so on."""

    @property
    def least_tokens(self) -> int:
        """The least that a round prefills if there is a prompt: of three sizes or more, the second."""
        return self.chunk_sizes[0 if len(self.chunk_sizes) < 3 else 1]

    def weight_at(self, start: int) -> float:
        """What a token at this position counts as while streams wait."""
        return 1.0 if self.double_at is None else 1.0 + start / self.double_at
