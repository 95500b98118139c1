"""The decoder: one forward pass for prefill and decode, over paged KV.

Named-axis Haliax inside. The hot call passes flat tuples of arrays, and the model is rebuilt from its leaves inside the
trace (`engine/rounds.py`). Every layer goes through one inner jit, so thirty equal layers are traced and lowered once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from levserve.model import cache, experts
from levserve.model.attention import Kernel, attend
from levserve.model.cache import Place, take_ends
from levserve.model.config import Activation, ModelConfig, parameter_shapes
from levserve.model.gpu.attention import attend_heads
from levserve.model.gpu.heads import HeadNorms
from levserve.model.linear import Linear
from levserve.model.quantize import Quantization, QuantizedLinear
from levserve.model.rotary import Angles, angles_at, rotate
from levserve.model.sampler import Best, best_of

ROW, CHUNK = "row", "chunk"
ACTIVATIONS: dict[Activation, Callable[[NamedArray], NamedArray]] = {
    Activation.SILU: hax.nn.silu,
    Activation.GELU_TANH: functools.partial(hax.nn.gelu, approximate=True),
}


class Norm(eqx.Module):
    """An RMS norm over the axes of its weight; with a bias, a layer norm."""

    weight: NamedArray
    bias: NamedArray | None
    eps: float = eqx.field(static=True)

    def __call__(self, x: NamedArray) -> NamedArray:
        over = self.weight.axes
        if self.bias is not None:
            x = x - hax.mean(x, over)
        x = x * hax.rsqrt(hax.mean(hax.square(x), over) + self.eps) * self.weight
        return x if self.bias is None else x + self.bias


def apply(norm: Norm | None, x: NamedArray) -> NamedArray:
    """Not every model has a norm at every place."""
    return x if norm is None else norm(x)


class Attention(eqx.Module):
    config: ModelConfig = eqx.field(static=True)
    kernel: Kernel = eqx.field(static=True)
    qkv: Linear
    out: Linear
    q_norm: Norm | None
    k_norm: Norm | None

    def __call__(
        self,
        x: NamedArray,
        pool: jax.Array,
        place: Place,
        angles: Angles | None,
        ends: jax.Array | None,
        *,
        window: int | None,
    ) -> tuple[NamedArray, jax.Array]:
        """Writes this chunk's keys and values to the pool, then reads everything the chunk, or its `ends`, may see from it."""
        config = self.config
        if self.kernel is Kernel.TRITON:
            heads, norms = self._heads(x)
            mixed, pool = attend_heads(
                heads,
                pool,
                place,
                angles,
                norms,
                ends,
                kv_heads=config.num_kv_heads,
                scale=config.score_scale,
                eps=config.norm_eps,
                window=window,
                softcap=config.attention_softcap,
            )
            mixed = mixed.reshape(place.positions.shape[0], -1, config.Mixed.size)
            return self.out(hax.named(mixed, (ROW, CHUNK, config.Mixed.name))), pool
        queries, keys, values = self._split(self.qkv(x, place.num_used))
        axes = (ROW, CHUNK, ..., config.HeadSize)

        def placed(norm: Norm | None, heads: NamedArray) -> jax.Array:
            normed = apply(norm, heads).rearrange(axes).array
            return normed if angles is None else rotate(normed, angles)

        with jax.named_scope("kv_write"):
            pool = cache.write(pool, placed(self.k_norm, keys), values.rearrange(axes).array, place)
        with jax.named_scope("attend"):
            q, positions = placed(self.q_norm, queries), place.positions
            if ends is not None:
                q, positions = take_ends(q, ends), take_ends(positions, ends)
            mixed = attend(
                q.reshape(*q.shape[:2], config.num_kv_heads, config.Group.size, config.head_dim),
                pool,
                place.table,
                positions,
                window=window,
                softcap=config.attention_softcap,
                scale=config.score_scale,
                kernel=self.kernel,
            )
        mixed = mixed.reshape(*mixed.shape[:2], config.Mixed.size)
        return self.out(
            hax.named(mixed, (ROW, CHUNK, config.Mixed.name)), place.num_used if ends is None else None
        ), pool

    def _heads(self, x: NamedArray) -> tuple[jax.Array, HeadNorms | None]:
        """[row * chunk, head, head_size] for the GPU's kernels, and the norms that these are to apply: those of a head."""
        config, qkv = self.config, self.qkv(x)
        if config.qk_norm_spans_heads:
            queries, keys, values = self._split(qkv)
            parts = [apply(self.q_norm, queries), apply(self.k_norm, keys), values]
            arrays = [part.rearrange((ROW, CHUNK, ..., config.HeadSize)).array for part in parts]
            return jnp.concatenate([array.reshape(-1, *array.shape[2:]) for array in arrays], axis=1), None
        array = qkv.rearrange((ROW, CHUNK, "qkv")).array.reshape(
            -1, config.QKV.size // config.head_dim, config.head_dim
        )
        if self.qkv.bias is None:
            array = array.astype(self.qkv.product_dtype)  # as it comes: another type would be another kernel
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


