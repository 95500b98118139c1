"""Attention of a decode step as one Pallas kernel for NVIDIA GPUs: from the fused projection to the mixed
values.

Each program of the grid takes one row, one key-value head and one split of the row's positions. It normalizes
and rotates the row's queries and its new key, writes the key and its value to the pool, and mixes the older
positions with the new pair, which it keeps in registers: no program reads what another one writes. Rows start
in order, so the longest should come first; a long row that started last would run alone at the end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from levserve.model.backend import HeadNorms
from levserve.model.cache import multiplied_in, to_storage
from levserve.model.gpu.heads import Rotation, rotated
from levserve.model.gpu.paged_attention import (
    LOG2_E,
    MASKED,
    MIN_ROWS,
    ONE_QUERY_PROGRAMS,
    Columns,
    apply_softcap,
    attend_keys,
    choose_splits,
    choose_tiling,
    divide,
    merge,
    pad_table,
    power_of_two,
    scaled_sinks,
    split_steps,
)
from levserve.model.rotary import Angles


@functools.partial(
    jax.jit, static_argnames=("kv_heads", "scale", "eps", "window", "softcap", "splits", "interpret")
)
def decode_attention(
    qkv: jax.Array,
    pool: jax.Array,
    table: jax.Array,
    positions: jax.Array,
    angles: Angles | None = None,
    norms: HeadNorms | None = None,
    sinks: jax.Array | None = None,
    *,
    kv_heads: int,
    scale: float,
    eps: float = 0.0,
    window: int | None = None,
    softcap: float | None = None,
    splits: int | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The mixed values [row, query head, head_size], in the pool's type or in float16 if that is fp8, and the
    pool.

    qkv [row, head, head_size]: queries, keys, values; pool [page, 2, kv_head, page_size, head_size], written
    in place; table [row, page]; positions [row], negative for padding, which is not written. Scores are
    multiplied by `scale` and limited by `softcap`. `sinks` [query head] are scores without a value. By
    default there are enough `splits` to fill the GPU.
    """
    rows, num_heads, size = qkv.shape
    num_queries = num_heads - 2 * kv_heads
    num_pages, _, _, page_size, _ = pool.shape
    tiling = choose_tiling(1, size, pool.dtype, rows * kv_heads)
    table, num_steps = pad_table(table, page_size, tiling.keys)
    splits = splits or choose_splits(rows * kv_heads, num_steps, ONE_QUERY_PROGRAMS)
    dtype = multiplied_in(pool.dtype)

    def of_row(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, *shape), lambda head, split, row: (row, *(0 for _ in shape)))

    of_pool = pl.BlockSpec((num_pages, 2, None, page_size, size), lambda head, split, row: (0, 0, head, 0, 0))
    inputs = [
        (qkv, of_row(num_heads, size)),
        (pool, of_pool),
        (table, of_row(table.shape[1])),
        (positions, of_row()),
    ]
    inputs += [(part[:, 0, 0], of_row(part.shape[-1])) for part in angles or ()]
    inputs += [(weight, pl.BlockSpec((size,), lambda head, split, row: (0,))) for weight in norms or ()]
    flat = (rows, kv_heads, num_queries // kv_heads, size)
    by_head = None if sinks is None else scaled_sinks(sinks, kv_heads)
    if by_head is not None and splits == 1:
        inputs.append((by_head, pl.BlockSpec((None, flat[2]), lambda head, split, row: (head, 0))))
    outputs = [
        (
            jax.ShapeDtypeStruct(flat, dtype),
            pl.BlockSpec((None, None, *flat[2:]), lambda head, split, row: (row, head, 0, 0)),
        )
    ]
    if splits > 1:
        of_split = [
            pl.BlockSpec((None, None, None, *flat[2:]), lambda head, split, row: (split, row, head, 0, 0))
        ]
        of_split += [
            pl.BlockSpec((None, None, None, flat[2]), lambda head, split, row: (split, row, head, 0))
        ] * 2
        outputs = [
            (jax.ShapeDtypeStruct((splits, *shape), jnp.float32), spec)
            for shape, spec in zip((flat, flat[:3], flat[:3]), of_split)
        ]
    outputs = [(jax.ShapeDtypeStruct(pool.shape, pool.dtype), of_pool), *outputs]
    kernel = functools.partial(
        _kernel,
        kv_heads=kv_heads,
        has_angles=angles is not None,
        has_norms=norms is not None,
        has_sinks=sinks is not None and splits == 1,
        keys=tiling.keys,
        splits=splits,
        num_steps=num_steps,
        scale=scale,
        eps=eps,
        window=window,
        softcap=softcap,
        interpret=interpret,
    )
    pool, *parts = pl.pallas_call(
        kernel,
        grid=(kv_heads, splits, rows),
        in_specs=[spec for _, spec in inputs],
        out_specs=[spec for _, spec in outputs],
        out_shape=[shape for shape, _ in outputs],
        input_output_aliases={1: 0},
        compiler_params=plgpu.CompilerParams(num_warps=tiling.num_warps, num_stages=tiling.num_stages),
        interpret=interpret,
        name="decode_attention",
    )(*(array for array, _ in inputs))
    if splits > 1:
        mixed, tops, totals = parts
        mixed = merge(mixed, tops, totals, by_head).astype(dtype)
    else:
        mixed = parts[0]
    return mixed.reshape(rows, num_queries, size), pool


def _kernel(
    qkv_ref: jax.Ref,
    pool_ref: jax.Ref,
    table_ref: jax.Ref,
    position_ref: jax.Ref,
    *refs: jax.Ref,
    kv_heads: int,
    has_angles: bool,
    has_norms: bool,
    has_sinks: bool,
    keys: int,
    splits: int,
    num_steps: int,
    scale: float,
    eps: float,
    window: int | None,
    softcap: float | None,
    interpret: bool,
) -> None:
    angle_refs, refs = refs[: 2 * has_angles], refs[2 * has_angles :]
    norm_refs, refs = refs[: 2 * has_norms] or (None, None), refs[2 * has_norms :]
    sink_refs, refs = refs[:has_sinks], refs[has_sinks:]
    written_ref, mixed_ref, *sum_refs = refs
    num_queries, (page_size, size) = qkv_ref.shape[0] - 2 * kv_heads, pool_ref.shape[2:]
    group, columns = num_queries // kv_heads, Columns(size, is_bounded=True)
    kv_head, split, position = pl.program_id(0), pl.program_id(1), position_ref[...]
    column, rotation = columns.numbers, Rotation.read(angle_refs, columns)

    def reader(heads: jax.Array) -> Callable[[jax.Array], jax.Array]:
        return lambda column: qkv_ref[heads[:, None], column[None, :]]

    heads = power_of_two(group)
    rows = max(heads, MIN_ROWS)

    def repeated(x: jax.Array) -> jax.Array:
        """Repeats [head, ...] to as many rows as a tensor core takes."""
        return jnp.broadcast_to(x[None], (rows // heads, *x.shape)).reshape(rows, *x.shape[1:])

    # A group whose size is not a power of two is padded by repeating its last head.
    read_group = reader(kv_head * group + jnp.minimum(jnp.arange(heads), group - 1))
    q = rotated(read_group, columns, rotation, norm_refs[0], eps) * (scale * LOG2_E)
    q = columns.masked(q).astype(multiplied_in(pool_ref.dtype))
    one_head = jnp.arange(1)
    key = rotated(reader(one_head + num_queries + kv_head), columns, rotation, norm_refs[1], eps)
    key = to_storage(key, pool_ref.dtype)
    value = reader(one_head + num_queries + kv_heads + kv_head)(column).astype(jnp.float32)
    value = to_storage(value, pool_ref.dtype)

    @pl.when((position >= 0) & (split == 0))
    def _write() -> None:
        page, slot = table_ref[position // page_size], position % page_size
        written_ref[page, 0, slot, column] = key.reshape(-1)
        written_ref[page, 1, slot, column] = value.reshape(-1)

    score = (q.astype(jnp.float32) * key.astype(jnp.float32)).sum(-1)
    if softcap is not None:
        score = apply_softcap(score, softcap)
    q, score = repeated(q), repeated(score)
    is_first = jnp.full(score.shape, split) == 0  # the first split has the new pair
    carry = (
        jnp.where(is_first[:, None], value.astype(jnp.float32), 0.0),
        jnp.where(is_first, score, MASKED),
        jnp.where(is_first, jnp.ones_like(score), 0.0),
    )
    start, end = jnp.int32(0), (position + keys - 1) // keys
    first = None
    if window is not None:
        first = position - window + 1
        start = jnp.maximum(first // keys, 0)
    steps, visible = split_steps(start, end, split, splits, num_steps), (first, position - 1)
    mixed, top, total = attend_keys(
        q, pool_ref, table_ref, steps, visible, carry, keys=keys, softcap=softcap, interpret=interpret
    )
    head = jnp.minimum(jnp.arange(rows) % heads, group - 1)  # repeated heads store the same values twice
    if sum_refs:
        top_ref, total_ref = sum_refs
        top_ref[head], total_ref[head] = top, total
    else:
        mixed = divide((mixed, top, total), sink_refs[0][head] if sink_refs else None)
    mixed_ref[head[:, None], column[None, :]] = mixed.astype(mixed_ref.dtype)
