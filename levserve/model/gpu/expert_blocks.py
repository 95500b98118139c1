"""Pairs of a token and an expert in blocks of one expert, and tiles of blocks that are multiplied together.

Used where Mosaic GPU computes the experts' products: it copies whole blocks, so the tokens' rows are first
put in the order of the blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from levserve.model.gpu.expert_tiles import Tiles, tile_pairs
from levserve.model.gpu.paged_attention import power_of_two

BLOCK = 64
"""Rows of the smallest product of a warp group."""

Found = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
"""Candidates for tiles: first blocks, experts, and which are tiles of two blocks and which of one."""


class Blocks(NamedTuple):
    """Tiles of two blocks of an expert, and tiles of one block for what is left. The former come first in
    `firsts`, `experts` and `counts`."""

    firsts: jax.Array
    """[2, tile]: the number of a tile's first block."""
    experts: jax.Array
    """[2, tile]: its expert."""
    counts: jax.Array
    """[2]: how many tiles there are."""
    pairs: jax.Array
    """[slot]: the pair in each slot of the blocks, or the total number of pairs where there is none.
    Undefined for empty blocks and for the extra slots after the last block."""
    of_blocks: jax.Array
    """[block]: its expert; the number of experts for an empty block."""
    places: jax.Array
    """[pair]: its slot. Undefined for the pairs of padding and for the extra last pair."""


def block_pairs(experts: jax.Array, num_experts: int, *, interpret: bool = False) -> Blocks:
    """Blocks of the pairs of tokens with `experts` [token, experts per token]; see `tile_pairs`."""
    found = tile_pairs(experts, num_experts, BLOCK, interpret=interpret)
    (num_blocks,) = found.experts.shape

    def find(expert_ref: jax.Ref, rank_ref: jax.Ref) -> Found:
        blocks = lax.iota(jnp.int32, power_of_two(num_blocks))
        is_there = blocks < num_blocks
        of_blocks = plgpu.load(expert_ref.at[blocks], mask=is_there, other=num_experts)
        ranks = plgpu.load(rank_ref.at[blocks], mask=is_there, other=0)
        after = plgpu.load(expert_ref.at[blocks + 1], mask=blocks + 1 < num_blocks, other=num_experts)
        is_first = (of_blocks < num_experts) & (ranks % 2 == 0)
        return blocks, of_blocks, is_first & (after == of_blocks), is_first & (after != of_blocks)

    listed = _list(find, (found.experts, found.ranks), num_blocks, interpret)
    return Blocks(*listed, found.pairs.reshape(-1), found.experts, found.places)


def halve_tiles(tiles: Tiles, num_experts: int, num_pairs: int, *, interpret: bool = False) -> Blocks:
    """The same tiles as two blocks each, or as one block where the second would have no pair."""
    (num_tiles,) = tiles.experts.shape
    assert tiles.pairs.shape[1] == 2 * BLOCK
    pairs = tiles.pairs.reshape(-1)

    def find(expert_ref: jax.Ref, pair_ref: jax.Ref) -> Found:
        numbers = lax.iota(jnp.int32, power_of_two(num_tiles))
        of_tiles = plgpu.load(expert_ref.at[numbers], mask=numbers < num_tiles, other=num_experts)
        is_used = of_tiles < num_experts
        middle = plgpu.load(pair_ref.at[(2 * numbers + 1) * BLOCK], mask=is_used, other=num_pairs)
        return 2 * numbers, of_tiles, is_used & (middle < num_pairs), is_used & (middle >= num_pairs)

    listed = _list(find, (tiles.experts, pairs), num_tiles, interpret)
    has_pair = pairs[: 2 * num_tiles * BLOCK : BLOCK] < num_pairs
    of_blocks = jnp.where(has_pair, jnp.repeat(tiles.experts, 2), num_experts)
    return Blocks(*listed, pairs, of_blocks, tiles.places)


def _list(
    find: Callable[..., Found], given: tuple[jax.Array, ...], most: int, interpret: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`Blocks.firsts`, `experts` and `counts`, with at most `most` tiles of each kind."""
    room = most + 1  # one extra, which takes masked stores when interpreted

    def kernel(*refs: jax.Ref) -> None:
        *given_refs, first_ref, of_tile_ref, count_ref = refs
        firsts, experts, *kinds = find(*given_refs)
        for kind, is_kind in enumerate(kinds):
            is_one = is_kind.astype(jnp.int32)
            to = kind * room + jnp.where(is_kind, jnp.cumsum(is_one) - 1, most)
            plgpu.store(first_ref.at[to], firsts, mask=is_kind)
            plgpu.store(of_tile_ref.at[to], experts, mask=is_kind)
            count_ref[kind] = jnp.sum(is_one)

    shapes = (2 * room,), (2 * room,), (2,)
    firsts, of_tiles, counts = pl.pallas_call(
        kernel,
        in_specs=[pl.BlockSpec(array.shape, lambda: (0,)) for array in given],
        out_specs=[pl.BlockSpec(shape, lambda: (0,)) for shape in shapes],
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="list_tiles",
    )(*given)
    return firsts.reshape(2, room), of_tiles.reshape(2, room), counts
