"""A layer's attention on an NVIDIA GPU: the one door to its Pallas kernels."""

from __future__ import annotations

import jax

from levserve.model.cache import Place, take_ends
from levserve.model.gpu.decode_attention import decode_attention
from levserve.model.gpu.heads import HeadNorms, place_heads
from levserve.model.gpu.paged_attention import paged_attention
from levserve.model.rotary import Angles


def attend_heads(
    qkv: jax.Array,
    pool: jax.Array,
    place: Place,
    angles: Angles | None,
    norms: HeadNorms | None,
    ends: jax.Array | None,
    *,
    kv_heads: int,
    scale: float,
    eps: float,
    window: int | None,
    softcap: float | None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """qkv [row * chunk, head, head_size] as it comes from the fused matrix, queries before keys before values. Norms and turns it,
    writes keys and values to the pool, and gives what the chunk's queries, or those at its `ends`, mix, [row * chunk or row,
    query head, head_size], and the pool.
    """
    if place.positions.shape[1] == 1:
        return decode_attention(
            qkv,
            pool,
            place.table,
            place.positions[:, 0],
            angles,
            norms,
            kv_heads=kv_heads,
            scale=scale,
            eps=eps,
            window=window,
            softcap=softcap,
            interpret=interpret,
        )
    q, pool = place_heads(
        qkv, pool, place, angles, norms, kv_heads=kv_heads, scale=scale, eps=eps, interpret=interpret
    )
    positions = place.positions
    if ends is not None:
        q, positions = take_ends(q, ends), take_ends(positions, ends)
    mixed = paged_attention(
        q, pool, place.table, positions, window=window, softcap=softcap, interpret=interpret
    )
    return mixed.reshape(-1, qkv.shape[1] - 2 * kv_heads, qkv.shape[2]), pool
