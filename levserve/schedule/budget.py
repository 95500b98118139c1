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
    """What a chunk may count as, ascending; it counts as the smallest that holds it."""
    busy_tokens: int
    """Prefill tokens in a round that also decodes: what keeps running streams moving."""
    idle_tokens: int
    """Prefill tokens in a round with nothing to decode."""
    chunk_overhead: int = 0
    """Prefill tokens that could be computed in the time a second chunk takes to begin: one that has no more is left for later."""
    double_at: int | None = None
    """After so many tokens of its prompt one counts as two, for it looks at all of them; after twice as many as three, and so on."""

    def weight_at(self, start: int) -> float:
        """What a token there counts as, while others wait for it."""
        return 1.0 if self.double_at is None else 1.0 + start / self.double_at
