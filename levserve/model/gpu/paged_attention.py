"""Attention over the pages of rows as a Pallas kernel for NVIDIA GPUs; decode attention shares its parts.

Every program of the grid takes a block of neighbouring queries of one row, one key-value head and one split
of the row's positions, and goes through the keys a step at a time with a running softmax. Keys are read in
place, with one index per position: such loads are two-dimensional, and Triton pipelines them. Loading whole
pages and reshaping them would cost half the bandwidth. Splits exist so that a few rows still fill the GPU:
each has an equal part of the row's keys, and their results are merged afterwards.
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

from levserve.model.cache import FP8, multiplied_in
from levserve.model.gpu.shared_memory import most_stages

MASKED = -1e30
LOG2_E = math.log2(math.e)
"""Queries are multiplied by it, so that `exp2` computes the weights of the softmax."""
MIN_ROWS = 16
"""Rows of the smallest matrix product a tensor core takes; a group of query heads is repeated to fill it."""
QUERY_BLOCK, BLOCK_ROWS = 16, 64
"""Queries of a row that prefill takes together: at least `QUERY_BLOCK`, and more if their query heads fill no
more than `BLOCK_ROWS` rows of a product."""
MANY_HEADS, MOST_ROWS = 32, 256
"""Groups of more than `MANY_HEADS` query heads have fewer queries, whose heads fill `MOST_ROWS` rows: 1,024
rows would not fit into shared memory, and 512 take three times as long to compile as 256."""
FEWEST_KEYS = 16
"""Keys of the smallest product."""
NUM_PROCESSORS = 132
"""Processors (SMs) of an H200, for which the number of splits is chosen."""
MANY_QUERY_PROGRAMS, ONE_QUERY_PROGRAMS = 2 * NUM_PROCESSORS, 8 * NUM_PROCESSORS
"""Programs that fill the GPU: those of many queries have 4 or 8 warps, those of one query 1 or 2."""

Carry = tuple[jax.Array, jax.Array, jax.Array]
"""A running softmax: the values mixed so far, the largest score and the sum of the weights."""


class Tiling(NamedTuple):
    """The tile sizes of a program; measured on an H200 with 32-token pages."""

    keys: int
    """Positions read in one step."""
    num_warps: int
    num_stages: int


FEW_QUERIES = {128: Tiling(64, 1, 2), 256: Tiling(64, 2, 2), 512: Tiling(32, 2, 2), 1024: Tiling(16, 2, 2)}
"""For one query per row, by the most bytes of a key: reading takes all of the time then."""
UNSPLIT = {128: Tiling(64, 1, 3), 256: Tiling(64, 2, 3)}
"""The same where rows are not split and have one program per head. The programs of a long row end last,
almost alone: with one more stage in flight they read faster."""
FEW_QUERIES_OF_FP8 = Tiling(32, 1, 3)
"""The same for keys in fp8 of any size."""
WIDEN_FP8 = (
    "{ .reg .b16 low, high; mov.b32 {low, high}, $2; "
    "cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }"
)
"""Widens four fp8 values in one register to float16 in two."""


@functools.partial(jax.jit, static_argnames=("window", "softcap", "splits", "interpret"))
def paged_attention(
    q: jax.Array,
    pool: jax.Array,
    table: jax.Array,
    positions: jax.Array,
    sinks: jax.Array | None = None,
    *,
    window: int | None = None,
    softcap: float | None = None,
    splits: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """The mixed values, shaped like q and in the pool's type, or in float16 if that is fp8.

    q [row, chunk, kv_head, group, head_size], scaled and multiplied by `LOG2_E`; pool [page, 2, kv_head,
    page_size, head_size]; table [row, page]; positions [row, chunk] of the queries, negative for padding,
    which comes last. Multiplies in the type of the result and sums in float32. Scores are limited by
    `softcap`. `sinks` [query head] are scores without a value. By default there are enough `splits` to fill
    the GPU.
    """
    rows, chunk, kv_heads, group, size = q.shape
    page_size = pool.shape[3]
    queries, tiling = choose_block(q.shape, pool.dtype)
    num_blocks = rows * chunk // queries
    table, num_steps = pad_table(table, page_size, tiling.keys)
    splits = splits or choose_splits(
        num_blocks * kv_heads, num_steps, ONE_QUERY_PROGRAMS if queries == 1 else MANY_QUERY_PROGRAMS
    )

    kernel = functools.partial(
        _kernel,
        keys=tiling.keys,
        splits=splits,
        num_steps=num_steps,
        has_sinks=sinks is not None and splits == 1,
        window=window,
        softcap=softcap,
        interpret=interpret,
    )
    flat = (num_blocks * queries, kv_heads, group, size)
    dtype = multiplied_in(pool.dtype)
    by_block = pl.BlockSpec((queries, None, group, size), lambda h, s, b: (last - b, h, 0, 0))
    # The last queries of a prompt see the most keys, so they start first.
    blocks_per_row, last = chunk // queries, num_blocks - 1
    out_specs, out_shape = [by_block], [jax.ShapeDtypeStruct(flat, dtype)]
    if splits > 1:
        out_specs = [pl.BlockSpec((None, queries, None, group, size), lambda h, s, b: (s, last - b, h, 0, 0))]
        out_specs += [pl.BlockSpec((None, queries, None, group), lambda h, s, b: (s, last - b, h, 0))] * 2
        out_shape = [
            jax.ShapeDtypeStruct((splits, *shape), jnp.float32) for shape in (flat, flat[:3], flat[:3])
        ]
    in_specs = [
        by_block,
        pl.BlockSpec((pool.shape[0], 2, None, page_size, size), lambda h, s, b: (0, 0, h, 0, 0)),
        pl.BlockSpec((None, table.shape[1]), lambda h, s, b: ((last - b) // blocks_per_row, 0)),
        pl.BlockSpec((queries,), lambda h, s, b: (last - b,)),
    ]
    by_head = None if sinks is None else scaled_sinks(sinks, kv_heads)
    in_kernel = [by_head] if by_head is not None and splits == 1 else []
    in_specs += [pl.BlockSpec((None, group), lambda h, s, b: (h, 0))] * len(in_kernel)
    result = pl.pallas_call(
        kernel,
        grid=(kv_heads, splits, num_blocks),
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        compiler_params=plgpu.CompilerParams(num_warps=tiling.num_warps, num_stages=tiling.num_stages),
        interpret=interpret,
        name="paged_attention",
    )(q.reshape(flat).astype(dtype), pool, table, positions.reshape(-1), *in_kernel)
    if splits == 1:
        return result[0].reshape(q.shape)
    mixed, tops, totals = result
    return merge(mixed, tops, totals, by_head).astype(dtype).reshape(q.shape)


def choose_block(shape: tuple[int, ...], dtype: jnp.dtype) -> tuple[int, Tiling]:
    """How many queries of a row a program takes together, for q of this shape, and how it is tiled: as few
    queries as needed for its tiles to fit into the card's shared memory."""
    rows, chunk, kv_heads, group, size = shape
    heads = power_of_two(group)
    fewest = QUERY_BLOCK if heads <= MANY_HEADS else MOST_ROWS // heads
    queries = math.gcd(chunk, max(fewest, BLOCK_ROWS // heads, 1))
    while True:
        tiling = choose_tiling(queries, size, dtype, rows * chunk // queries * kv_heads)
        fitted = fit_memory(tiling, max(queries * heads, MIN_ROWS), size, dtype)
        if fitted is not None or queries == 1:
            return queries, fitted or tiling
        queries //= 2


def fit_memory(tiling: Tiling, num_rows: int, size: int, dtype: jnp.dtype) -> Tiling | None:
    """The tiling with as many stages, or else keys, as the card's shared memory has room for beside the rows
    of queries; None if there is too little for any."""
    size, multiplied = power_of_two(size), multiplied_in(dtype).itemsize
    keys = tiling.keys
    while keys >= FEWEST_KEYS:
        stage = 2 * keys * size * dtype.itemsize
        # Where a product has more columns than rows, several warps share each row, and exchange its weights.
        weights = num_rows * keys * multiplied if num_rows < size else 0
        stages = most_stages(tiling.num_stages, stage, num_rows * size * multiplied + weights)
        if stages is not None:
            return tiling._replace(keys=keys, num_stages=stages)
        keys //= 2
    return None


def choose_tiling(queries: int, size: int, dtype: jnp.dtype, num_programs: int) -> Tiling:
    """How a program is tiled on an H200. Larger keys take shorter steps: keys and values of all stages share
    227 KB."""
    key_bytes = size * dtype.itemsize
    if queries == 1 and dtype == FP8:
        return FEW_QUERIES_OF_FP8
    if queries == 1:
        # On the same condition `choose_splits` gives one split; it also does if there is only one step.
        by_bytes = FEW_QUERIES | UNSPLIT if 2 * num_programs > ONE_QUERY_PROGRAMS else FEW_QUERIES
        return next(tiling for most, tiling in by_bytes.items() if key_bytes <= most)
    if key_bytes <= 256:
        return Tiling(64, num_warps=4, num_stages=3)
    return Tiling(32 if key_bytes <= 512 else 16, num_warps=8, num_stages=2)


def choose_splits(num_programs: int, num_steps: int, wanted: int) -> int:
    most = 8 if num_programs >= NUM_PROCESSORS // 4 else 16  # more than 8 are merged by two kernels
    splits = min(max(wanted // num_programs, 1), most, num_steps)
    return 1 << (splits.bit_length() - 1)


def split_steps(
    start: jax.Array, end: jax.Array, split: jax.Array, splits: int, num_steps: int
) -> tuple[jax.Array, jax.Array]:
    """This split's part of the steps from `start` to `end`, which are at most `num_steps`.

    For a single split the number of steps is a constant: if it is computed, fp8 is read a quarter slower.
    """
    each = num_steps if splits == 1 else (end - start + splits - 1) // splits
    start = start + split * each
    return start, jnp.minimum(start + each, end)


def pad_table(table: jax.Array, page_size: int, keys: int) -> tuple[jax.Array, int]:
    """The table, padded so that no step reads beyond it, and its number of steps."""
    unread = -table.shape[1] % max(keys // page_size, 1)
    table = jnp.pad(table, ((0, 0), (0, unread)), mode="edge")
    return table, -(-table.shape[1] * page_size // keys)


def merge(mixed: jax.Array, tops: jax.Array, totals: jax.Array, sinks: jax.Array | None = None) -> jax.Array:
    """Merges the splits, the first axis, one by one: XLA would compile sums over it to separate kernels.

    `sinks` come from `scaled_sinks`.
    """
    splits = range(len(tops))
    top = functools.reduce(jnp.maximum, (tops[split] for split in splits))
    if sinks is not None:
        top = jnp.maximum(top, sinks[None])
    weights = [jnp.exp2(tops[split] - top) for split in splits]  # an empty split weighs nothing
    total = functools.reduce(jnp.add, (totals[split] * weights[split] for split in splits))
    if sinks is not None:
        total = total + jnp.exp2(sinks[None] - top)
    summed = functools.reduce(jnp.add, (mixed[split] * weights[split][..., None] for split in splits))
    return summed / jnp.maximum(total, 1e-30)[..., None]


def scaled_sinks(sinks: jax.Array, kv_heads: int) -> jax.Array:
    """Sinks [query head] as [kv_head, group], multiplied like the queries."""
    return sinks.reshape(kv_heads, -1) * LOG2_E


def divide(carry: Carry, sinks: jax.Array | None) -> jax.Array:
    """The mixed values of a finished softmax [query, column], to which `sinks` [query] are added if given."""
    mixed, top, total = carry
    if sinks is not None:
        new_top = jnp.maximum(top, sinks)
        shrink = jnp.exp2(top - new_top)
        mixed, total = mixed * shrink[:, None], total * shrink + jnp.exp2(sinks - new_top)
    return mixed / jnp.maximum(total, 1e-30)[:, None]


def power_of_two(number: int) -> int:
    """The number rounded up to a power of two: Triton takes no other sizes."""
    return 1 << (number - 1).bit_length()


class Columns(NamedTuple):
    """The columns of a head. A size that is not a power of two is padded by repeating the last column."""

    size: int
    is_bounded: bool = False
    """Whether a bound is computed even where it changes nothing. This hides from Triton that columns are
    neighbours; otherwise Triton reads them together and keeps the queries of decoding in 168 registers
    instead of 130, so that fewer programs run at once."""

    @property
    def padded(self) -> int:
        return power_of_two(self.size)

    @property
    def numbers(self) -> jax.Array:
        numbers = jnp.arange(self.padded)
        return jnp.minimum(numbers, self.size - 1) if self.is_bounded or self.padded > self.size else numbers

    def masked(self, x: jax.Array) -> jax.Array:
        """[row, column] with zeros in place of repeated columns."""
        if self.padded == self.size:
            return x
        return jnp.where(jnp.arange(self.padded)[None, :] < self.size, x, jnp.zeros_like(x))


def attend_keys(
    q: jax.Array,
    pool_ref: jax.Ref,
    table_ref: jax.Ref,
    steps: tuple[jax.Array, jax.Array],
    visible: tuple[jax.Array | None, jax.Array],
    carry: Carry,
    *,
    keys: int,
    softcap: float | None,
    interpret: bool,
) -> Carry:
    """Adds the keys of these steps to the running softmax of q [query, column].

    Only positions from the first to the last of `visible` count; the first may be None.
    """
    page_size, size = pool_ref.shape[2:]
    columns = Columns(size)
    first, last = visible

    def load(half: int, page: jax.Array, slot: jax.Array) -> jax.Array:
        if columns.padded == size:
            return widen(pool_ref[page, half, slot, :], q.dtype, interpret)
        return widen(
            pool_ref[page[:, None], half, slot[:, None], columns.numbers[None, :]], q.dtype, interpret
        )

    def pages_of(step: jax.Array) -> jax.Array:
        """The page of each key of the step, or any page if there is no such step."""
        return table_ref[jnp.minimum((step * keys + jnp.arange(keys)) // page_size, table_ref.shape[0] - 1)]

    def mix(step: jax.Array, carry: tuple[jax.Array, Carry]) -> tuple[jax.Array, Carry]:
        page, (mixed, top, total) = carry
        at = step * keys + jnp.arange(keys)
        slot = at % page_size
        # One step ahead: otherwise Triton counts this load among its stages, and the keys of only one step
        # are in flight.
        following = pages_of(step + 1)
        scores = jnp.dot(q, load(0, page, slot).T, preferred_element_type=jnp.float32)
        if softcap is not None:
            scores = apply_softcap(scores, softcap)
        is_visible = at[None, :] <= last
        if first is not None:
            is_visible &= at[None, :] >= first
        scores = jnp.where(is_visible, scores, MASKED)
        new_top = jnp.maximum(top, scores.max(-1))
        shrink = jnp.exp2(top - new_top)
        weights = jnp.exp2(scores - new_top[:, None])
        new = jnp.dot(weights.astype(q.dtype), load(1, page, slot), preferred_element_type=jnp.float32)
        return following, (mixed * shrink[:, None] + new, new_top, total * shrink + weights.sum(-1))

    return lax.fori_loop(*steps, mix, (pages_of(steps[0]), carry))[1]


def widen(x: jax.Array, dtype: jnp.dtype, interpret: bool) -> jax.Array:
    """Widens fp8 four values at a time; Triton's own conversion unpacks and repacks them."""
    if x.dtype != FP8 or interpret:
        return x.astype(dtype)
    given = jax.ShapeDtypeStruct(x.shape, jnp.float16)
    (wide,) = plgpu.elementwise_inline_asm(
        WIDEN_FP8, args=[x], constraints="=r,=r,r", pack=4, result_shape_dtypes=[given]
    )
    return wide.astype(dtype)


def apply_softcap(scores: jax.Array, softcap: float) -> jax.Array:
    cap = softcap * LOG2_E
    return cap * jnp.tanh(scores / cap)


def _kernel(
    q_ref: jax.Ref,
    pool_ref: jax.Ref,
    table_ref: jax.Ref,
    position_ref: jax.Ref,
    *refs: jax.Ref,
    keys: int,
    splits: int,
    num_steps: int,
    has_sinks: bool,
    window: int | None,
    softcap: float | None,
    interpret: bool,
) -> None:
    sink_refs, (mixed_ref, *sum_refs) = refs[:has_sinks], refs[has_sinks:]
    queries, group, size = q_ref.shape
    # Sizes that are not powers of two are padded by repeating: a repeated head computes and stores the same
    # values twice.
    heads = max(power_of_two(group), MIN_ROWS // queries)
    row = jnp.arange(queries * heads)
    query, head = row // heads, row % group if queries == 1 else jnp.minimum(row % heads, group - 1)
    columns = Columns(size)
    place = (query[:, None], head[:, None], columns.numbers[None, :])
    position = position_ref[query][:, None]
    start, end = jnp.int32(0), jnp.max(position_ref[jnp.arange(queries)]) // keys + 1
    first = None
    if window is not None:
        start = jnp.maximum((position_ref[0] - window + 1) // keys, 0)
        first = position - window + 1
    empty = (
        jnp.zeros((queries * heads, columns.padded), jnp.float32),
        jnp.full((queries * heads,), MASKED, jnp.float32),
        jnp.zeros((queries * heads,), jnp.float32),
    )
    q = columns.masked(q_ref[place])
    steps, visible = split_steps(start, end, pl.program_id(1), splits, num_steps), (first, position)
    mixed, top, total = attend_keys(
        q, pool_ref, table_ref, steps, visible, empty, keys=keys, softcap=softcap, interpret=interpret
    )
    if sum_refs:
        top_ref, total_ref = sum_refs
        top_ref[query, head], total_ref[query, head] = top, total
    else:
        mixed = divide((mixed, top, total), sink_refs[0][head] if sink_refs else None)
    mixed_ref[place] = mixed.astype(mixed_ref.dtype)
