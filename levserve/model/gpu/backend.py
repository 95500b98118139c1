"""The backend for NVIDIA GPUs: Pallas kernels for attention, experts, packed matrices and sampling.

Most kernels use Pallas' Triton backend, which jax announces as deprecated. All Triton kernels are reached
through this file, so each can be replaced separately. Wide experts with many tokens have a Mosaic GPU kernel.
Matrices of four and eight bits have a kernel in PTX, handed to XLA the same way as Triton's kernels; where
XLA does not accept it, they are stored in a different order, for a Triton kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from levserve.model.backend import (
    FLOAT32,
    Arrays,
    AttentionShape,
    ExpertChoice,
    HeadNorms,
    Likeliest,
    Mixture,
    PackedProduct,
)
from levserve.model.cache import Place, take_ends
from levserve.model.config import ModelConfig
from levserve.model.experts import are_few, mix_gathered
from levserve.model.experts import choose_experts as choose_by_rule
from levserve.model.fp8_rows import Fp8Rows
from levserve.model.gpu.decode_attention import decode_attention
from levserve.model.gpu.draw import draw_tokens
from levserve.model.gpu.expert_blocks import BLOCK
from levserve.model.gpu.expert_choice import choose_experts, is_plain
from levserve.model.gpu.expert_plan import (
    WIDENED_FROM,
    Plan,
    bytes_to_widen,
    choose_plan,
    stored,
    takes_packed,
)
from levserve.model.gpu.fp8_activations import group_to_round, multiply_rounded
from levserve.model.gpu.fragment_plan import choose_fragments, takes
from levserve.model.gpu.fragment_product import multiply_fragments, runs_here
from levserve.model.gpu.gate import Gate
from levserve.model.gpu.grouped_experts import FLOAT32_PRECISION, mix_grouped
from levserve.model.gpu.heads import place_heads
from levserve.model.gpu.hopper import is_hopper
from levserve.model.gpu.mosaic_experts import mix_blocks, mix_fp8_blocks, mix_tiles
from levserve.model.gpu.mosaic_fp8_plan import serves_fp8
from levserve.model.gpu.mosaic_plan import is_faster, is_faster_below, serves
from levserve.model.gpu.packed_plan import MAX_ROWS, choose_tiling
from levserve.model.gpu.packed_product import multiply_in_registers
from levserve.model.gpu.paged_attention import paged_attention
from levserve.model.gpu.round_fp8 import MAX_WIDTH, round_gated, round_normed
from levserve.model.packed import PackedMatrix, Scheme
from levserve.model.parameter_shapes import parameter_shapes
from levserve.model.rotary import Angles
from levserve.model.text_attention import Texts
from levserve.model.traits import GPU_KERNEL_TRAITS, Traits
from levserve.model.xla import XlaBackend

HEAD_SIZES = range(16, 257)
TEXT_PAGE = 32
"""Tokens per page of a text's keys and values; texts are padded to a multiple of it."""


def unsupported_reason(head_dim: int) -> str | None:
    """Why these kernels cannot serve a model, or None."""
    if head_dim not in HEAD_SIZES:
        return f"a head size of {head_dim} (it takes {HEAD_SIZES[0]} to {HEAD_SIZES[-1]})"
    return None


class ExpertKernels(StrEnum):
    """Which kernels compute the experts' products."""

    AUTO = "auto"
    """Chosen by the table in `mosaic_plan`."""
    TRITON = "triton"
    MOSAIC = "mosaic"
    """Mosaic GPU wherever possible."""
    BOTH = "both"
    """Triton for the first product and Mosaic GPU for the second, wherever possible."""


