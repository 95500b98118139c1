"""Queries over their rows' pages on a CPU.

XLA would gather the pages first and multiply matrices of three rows: here a step of 32 rows takes a third of
the time. A piece of the work is some neighbouring queries of one row over one key-value head; how many there
are decides how they are taken.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from levserve.jit.builder import F32, Builder, Value
from levserve.jit.target import Target
from levserve.jit.xla_call import Call, Kernel, Work, register
from levserve.model.cache import Place, numbers_of
from levserve.model.cpu import few_queries as cpu_few_queries
from levserve.model.cpu import many_queries as cpu_many_queries
from levserve.model.cpu.heads import LANES, Given, Heads, Part


def takes_many(target: Target) -> bool:
    """Whether many queries are taken in another way than few; where it was not measured, they are not."""
    return target.vector_bytes > 16


def mixed_context(target: Target) -> int:
    """Where a prompt's chunk may begin, at most, to be computed beside decoding rows: few that are neighbours
    read all keys one by one."""
    return 2**31 if takes_many(target) else 256


def refuse_unservable(head_dim: int) -> str | None:
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
    """As `attend`, of queries that are scaled."""
    _, _, kv_heads, group, size = q.shape
    name = register(kernel_for(Heads(kv_heads, group, size, pool.shape[3], numbers_of(pool), target)))
    limits = (
        jnp.asarray([0 if window is None else window], jnp.int32),
        jnp.asarray([softcap or 0.0], jnp.float32),
    )
    return jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(q.shape, jnp.float32))(
        q.astype(jnp.float32), pool, table, positions, *limits
    )


def kernel_for(heads: Heads) -> Kernel:
    """For arguments q [row, chunk, kv_head, group, size], pool, table [row, page], positions [row, chunk],
    window, softcap."""
    name = f"levserve_attend_{heads.numbers}_{heads.kv_heads}_{heads.group}_{heads.size}_{heads.page_size}"
    token_bytes = heads.kv_heads * heads.group * heads.size * 4

    def given(call: Call) -> Given:
        q, pool, table, positions, window, softcap = map(call.argument, range(6))
        builder = call.builder
        limits = builder.index(window, builder.number(0)), builder.load(softcap, F32)
        sizes = call.argument_size(0, 1), call.argument_size(2, 1)
        return Given(q, call.result(0), token_bytes, token_bytes, pool, table, positions, *limits, *sizes)

    def count(call: Call) -> Value:
        return num_pieces(heads, given(call), call.argument_size(0, 0))

    def attend(call: Call, _: Value, own: Value, piece: Value) -> None:
        attend_part(call.builder, heads, given(call), own, piece)

    works = (Work(count, attend),)
    return Kernel(name, heads.target, works, own_bytes=lambda call: own_bytes(heads, given(call)))


def join(place: Place, heads: Heads) -> jax.Array:
    """What `Given.joined` is for rows of one token each: neighbours that are written to the same page have
    the same pages before it.

    So a prompt's tokens beside decoding rows read their keys together, if they are enough for that.
    """
    rows, chunk = place.positions.shape
    together = max(cpu_many_queries.most_queries(heads.target) // heads.group, 1)
    most, many = math.gcd(heads.page_size, 2 ** int(math.log2(together))), _many(heads)
    if chunk > 1 or most * heads.group < many or not takes_many(heads.target):
        return jnp.ones(rows, jnp.int32)
    blocks = place.pages * (heads.page_size // most) + place.offsets // most
    is_first = jnp.concatenate([jnp.ones(1, bool), blocks[1:] != blocks[:-1]])
    which = jnp.cumsum(is_first)
    count = (which[:, None] == which[None]).sum(1, dtype=jnp.int32)
    is_worth_it = (count * heads.group >= many) & (place.positions[:, 0] >= 0)
    return jnp.where(is_worth_it, jnp.where(is_first, count, 0), 1)


def num_pieces(heads: Heads, given: Given, rows: Value) -> Value:
    return rows * heads.kv_heads * _num_parts(heads, given)


def own_bytes(heads: Heads, given: Given) -> Value:
    few, many = (kind.own_bytes(heads, given) for kind in (cpu_few_queries, cpu_many_queries))
    return few.most(many) if takes_many(heads.target) else few


def attend_part(builder: Builder, heads: Heads, given: Given, own: Value, piece: Value) -> None:
    parts, queries = _num_parts(heads, given), given.num_queries(heads)
    pair, number = piece // parts, piece % parts
    row, head = pair // heads.kv_heads, pair % heads.kv_heads
    each = (queries + (parts - 1)) // parts  # of 5 there are 3 and 2, not 4 and 1
    first = number * each
    held = (queries - first).least(each).most(0)
    if given.joined is not None:
        joined = (queries >= _many(heads)).choose(builder.number(1), builder.index(given.joined, row))
        with_others = number.is_(0).choose(joined * heads.group, 0)
        first, held = joined.is_(1).choose(first, 0), joined.is_(1).choose(held, with_others)
    part = Part(builder, heads, given, row, head, first, held)
    with builder.when(held < cpu_few_queries.MOST + 1):
        cpu_few_queries.attend_few(builder, heads, given, own, part)
    if takes_many(heads.target):
        with builder.when(held >= cpu_few_queries.MOST + 1):
            cpu_many_queries.attend_many(builder, heads, given, own, part)


def _num_parts(heads: Heads, given: Given) -> Value:
    """Of the queries of one row and head."""
    few = given.num_parts(heads, cpu_few_queries.MOST)
    many = given.num_parts(heads, cpu_many_queries.most_queries(heads.target))
    return (given.num_queries(heads) >= _many(heads)).choose(many, few) if takes_many(heads.target) else few


def _many(heads: Heads) -> int:
    """Queries of a row and head: with fewer, most lanes would be left over."""
    return cpu_many_queries.most_queries(heads.target) // 2
