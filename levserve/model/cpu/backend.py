"""The backend of CPUs: kernels that LLVM compiles for this CPU, for attention, products and whole layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp

from levserve.jit.target import Target, detect_target
from levserve.model import cache
from levserve.model.backend import Likeliest, Product
from levserve.model.cache import Place
from levserve.model.config import ModelConfig
from levserve.model.cpu import argmax, attention, draw, layers, linear, refine
from levserve.model.cpu.forms import Form, forms_of
from levserve.model.cpu.heads import HeadShape
from levserve.model.int8_packing import SIGNED_ORDER, UNSIGNED_ORDER, BlockOrder, is_packable
from levserve.model.parameter_shapes import parameter_shapes
from levserve.model.quantize import is_quantized
from levserve.model.rotary import Angles
from levserve.model.rules import Drawn, Masks, Memory, Rules
from levserve.model.traits import CPU_TRAITS, Traits
from levserve.model.xla import XlaBackend

PLAIN_FIELDS = frozenset(
    "vocab_size hidden_size intermediate_size num_layers num_heads num_kv_heads head_dim norm_eps rope_theta "
    "rope_scaling rotary_size qkv_bias qk_norm windows attention_scale "
    # These do not affect the layers themselves.
    "max_position tied_head embed_scale logit_scale head_bias logit_softcap".split()
)
"""The fields of a config that the whole-layer kernel honours, whatever their value."""


@dataclass(frozen=True)
class CpuBackend(XlaBackend):
    samples_rows = True

    platform: str = "cpu"
    target: Target = field(default_factory=detect_target)
    has_products: bool = False
    """Whether products with matrices are kernels: only if the CPU has an instruction for int8 products."""
    packs_int8: bool = False
    """Whether that instruction is x86's, for which int8 matrices are packed."""
    runs_layers: bool = False

    @property
    def traits(self) -> Traits:
        if not self.runs_layers:
            return CPU_TRAITS
        return replace(
            CPU_TRAITS, leaves_out_padding=True, mixed_context=attention.mixed_context(self.target)
        )

    def describe(self) -> str:
        kernels = ["attention", "sampling"]
        if self.has_products:
            kernels.append("products with packed int8" if self.packs_int8 else "products")
        if self.runs_layers:
            kernels.append("whole layers, which skip padding")
        return f"LLVM kernels for {', '.join(kernels)}"

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
        if sinks is not None:  # the kernel does not support sinks
            return super().mix_values(q, pool, table, positions, window=window, softcap=softcap, sinks=sinks)
        return attention.paged_attention(
            q, pool, table, positions, target=self.target, window=window, softcap=softcap
        )

    def product(
        self, weight: jax.Array, scale: jax.Array | None, *, in_two_terms: bool = False
    ) -> Product | None:
        if weight.ndim == 2 and self._has_product_with(weight, scale):
            return lambda x, num_used: linear.multiply(
                weight, scale, x, num_used, target=self.target, in_two_terms=in_two_terms
            )
        return super().product(weight, scale, in_two_terms=in_two_terms)

    def run_layers(
        self,
        config: ModelConfig,
        x: jax.Array,
        pools: Sequence[jax.Array],
        place: Place,
        angles: Angles,
        layers_arrays: Sequence[Mapping[str, jax.Array]],
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        rope = config.rope(0)
        assert rope is not None
        page_size = pools[0].shape[3]
        head = config.num_kv_heads, config.Group.size, config.head_dim
        shape = layers.ModelShape(
            HeadShape(*head, page_size, cache.numbers_of(pools[0]), self.target),
            num_layers=config.num_layers,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            rotary_size=rope.size,
            norm_eps=config.norm_eps,
            query_scale=config.score_scale,
            array_names=tuple(layers_arrays[0]),
            forms=forms_of(layers_arrays),
        )
        windows = [config.window(index) or 0 for index in range(config.num_layers)]
        return layers.run_layers(shape, x, pools, place, angles, windows, layers_arrays)

    @property
    def refines_logits(self) -> bool:
        return self.has_products

    def refine(
        self, logits: jax.Array, hidden: jax.Array, embed: jax.Array, num_used: jax.Array | None
    ) -> jax.Array:
        if not self.refines_logits or not refine.takes(embed):
            return logits
        return refine.refine_logits(logits, hidden, embed, num_used, target=self.target)

    def likeliest(self, logits: jax.Array, num_used: jax.Array | None = None) -> Likeliest:
        if not self.has_products or num_used is None:
            return super().likeliest(logits)
        return Likeliest(*argmax.argmax_rows(logits, num_used, target=self.target))

    def sample_rows(
        self,
        logits: jax.Array,
        positions: jax.Array,
        rules: Rules,
        memory: Memory,
        masks: Masks,
        num_used: jax.Array,
    ) -> Drawn:
        return draw.draw_rows(logits, positions, rules, memory, masks, num_used, target=self.target)

    @property
    def block_order(self) -> BlockOrder | None:
        if not self.has_products:
            return None
        return UNSIGNED_ORDER if self.packs_int8 else SIGNED_ORDER

    @property
    def can_widen_blocks(self) -> bool:
        return self.packs_int8 and self.target.has_amx_bf16

    def packs(self, kept: jnp.dtype) -> bool:
        return self.packs_int8 and kept == jnp.int8

    def layers_unsupported_reason(
        self, config: ModelConfig, matrices: jnp.dtype, kv_dtype: jnp.dtype
    ) -> str | None:
        """Why the whole-layer kernel cannot serve a model with matrices and KV of these types, or None.

        It serves a model only if every field of the config outside of `PLAIN_FIELDS` has its default, so that
        a new field can never be ignored.
        """
        if config.num_shards > 1:
            return "devices that share a model add up their results within every layer"
        if not self.has_products:
            return "this CPU has no instruction for int8 products"
        others = (each for each in dataclasses.fields(config) if each.name not in PLAIN_FIELDS)
        unknown = [each.name for each in others if getattr(config, each.name) != each.default]
        if unknown:
            return f"the whole-layer kernel does not support these config fields: {', '.join(unknown)}"
        rope = config.rope(0)
        if rope is None:
            return "positions are not rotary"
        if reason := layers.unsupported_reason(config.head_dim, rope.size, kv_dtype):
            return reason
        stored = jnp.dtype(jnp.uint8) if self.packs(matrices) else matrices
        for name, shape in parameter_shapes(config).items():
            if is_quantized(name) and name != "head" and not self._has_product(shape, stored):
                return f"matrices of {shape[0]} x {shape[1]} in {matrices}"
        return None

    def _has_product_with(self, weight: jax.Array, scale: jax.Array | None) -> bool:
        form = Form.of(weight, scale)
        if form.is_widened:
            return True
        if not form.has_four_bits:
            return self._has_product(weight.shape, weight.dtype)
        return self.block_order is not None and self.block_order.takes(len(weight))

    def _has_product(self, shape: tuple[int, ...], dtype: jnp.dtype) -> bool:
        """Whether there is a kernel for products with matrices [out, in] of this type."""
        if dtype == jnp.uint8:
            return is_packable(*shape)
        is_known = dtype == jnp.bfloat16 or (dtype == jnp.int8 and not self.packs_int8)
        return self.has_products and is_known and linear.unsupported_reason(*shape) is None


@dataclass(frozen=True)
class CpuTextBackend(CpuBackend):
    """For models that compute whole texts. They have no pages for the attention kernel to read."""

    def describe(self) -> str:
        return "an LLVM kernel for sampling"


def fit_target(target: Target) -> CpuBackend:
    """The backend for a CPU; whether it runs whole layers is decided later."""
    return CpuBackend(
        target=target,
        has_products=target.has_dot_product or target.has_vnni,
        packs_int8=target.has_vnni,
    )
