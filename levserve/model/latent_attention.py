"""Attention whose keys and values come from one short vector for all heads (DeepSeek's MLA).

Keys and values are expanded to full heads before they are cached, so that pages and kernels are those of any
other model. The cache then takes more memory than the short vectors would.
"""

from __future__ import annotations

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray

from levserve.model.backend import AttentionShape, Backend
from levserve.model.cache import Place
from levserve.model.config import ModelConfig
from levserve.model.feed_forward import CHUNK, ROW
from levserve.model.linear import Linear
from levserve.model.norm import Norm, apply
from levserve.model.rotary import Angles

LATENT_NORM_EPS = 1e-6
"""The epsilon of the norms of short vectors, whatever that of the other norms is."""


class LatentAttention(eqx.Module):
    """In queries and keys the rotated dimensions of a head come first; values are padded to the same size."""

    config: ModelConfig = eqx.field(static=True)
    backend: Backend = eqx.field(static=True)
    q_down: Linear | None
    q_down_norm: Norm | None
    q: Linear
    kv_down: Linear
    kv_down_norm: Norm
    kv_up: Linear
    out: Linear

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
        """Does the same as `Attention`."""
        config = self.config
        shape = AttentionShape.of(config, window)
        heads = self._heads(apply(norm, x), place.num_used)
        mixed, pool = self.backend.attend(heads, pool, place, angles, None, ends, shape)
        rows, chunk, _ = mixed.shape
        by_head = mixed.reshape(rows, chunk, config.num_heads, config.head_dim)
        values = by_head[..., : config.value_size].reshape(rows, chunk, -1)
        num_used = place.num_used if ends is None else None
        return self.out(hax.named(values, (ROW, CHUNK, config.Mixed.name)), num_used), pool

    def _heads(self, x: NamedArray, num_used: jax.Array) -> jax.Array:
        """[row * chunk, head, head_size]: queries, keys and values."""
        config = self.config
        assert config.latent is not None
        num_heads, size, rotated = config.num_heads, config.head_dim, config.latent.rotary_size
        short = x if self.q_down is None else apply(self.q_down_norm, self.q_down(x, num_used))
        queries = _flat(self.q(short, num_used)).reshape(-1, num_heads, size)
        down = self.kv_down(x, num_used)
        rank = config.latent.kv_rank
        latent = self.kv_down_norm(down["kv_down", :rank].rename({"kv_down": "kv_rank"}))
        up = _flat(self.kv_up(latent, num_used)).reshape(-1, num_heads, size - rotated + config.value_size)
        plain, values = jnp.split(up, [size - rotated], axis=2)
        turned = _flat(down["kv_down", rank:])[:, None]
        turned = jnp.broadcast_to(turned, (len(up), num_heads, rotated))
        keys = jnp.concatenate([turned, plain], axis=2)
        values = jnp.pad(values, ((0, 0), (0, 0), (0, size - config.value_size)))
        return jnp.concatenate([queries, keys, values], axis=1)


def _flat(x: NamedArray) -> jax.Array:
    """[row * chunk, feature]"""
    array = x.rearrange((ROW, CHUNK, ...)).array
    return array.reshape(-1, array.shape[-1])
