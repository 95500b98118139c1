"""The decoder: one forward pass for prefill and decode, over paged KV.

Named-axis Haliax inside. The hot call passes flat tuples of arrays, and the model is rebuilt from its leaves
inside the trace (`device/rounds.py`). Every layer goes through one inner jit, so thirty equal layers are
traced and lowered once.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from levserve.model import cache
from levserve.model.backend import AttentionShape, Backend, HeadNorms
from levserve.model.balance import BALANCE
from levserve.model.cache import Place, take_ends
from levserve.model.config import Latent, ModelConfig
from levserve.model.feed_forward import CHUNK, ROW, Experts, Mlp
from levserve.model.latent_attention import LATENT_NORM_EPS, LatentAttention
from levserve.model.linear import Linear
from levserve.model.norm import Norm, apply
from levserve.model.packed import SCALE, Kept, PackedMatrix
from levserve.model.parameter_shapes import parameter_shapes
from levserve.model.quantize import Quantization
from levserve.model.rotary import Angles, angles_at
from levserve.model.sharding import gather_over_devices, look_up_over_devices
from levserve.model.xla import XLA_ON_CPU


class Attention(eqx.Module):
    config: ModelConfig = eqx.field(static=True)
    backend: Backend = eqx.field(static=True)
    qkv: Linear
    out: Linear
    q_norm: Norm | None
    k_norm: Norm | None
    sinks: NamedArray | None

    def __call__(
        self,
        x: NamedArray,
        pool: jax.Array,
        place: Place,
        angles: Angles | None,
        ends: jax.Array | None,
        *,
        norm: Norm | None,
        window: int | None,
    ) -> tuple[NamedArray, jax.Array]:
        """Writes the chunk's keys and values, then attends to all that the chunk, or its `ends`, may see.

        The norm, if there is one, comes first.
        """
        config = self.config
        shape = AttentionShape(
            config.num_kv_heads, config.score_scale, config.norm_eps, window, config.attention_softcap
        )
        heads, norms = self._heads(self.qkv.of_normed(x, norm, place.num_used))
        sinks = None if self.sinks is None else self.sinks.array
        mixed, pool = self.backend.attend(heads, pool, place, angles, norms, ends, shape, sinks)
        num_used = place.num_used if ends is None else None
        return self.out(hax.named(mixed, (ROW, CHUNK, config.Mixed.name)), num_used), pool

    def _heads(self, qkv: NamedArray) -> tuple[jax.Array, HeadNorms | None]:
        """[row * chunk, head, head_size], and the norms that are still to be applied to each head."""
        config = self.config
        if config.qk_norm_spans_heads:
            queries, keys, values = self._split(qkv)
            parts = [apply(self.q_norm, queries), apply(self.k_norm, keys), values]
            arrays = [part.rearrange((ROW, CHUNK, ..., config.HeadSize)).array for part in parts]
            return jnp.concatenate([array.reshape(-1, *array.shape[2:]) for array in arrays], axis=1), None
        array = qkv.rearrange((ROW, CHUNK, "qkv")).array
        array = array.reshape(-1, config.QKV.size // config.head_dim, config.head_dim)
        if self.qkv.bias is None:
            # As it comes: another type would be another kernel.
            array = array.astype(self.qkv.product_dtype(len(array)))
        if self.q_norm is None or self.k_norm is None:
            return array, None
        return array, HeadNorms(self.q_norm.weight.array, self.k_norm.weight.array)

    def _split(self, qkv: NamedArray) -> tuple[NamedArray, NamedArray, NamedArray]:
        """Cuts the fused projection into queries, keys and values by head."""
        config = self.config
        num_q, num_kv = config.num_heads, config.num_kv_heads

        def heads(start: int, Head: Axis) -> NamedArray:
            part = qkv["qkv", start * config.head_dim : (start + Head.size) * config.head_dim]
            return part.unflatten_axis("qkv", (Head, config.HeadSize))

        return heads(0, config.Heads), heads(num_q, config.KVHeads), heads(num_q + num_kv, config.KVHeads)


class Layer(eqx.Module):
    """One layer; a norm that the model does not have is None."""

    input_norm: Norm | None
    attention: Attention | LatentAttention
    attention_post_norm: Norm | None
    mlp_norm: Norm | None
    mlp: Mlp | Experts
    mlp_post_norm: Norm | None

    @property
    def arrays(self) -> dict[str, jax.Array]:
        """The arrays of a layer without post-norms and experts, by name; absent ones are left out."""
        attention = self.attention
        assert isinstance(self.mlp, Mlp) and isinstance(attention, Attention)
        named: dict[str, NamedArray | None] = {"qkv_bias": attention.qkv.bias}
        for name, norm in (
            ("input_norm", self.input_norm),
            ("q_norm", attention.q_norm),
            ("k_norm", attention.k_norm),
            ("mlp_norm", self.mlp_norm),
        ):
            named[name] = None if norm is None else norm.weight
        for name, linear in (
            ("qkv", attention.qkv),
            ("out", attention.out),
            ("gate_up", self.mlp.gate_up),
            ("down", self.mlp.down),
        ):
            assert isinstance(linear.weight, NamedArray)  # no kernel runs layers of packed matrices
            named |= {name: linear.weight, f"{name}_scale": linear.scale}
        return {name: array.array for name, array in named.items() if array is not None}


@functools.partial(jax.jit, static_argnames=("window",))
def run_layer(
    layer: Layer,
    x: NamedArray,
    pool: jax.Array,
    place: Place,
    angles: Angles | None,
    ends: jax.Array | None,
    *,
    window: int | None,
) -> tuple[NamedArray, jax.Array]:
    """With `ends`, only that place of each chunk is computed to the end; all keys and values are written."""
    mixed, pool = layer.attention(x, pool, place, angles, ends, norm=layer.input_norm, window=window)
    num_used: jax.Array | None = place.num_used
    if ends is not None:
        x = hax.named(take_ends(x.rearrange((ROW, CHUNK, "embed")).array, ends), (ROW, CHUNK, "embed"))
        place, num_used = place._replace(positions=take_ends(place.positions, ends)), None
    config = layer.attention.config
    added = x + apply(layer.attention_post_norm, mixed) * config.residual_scale
    with jax.named_scope("mlp"):
        mlp_norm = layer.input_norm if config.shares_norm else layer.mlp_norm
        fed = x if config.is_parallel else added
        if isinstance(layer.mlp, Mlp):
            fed = layer.mlp(fed, num_used, mlp_norm)
        else:
            normed, is_real = apply(mlp_norm, fed), place.positions >= 0
            if layer.mlp_post_norm is None and config.residual_scale == 1.0:
                return layer.mlp.add_to(added, normed, is_real), pool
            fed = layer.mlp(normed, is_real)
        return added + apply(layer.mlp_post_norm, fed) * config.residual_scale, pool


class Decoder(eqx.Module):
    """A whole model. Activations are float32 between the products; weights and KV have their own types."""

    config: ModelConfig = eqx.field(static=True)
    embed: NamedArray
    positions: NamedArray | None
    layers: tuple[Layer, ...]
    final_norm: Norm
    head: Linear | None
    head_balance: NamedArray | None
    """What hidden states are multiplied with before the head, if its matrix is balanced."""
    backend: Backend = eqx.field(static=True)

    @staticmethod
    def from_arrays(
        config: ModelConfig,
        arrays: Mapping[str, jax.Array],
        *,
        backend: Backend = XLA_ON_CPU,
        quantization: Quantization | Kept | None = None,
    ) -> Decoder:
        """Builds the model from the arrays that `parameter_shapes` names, or from quantized ones."""
        assert arrays.keys() == parameter_shapes(config).keys() or any(
            name.endswith("_scale") for name in arrays
        )

        widened = None if quantization is None else quantization.widened
        is_shared = config.num_shards > 1
        schemes = quantization.by_name() if isinstance(quantization, Kept) else {}

        def optional(name: str, *axes: Axis) -> NamedArray | None:
            return hax.named(arrays[name], axes) if name in arrays else None

        def linear(name: str, Out: Axis, In: Axis, *stacked: Axis, is_expert: bool = False) -> Linear:
            bias = optional(f"{name}_bias", *stacked, Out)
            # Products that are added to the residual stream are never rounded: every bit counts there.
            rounds = backend.rounds_products and Out.name in (config.QKV.name, config.GateUp.name)
            # The devices' experts are added up after they are mixed.
            is_partial = is_shared and Out == config.Embed and not is_expert
            axes = (*stacked, Out, In)
            if name in schemes:
                matrix = PackedMatrix.from_arrays(arrays, schemes[name], axes, name)
                return Linear(matrix, bias, None, backend, rounds, widened, is_partial)
            inner = In.resize(arrays[name].shape[-1])  # a byte may be two numbers
            weight, scale = hax.named(arrays[name], (*stacked, Out, inner)), None
            if name + SCALE in arrays:
                of_blocks = [Axis("block", size) for size in arrays[name + SCALE].shape[1:]]
                scale = hax.named(arrays[name + SCALE], (Out, *of_blocks))
            return Linear(
                weight,
                bias,
                scale,
                backend,
                rounds,
                None if scale is None else widened,
                is_partial,
                in_two_terms=name == "head",
            )

        def norm(name: str, *over: Axis, eps: float = config.norm_eps) -> Norm | None:
            if name not in arrays:
                return None
            weight = arrays[name].reshape([axis.size for axis in over])
            bias = optional(f"{name}_bias", *over)
            is_partial = is_shared and over[0] in (config.Heads, config.KVHeads)
            return Norm(hax.named(weight, over), bias, eps, config.has_layer_norms, backend, is_partial)

        def mlp(at: str, width: int, *stacked: Axis, is_expert: bool = False) -> Mlp:
            gate_up = linear(at + "gate_up", config.gate_up(width), config.Embed, *stacked)
            Width = Axis(config.Mlp.name, width)
            down = linear(at + "down", config.Embed, Width, *stacked, is_expert=is_expert)
            return Mlp(config, gate_up, down)

        def mixture(at: str) -> Experts:
            shared, Gate = config.shared_size, Axis("gate", 1)
            return Experts(
                config,
                backend,
                linear(at + "router", config.Expert, config.Embed),
                mlp(at + "experts_", config.intermediate_size, config.Expert, is_expert=True),
                optional(at + "router_correction", config.Expert),
                mlp(at + "shared_", shared, is_expert=True) if shared else None,
                linear(at + "shared_gate", Gate, config.Embed) if config.has_shared_gate else None,
            )

        def attention(at: str) -> Attention | LatentAttention:
            q_over, k_over = ([config.Heads], [config.KVHeads]) if config.qk_norm_spans_heads else ([], [])
            if config.latent is not None:
                return latent_attention(at, config.latent)
            return Attention(
                config,
                backend,
                linear(at + "qkv", config.QKV, config.Embed),
                linear(at + "out", config.Embed, config.Mixed),
                norm(at + "q_norm", *q_over, config.HeadSize),
                norm(at + "k_norm", *k_over, config.HeadSize),
                optional(at + "sinks", config.Heads),
            )

        def latent_attention(at: str, latent: Latent) -> LatentAttention:
            def axis(name: str, number: int) -> Axis:
                return Axis(name, arrays[at + name].shape[number])

            KVRank, QueryRank = Axis("kv_rank", latent.kv_rank), config.Embed
            q_down = None
            if latent.query_rank is not None:
                QueryRank = axis("q_down", 0)
                q_down = linear(at + "q_down", QueryRank, config.Embed)
            kv_down_norm = norm(at + "kv_down_norm", KVRank, eps=LATENT_NORM_EPS)
            assert kv_down_norm is not None
            return LatentAttention(
                config,
                backend,
                q_down,
                norm(at + "q_down_norm", QueryRank, eps=LATENT_NORM_EPS),
                linear(at + "q", axis("q", 0), QueryRank),
                linear(at + "kv_down", axis("kv_down", 0), config.Embed),
                kv_down_norm,
                linear(at + "kv_up", axis("kv_up", 0), KVRank),
                linear(at + "out", config.Embed, config.Mixed),
            )

        def layer(index: int) -> Layer:
            at = f"layers.{index}."
            return Layer(
                norm(at + "input_norm", config.Embed),
                attention(at),
                norm(at + "attention_post_norm", config.Embed),
                norm(at + "mlp_norm", config.Embed),
                mixture(at) if config.is_mixture(index) else mlp(at, config.dense_width),
                norm(at + "mlp_post_norm", config.Embed),
            )

        final_norm = norm("final_norm", config.Embed)
        assert final_norm is not None
        return Decoder(
            config,
            hax.named(arrays["embed"], (config.Vocab, config.Embed)),
            optional("positions", config.Position, config.Embed),
            tuple(layer(index) for index in range(config.num_layers)),
            final_norm,
            linear("head", config.Vocab, config.Embed) if "head" in arrays else None,
            optional(BALANCE, config.Embed),
            backend,
        )

    def __call__(
        self,
        tokens: jax.Array,
        pools: tuple[jax.Array, ...],
        table: jax.Array,
        positions: jax.Array,
        ends: jax.Array | None = None,
    ) -> tuple[NamedArray, tuple[jax.Array, ...]]:
        """Runs a chunk of each row: tokens and positions [row, chunk], table [row, page]; gives its hidden
        states.

        Positions must be the row's next ones, and negative for padding, whose results mean nothing. With
        `ends` [row] only the hidden state at that place of each chunk is computed to the end, and given as a
        chunk of one.
        """
        config = self.config
        x = self._embed(tokens) * config.embed_scale
        if self.positions is not None:
            x = x + self.positions.take(
                "position", hax.named(jnp.maximum(positions, 0), (ROW, CHUNK))
            ).astype(jnp.float32)
        place = cache.place(table, positions, pools[0])
        ropes = [config.rope(index) for index in range(config.num_layers)]
        angles = {rope: None if rope is None else angles_at(positions, rope) for rope in ropes}
        if ends is None and self.backend.runs_layers:
            ordered = x.rearrange((ROW, CHUNK, "embed"))
            shared = angles[ropes[0]]
            assert shared is not None  # layers that are run at once have rotary positions, all the same
            arrays = [layer.arrays for layer in self.layers]
            run, pools = self.backend.run_layers(config, ordered.array, pools, place, shared, arrays)
            return self.final_norm(hax.named(run, ordered.axes)), pools
        written = []
        for index, (layer, pool) in enumerate(zip(self.layers, pools, strict=True)):
            last_ends = ends if layer is self.layers[-1] else None
            x, pool = run_layer(
                layer, x, pool, place, angles[ropes[index]], last_ends, window=config.window(index)
            )
            written.append(pool)
        return self.final_norm(x), tuple(written)

    def _embed(self, tokens: jax.Array) -> NamedArray:
        if self.config.num_shards > 1:
            found = look_up_over_devices(self.embed.array, tokens)
            return hax.named(found, (ROW, CHUNK, "embed"))
        return self.embed.take("vocab", hax.named(tokens, (ROW, CHUNK))).astype(jnp.float32)

    @property
    def _is_head_refined(self) -> bool:
        """Whether the head is int8 with a scale per row, and its matrix is the embedding, which is not."""
        config, head = self.config, self.head
        if head is None or not config.tied_head or config.head_bias or config.num_shards > 1:
            return False
        return head.scale is not None and head.scale.ndim == 1 and head.widened is None

    def logits(self, hidden: NamedArray, num_used: jax.Array | None = None) -> jax.Array:
        """float32 scores [row, vocab] of hidden states [row, embed]; ask only for rows that are sampled."""
        head = Linear(self.embed, backend=self.backend) if self.head is None else self.head
        given = hidden if self.head_balance is None else hidden * self.head_balance
        scores = head(given, num_used).rearrange((ROW, "vocab")).array
        if self._is_head_refined:
            states = hidden.rearrange((ROW, "embed")).array
            scores = self.backend.refine(scores, states, self.embed.array, num_used)
        if self.config.num_shards > 1:
            scores = gather_over_devices(scores)[:, : self.config.vocab_size]
        scores = scores * self.config.logit_scale
        cap = self.config.logit_softcap
        return scores if cap is None else cap * jnp.tanh(scores / cap)


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A decoder without its arrays; of several devices that share a model, what each of them runs."""

    config: ModelConfig
    backend: Backend = XLA_ON_CPU
    quantization: Quantization | Kept | None = None

    def build(self, arrays: Mapping[str, jax.Array]) -> Decoder:
        return Decoder.from_arrays(self.config, arrays, backend=self.backend, quantization=self.quantization)
