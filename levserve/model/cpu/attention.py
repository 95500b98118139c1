"""Attention over the pages of rows on a CPU.

XLA would gather the pages first and multiply matrices of only three rows; for a step of 32 rows this kernel
takes a third of the time. A task is a block of neighbouring queries of one row over one key-value head. The
number of queries of a row decides whether its blocks have few queries (`few_queries`) or many
(`many_queries`).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from levserve.jit.builder import F32, Builder, Value
from levserve.jit.target import Target
from levserve.jit.xla_call import Call, Kernel, Stage, register
from levserve.model.cache import Place, numbers_of
from levserve.model.cpu import few_queries, many_queries
from levserve.model.cpu.heads import LANES, AttentionArrays, HeadShape, QueryBlock


def has_many_queries(target: Target) -> bool:
    """Whether `many_queries` is used on this target: only where it was measured to be faster."""
    return target.vector_bytes > 16


def mixed_context(target: Target) -> int:
    """A prompt's chunk that begins before this position may be computed beside decoding rows.

    The limit is low without `many_queries`, because each token of the chunk then reads all keys separately.
    """
    return 2**31 if has_many_queries(target) else 256


def unsupported_reason(head_dim: int) -> str | None:
    """Why this kernel cannot serve a model, or None."""
    if head_dim % LANES:
        return f"a head size of {head_dim} (it takes multiples of {LANES})"
    return None


def paged_attention(
    q: jax.Array,
    pool: jax.Array,
    table: jax.Array,
    positions: jax.Array,
    *,
    target: Target,
    window: int | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """Like `XlaBackend.mix_values`, for queries that are already scaled."""
    _, _, kv_heads, group, size = q.shape
    name = register(kernel_for(HeadShape(kv_heads, group, size, pool.shape[3], numbers_of(pool), target)))
    limits = jnp.asarray([window or 0], jnp.int32), jnp.asarray([softcap or 0.0], jnp.float32)
    call = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(q.shape, jnp.float32))
    return call(q.astype(jnp.float32), pool, table, positions, *limits)


def kernel_for(heads: HeadShape) -> Kernel:
    """The kernel for q [row, chunk, kv_head, group, size], pool, table, positions, window and softcap."""
    name = f"levserve_attend_{heads.dtype}_{heads.kv_heads}_{heads.group}_{heads.size}_{heads.page_size}"
    token_bytes = heads.kv_heads * heads.group * heads.size * 4

    def arrays_of(call: Call) -> AttentionArrays:
        q, pool, table, positions, window, softcap = map(call.argument, range(6))
        builder = call.builder
        limits = builder.load_int32(window, builder.constant(0)), builder.load(softcap, F32)
        sizes = call.argument_size(0, 1), call.argument_size(2, 1)
        output = call.result(0)
        return AttentionArrays(q, output, token_bytes, token_bytes, pool, table, positions, *limits, *sizes)

    def count(call: Call) -> Value:
        return num_tasks(heads, arrays_of(call), call.argument_size(0, 0))

    def attend(call: Call, _: Value, scratch: Value, task: Value) -> None:
        attend_block(call.builder, heads, arrays_of(call), scratch, task)

    stages = (Stage(count, attend),)
    return Kernel(
        name, heads.target, stages, scratch_bytes=lambda call: scratch_bytes(heads, arrays_of(call))
    )


def count_joined_rows(place: Place, heads: HeadShape) -> jax.Array:
    """`AttentionArrays.joined_rows` for rows of one token each.

    Neighbouring rows that write to the same page belong to one prompt and have the same earlier pages. So the
    tokens of a prompt that is computed beside decoding rows read their keys together, if there are enough of
    them for `many_queries`.
    """
    rows, chunk = place.positions.shape
    max_rows = max(many_queries.max_queries(heads.target) // heads.group, 1)
    most, enough = math.gcd(heads.page_size, 2 ** int(math.log2(max_rows))), _enough_queries(heads)
    if chunk > 1 or most * heads.group < enough or not has_many_queries(heads.target):
        return jnp.ones(rows, jnp.int32)
    page_parts = place.pages * (heads.page_size // most) + place.offsets // most
    is_first = jnp.concatenate([jnp.ones(1, bool), page_parts[1:] != page_parts[:-1]])
    run = jnp.cumsum(is_first)
    count = (run[:, None] == run[None]).sum(1, dtype=jnp.int32)
    is_joined = (count * heads.group >= enough) & (place.positions[:, 0] >= 0)
    return jnp.where(is_joined, jnp.where(is_first, count, 0), 1)


def num_tasks(heads: HeadShape, arrays: AttentionArrays, rows: Value) -> Value:
    return rows * heads.kv_heads * _blocks_per_row(heads, arrays)


def scratch_bytes(heads: HeadShape, arrays: AttentionArrays) -> Value:
    few, many = (kind.scratch_bytes(heads, arrays) for kind in (few_queries, many_queries))
    return few.maximum(many) if has_many_queries(heads.target) else few


def attend_block(
    builder: Builder, heads: HeadShape, arrays: AttentionArrays, scratch: Value, task: Value
) -> None:
    blocks, queries = _blocks_per_row(heads, arrays), arrays.queries_per_row(heads)
    pair, number = task // blocks, task % blocks
    row, kv_head = pair // heads.kv_heads, pair % heads.kv_heads
    block_size = (queries + (blocks - 1)) // blocks  # 5 queries become 3 and 2, not 4 and 1
    first = number * block_size
    count = (queries - first).minimum(block_size).maximum(0)
    if arrays.joined_rows is not None:
        has_enough = queries >= _enough_queries(heads)
        joined = has_enough.select(builder.constant(1), builder.load_int32(arrays.joined_rows, row))
        joined_count = number.equals(0).select(joined * heads.group, 0)
        first = joined.equals(1).select(first, 0)
        count = joined.equals(1).select(count, joined_count)
    block = QueryBlock(builder, heads, arrays, row=row, kv_head=kv_head, first_query=first, num_queries=count)
    with builder.when(count < few_queries.MAX_QUERIES + 1):
        few_queries.attend_few(builder, heads, arrays, scratch, block)
    if has_many_queries(heads.target):
        with builder.when(count >= few_queries.MAX_QUERIES + 1):
            many_queries.attend_many(builder, heads, arrays, scratch, block)


def _blocks_per_row(heads: HeadShape, arrays: AttentionArrays) -> Value:
    """Blocks of the queries of one row over one key-value head."""
    few = arrays.num_blocks(heads, few_queries.MAX_QUERIES)
    many = arrays.num_blocks(heads, many_queries.max_queries(heads.target))
    if not has_many_queries(heads.target):
        return few
    return (arrays.queries_per_row(heads) >= _enough_queries(heads)).select(many, few)


def _enough_queries(heads: HeadShape) -> int:
    """How many queries a row needs for `many_queries`: with fewer, most lanes would be unused."""
    return many_queries.max_queries(heads.target) // 2
