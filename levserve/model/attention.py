"""Attention of a few queries per row over the row's pages.

One function, `attend`, behind which a CPU's own kernel may stand; an NVIDIA GPU's, which norm, turn and write as well, stand
behind `gpu_attention.attend_heads`. Which one it is, is chosen once, at start. The plain XLA one walks the page tables in
blocks with a running softmax and stops after the last block any row needs. So a batch pays for its longest row, not for the
model's maximum length, and one compiled program serves every context length.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import jax
import jax.numpy as jnp
from jax import lax

from levserve.model.cache import NUMBERS, from_bits, from_storage, multiplied_in
from levserve.model.config import ModelConfig
from levserve.model.gpu import paged_attention

FEW_QUERIES = 16
"""Of a row, at most: then attention is all reading of keys and values."""
FEW_BLOCK_TOKENS = 64
"""Tokens of each row looked at together for few queries: the next multiple of it is what a row costs."""
BLOCK_TOKENS = 256
"""The same for many queries, whose running softmax is the cost: fewer, larger steps."""
MASKED = -1e30
LOWEST = -1e20
"""Where the running maximum starts: below any score, and so far above a masked one that its weight is zero."""


class Kernel(StrEnum):
    XLA = "xla"
    LLVM = "llvm"
    """Written for the CPU at hand."""
    LLVM_DOT = "llvm-dot"
    """The same on an ARM CPU that sums products of int8 in one instruction: there products with matrices are written too."""
    LLVM_VNNI = "llvm-vnni"
    """The same on an x86 CPU that sums products of int8 in one instruction, for which matrices are packed."""
    LLVM_AMX = "llvm-amx"
    """The same for few queries on a CPU with matrix units, which multiply bfloat16 many times as fast as float32: many take XLA."""
    TRITON = "triton"
    """A Pallas kernel for NVIDIA GPUs."""


CPU_FEATURES = {
    "amx_bf16": Kernel.LLVM_AMX,
    "asimddp": Kernel.LLVM_DOT,
    "avx512_vnni": Kernel.LLVM_VNNI,
    "avx_vnni": Kernel.LLVM_VNNI,
}
"""What Linux calls what decides between the CPU's."""


def choose_kernel(
    platform: str, config: ModelConfig, cpu_features: str = "", narrow: jnp.dtype | None = None
) -> tuple[Kernel, str]:
    """The best kernel that can serve the model on this platform, and why, in words for the log."""
    if platform == "cpu":
        from levserve.model.cpu import attention as cpu_attention  # and LLVM with it, which others do without

        reason = cpu_attention.refuse_unservable(config.head_dim)
        has = [kernel for feature, kernel in CPU_FEATURES.items() if feature in cpu_features.split()]
        kernel = (
            Kernel.LLVM_VNNI
            if narrow == jnp.int8 and Kernel.LLVM_VNNI in has
            else next(iter(has), Kernel.LLVM)
        )
        return (
            (Kernel.XLA, f"the CPU kernel does not take {reason}")
            if reason is not None
            else (kernel, "written for this CPU")
        )
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
    has_few = q.shape[1] * q.shape[3] <= FEW_QUERIES
    if kernel in (Kernel.LLVM, Kernel.LLVM_DOT, Kernel.LLVM_VNNI) or (kernel is Kernel.LLVM_AMX and has_few):
        from levserve.model.cpu import attention as cpu_attention

        return cpu_attention.paged_attention(q, pool, table, positions, window=window, softcap=softcap)
    return _attend_in_blocks(
        q, pool, table, positions, window, softcap, in_bfloat16=has_few or kernel is Kernel.LLVM_AMX
    )


