"""The random numbers that tokens are drawn with, from nothing but a request's seed and the position."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry2x32_p

SECOND_DRAW = 2**30
"""Added to the position for the random numbers of a second draw; no sequence is this long."""


def make_points(seeds: jax.Array, positions: jax.Array, *shape: int) -> jax.Array:
    """Random numbers for each row, at least 0 and below 1: [row, *shape]."""
    keys = jax.vmap(lambda seed, position: jax.random.fold_in(jax.random.wrap_key_data(seed), position))(
        seeds, positions
    )
    return jax.vmap(lambda key: jax.random.uniform(key, shape))(keys)


def points_of_draws(seeds: jax.Array, positions: jax.Array) -> jax.Array:
    """The two numbers of each row's first draw, and of its second: [draw, row, 2].

    They are those of `make_points`, from a program a fourth as large. XLA expands the cipher wherever it is
    used, and `make_points` uses it twice: to turn seed and position into a key, and this key and a place into
    bits. Here both are turns of one loop.
    """
    at = jnp.stack([positions, positions + SECOND_DRAW]).astype(jnp.uint32)[:, :, None]
    shape = (2, len(positions), 2)
    places = lax.broadcasted_iota(jnp.uint32, shape, 2)
    keys = tuple(jnp.broadcast_to(seeds[None, :, word, None], shape) for word in (0, 1))

    def shuffle(keys: tuple[jax.Array, ...], words: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
        return tuple(threefry2x32_p.bind(*keys, jnp.zeros_like(words), words)), None

    (first, second), _ = lax.scan(shuffle, keys, jnp.stack([jnp.broadcast_to(at, shape), places]))
    mantissa = (first ^ second) >> 9 | jnp.uint32(0x3F800000)  # of a number from 1 to 2
    return lax.bitcast_convert_type(mantissa, jnp.float32) - 1.0