class Mlp(eqx.Module):
    config: ModelConfig = eqx.field(static=True)
    gate_up: Linear
    down: Linear

    def __call__(self, x: NamedArray, num_used: jax.Array | None = None) -> NamedArray:
        wide = self.gate_up(x, num_used)
        activate = ACTIVATIONS[self.config.activation]
        size = self.config.intermediate_size
        if not self.config.is_gated:
            return self.down(activate(wide).rename({"gate_up": "mlp"}), num_used)
        gate, up = (wide["gate_up", at : at + size].rename({"gate_up": "mlp"}) for at in (0, size))
        return self.down(activate(gate) * up, num_used)


class Experts(eqx.Module):
    """A router, and the feed-forward parts of all experts as one `Mlp` whose matrices are [expert, out, in]."""

    config: ModelConfig = eqx.field(static=True)
    router: Linear
    stacked: Mlp

    def __call__(self, x: NamedArray, place: Place) -> NamedArray:
        config = self.config
        flat = x.flatten_axes((ROW, CHUNK), "token").rearrange(("token", "embed"))
        scores = self.router(flat).rearrange(("token", "expert")).array
        choice = experts.choose(scores, config.experts_per_token, renormalises=config.renormalises_experts)
        mixed = experts.mix(flat.array, choice, place.positions.reshape(-1) >= 0, self, config.num_experts)
        return hax.named(mixed.reshape(*place.positions.shape, config.hidden_size), (ROW, CHUNK, "embed"))

    def one(self, number: jax.Array, tokens: jax.Array) -> jax.Array:
        return self._run(
            self.stacked.gate_up.of_expert(number), self.stacked.down.of_expert(number), tokens, "token"
        )

    def chosen(self, numbers: jax.Array, tokens: jax.Array) -> jax.Array:
        named = hax.named(numbers, "token")
        return self._run(
            self.stacked.gate_up.of_each(named), self.stacked.down.of_each(named), tokens, "token"
        )

    def every(self, tokens: jax.Array) -> jax.Array:
        return self._run(self.stacked.gate_up, self.stacked.down, tokens, "expert", "slot")

    def _run(self, gate_up: Linear, down: Linear, tokens: jax.Array, *axes: str) -> jax.Array:
        return (
            Mlp(self.config, gate_up, down)(hax.named(tokens, (*axes, "embed")))
            .rearrange((*axes, "embed"))
            .array
        )


class Layer(eqx.Module):
    """Where a norm is None the model has none there."""

    input_norm: Norm | None
    attention: Attention
    attention_post_norm: Norm | None
    mlp_norm: Norm | None
    mlp: Mlp | Experts
    mlp_post_norm: Norm | None

    @property
    def is_plain(self) -> bool:
        """Whether it is nothing but norms by size, attention and a gated part, with matrices that a CPU's kernel multiplies."""
        norms = (self.input_norm, self.mlp_norm)
        has_others = self.attention_post_norm is not None or self.mlp_post_norm is not None
        if (
            has_others
            or not isinstance(self.mlp, Mlp)
            or any(norm is None or norm.bias is not None for norm in norms)
        ):
            return False
        config, linears = self.attention.config, self._linears()
        is_known = config.is_gated and config.activation is Activation.SILU
        is_known = is_known and not config.attention_softcap and not config.qk_norm_spans_heads
        has_bias = any(linear.bias is not None for name, linear in linears.items() if name != "qkv")
        known = (jnp.int8, jnp.uint8, jnp.bfloat16)
        is_multiplied = all(
            linear.is_servable and linear.weight.dtype in known for linear in linears.values()
        )
        return is_known and not has_bias and is_multiplied

    @property
    def arrays(self) -> dict[str, jax.Array]:
        """Those of a plain layer, by name; what it does not have is not there."""
        named = {"qkv_bias": self.attention.qkv.bias}
        norms = {
            "input_norm": self.input_norm,
            "q_norm": self.attention.q_norm,
            "k_norm": self.attention.k_norm,
            "mlp_norm": self.mlp_norm,
        }
        named |= {name: norm and norm.weight for name, norm in norms.items()}
        for name, linear in self._linears().items():
            named |= {
                name: linear.weight,
                f"{name}_scale": linear.scale if isinstance(linear, QuantizedLinear) else None,
            }
        return {name: array.array for name, array in named.items() if array is not None}

    def _linears(self) -> dict[str, Linear]:
        assert isinstance(self.mlp, Mlp)
        return {
            "qkv": self.attention.qkv,
            "out": self.attention.out,
            "gate_up": self.mlp.gate_up,
            "down": self.mlp.down,
        }


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
    """With `ends` only that place of each row's chunk is taken through the layer; the keys and values of all are written."""
    mixed, pool = layer.attention(apply(layer.input_norm, x), pool, place, angles, ends, window=window)
    num_used: jax.Array | None = place.num_used
    if ends is not None:
        x = hax.named(take_ends(x.rearrange((ROW, CHUNK, "embed")).array, ends), (ROW, CHUNK, "embed"))
        place, num_used = place._replace(positions=take_ends(place.positions, ends)), None
    x = x + apply(layer.attention_post_norm, mixed)
    with jax.named_scope("mlp"):
        fed = apply(layer.mlp_norm, x)
        fed = layer.mlp(fed, num_used) if isinstance(layer.mlp, Mlp) else layer.mlp(fed, place)
        return x + apply(layer.mlp_post_norm, fed), pool