@dataclass(frozen=True)
class GpuBackend(XlaBackend):
    platform: str = "gpu"
    interpret: bool = False
    """Whether jax interprets the kernels, which needs no GPU; for tests."""
    expert_kernels: ExpertKernels = ExpertKernels.AUTO
    draws_tokens = True
    rounds_products = True

    @property
    def float32_precision(self) -> str:
        """Three tensor-core products, which are three times as fast as one product without tensor cores."""
        return super().float32_precision if self.interpret else FLOAT32_PRECISION.name

    @property
    def traits(self) -> Traits:
        return GPU_KERNEL_TRAITS

    def describe(self) -> str:
        return "pallas kernels for attention, experts, packed matrices and sampling, XLA for the rest"

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
        positions = place.positions
        rows, chunk = positions.shape
        limits = {"window": shape.window, "softcap": shape.softcap, "interpret": self.interpret}
        heads = {"kv_heads": shape.kv_heads, "scale": shape.scale, "eps": shape.eps}
        if chunk == 1:
            mixed, pool = decode_attention(
                qkv, pool, place.table, positions[:, 0], angles, norms, sinks, **heads, **limits
            )
            return mixed.reshape(rows, 1, -1), pool
        q, pool = place_heads(qkv, pool, place, angles, norms, **heads, interpret=self.interpret)
        if ends is not None:
            q, positions = take_ends(q, ends), take_ends(positions, ends)
        mixed = paged_attention(q, pool, place.table, positions, sinks, **limits)
        return mixed.reshape(rows, positions.shape[1], -1), pool

    def text_scratch(self, rows: int, chunk: int, heads: int, size: int, dtype: jnp.dtype) -> Arrays:
        """Room for the keys and values of all texts, as consecutive pages."""
        return (jnp.zeros((-(-rows * chunk // TEXT_PAGE), 2, heads, TEXT_PAGE, size), dtype),)

    def attend_texts(
        self, qkv: jax.Array, texts: Texts, scratch: Arrays, num_heads: int
    ) -> tuple[jax.Array, Arrays]:
        """Uses the prompts' kernels. Every query gets its text's last position, so it sees the whole text."""
        rows, chunk, width = qkv.shape
        assert chunk % TEXT_PAGE == 0, "a page belongs to one text"
        size = width // (3 * num_heads)
        numbers = np.arange(rows * chunk, dtype=np.int32).reshape(rows, chunk)
        pages, offsets = (jnp.asarray(part.reshape(-1)) for part in np.divmod(numbers, TEXT_PAGE))
        table = jnp.asarray(numbers[:, ::TEXT_PAGE] // TEXT_PAGE)
        place = Place(table, texts.ends, pages, offsets, jnp.asarray([rows * chunk], jnp.int32))
        q, pool = place_heads(
            qkv.reshape(rows * chunk, -1, size),
            scratch[0],
            place,
            texts.angles,
            kv_heads=num_heads,
            scale=size**-0.5,
            interpret=self.interpret,
        )
        mixed = paged_attention(q, pool, table, texts.ends, interpret=self.interpret)
        return mixed.reshape(rows, chunk, -1), (pool,)

    def arrange(self, scheme: Scheme, shape: tuple[int, ...], widened: jnp.dtype) -> Scheme | None:
        if self.interpret or widened != jnp.bfloat16:
            return scheme
        if len(shape) == 3:
            return scheme if takes_packed(scheme, shape, widened) else None
        if takes(shape, scheme) and runs_here():
            return replace(scheme, in_lanes=True)
        return None if scheme.has_offsets else scheme

    def rounds_packed(self, num_rows: int) -> bool:
        return num_rows > MAX_ROWS  # The kernels for fewer rows write float32.

    def packed_product(
        self, matrix: PackedMatrix, widened: jnp.dtype, summed: jnp.dtype = FLOAT32
    ) -> PackedProduct:
        plain = super().packed_product(matrix, widened, summed)
        num_columns, num_inputs = (axis.size for axis in matrix.axes)

        def multiply(x: jax.Array | Fp8Rows, num_used: jax.Array | None) -> jax.Array:
            num_rows = len(x.codes if isinstance(x, Fp8Rows) else x)
            given = (num_rows, (num_columns, num_inputs), matrix.scheme)
            if widened != jnp.bfloat16:
                return plain(x, num_used)
            if matrix.scheme.rounds_rows:
                product = multiply_rounded(matrix, x, summed, interpret=self.interpret)
                return plain(x, num_used) if product is None else product
            assert not isinstance(x, Fp8Rows)
            fragments = choose_fragments(*given, is_hopper=is_hopper())
            if fragments is not None:
                return multiply_fragments(matrix, x, tiling=fragments)
            tiling = choose_tiling(*given)
            if tiling is None:
                return plain(x, num_used)
            return multiply_in_registers(matrix, x.astype(widened), tiling=tiling, interpret=self.interpret)

        return multiply

    def round_normed(
        self, x: jax.Array, weight: jax.Array, eps: float, matrix: PackedMatrix, widened: jnp.dtype
    ) -> Fp8Rows | None:
        group = group_to_round(len(x), matrix)
        if group is None or widened != jnp.bfloat16 or x.shape[1] > MAX_WIDTH:
            return None
        return round_normed(x, weight, eps=eps, group=group, interpret=self.interpret)

    def round_gated(
        self, x: jax.Array, config: ModelConfig, matrix: PackedMatrix, widened: jnp.dtype
    ) -> Fp8Rows | None:
        group = group_to_round(len(x), matrix)
        if group is None or widened != jnp.bfloat16:
            return None
        gate = Gate(config.activation, config.is_gated, config.gate_limit, config.up_offset)
        return round_gated(x, gate=gate, group=group, interpret=self.interpret)

    def scratch_bytes(self, config: ModelConfig, schemes: Mapping[str, Scheme]) -> int:
        shapes = parameter_shapes(config)
        layers = [
            f"layers.{index}.experts_" for index in range(config.num_layers) if config.is_mixture(index)
        ]
        names = ([f"{layer}{part}" for part in ("gate_up", "down")] for layer in layers)
        return max(
            (bytes_to_widen(*((schemes.get(name), shapes[name]) for name in both)) for both in names),
            default=0,
        )

    def mix_experts(self, x: jax.Array, scores: jax.Array, is_real: jax.Array, experts: Mixture) -> jax.Array:
        x, experts = self._widened_for_prompts(x, experts)
        rule, (gate_up, down), dtype = experts.rule, experts.matrices, experts.dtype
        plan = choose_plan(len(x), rule, gate_up, down, dtype)
        if plan is None:
            return super().mix_experts(x, scores, is_real, experts)
        choice = self._choose_experts(scores, is_real, experts)
        is_packed = isinstance(gate_up, PackedMatrix) or isinstance(down, PackedMatrix)
        if not is_packed and are_few(choice.experts.size, rule.num_experts):
            known = jnp.minimum(choice.experts, rule.num_experts - 1)
            total = mix_gathered(x, choice._replace(experts=known), experts)
        elif (arrays := self._matrices_for_mosaic(experts)) and self._uses_mosaic(len(x), experts):
            total = mix_blocks(x.astype(dtype), choice, *arrays, gate=plan.gate)
        elif packed := self._fp8_for_mosaic(len(x), experts):
            total = mix_fp8_blocks(x.astype(dtype), choice, *packed, gate=plan.gate)
        else:
            given = x.astype(dtype), choice, gate_up, down, experts.biases
            total = mix_grouped(*given, plan=plan, interpret=self.interpret)
        return jnp.where(is_real[:, None], total, 0.0)

    def add_experts(
        self, added: jax.Array, x: jax.Array, scores: jax.Array, is_real: jax.Array, experts: Mixture
    ) -> jax.Array:
        x, experts = self._widened_for_prompts(x, experts)
        plan, matrices = self._plan_of_both(len(x), experts), self._matrices_for_mosaic(experts)
        if plan is None or matrices is None:
            return super().add_experts(added, x, scores, is_real, experts)
        choice = self._choose_experts(scores, is_real, experts)
        return mix_tiles(x.astype(experts.dtype), choice, *matrices, added, is_real, plan=plan)

    def _widened_for_prompts(self, x: jax.Array, experts: Mixture) -> tuple[jax.Array, Mixture]:
        rule, given = experts.rule, (stored(matrix) for matrix in experts.matrices)
        is_prompt = len(x) * rule.per_token > WIDENED_FROM * rule.num_experts
        if not is_prompt or experts.dtype != jnp.bfloat16 or not bytes_to_widen(*given):
            return x, experts
        # XLA moves invariants out of loops, and would keep the widened matrices of all layers in memory.
        x, experts = lax.optimization_barrier((x, experts))
        return x, experts.widened()

    def _plan_of_both(self, num_tokens: int, experts: Mixture) -> Plan | None:
        """The plan for Triton's first product if Mosaic GPU computes the second, else None."""
        kernels, matrices = self.expert_kernels, self._matrices_for_mosaic(experts)
        if matrices is None or self._uses_mosaic(num_tokens, experts):
            return None
        is_chosen = kernels is ExpertKernels.AUTO and is_faster_below(num_tokens, experts.rule)
        if not is_chosen and kernels is not ExpertKernels.BOTH:
            return None
        plan = choose_plan(num_tokens, experts.rule, *matrices, experts.dtype)
        return plan if plan is not None and plan.size == 2 * BLOCK and plan.rounds else None

    def _uses_mosaic(self, num_tokens: int, experts: Mixture) -> bool:
        """Whether Mosaic GPU, not Triton, computes both products."""
        kernels, matrices = self.expert_kernels, self._matrices_for_mosaic(experts)
        if matrices is None or kernels in (ExpertKernels.TRITON, ExpertKernels.BOTH):
            return False
        return kernels is ExpertKernels.MOSAIC or is_faster(num_tokens, experts.rule, matrices[1].shape[2])

    def _matrices_for_mosaic(self, experts: Mixture) -> tuple[jax.Array, jax.Array] | None:
        """The experts' matrices if Mosaic GPU can multiply them, else None."""
        gate_up, down = experts.matrices
        if isinstance(gate_up, PackedMatrix) or isinstance(down, PackedMatrix):
            return None
        if self.interpret or experts.biases is not None or not is_hopper():
            return None
        return (gate_up, down) if serves(experts.rule, gate_up, down) else None

    def _fp8_for_mosaic(self, num_tokens: int, experts: Mixture) -> tuple[PackedMatrix, PackedMatrix] | None:
        """The experts' matrices if Mosaic GPU should multiply them as FP8, else None."""
        gate_up, down = experts.matrices
        if not (isinstance(gate_up, PackedMatrix) and isinstance(down, PackedMatrix)):
            return None
        if self.interpret or experts.biases is not None or experts.dtype != jnp.bfloat16 or not is_hopper():
            return None
        is_chosen = self.expert_kernels is not ExpertKernels.TRITON
        return (gate_up, down) if is_chosen and serves_fp8(num_tokens, experts.rule, gate_up, down) else None

    def _choose_experts(self, scores: jax.Array, is_real: jax.Array, experts: Mixture) -> ExpertChoice:
        """The experts of each token; padding gets the number of experts in place of an expert."""
        rule = experts.rule
        if is_plain(rule.routing):
            return choose_experts(scores, is_real, rule, interpret=self.interpret)
        choice = choose_by_rule(scores, rule.per_token, rule.routing, experts.correction)
        return choice._replace(experts=jnp.where(is_real[:, None], choice.experts, rule.num_experts))

    def draw(
        self,
        logits: jax.Array,
        temperature: jax.Array,
        top_k: jax.Array,
        top_p: jax.Array,
        min_p: jax.Array,
        points: jax.Array,
        positions: jax.Array,
        words: jax.Array,
        at: jax.Array,
        slots: jax.Array,
    ) -> Likeliest:
        given = (logits, temperature, top_k, top_p, min_p, points, positions, words, at, slots)
        return Likeliest(*draw_tokens(*given, interpret=self.interpret))
