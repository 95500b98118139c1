"""Tiles of tokens with the same expert, found by a Pallas kernel for NVIDIA GPUs.

A pair is a token and one of its experts; pairs are numbered token by token. A tile is up to `size` pairs of
one expert, which are multiplied with its matrices together. No sort is needed: every expert counts the pairs
of the experts before it, which tells where its own tiles begin.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from levserve.model.gpu.paged_attention import power_of_two

PAIRS_PER_STEP = 32768
"""The most pairs that a program reads in one step: those of 4,096 tokens of Qwen3-30B-A3B, which take 8.8 us,
and 15.7 us in steps of 4,096 pairs."""
PAIRS_PER_WARP, MIN_WARPS, MAX_WARPS = 512, 4, 16


class Tiles(NamedTuple):
    """Tiles of pairs of one expert."""

    pairs: jax.Array
    """[tile, size]: pairs, by their numbers; the total number of pairs where a tile is not full. The
    extra last tile is undefined."""
    experts: jax.Array
    """[tile]: its expert; the number of experts for an empty tile."""
    ranks: jax.Array
    """[tile]: how many tiles of the same expert come before it."""
    places: jax.Array
    """[pair]: its place among the tiles' pairs. Undefined for a pair that is in no tile and for the extra
    last pair."""


def tile_pairs(experts: jax.Array, num_experts: int, size: int, *, interpret: bool = False) -> Tiles:
    """Tiles of the pairs of tokens with `experts` [token, experts per token]. A token has no expert twice; a
    pair of expert `num_experts` is in no tile.

    The first tile of expert e is `before // size + e`, where `before` counts the pairs of the experts before
    it. So no two experts' tiles overlap, and each expert finds its place without knowing how many tiles the
    others have.
    """
    num_tiles = experts.size // size + num_experts
    shapes = ((num_tiles + 1) * size,), (num_tiles,), (num_tiles,), (experts.size + 1,)
    pairs, *rest = pl.pallas_call(
        functools.partial(_kernel, num_experts=num_experts, size=size),
        grid=(num_experts,),
        in_specs=[pl.BlockSpec(experts.shape, lambda number: (0, 0))],
        out_specs=[pl.BlockSpec(shape, lambda number: (0,)) for shape in shapes],
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes],
        compiler_params=plgpu.CompilerParams(num_warps=_num_warps(experts.shape), num_stages=1),
        interpret=interpret,
        name="tile_pairs",
    )(experts)
    return Tiles(pairs.reshape(num_tiles + 1, size), *rest)


def _step(shape: tuple[int, ...]) -> tuple[int, int]:
    """Tokens that are read in one step, and expert places of each."""
    num_tokens, per_token = shape
    width = power_of_two(per_token)
    return min(power_of_two(num_tokens), max(PAIRS_PER_STEP // width, 1)), width


def _num_warps(shape: tuple[int, ...]) -> int:
    height, width = _step(shape)
    return max(MIN_WARPS, min(MAX_WARPS, height * width // PAIRS_PER_WARP))


def _kernel(
    expert_ref: jax.Ref,
    pair_ref: jax.Ref,
    of_tile_ref: jax.Ref,
    rank_ref: jax.Ref,
    place_ref: jax.Ref,
    *,
    num_experts: int,
    size: int,
) -> None:
    (num_tokens, per_token), (num_tiles,) = expert_ref.shape, of_tile_ref.shape
    number = pl.program_id(0)
    height, width = _step(expert_ref.shape)
    num_steps = -(-num_tokens // height)
    place = lax.broadcasted_iota(jnp.int32, (height, width), 1)

    def load(step: jax.Array) -> tuple[jax.Array, jax.Array]:
        tokens = step * height + jnp.arange(height, dtype=jnp.int32)
        is_there = (tokens < num_tokens)[:, None] & (place < per_token)
        return tokens, plgpu.load(expert_ref.at[tokens[:, None], place], mask=is_there, other=num_experts)

    def count(step: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        _, experts = load(step)
        is_before, is_own = (mask.astype(jnp.int32) for mask in (experts < number, experts == number))
        before, own = carry
        return before + jnp.sum(is_before), own + jnp.sum(is_own)

    before, own = lax.fori_loop(0, num_steps, count, (jnp.int32(0), jnp.int32(0)))
    first, used = before // size + number, (own + size - 1) // size
    end = jnp.where(number == num_experts - 1, num_tiles, (before + own) // size + number + 1)

    def name_tile(tile: jax.Array, carry: None) -> None:
        of_tile_ref[tile] = jnp.where(tile < first + used, number, num_experts)
        rank_ref[tile] = tile - first

    lax.fori_loop(first, end, name_tile, None)
    unfilled = own + jnp.arange(size, dtype=jnp.int32)
    none = jnp.full(size, num_tokens * per_token, jnp.int32)
    plgpu.store(pair_ref.at[first * size + unfilled], none, mask=unfilled < used * size)

    def put(step: jax.Array, count: jax.Array) -> jax.Array:
        tokens, experts = load(step)
        own_place = jnp.where(experts == number, place, -1).max(1)  # a token has an expert at most once
        is_own = own_place >= 0
        is_one = is_own.astype(jnp.int32)
        rank = count + jnp.cumsum(is_one) - 1
        # When interpreted, a masked store writes back the old value, so it must not go to a place in use.
        to = jnp.where(is_own, first * size + rank, num_tiles * size)
        pairs = jnp.where(is_own, tokens * per_token + own_place, num_tokens * per_token)
        plgpu.store(pair_ref.at[to], pairs, mask=is_own)
        plgpu.store(place_ref.at[pairs], to, mask=is_own)
        return count + jnp.sum(is_one)

    lax.fori_loop(0, num_steps, put, jnp.int32(0))
