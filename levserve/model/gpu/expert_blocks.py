"""Pairs of a token and an expert in blocks of one expert, and tiles of blocks that are multiplied together.

Used where the experts' products are made by Mosaic GPU: its copies take whole blocks, so the tokens' rows are
put in the order of the blocks first.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from levserve.model.gpu.expert_tiles import tile_pairs
from levserve.model.gpu.paged_attention import power_of_two

BLOCK = 64
"""Rows of the smallest product of a warp group."""


class Blocks(NamedTuple):
    """Tiles of two blocks of an expert, which come first in every array, and of one, what is left of it."""

    firsts: jax.Array
    """[2, tile]: the number of a tile's first block."""
    experts: jax.Array
    """[2, tile]: its expert."""
    counts: jax.Array
    """[2]: how many tiles there are."""
    pairs: jax.Array
    """[slot]: the pair of each slot of the blocks, and the number of all pairs where there is none. It means
    nothing for blocks that are empty, nor for the last 64 slots, which are in excess."""
    of_blocks: jax.Array
    """[block]: its expert; the number of experts for a block that is empty."""
    places: jax.Array
    """[pair]: the slot of each. It means nothing for the pairs of padding, nor for the last one, which is in
    excess."""


def block_pairs(experts: jax.Array, num_experts: int, *, interpret: bool = False) -> Blocks:
    """Blocks of the pairs of tokens with `experts` [token, experts per token]; see `tile_pairs`."""
    found = tile_pairs(experts, num_experts, BLOCK, interpret=interpret)
    (num_blocks,) = found.experts.shape
    most = num_blocks + 1  # one in excess, where interpreted stores go that are masked
    shapes = (2 * most,), (2 * most,), (2,)
    firsts, of_tiles, counts = pl.pallas_call(
        lambda *refs: _list_tiles(*refs, num_experts=num_experts),
        in_specs=[pl.BlockSpec((num_blocks,), lambda: (0,))] * 2,
        out_specs=[pl.BlockSpec(shape, lambda: (0,)) for shape in shapes],
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="list_tiles",
    )(found.experts, found.ranks)
    return Blocks(
        firsts.reshape(2, most),
        of_tiles.reshape(2, most),
        counts,
        found.pairs.reshape(-1),
        found.experts,
        found.places,
    )


def _list_tiles(
    expert_ref: jax.Ref,
    rank_ref: jax.Ref,
    first_ref: jax.Ref,
    of_tile_ref: jax.Ref,
    count_ref: jax.Ref,
    *,
    num_experts: int,
) -> None:
    (num_blocks,) = expert_ref.shape
    blocks = lax.iota(jnp.int32, power_of_two(num_blocks))
    is_there = blocks < num_blocks
    experts = plgpu.load(expert_ref.at[blocks], mask=is_there, other=num_experts)
    ranks = plgpu.load(rank_ref.at[blocks], mask=is_there, other=0)
    after = plgpu.load(expert_ref.at[blocks + 1], mask=blocks + 1 < num_blocks, other=num_experts)
    is_first = (experts < num_experts) & (ranks % 2 == 0)
    for kind, is_kind in enumerate((is_first & (after == experts), is_first & (after != experts))):
        is_one = is_kind.astype(jnp.int32)
        to = kind * (num_blocks + 1) + jnp.where(is_kind, jnp.cumsum(is_one) - 1, num_blocks)
        plgpu.store(first_ref.at[to], blocks, mask=is_kind)
        plgpu.store(of_tile_ref.at[to], experts, mask=is_kind)
        count_ref[kind] = jnp.sum(is_one)
