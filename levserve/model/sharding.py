"""Tensor parallelism: how each array of a model is cut over several devices, and what they exchange.

Each device runs the same decoder with fewer heads, a narrower feed-forward part and less vocabulary, inside
`shard_map`. Two sums in each layer (after `out` and after `down`), one for the embedding and one gather of
the logits make the devices one model. `TABLE` says how every array is cut; an array that it does not name is
whole on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from levserve.model.config import ModelConfig
from levserve.model.packed import OFFSET, SCALE, ZERO

AXIS = "tensor"
"""The mesh axis that models are cut over."""


@dataclass(frozen=True, slots=True)
class Shards:
    """How many devices share a model, and which of their shares this process loads."""

    count: int = 1
    here: tuple[int, ...] = (0,)


UNSHARED = Shards()


@dataclass(frozen=True, slots=True)
class Units:
    """What is divided among the devices: `count` units, each of `size` rows or columns of an array."""

    count: int
    size: int = 1

    def share(self, count: int, index: int) -> range:
        """The rows or columns of device `index` of `count`; there may be fewer of them on the last devices.

        Where there are more devices than units, several devices have the same unit.
        """
        if count > self.count:
            first, num_units = index * self.count // count, 1
        else:
            num_units = -(-self.count // count)
            first = min(index * num_units, self.count)
        last = min(first + num_units, self.count)
        return range(first * self.size, last * self.size)


def _query_heads(config: ModelConfig) -> Units:
    return Units(config.num_heads, config.head_dim)


def _kv_heads(config: ModelConfig) -> Units:
    return Units(config.num_kv_heads, config.head_dim)


def _gate_and_up(config: ModelConfig, width: int) -> tuple[Units, ...]:
    return (Units(width),) * (2 if config.is_gated else 1)


def _vocab_rows(config: ModelConfig) -> Units:
    return Units(config.vocab_size)


def _queries_keys_values(config: ModelConfig) -> tuple[Units, ...]:
    return _query_heads(config), _kv_heads(config), _kv_heads(config)


def _expanded_heads(config: ModelConfig) -> tuple[Units, ...]:
    """Each head's key without the part that all heads share, and its value."""
    assert config.latent is not None
    own = config.head_dim - config.latent.rotary_size
    return (Units(config.num_heads, own + config.value_size),)


class Cut(NamedTuple):
    """How one kind of array is cut: by its outputs, which are rows, or by its inputs, which are columns.

    A fused array has several `parts` one after another, and each device gets its share of each of them.
    """

    parts: Callable[[ModelConfig], tuple[Units, ...]]
    is_by_columns: bool = False


TABLE = {
    "embed": Cut(lambda config: (_vocab_rows(config),)),
    "head": Cut(lambda config: (_vocab_rows(config),)),
    "head_bias": Cut(lambda config: (_vocab_rows(config),)),
    "qkv": Cut(_queries_keys_values),
    "qkv_bias": Cut(_queries_keys_values),
    "q": Cut(lambda config: (_query_heads(config),)),
    "kv_up": Cut(_expanded_heads),
    "out": Cut(lambda config: (Units(config.num_heads, config.value_size),), is_by_columns=True),
    "sinks": Cut(lambda config: (Units(config.num_heads),)),
    "gate_up": Cut(lambda config: _gate_and_up(config, config.dense_width)),
    "gate_up_bias": Cut(lambda config: _gate_and_up(config, config.dense_width)),
    "down": Cut(lambda config: (Units(config.dense_width),), is_by_columns=True),
    "experts_gate_up": Cut(lambda config: _gate_and_up(config, config.intermediate_size)),
    "experts_gate_up_bias": Cut(
        lambda config: _gate_and_up(config, config.intermediate_size), is_by_columns=True
    ),
    "experts_down": Cut(lambda config: (Units(config.intermediate_size),), is_by_columns=True),
    "shared_gate_up": Cut(lambda config: _gate_and_up(config, config.shared_size)),
    "shared_down": Cut(lambda config: (Units(config.shared_size),), is_by_columns=True),
}
SPANNING_NORMS = {
    "q_norm": Cut(lambda config: (_query_heads(config),)),
    "k_norm": Cut(lambda config: (_kv_heads(config),)),
}
"""Norms over all heads together, which are cut with the heads."""


