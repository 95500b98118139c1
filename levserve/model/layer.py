"""One layer of a decoder: attention over paged KV, and a feed-forward part. Named-axis Haliax inside.

Every layer goes through one inner jit, so thirty equal layers are traced and lowered once.
"""

from __future__ import annotations

import functools

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from levserve.model.backend import AttentionShape, Backend, HeadNorms
from levserve.model.cache import Place, take_ends
from levserve.model.config import ModelConfig
from levserve.model.feed_forward import CHUNK, ROW, Experts, Mlp
from levserve.model.latent_attention import LatentAttention
from levserve.model.linear import Linear
from levserve.model.norm import Norm, apply
from levserve.model.rotary import Angles


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

        Applies the norm first, if there is one.
        """
        config = self.config
        shape = AttentionShape.of(config, window)
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
            # In the type of the product: a conversion would be another kernel.
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
