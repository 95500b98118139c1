"""Queries over their rows' pages, as a Pallas kernel for NVIDIA GPUs: the same one for decoding and for prefill.

Every program of the grid takes a block of neighbouring queries of one row, one key-value head and one split of the row's
positions, and walks the keys a step at a time with a running softmax. Keys are read where they lie, by one index per
position: loads of two dimensions, which Triton pipelines; a load of whole pages that is reshaped costs half the bandwidth.
Splits exist so that a few long rows still fill the card; their partial results are merged afterwards.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from levserve.model.cache import multiplied_in

MASKED = -1e30
MIN_ROWS = 16
"""Rows of the smallest matrix product a tensor core takes; a group of query heads is repeated to fill it."""
QUERY_BLOCK = 16
"""Queries of one row that prefill takes together."""
NUM_PROCESSORS = 132
"""Of an H200; what splits are chosen for."""


class Tiling(NamedTuple):
    """How a program is cut; measured on an H200 with 32-token pages."""

    keys: int
    """Positions looked at in one step."""
    num_warps: int
    num_stages: int


def refuse_unservable(head_dim: int) -> str | None:
    """Why this kernel cannot serve a model, or None."""
    if not 16 <= head_dim <= 256:
        return f"a head size of {head_dim} (it takes 16 to 256)"
    return None


@functools.partial(jax.jit, static_argnames=("window", "softcap", "splits", "interpret"))
def paged_attention(
    q: jax.Array,
    pool: jax.Array,
    table: jax.Array,
    positions: jax.Array,
    *,
    window: int | None = None,
    softcap: float | None = None,
    splits: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """q [row, chunk, kv_head, group, head_size] scaled; pool [page, 2, kv_head, page_size, head_size]; table [row, page];
    positions [row, chunk] of the queries, negative for padding, which comes last. Computes and answers in the pool's type, or
    in bfloat16 if that is fp8, and sums in float32.

    Scores are bent to stay within `softcap`. Without `splits` there are as many as fill the card.
    """
    rows, chunk, kv_heads, group, size = q.shape
    page_size = pool.shape[3]
    queries = math.gcd(chunk, QUERY_BLOCK)
    tiling = _tiling(queries, size * pool.dtype.itemsize)
    unread = -table.shape[1] % max(tiling.keys // page_size, 1)
    table = jnp.pad(table, ((0, 0), (0, unread)), mode="edge")  # so that no step reads beyond it
    num_steps = -(-table.shape[1] * page_size // tiling.keys)
    num_blocks = rows * chunk // queries
    splits = splits or _num_splits(num_blocks * kv_heads, num_steps)

    kernel = functools.partial(
        _kernel,
        tiling=tiling,
        steps_per_split=-(-num_steps // splits),
        is_whole=splits == 1,
        window=window,
        softcap=softcap,
    )
    flat = (num_blocks * queries, kv_heads, group, size)
    dtype = multiplied_in(pool.dtype)
    by_block = pl.BlockSpec((queries, None, group, size), lambda b, h, s: (b, h, 0, 0))
    blocks_per_row = chunk // queries
    out_specs, out_shape = [by_block], [jax.ShapeDtypeStruct(flat, dtype)]
    if splits > 1:
        out_specs = [pl.BlockSpec((None, queries, None, group, size), lambda b, h, s: (s, b, h, 0, 0))]
        out_specs += [pl.BlockSpec((None, queries, None, group), lambda b, h, s: (s, b, h, 0))] * 2
        out_shape = [jax.ShapeDtypeStruct((splits, *shape), jnp.float32) for shape in (flat, flat[:3], flat[:3])]
    result = pl.pallas_call(
        kernel,
        grid=(num_blocks, kv_heads, splits),
        in_specs=[
            by_block,
            pl.BlockSpec((pool.shape[0], 2, None, page_size, size), lambda b, h, s: (0, 0, h, 0, 0)),
            pl.BlockSpec((None, table.shape[1]), lambda b, h, s: (b // blocks_per_row, 0)),
            pl.BlockSpec((queries,), lambda b, h, s: (b,)),
        ],
        out_specs=out_specs,
        out_shape=out_shape,
        compiler_params=plgpu.CompilerParams(num_warps=tiling.num_warps, num_stages=tiling.num_stages),
        interpret=interpret,
        name="paged_attention",
    )((q.reshape(flat) * math.log2(math.e)).astype(dtype), pool, table, positions.reshape(-1))
    if splits == 1:
        return result[0].reshape(q.shape)
    mixed, tops, totals = result
    weights = jnp.exp2(tops - tops.max(0, keepdims=True))  # an empty split weighs nothing
    total = (totals * weights).sum(0)
    return ((mixed * weights[..., None]).sum(0) / jnp.maximum(total, 1e-30)[..., None]).astype(dtype).reshape(q.shape)


def _tiling(queries: int, key_bytes: int) -> Tiling:
    """Larger keys take shorter steps: keys and values of all stages share a processor's 227 KB."""
    if queries == 1:
        return Tiling(32 if key_bytes <= 512 else 16, num_warps=2, num_stages=3)
    if key_bytes <= 256:
        return Tiling(64, num_warps=4, num_stages=3 if key_bytes <= 128 else 2)
    return Tiling(32 if key_bytes <= 512 else 16, num_warps=8, num_stages=2)