class Decoder(eqx.Module):
    """A whole model. Activations are float32 between the products; weights and KV have their own types."""

    config: ModelConfig = eqx.field(static=True)
    embed: NamedArray
    positions: NamedArray | None
    layers: tuple[Layer, ...]
    final_norm: Norm
    head: Linear | None
    has_kernel: bool = eqx.field(static=True, default=False)

    @staticmethod
    def from_arrays(
        config: ModelConfig,
        arrays: Mapping[str, jax.Array],
        *,
        kernel: Kernel = Kernel.XLA,
        quantization: Quantization | None = None,
    ) -> Decoder:
        """Arranges the arrays that `parameter_shapes` names, or those that `quantize_arrays` made of them."""
        assert arrays.keys() == parameter_shapes(config).keys() or any(
            name.endswith("_scale") for name in arrays
        )

        has_kernel = kernel in (Kernel.LLVM_DOT, Kernel.LLVM_VNNI)
        widened = None if quantization is None else quantization.widened

        def optional(name: str, *axes: Axis) -> NamedArray | None:
            return hax.named(arrays[name], axes) if name in arrays else None

        def linear(name: str, Out: Axis, In: Axis, *stacked: Axis) -> Linear:
            weight, bias = hax.named(arrays[name], (*stacked, Out, In)), optional(f"{name}_bias", Out)
            scale = optional(f"{name}_scale", Out)
            # Not what is added to the residual stream, whose every bit counts.
            rounds = kernel is Kernel.TRITON and Out in (config.QKV, config.GateUp)
            if scale is None:
                return Linear(weight, bias, rounds, has_kernel)
            is_packed = weight.dtype == jnp.uint8
            return QuantizedLinear(
                weight, bias, rounds, is_packed or kernel is Kernel.LLVM_DOT, scale, widened
            )

        def norm(name: str, *over: Axis) -> Norm | None:
            if name not in arrays:
                return None
            weight = arrays[name].reshape([axis.size for axis in over])
            return Norm(hax.named(weight, over), optional(f"{name}_bias", *over), config.norm_eps)

        def mlp(at: str, *stacked: Axis) -> Mlp:
            gate_up = linear(at + "gate_up", config.GateUp, config.Embed, *stacked)
            return Mlp(config, gate_up, linear(at + "down", config.Embed, config.Mlp, *stacked))

        def mixture(at: str) -> Experts:
            return Experts(
                config,
                linear(at + "router", config.Expert, config.Embed),
                mlp(at + "experts_", config.Expert),
            )

        def layer(at: str) -> Layer:
            q_over, k_over = ([config.Heads], [config.KVHeads]) if config.qk_norm_spans_heads else ([], [])
            return Layer(
                norm(at + "input_norm", config.Embed),
                Attention(
                    config,
                    kernel,
                    linear(at + "qkv", config.QKV, config.Embed),
                    linear(at + "out", config.Embed, config.Mixed),
                    norm(at + "q_norm", *q_over, config.HeadSize),
                    norm(at + "k_norm", *k_over, config.HeadSize),
                ),
                norm(at + "attention_post_norm", config.Embed),
                norm(at + "mlp_norm", config.Embed),
                mixture(at) if config.num_experts else mlp(at),
                norm(at + "mlp_post_norm", config.Embed),
            )

        final_norm = norm("final_norm", config.Embed)
        assert final_norm is not None
        return Decoder(
            config,
            hax.named(arrays["embed"], (config.Vocab, config.Embed)),
            optional("positions", config.Position, config.Embed),
            tuple(layer(f"layers.{index}.") for index in range(config.num_layers)),
            final_norm,
            linear("head", config.Vocab, config.Embed) if "head" in arrays else None,
            has_kernel,
        )

    def __call__(
        self,
        tokens: jax.Array,
        pools: tuple[jax.Array, ...],
        table: jax.Array,
        positions: jax.Array,
        ends: jax.Array | None = None,
    ) -> tuple[NamedArray, tuple[jax.Array, ...]]:
        """Runs a chunk of each row: tokens and positions [row, chunk], table [row, page]; gives its hidden states.

        Positions must be the row's next ones, and negative where there is padding, whose results mean nothing. With `ends`
        [row] only the hidden state at that place of each chunk is computed to the end, and given as a chunk of one.
        """
        config = self.config
        x = self.embed.take("vocab", hax.named(tokens, (ROW, CHUNK))).astype(jnp.float32) * config.embed_scale
        if self.positions is not None:
            x = x + self.positions.take(
                "position", hax.named(jnp.maximum(positions, 0), (ROW, CHUNK))
            ).astype(jnp.float32)
        place = cache.place(table, positions, pools[0])
        ropes = [config.rope(index) for index in range(config.num_layers)]
        angles = {rope: None if rope is None else angles_at(positions, rope) for rope in ropes}
        if ends is None and self.skips_padding(cache.numbers_of(pools[0])):
            x, pools = self._run_plain(x, pools, place, angles[ropes[0]])
            return self.final_norm(x), pools
        written = []
        for index, (layer, pool) in enumerate(zip(self.layers, pools, strict=True)):
            last_ends = ends if layer is self.layers[-1] else None
            x, pool = run_layer(
                layer, x, pool, place, angles[ropes[index]], last_ends, window=config.window(index)
            )
            written.append(pool)
        return self.final_norm(x), tuple(written)

    @property
    def has_gpu_kernels(self) -> bool:
        return self.layers[0].attention.kernel is Kernel.TRITON

    def skips_padding(self, kept: jnp.dtype) -> bool:
        """Whether one kernel takes all layers, with keys and values in this type, and leaves out what is padding."""
        rope = self.config.rope(0)
        if (
            not self.has_kernel
            or rope is None
            or any(self.config.rope(index) != rope for index in range(self.config.num_layers))
        ):
            return False
        from levserve.model.cpu import layers as cpu_layers

        refusal = cpu_layers.refuse_unservable(self.config.head_dim, rope.size, kept)
        return (
            refusal is None
            and all(layer.is_plain for layer in self.layers)
            and len({tuple(layer.arrays) for layer in self.layers}) == 1
        )

    def _run_plain(
        self, x: NamedArray, pools: tuple[jax.Array, ...], place: Place, angles: Angles | None
    ) -> tuple[NamedArray, tuple[jax.Array, ...]]:
        from levserve.model.cpu import layers as cpu_layers
        from levserve.model.cpu.heads import Heads

        config, rope = self.config, self.config.rope(0)
        assert rope is not None and angles is not None
        arrays = [layer.arrays for layer in self.layers]
        plan = cpu_layers.Plan(
            Heads(
                config.num_kv_heads,
                config.Group.size,
                config.head_dim,
                pools[0].shape[3],
                cache.numbers_of(pools[0]),
            ),
            num_layers=config.num_layers,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            rotated=rope.size,
            eps=config.norm_eps,
            scale=config.score_scale,
            fields=tuple(arrays[0]),
            matrices=arrays[0]["qkv"].dtype,
        )
        windows = [config.window(index) or 0 for index in range(config.num_layers)]
        ordered = x.rearrange((ROW, CHUNK, "embed"))
        run, pools = cpu_layers.run_layers(plan, ordered.array, pools, place, angles, windows, arrays)
        return hax.named(run, ordered.axes), pools

    def logits(self, hidden: NamedArray, num_used: jax.Array | None = None) -> jax.Array:
        """Float32 scores [row, vocab] of hidden states [row, embed]; ask only for the rows that are sampled."""
        head = Linear(self.embed, has_kernel=self.has_kernel) if self.head is None else self.head
        scores = head(hidden, num_used).rearrange((ROW, "vocab")).array
        cap = self.config.logit_softcap
        return scores if cap is None else cap * jnp.tanh(scores / cap)

    def best_of(self, logits: jax.Array, num_used: jax.Array) -> Best:
        """The likeliest tokens of the first `num_used` [1] rows."""
        if not self.has_kernel:
            return best_of(logits)
        from levserve.model.cpu.argmax import find_best

        return Best(*find_best(logits, num_used))