def _attend_in_blocks(
    q: jax.Array,
    pool: jax.Array,
    table: jax.Array,
    positions: jax.Array,
    window: int | None,
    softcap: float | None,
    *,
    in_bfloat16: bool,
) -> jax.Array:
    rows, chunk, kv_heads, group, size = q.shape
    queries = chunk * group
    page_size = pool.shape[3]
    block_tokens = FEW_BLOCK_TOKENS if queries <= FEW_QUERIES else BLOCK_TOKENS
    block = min(max(block_tokens // page_size, 1), table.shape[1])  # pages
    width = block * page_size
    table = jnp.pad(
        table, ((0, 0), (0, -table.shape[1] % block)), mode="edge"
    )  # so that a slice at the end is not moved back
    tiles = pool.reshape(-1, page_size * size)  # [page * 2 * kv_head, slot * head_size]
    read, dtype = _reader(pool.dtype, is_bfloat16=queries > 1 and in_bfloat16)

    q = q.transpose(0, 2, 1, 3, 4).reshape(rows, kv_heads, queries, size).astype(dtype)
    seen_to = jnp.repeat(positions, group, axis=1)[:, None, :, None]  # [row, 1, query, 1]

    def gather(pages: jax.Array, half: int) -> jax.Array:
        """Keys or values of these pages [row, block], as [row, kv_head, token, head_size], in which order no copy is needed."""
        numbers = ((pages * 2 + half) * kv_heads)[:, None] + jnp.arange(kv_heads, dtype=jnp.int32)[
            None, :, None
        ]
        stored = tiles.at[numbers].get(mode="promise_in_bounds", wrap_negative_indices=False)
        if stored.dtype not in NUMBERS:
            stored = lax.optimization_barrier(
                stored
            )  # so that tiles are copied as they lie: by rows it takes twice as long
        return read(stored.reshape(rows, kv_heads, width, size))

    def mix_block(
        index: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        mixed, top, total = carry
        pages = lax.dynamic_slice_in_dim(table, index * block, block, axis=1)
        scores = jnp.einsum("rkmd,rktd->rkmt", q, gather(pages, 0), preferred_element_type=jnp.float32)
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        at = index * width + jnp.arange(width, dtype=jnp.int32)[None, None, None]
        is_seen = at <= seen_to
        if window is not None:
            is_seen &= at > seen_to - window
        scores = jnp.where(is_seen, scores, MASKED)
        new_top = jnp.maximum(top, scores.max(-1))
        shrink = jnp.exp(top - new_top)
        weights = jnp.exp(scores - new_top[..., None])
        new = jnp.einsum(
            "rkmt,rktd->rkmd", weights.astype(dtype), gather(pages, 1), preferred_element_type=jnp.float32
        )
        return mixed * shrink[..., None] + new, new_top, total * shrink + weights.sum(-1)

    start = (
        jnp.zeros((rows, kv_heads, queries, size), jnp.float32),
        jnp.full((rows, kv_heads, queries), LOWEST, jnp.float32),
        jnp.zeros((rows, kv_heads, queries), jnp.float32),
    )
    num_blocks = jnp.maximum(positions.max(), 0) // width + 1
    mixed, _, total = lax.fori_loop(jnp.int32(0), num_blocks.astype(jnp.int32), mix_block, start)
    mixed = mixed / jnp.maximum(total, 1e-30)[..., None]  # a padding query sees nothing and gets zeros
    return mixed.reshape(rows, kv_heads, chunk, group, size).transpose(0, 2, 1, 3, 4)


def _reader(storage: jnp.dtype, *, is_bfloat16: bool) -> tuple[Callable[[jax.Array], jax.Array], jnp.dtype]:
    """How stored keys and values become the factors of a product, and in which type those are multiplied.

    On a CPU a few queries are multiplied in bfloat16, which halves what is read. One query alone has no fast bfloat16 product
    there, and for many the float32 one is faster than what widening costs, but where there are matrix units.
    """
    if NUMBERS.get(storage, storage) != jnp.bfloat16 or jax.default_backend() != "cpu":
        return from_storage, multiplied_in(storage)
    if is_bfloat16:
        return from_bits, jnp.dtype(jnp.bfloat16)
    return lambda x: from_storage(x).astype(jnp.float32), jnp.dtype(jnp.float32)