def _num_splits(num_programs: int, num_steps: int) -> int:
    splits = min(max(2 * NUM_PROCESSORS // num_programs, 1), 16, num_steps)
    return 1 << (splits.bit_length() - 1)


def _kernel(
    q_ref: jax.Ref,
    pool_ref: jax.Ref,
    table_ref: jax.Ref,
    position_ref: jax.Ref,
    mixed_ref: jax.Ref,
    top_ref: jax.Ref | None = None,
    total_ref: jax.Ref | None = None,
    *,
    tiling: Tiling,
    steps_per_split: int,
    is_whole: bool,
    window: int | None,
    softcap: float | None,
) -> None:
    queries, group, size = q_ref.shape
    page_size, keys = pool_ref.shape[2], tiling.keys
    dtype = multiplied_in(pool_ref.dtype)
    # Sizes that are no power of two are rounded up by repeating: who is there twice computes and stores the same twice.
    heads = max(1 << (group - 1).bit_length(), MIN_ROWS // queries)
    row = jnp.arange(queries * heads)
    query, head = row // heads, row % group if queries == 1 else jnp.minimum(row % heads, group - 1)
    padded = 1 << (size - 1).bit_length()
    column = jnp.minimum(jnp.arange(padded), size - 1)
    every: jax.Array | slice = slice(None) if padded == size else column[None, :]

    def pick(index: jax.Array) -> jax.Array:
        return index if padded == size else index[:, None]

    position = position_ref[query]
    q = q_ref[pick(query), pick(head), every]
    if padded != size:
        q = jnp.where(jnp.arange(padded)[None, :] < size, q, jnp.zeros_like(q))
    start = pl.program_id(2) * steps_per_split
    end = jnp.minimum(start + steps_per_split, jnp.max(position_ref[jnp.arange(queries)]) // keys + 1)
    if window is not None:
        start = jnp.maximum(start, (position_ref[0] - window + 1) // keys)

    def mix(step: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        mixed, top, total = carry
        at = step * keys + jnp.arange(keys)
        page, slot = pick(table_ref[at // page_size]), pick(at % page_size)
        scores = jnp.dot(q, pool_ref[page, 0, slot, every].astype(dtype).T, preferred_element_type=jnp.float32)
        if softcap is not None:
            cap = softcap * math.log2(math.e)
            scores = cap * jnp.tanh(scores / cap)
        is_seen = at[None, :] <= position[:, None]
        if window is not None:
            is_seen &= at[None, :] > position[:, None] - window
        scores = jnp.where(is_seen, scores, MASKED)
        new_top = jnp.maximum(top, scores.max(-1))
        shrink = jnp.exp2(top - new_top)
        weights = jnp.exp2(scores - new_top[:, None])
        values = pool_ref[page, 1, slot, every].astype(dtype)
        mixed = mixed * shrink[:, None] + jnp.dot(weights.astype(dtype), values, preferred_element_type=jnp.float32)
        return mixed, new_top, total * shrink + weights.sum(-1)

    nothing = (
        jnp.zeros((queries * heads, padded), jnp.float32),
        jnp.full((queries * heads,), MASKED, jnp.float32),
        jnp.zeros((queries * heads,), jnp.float32),
    )
    mixed, top, total = lax.fori_loop(start, end, mix, nothing)
    if is_whole:
        mixed = mixed / jnp.maximum(total, 1e-30)[:, None]
    else:
        assert top_ref is not None and total_ref is not None
        top_ref[query, head], total_ref[query, head] = top, total
    mixed_ref[pick(query), pick(head), every] = mixed.astype(mixed_ref.dtype)
