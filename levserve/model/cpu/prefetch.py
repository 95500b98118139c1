"""Which parts of a matrix a product prefetches while it multiplies."""

from __future__ import annotations

from dataclasses import dataclass

from levserve.jit.builder import CACHE_LINE_BYTES, Builder, Value
from levserve.jit.target import Target

FROM_MEMORY, FROM_CACHE = 4096, 1024
"""How many bytes before its use the matrix is prefetched, from memory or from the second-level cache."""
SHARE = 2
SECOND_LEVEL = 2
"""LLVM's number for prefetching into the second-level cache only."""


@dataclass(frozen=True)
class Prefetch:
    """Where a tile of rows prefetches the matrix."""

    near: Value
    """What this tile multiplies a little later."""
    far: Value | None
    """What later tiles multiply: one byte for `SHARE` bytes that this tile multiplies."""

    def write(self, builder: Builder, done: Value, num_bytes: int) -> None:
        """Writes the instructions for `num_bytes` that are multiplied after `done` bytes of the matrix."""
        for line in range(0, num_bytes, CACHE_LINE_BYTES):
            builder.prefetch(self.near + done + line)
        if self.far is not None:
            for line in range(0, num_bytes // SHARE, CACHE_LINE_BYTES):
                builder.prefetch(self.far + done // SHARE + line, SECOND_LEVEL)


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

    A single tile waits for memory. Several find their part in the second-level cache, and each full one
    brings a share of the next part there, if there is one. Only x86 was measured.
    """
    if target.arch != "x86_64":
        return Prefetch(weight + FROM_MEMORY, None)
    are_several = num_tiles >= 2
    near = weight + are_several.select(builder.constant(FROM_CACHE), builder.constant(FROM_MEMORY))
    if not is_full:
        return Prefetch(near, None)
    offset = tile * (part_bytes // SHARE)
    has_share = are_several & has_next & (offset < part_bytes)
    return Prefetch(near, weight + has_share.select(offset + part_bytes, builder.constant(0)))
