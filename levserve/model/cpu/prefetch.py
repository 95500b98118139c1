"""Which parts of a matrix a product prefetches while it multiplies."""

from __future__ import annotations

from dataclasses import dataclass

from levserve.jit.builder import CACHE_LINE_BYTES, Builder, Value
from levserve.jit.target import Target

FROM_MEMORY, FROM_CACHE = 4096, 1024
"""How many bytes before its use the matrix is prefetched, from memory or from the second-level cache."""
SECOND_LEVEL = 2
"""The `cache` of `Builder.prefetch` that leaves the first level as it is."""
SEVERAL = 3
"""So many tiles take longer to multiply than the memory takes to be read."""
LEAST_SHIFT, MORE_TILES = 2, (8, 16, 32)
"""The shift of `Far`, which is one more from each of these numbers of tiles on."""


@dataclass(frozen=True)
class Far:
    """A tile's share of what later tiles multiply: one byte for 2 ** `shift` bytes that it multiplies."""

    start: Value
    shift: Value


@dataclass(frozen=True)
class Prefetch:
    """Where a tile of rows prefetches the matrix."""

    near: Value
    """What this tile multiplies a little later."""
    far: Far | None

    def write_near(self, builder: Builder, done: Value, num_bytes: int) -> None:
        """Writes the instructions for `num_bytes` that are multiplied after `done` bytes of the matrix."""
        for line in range(0, num_bytes, CACHE_LINE_BYTES):
            builder.prefetch(self.near + done + line)

    def write_far(self, builder: Builder, done: Value, num_bytes: int) -> None:
        """The same for the share: the largest is prefetched once, a smaller one several times."""
        if self.far is not None:
            place = self.far.start + (done >> self.far.shift)
            for line in range(0, max(1, num_bytes >> LEAST_SHIFT), CACHE_LINE_BYTES):
                builder.prefetch(place + line, SECOND_LEVEL)


def choose_prefetch(
    builder: Builder,
    target: Target,
    weight: Value,
    part_bytes: int,
    *,
    tile: Value,
    num_tiles: Value,
    is_full: bool,
    has_next: Value,
) -> Prefetch:
    """What one of `num_tiles` tiles prefetches that multiply the same `part_bytes` of the matrix in turn.

    One or two wait for memory. Several find their part in the second-level cache, and full ones bring the
    next part there, if there is one. Each brings as small a share as it can: a cache waits for few lines of
    memory at a time, and what the tile itself reads would wait behind them. Only x86 was measured.
    """
    if target.arch != "x86_64":
        return Prefetch(weight + FROM_MEMORY, None)
    are_several, none = num_tiles >= SEVERAL, builder.constant(0)
    near = weight + are_several.select(builder.constant(FROM_CACHE), builder.constant(FROM_MEMORY))
    if not is_full:
        return Prefetch(near, None)
    shift = builder.constant(LEAST_SHIFT)
    for enough in MORE_TILES:
        shift = shift + (num_tiles >= enough).select(builder.constant(1), none)
    share = tile * (builder.constant(part_bytes) >> shift)
    has_share = are_several & has_next & (share < part_bytes)
    return Prefetch(near, Far(weight + has_share.select(share + part_bytes, none), shift))
