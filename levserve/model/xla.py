"""The backend without kernels: XLA serves every model on every device, and is the reference for kernels.

The backends with kernels inherit what they do not override.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from levserve.model import cache, int4_blocks
from levserve.model.attention import attend_in_blocks
from levserve.model.backend import (
    FLOAT32,
    Arrays,
    AttentionShape,
    Backend,
    CompilerOptions,
    HeadNorms,
    Likeliest,
    Mixture,
    PackedProduct,
    Product,
)
from levserve.model.cache import Place, take_ends
from levserve.model.experts import are_few, choose_experts, mix_gathered, mix_in_blocks, mix_in_slots
from levserve.model.int8_blocks import multiply_blocks
from levserve.model.int8_packing import BlockOrder
from levserve.model.packed import PackedMatrix, multiply_packed
from levserve.model.quantize import multiply_rotated
from levserve.model.rotary import Angles, rotate
from levserve.model.search import likeliest
from levserve.model.text_attention import Texts, attend_to_all
from levserve.model.traits import ACCELERATOR_TRAITS, CPU_TRAITS, GPU_TRAITS, Traits

LIBRARY_ROWS = 64
LIBRARY_TOKENS = 1024
"""From this many on a GPU's own library multiplies faster than XLA's Triton kernels, and adds to the residual
stream as well. Measured on an H200, ms with XLA's own and with the library's: an 8B model at 2 / 64 / 256
rows 4.35 / 6.22 / 12.1 and 4.88 / 5.95 / 12.0, a 1B model 1.01 / 1.55 / 3.00 and 1.20 / 1.56 / 2.87;
prefill of 512 and 8,192 tokens of the 1B model 3.5 / 28.6 and 3.8 / 28.0."""


@dataclass(frozen=True)
class XlaBackend(Backend):
    platform: str = "cpu"
    runs_layers = False
    draws_tokens = False
    samples_rows = False
    rounds_products = False

    @property
    def is_cpu(self) -> bool:
        return self.platform == "cpu"

    @property
    def traits(self) -> Traits:
        if self.is_cpu:
            return CPU_TRAITS
        return GPU_TRAITS if self.platform == "gpu" else ACCELERATOR_TRAITS

    def describe(self) -> str:
        return "xla"

    def attend(
        self,
        qkv: jax.Array,
        pool: jax.Array,
        place: Place,
        angles: Angles | None,
        norms: HeadNorms | None,
        ends: jax.Array | None,
        shape: AttentionShape,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        rows, chunk = place.positions.shape
        heads, size = qkv.shape[1] - 2 * shape.kv_heads, qkv.shape[2]
        qkv = qkv.reshape(rows, chunk, -1, size)
        q, k, v = jnp.split(qkv, (heads, heads + shape.kv_heads), axis=2)
        if norms is not None:
            q, k = (self._norm(x, weight, shape.eps) for x, weight in zip((q, k), norms))
        if angles is not None:
            q, k = rotate(q, angles), rotate(k, angles)
        with jax.named_scope("kv_write"):
            pool = cache.write(pool, k, v, place)
        positions = place.positions
        if ends is not None:
            q, positions = take_ends(q, ends), take_ends(positions, ends)
        q = q.reshape(rows, -1, shape.kv_heads, heads // shape.kv_heads, size) * shape.scale
        with jax.named_scope("attend"):
            mixed = self.mix_values(
                q, pool, place.table, positions, window=shape.window, softcap=shape.softcap, sinks=sinks
            )
        return mixed.reshape(rows, -1, heads * size), pool

    def mix_values(
        self,
        q: jax.Array,
        pool: jax.Array,
        table: jax.Array,
        positions: jax.Array,
        *,
        window: int | None = None,
        softcap: float | None = None,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        """Attention of scaled queries [row, chunk, kv_head, group, head_size] over pages already written."""
        return attend_in_blocks(
            q, pool, table, positions, window=window, softcap=softcap, sinks=sinks, on_cpu=self.is_cpu
        )

    def text_scratch(self, rows: int, chunk: int, heads: int, size: int, dtype: jnp.dtype) -> Arrays:
        return ()

    def attend_texts(
        self, qkv: jax.Array, texts: Texts, scratch: Arrays, num_heads: int
    ) -> tuple[jax.Array, Arrays]:
        return attend_to_all(qkv, texts, num_heads), scratch

    def product(
        self, weight: jax.Array, scale: jax.Array | None, *, in_two_terms: bool = False
    ) -> Product | None:
        if scale is None or weight.ndim != 2 or not self.is_cpu:
            return None
        if int4_blocks.is_packed(weight.shape, scale.shape):
            return lambda x, num_used: int4_blocks.multiply_nibbles(weight, scale, x)
        if scale.ndim == 2:
            return lambda x, num_used: multiply_blocks(weight, scale, x, in_two_terms=in_two_terms)
        return lambda x, num_used: multiply_rotated(weight, scale, x)

    def packed_product(
        self, matrix: PackedMatrix, widened: jnp.dtype, summed: jnp.dtype = FLOAT32
    ) -> PackedProduct:
        return lambda x, num_used: multiply_packed(matrix, x, widened, summed)

    def mean(self, x: jax.Array) -> jax.Array:
        """On a CPU XLA adds in an order that depends on the number of rows, and the last bit of a sum can
        decide which integer an activation is rounded to. The order of `sum_pairwise` is always the same."""
        return sum_pairwise(x) / x.shape[-1] if self.is_cpu else jnp.mean(x, axis=-1, keepdims=True)

    def mix_experts(self, x: jax.Array, scores: jax.Array, is_real: jax.Array, experts: Mixture) -> jax.Array:
        rule = experts.rule
        num_experts = rule.num_experts
        choice = choose_experts(scores, rule.per_token, rule.routing, experts.correction)
        if self.is_cpu:
            return mix_in_blocks(x, choice, is_real, experts, num_experts)
        if are_few(choice.experts.size, num_experts):
            return mix_gathered(x, choice, experts)
        return mix_in_slots(x, choice, is_real, experts, num_experts)

    def _norm(self, x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
        return x * lax.rsqrt(self.mean(jnp.square(x)) + eps) * weight[None, None, None]

    def likeliest(self, logits: jax.Array, num_used: jax.Array | None = None) -> Likeliest:
        """On a CPU XLA's maximum of a large array overlooks NaN, so a row is also searched for it."""
        best = likeliest(logits)
        if not self.is_cpu:
            return best
        return best._replace(values=jnp.where(jnp.isnan(logits).any(-1), jnp.nan, best.values))

    def kv_storage(self, dtype: jnp.dtype) -> jnp.dtype:
        """On a CPU, types that XLA does not compute in are stored as their bits.

        jaxlib 0.10 converts the whole pool to float32 and back for every bfloat16 scatter (100 ms for 32,768
        slots against 10 us); later versions compute in bfloat16.
        """
        is_known = not self.is_cpu or (dtype == jnp.bfloat16 and jax.__version_info__ >= (0, 11))
        return dtype if is_known else cache.BITS.get(dtype, dtype)

    def expert_storage(self, dtype: jnp.dtype) -> jnp.dtype:
        """jaxlib on a CPU converts a whole bfloat16 array to float32 to take a slice of it in a loop."""
        return cache.BITS.get(dtype, dtype) if self.is_cpu else dtype

    def multiplied_in(self, dtype: jnp.dtype) -> jnp.dtype | None:
        return None if self.is_cpu else dtype

    @property
    def block_order(self) -> BlockOrder | None:
        return None

    @property
    def can_widen_blocks(self) -> bool:
        return False

    def packs(self, kept: jnp.dtype) -> bool:
        return False

    def compiler_options(self, *, num_tokens: int, is_prefill: bool, is_quantized: bool) -> CompilerOptions:
        is_large = num_tokens >= (LIBRARY_TOKENS if is_prefill else LIBRARY_ROWS)
        if self.platform != "gpu" or not is_large or is_quantized:
            return {}
        return {"xla_gpu_enable_triton_gemm": False}


XLA_ON_CPU = XlaBackend("cpu")


def sum_pairwise(x: jax.Array) -> jax.Array:
    """Adds the second half of the last axis to the first until one value is left."""
    while (size := x.shape[-1]) > 1:
        half = size // 2
        pairs = x[..., :half] + x[..., half : 2 * half]
        x = jnp.concatenate([pairs[..., :-1], pairs[..., -1:] + x[..., -1:]], -1) if size % 2 else pairs
    return x
