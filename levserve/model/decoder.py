"""The decoder: one forward pass for prefill and decode, over paged KV.

Named-axis Haliax inside. The hot call passes flat tuples of arrays, and the model is rebuilt from its leaves inside the
trace (`engine/rounds.py`). Every layer goes through one inner jit, so thirty equal layers are traced and lowered once.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from levserve.model import cache
from levserve.model.attention import Kernel, attend
from levserve.model.cache import Place
from levserve.model.config import ModelConfig, parameter_shapes
from levserve.model.rotary import Angles, angles_at, rotate

ROW, CHUNK = "row", "chunk"


class Linear(eqx.Module):
    """A matrix [out, in]: the layout CPU and GPU matrix products read fastest, and the one checkpoints have."""

    weight: NamedArray
    bias: NamedArray | None = None

    def __call__(self, x: NamedArray) -> NamedArray:
        """Multiplies in the weight's type and always sums in float32: a bfloat16 result is 20 times slower on CPU."""
        Out, In = self.weight.axes
        y = hax.dot(x.astype(self.weight.dtype), self.weight, axis=In, preferred_element_type=jnp.float32)
        return y if self.bias is None else y + self.bias


class RMSNorm(eqx.Module):
    weight: NamedArray
    eps: float = eqx.field(static=True)

    def __call__(self, x: NamedArray) -> NamedArray:
        (Over,) = self.weight.axes
        return x * hax.rsqrt(hax.mean(hax.square(x), Over) + self.eps) * self.weight


class Attention(eqx.Module):
    config: ModelConfig = eqx.field(static=True)
    kernel: Kernel = eqx.field(static=True)
    qkv: Linear
    out: Linear
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None

    def __call__(
        self, x: NamedArray, pool: jax.Array, place: Place, angles: Angles, *, window: int | None
    ) -> tuple[NamedArray, jax.Array]:
        """Writes this chunk's keys and values to the pool, then reads everything the chunk may see from it."""
        config = self.config
        queries, keys, values = self._split(self.qkv(x))
        if self.q_norm is not None and self.k_norm is not None:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        axes = (ROW, CHUNK, ..., config.HeadSize)
        with jax.named_scope("kv_write"):
            k = rotate(keys.rearrange(axes).array, angles)
            pool = cache.write(pool, k, values.rearrange(axes).array, place)
        with jax.named_scope("attend"):
            q = rotate(queries.rearrange(axes).array, angles) * config.head_dim**-0.5
            grouped = q.reshape(*q.shape[:2], config.num_kv_heads, config.Group.size, config.head_dim)
            mixed = attend(grouped, pool, place.table, place.positions, window=window, kernel=self.kernel)
        mixed = mixed.reshape(*mixed.shape[:2], config.Mixed.size)
        return self.out(hax.named(mixed, (ROW, CHUNK, config.Mixed.name))), pool

    def _split(self, qkv: NamedArray) -> tuple[NamedArray, NamedArray, NamedArray]:
        """Cuts the fused projection into queries, keys and values by head."""
        config = self.config
        num_q, num_kv = config.num_heads, config.num_kv_heads

        def heads(start: int, count: int) -> NamedArray:
            part = qkv["qkv", start * config.head_dim : (start + count) * config.head_dim]
            return part.unflatten_axis("qkv", (Axis("heads", count), config.HeadSize))

        return heads(0, num_q), heads(num_q, num_kv), heads(num_q + num_kv, num_kv)


class Mlp(eqx.Module):
    gate_up: Linear
    down: Linear

    def __call__(self, x: NamedArray) -> NamedArray:
        both = self.gate_up(x)
        (_, In) = self.down.weight.axes
        gate = both["gate_up", : In.size].rename({"gate_up": In.name})
        up = both["gate_up", In.size :].rename({"gate_up": In.name})
        return self.down(hax.nn.silu(gate) * up)


class Layer(eqx.Module):
    input_norm: RMSNorm
    attention: Attention
    mlp_norm: RMSNorm
    mlp: Mlp


@functools.partial(jax.jit, static_argnames=("window",))
def run_layer(
    layer: Layer, x: NamedArray, pool: jax.Array, place: Place, angles: Angles, *, window: int | None
) -> tuple[NamedArray, jax.Array]:
    mixed, pool = layer.attention(layer.input_norm(x), pool, place, angles, window=window)
    x = x + mixed
    with jax.named_scope("mlp"):
        return x + layer.mlp(layer.mlp_norm(x)), pool


class Decoder(eqx.Module):
    """A whole model. Activations are float32 between the products; weights and KV have their own types."""

    config: ModelConfig = eqx.field(static=True)
    embed: NamedArray
    layers: tuple[Layer, ...]
    final_norm: RMSNorm
    head: Linear | None

    @staticmethod
    def from_arrays(config: ModelConfig, arrays: Mapping[str, jax.Array], *, kernel: Kernel = Kernel.XLA) -> Decoder:
        """Arranges the arrays that `parameter_shapes` names."""
        assert arrays.keys() == parameter_shapes(config).keys()
        norm = functools.partial(RMSNorm, eps=config.norm_eps)

        def named(name: str, *axes: Axis) -> NamedArray:
            return hax.named(arrays[name], axes)

        def optional(name: str, *axes: Axis) -> NamedArray | None:
            return named(name, *axes) if name in arrays else None

        def head_norm(name: str) -> RMSNorm | None:
            return norm(named(name, config.HeadSize)) if name in arrays else None

        def layer(at: str) -> Layer:
            qkv = Linear(named(at + "qkv", config.QKV, config.Embed), optional(at + "qkv_bias", config.QKV))
            out = Linear(named(at + "out", config.Embed, config.Mixed), optional(at + "out_bias", config.Embed))
            return Layer(
                norm(named(at + "input_norm", config.Embed)),
                Attention(config, kernel, qkv, out, head_norm(at + "q_norm"), head_norm(at + "k_norm")),
                norm(named(at + "mlp_norm", config.Embed)),
                Mlp(
                    Linear(named(at + "gate_up", config.GateUp, config.Embed)),
                    Linear(named(at + "down", config.Embed, config.Mlp)),
                ),
            )

        return Decoder(
            config,
            named("embed", config.Vocab, config.Embed),
            tuple(layer(f"layers.{index}.") for index in range(config.num_layers)),
            norm(named("final_norm", config.Embed)),
            None if config.tied_head else Linear(named("head", config.Vocab, config.Embed)),
        )

    def __call__(
        self, tokens: jax.Array, pools: tuple[jax.Array, ...], table: jax.Array, positions: jax.Array
    ) -> tuple[NamedArray, tuple[jax.Array, ...]]:
        """Runs a chunk of each row: tokens and positions [row, chunk], table [row, page]; gives its hidden states.

        Positions must be the row's next ones, and negative where there is padding, whose results mean nothing.
        """
        x = self.embed.take("vocab", hax.named(tokens, (ROW, CHUNK))).astype(jnp.float32)
        place = cache.place(table, positions, pools[0])
        angles = angles_at(positions, self.config)
        written = []
        for index, (layer, pool) in enumerate(zip(self.layers, pools, strict=True)):
            x, pool = run_layer(layer, x, pool, place, angles, window=self.config.window(index))
            written.append(pool)
        return self.final_norm(x), tuple(written)

    def logits(self, hidden: NamedArray) -> jax.Array:
        """Float32 scores [row, vocab] of hidden states [row, embed]; ask only for the rows that are sampled."""
        head = Linear(self.embed) if self.head is None else self.head
        return head(hidden).rearrange((ROW, "vocab")).array
