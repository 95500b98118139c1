"""Builds the parts of a decoder from its arrays, which it finds by name.

The names and shapes are those of `parameter_shapes`; a quantized matrix has further arrays beside it. The
model is rebuilt in this way inside every trace, so nothing here computes.
"""

from __future__ import annotations

from collections.abc import Mapping

import haliax as hax
import jax
from haliax import Axis, NamedArray

from levserve.model.backend import Backend
from levserve.model.config import Latent, ModelConfig
from levserve.model.feed_forward import Experts, Mlp
from levserve.model.latent_attention import LATENT_NORM_EPS, LatentAttention
from levserve.model.layer import Attention, Layer
from levserve.model.linear import Linear
from levserve.model.norm import Norm
from levserve.model.packed import SCALE, Kept, PackedMatrix
from levserve.model.quantize import Quantization


class Assembly:
    """Builds the parts of one decoder. `at` is the prefix of the names of a layer's arrays."""

    def __init__(
        self,
        config: ModelConfig,
        arrays: Mapping[str, jax.Array],
        backend: Backend,
        quantization: Quantization | Kept | None,
    ) -> None:
        self._config = config
        self._arrays = arrays
        self._backend = backend
        self._widened = None if quantization is None else quantization.widened
        self._schemes = quantization.by_name() if isinstance(quantization, Kept) else {}
        self._is_shared = config.num_shards > 1

    def layer(self, index: int) -> Layer:
        config, at = self._config, f"layers.{index}."
        return Layer(
            self.norm(at + "input_norm", config.Embed),
            self._attention(at) if config.latent is None else self._latent_attention(at, config.latent),
            self.norm(at + "attention_post_norm", config.Embed),
            self.norm(at + "mlp_norm", config.Embed),
            self._mixture(at) if config.is_mixture(index) else self._mlp(at, config.dense_width),
            self.norm(at + "mlp_post_norm", config.Embed),
        )

    def optional(self, name: str, *axes: Axis) -> NamedArray | None:
        """An array that the model may not have."""
        return hax.named(self._arrays[name], axes) if name in self._arrays else None

    def linear(self, name: str, Out: Axis, In: Axis, *stacked: Axis, is_expert: bool = False) -> Linear:
        config, arrays, backend = self._config, self._arrays, self._backend
        bias = self.optional(f"{name}_bias", *stacked, Out)
        # Products that are added to the residual stream are never rounded: every bit counts there.
        rounds = backend.rounds_products and Out.name in (config.QKV.name, config.GateUp.name)
        # Experts' results are summed over devices only after they are mixed.
        is_partial = self._is_shared and Out == config.Embed and not is_expert
        if name in self._schemes:
            matrix = PackedMatrix.from_arrays(arrays, self._schemes[name], (*stacked, Out, In), name)
            return Linear(matrix, bias, None, backend, rounds, self._widened, is_partial)
        inner = In.resize(arrays[name].shape[-1])  # a byte may hold two codes
        weight, scale = hax.named(arrays[name], (*stacked, Out, inner)), None
        if name + SCALE in arrays:
            of_blocks = [Axis("block", size) for size in arrays[name + SCALE].shape[1:]]
            scale = hax.named(arrays[name + SCALE], (Out, *of_blocks))
        widened = None if scale is None else self._widened
        return Linear(weight, bias, scale, backend, rounds, widened, is_partial, in_two_terms=name == "head")

    def norm(self, name: str, *over: Axis, eps: float | None = None) -> Norm | None:
        """A norm over these axes, if the model has it; `eps` is the config's unless another is given."""
        config = self._config
        if name not in self._arrays:
            return None
        weight = self._arrays[name].reshape([axis.size for axis in over])
        bias = self.optional(f"{name}_bias", *over)
        is_partial = self._is_shared and over[0] in (config.Heads, config.KVHeads)
        eps = config.norm_eps if eps is None else eps
        return Norm(hax.named(weight, over), bias, eps, config.has_layer_norms, self._backend, is_partial)

    def _attention(self, at: str) -> Attention:
        config = self._config
        q_over, k_over = ([config.Heads], [config.KVHeads]) if config.qk_norm_spans_heads else ([], [])
        return Attention(
            config,
            self._backend,
            self.linear(at + "qkv", config.QKV, config.Embed),
            self.linear(at + "out", config.Embed, config.Mixed),
            self.norm(at + "q_norm", *q_over, config.HeadSize),
            self.norm(at + "k_norm", *k_over, config.HeadSize),
            self.optional(at + "sinks", config.Heads),
        )

    def _latent_attention(self, at: str, latent: Latent) -> LatentAttention:
        config = self._config
        KVRank, QueryRank = Axis("kv_rank", latent.kv_rank), config.Embed
        q_down = None
        if latent.query_rank is not None:
            QueryRank = self._rows_of(at, "q_down")
            q_down = self.linear(at + "q_down", QueryRank, config.Embed)
        kv_down_norm = self.norm(at + "kv_down_norm", KVRank, eps=LATENT_NORM_EPS)
        assert kv_down_norm is not None
        return LatentAttention(
            config,
            self._backend,
            q_down,
            self.norm(at + "q_down_norm", QueryRank, eps=LATENT_NORM_EPS),
            self.linear(at + "q", self._rows_of(at, "q"), QueryRank),
            self.linear(at + "kv_down", self._rows_of(at, "kv_down"), config.Embed),
            kv_down_norm,
            self.linear(at + "kv_up", self._rows_of(at, "kv_up"), KVRank),
            self.linear(at + "out", config.Embed, config.Mixed),
        )

    def _rows_of(self, at: str, name: str) -> Axis:
        """The output axis of a matrix, named after it."""
        return Axis(name, self._arrays[at + name].shape[0])

    def _mlp(self, at: str, width: int, *stacked: Axis, is_expert: bool = False) -> Mlp:
        config = self._config
        gate_up = self.linear(at + "gate_up", config.gate_up(width), config.Embed, *stacked)
        Width = Axis(config.Mlp.name, width)
        down = self.linear(at + "down", config.Embed, Width, *stacked, is_expert=is_expert)
        return Mlp(config, gate_up, down)

    def _mixture(self, at: str) -> Experts:
        config, shared = self._config, self._config.shared_size
        Gate = Axis("gate", 1)
        return Experts(
            config,
            self._backend,
            self.linear(at + "router", config.Expert, config.Embed),
            self._mlp(at + "experts_", config.intermediate_size, config.Expert, is_expert=True),
            self.optional(at + "router_correction", config.Expert),
            self._mlp(at + "shared_", shared, is_expert=True) if shared else None,
            self.linear(at + "shared_gate", Gate, config.Embed) if config.has_shared_gate else None,
        )
