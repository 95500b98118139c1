"""Attention of a few queries per row over the row's pages.

One function, `attend`, behind which a backend's own kernel may stand; which one is chosen once, at start. The plain XLA one
walks the page tables in blocks with a running softmax and stops after the last block any row needs. So a batch pays for its
longest row, not for the model's maximum length, and one compiled program serves every context length.
"""

from __future__ import annotations

from enum import StrEnum

import jax
import jax.numpy as jnp
from jax import lax

from levserve.model.cache import from_storage
from levserve.model.config import ModelConfig
from levserve.model.kernels import paged_attention

BLOCK_TOKENS = 256
"""Tokens of each row looked at together: one pass for short chats, and a small loop overhead for long ones."""
MASKED = -1e30


class Kernel(StrEnum):
    XLA = "xla"
    TRITON = "triton"
    """A Pallas kernel for NVIDIA GPUs."""


def choose_kernel(platform: str, config: ModelConfig) -> tuple[Kernel, str]:
    """The best kernel that can serve the model on this platform, and why, in words for the log."""
    if platform != "gpu":
        return Kernel.XLA, f"the {platform} has no kernel of its own"
    reason = paged_attention.refuse_unservable(config.head_dim)
    if reason is not None:
        return Kernel.XLA, f"the GPU kernel does not take {reason}"
    return Kernel.TRITON, "an NVIDIA GPU"


def attend(
    q: jax.Array,
    pool: jax.Array,
    table: jax.Array,
    positions: jax.Array,
    *,
    window: int | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    kernel: Kernel = Kernel.XLA,
) -> jax.Array:
    """Mixes the values every query may see: those at or before its position, within the window if there is one.

    q [row, chunk, kv_head, group, head_size] float32; pool as in `cache`; table [row, page]; positions [row, chunk], negative
    for padding. Scores are multiplied by `scale` and then bent to stay within `softcap`. Gives q's shape, in float32 or in the
    type that a kernel computes in.
    """
    q = q * scale
    if kernel is Kernel.TRITON:
        return paged_attention.paged_attention(q, pool, table, positions, window=window, softcap=softcap)
    return _attend_in_blocks(q, pool, table, positions, window, softcap)


def _attend_in_blocks(
    q: jax.Array, pool: jax.Array, table: jax.Array, positions: jax.Array, window: int | None, softcap: float | None
) -> jax.Array:
    """Dots run in float32 on CPU, where bits are stored (XLA has no bfloat16 batched dot on ARM, and widening the gathered
    block costs less than the gather), and in the pool's own type elsewhere."""
    rows, chunk, kv_heads, group, size = q.shape
    page_size = pool.shape[3]
    block = min(max(BLOCK_TOKENS // page_size, 1), table.shape[1])  # pages
    width = block * page_size
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % block)), mode="edge")  # so that a slice at the end is not moved back

    dtype = jnp.dtype(jnp.float32) if pool.dtype == jnp.uint16 else pool.dtype
    q = q.transpose(0, 2, 1, 3, 4).reshape(rows, kv_heads, chunk * group, size).astype(dtype)
    seen_to = jnp.repeat(positions, group, axis=1)[:, None, :, None]  # [row, 1, chunk * group, 1]

    def mix_block(index: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        mixed, top, total = carry
        pages = lax.dynamic_slice_in_dim(table, index * block, block, axis=1)
        stored = pool.at[pages].get(mode="promise_in_bounds", wrap_negative_indices=False)
        entries = from_storage(stored)  # [row, block, 2, kv_head, page_size, head_size]
        keys, values = entries.transpose(2, 0, 3, 1, 4, 5).reshape(2, rows, kv_heads, width, size)
        scores = jnp.einsum("rkmd,rktd->rkmt", q, keys, preferred_element_type=jnp.float32)
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        at = index * width + jnp.arange(width, dtype=jnp.int32)[None, None, None]
        is_seen = at <= seen_to
        if window is not None:
            is_seen &= at > seen_to - window
        scores = jnp.where(is_seen, scores, MASKED)
        new_top = jnp.maximum(top, scores.max(-1))
        shrink = jnp.exp(top - new_top)
        weights = jnp.where(is_seen, jnp.exp(scores - new_top[..., None]), 0.0)
        mixed = mixed * shrink[..., None] + jnp.einsum("rkmt,rktd->rkmd", weights.astype(dtype), values, preferred_element_type=jnp.float32)
        return mixed, new_top, total * shrink + weights.sum(-1)

    start = (
        jnp.zeros((rows, kv_heads, chunk * group, size), jnp.float32),
        jnp.full((rows, kv_heads, chunk * group), MASKED, jnp.float32),
        jnp.zeros((rows, kv_heads, chunk * group), jnp.float32),
    )
    num_blocks = jnp.maximum(positions.max(), 0) // width + 1
    mixed, _, total = lax.fori_loop(jnp.int32(0), num_blocks.astype(jnp.int32), mix_block, start)
    mixed = mixed / jnp.maximum(total, 1e-30)[..., None]  # a padding query sees nothing and gets zeros
    return mixed.reshape(rows, kv_heads, chunk, group, size).transpose(0, 2, 1, 3, 4)
