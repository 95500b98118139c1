"""Queries over their rows' pages on a CPU.

XLA would gather the pages first and multiply matrices of three rows: here a step of 32 rows takes a third of the time. A piece
of the work is some neighbouring queries of one row over one key-value head; how many there are decides how they are taken.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from levserve.model.cache import numbers_of
from levserve.model.kernels import cpu_few_queries, cpu_many_queries
from levserve.model.kernels.cpu_heads import LANES, Given, Heads
from levserve.model.kernels.handler import Call, Kernel, Work, register
from levserve.model.kernels.writer import F32, Value, Writer, vector_bytes

MANY = cpu_many_queries.MOST // 2
"""Queries of a row and head: with fewer, most lanes would be left over."""
HAS_MANY = vector_bytes() > 16
"""Where it was not measured, all are few."""


def refuse_unservable(head_dim: int) -> str | None:
    """Why this kernel cannot serve a model, or None."""
    if head_dim % LANES:
        return f"a head size of {head_dim} (it takes multiples of {LANES})"
    return None


def paged_attention(
    q: jax.Array, pool: jax.Array, table: jax.Array, positions: jax.Array, *, window: int | None = None, softcap: float | None = None
) -> jax.Array:
    """As `attend`, of queries that are scaled."""
    _, _, kv_heads, group, size = q.shape
    numbers = numbers_of(pool)
    name = f"levserve_attend_{numbers}_{kv_heads}_{group}_{size}_{pool.shape[3]}"
    register(name, kernel_for(Heads(kv_heads, group, size, pool.shape[3], numbers)))
    limits = jnp.asarray([0 if window is None else window], jnp.int32), jnp.asarray([softcap or 0.0], jnp.float32)
    return jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(q.shape, jnp.float32))(q.astype(jnp.float32), pool, table, positions, *limits)


def kernel_for(heads: Heads) -> Kernel:
    """For arguments q [row, chunk, kv_head, group, size], pool, table [row, page], positions [row, chunk], window, softcap."""
    token_bytes = heads.kv_heads * heads.group * heads.size * 4

    def given(call: Call) -> Given:
        q, pool, table, positions, window, softcap = map(call.argument, range(6))
        writer = call.writer
        limits = writer.index(window, writer.number(0)), writer.load(softcap, F32)
        sizes = call.argument_size(0, 1), call.argument_size(2, 1)
        return Given(q, call.result(0), token_bytes, token_bytes, pool, table, positions, *limits, *sizes)

    def count(call: Call) -> Value:
        return num_pieces(heads, given(call), call.argument_size(0, 0))

    def attend(call: Call, _: Value, own: Value, piece: Value) -> None:
        attend_part(call.writer, heads, given(call), own, piece)

    return Kernel((Work(count, attend),), own_bytes=lambda call: own_bytes(heads, given(call)))


def num_pieces(heads: Heads, given: Given, rows: Value) -> Value:
    few, many = (given.num_parts(heads, kind.MOST) for kind in (cpu_few_queries, cpu_many_queries))
    return rows * heads.kv_heads * (_are_many(heads, given).choose(many, few) if HAS_MANY else few)


def own_bytes(heads: Heads, given: Given) -> Value:
    few, many = (kind.own_bytes(heads, given) for kind in (cpu_few_queries, cpu_many_queries))
    return _are_many(heads, given).choose(many, few) if HAS_MANY else few


def attend_part(writer: Writer, heads: Heads, given: Given, own: Value, piece: Value) -> None:
    if not HAS_MANY:
        return cpu_few_queries.attend_few(writer, heads, given, own, piece)
    with writer.when(_are_many(heads, given)):
        cpu_many_queries.attend_many(writer, heads, given, own, piece)
    with writer.when(given.num_queries(heads) < MANY):
        cpu_few_queries.attend_few(writer, heads, given, own, piece)


def _are_many(heads: Heads, given: Given) -> Value:
    return given.num_queries(heads) >= MANY