class Share(NamedTuple):
    """A device's share of an array: these `ranges` of one axis, one after another."""

    axis: int
    ranges: tuple[range, ...]


def share_of(name: str, ndim: int, config: ModelConfig, count: int, index: int) -> Share | None:
    """What device `index` of `count` has of an array of the whole model; None: all of it."""
    cut = find_cut(name, config)
    if cut is None:
        return None
    axis = ndim - 1 if cut.is_by_columns else max(ndim - 2, 0)
    ranges = []
    start = 0
    for units in cut.parts(config):
        share = units.share(count, index)
        ranges.append(range(start + share.start, start + share.stop))
        start += units.count * units.size
    return Share(axis, tuple(ranges))


def find_cut(name: str, config: ModelConfig) -> Cut | None:
    """How the array is cut; None if every device has all of it."""
    kind = name.rsplit(".", 1)[-1]
    if config.qk_norm_spans_heads and kind in SPANNING_NORMS:
        return SPANNING_NORMS[kind]
    # Devices quantize their own shares, so that each has scales of its own.
    for end in (SCALE, ZERO, OFFSET):
        kind = kind.removesuffix(end)
    return TABLE.get(kind)


def indivisible_reason(config: ModelConfig, count: int) -> str | None:
    """Why `count` devices cannot share the model, or None.

    A vocabulary that does not divide evenly is padded with rows of zeros. Where there are fewer key and value
    heads than devices, several devices have the same one.
    """
    if config.num_heads % count:
        return f"its {config.num_heads} query heads cannot be shared evenly by {count} devices"
    if config.num_kv_heads % count and count % config.num_kv_heads:
        heads = f"its {config.num_kv_heads} key and value heads"
        return f"{heads} can neither be shared evenly by {count} devices nor repeated evenly on them"
    for width in (config.intermediate_size, config.dense_size, config.shared_size):
        if width % count:
            return f"its feed-forward part of width {width} cannot be shared evenly by {count} devices"
    return None


def largest_count(config: ModelConfig, num_devices: int, multiple_of: int = 1) -> int:
    """The most devices, a multiple of `multiple_of`, that can share the model; `multiple_of` if none can."""
    counts = range(num_devices - num_devices % multiple_of, 0, -multiple_of)
    return next((n for n in counts if indivisible_reason(config, n) is None), multiple_of)


def local_config(config: ModelConfig, count: int) -> ModelConfig:
    """The config of what each of `count` devices runs."""
    if count == 1:
        return config
    assert indivisible_reason(config, count) is None
    return replace(
        config,
        num_heads=config.num_heads // count,
        num_kv_heads=max(config.num_kv_heads // count, 1),
        intermediate_size=config.intermediate_size // count,
        dense_size=config.dense_size // count,
        shared_size=config.shared_size // count,
        num_shards=count,
    )


def stacked_shape(shape: Sequence[int], count: int) -> tuple[int, ...]:
    """The shape of `count` equal shares stacked along the first axis, as they lie on host and mesh."""
    return (shape[0] * count, *shape[1:])


def sum_over_devices(x: jax.Array) -> jax.Array:
    return lax.psum(x, AXIS)


def on_first_device(x: jax.Array) -> jax.Array:
    """x on the first device and zeros on the others, so that a sum over devices counts it once."""
    return jnp.where(lax.axis_index(AXIS) == 0, x, jnp.zeros_like(x))


def mean_over_devices(x: jax.Array) -> jax.Array:
    return lax.pmean(x, AXIS)


def gather_over_devices(x: jax.Array) -> jax.Array:
    """The devices' columns side by side."""
    return lax.all_gather(x, AXIS, axis=1, tiled=True)


def look_up_over_devices(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """float32 rows of a table [word, embed] that is cut by words, for tokens of any shape."""
    at = tokens - lax.axis_index(AXIS).astype(jnp.int32) * table.shape[0]
    is_here = (at >= 0) & (at < table.shape[0])
    found = table.at[jnp.where(is_here, at, 0)].get(mode="promise_in_bounds").astype(jnp.float32)
    return sum_over_devices(jnp.where(is_here[..., None], found, 0.0))
