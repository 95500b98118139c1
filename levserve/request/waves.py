"""Cuts the prompts of one request into waves, each small enough to leave room for other requests."""

from __future__ import annotations

from collections.abc import Sequence

WAVE_SHARE = 4
"""A wave takes at most a quarter of the tokens that may be admitted."""


def split_waves(sizes: Sequence[int], max_prompts: int, max_admitted: int) -> list[slice]:
    """Cuts prompts of these sizes; one that exceeds the share of the tokens by itself is its own wave."""
    max_tokens = max_admitted // WAVE_SHARE
    waves = []
    start, num_tokens = 0, 0
    for index, size in enumerate(sizes):
        num_tokens += size
        if index > start and (index - start == max_prompts or num_tokens > max_tokens):
            waves.append(slice(start, index))
            start, num_tokens = index, size
    return [*waves, slice(start, len(sizes))]
