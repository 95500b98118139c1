"""The random numbers that tokens are drawn with, which depend only on a request's seed and the position."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

SECOND_DRAW = 2**30
"""Added to the position for the random numbers of a second draw; no sequence is this long."""
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
"""Bits by which the rounds of Threefry rotate a word; the two tuples alternate."""
PARITY = 0x1BD11BDA
"""The third key of Threefry is the XOR of this and the other two."""

Pair = tuple[jax.Array, jax.Array]


def make_points(seeds: jax.Array, positions: jax.Array, *shape: int) -> jax.Array:
    """Random numbers for each row, at least 0 and below 1: [row, *shape]."""
    keys = jax.vmap(lambda seed, position: jax.random.fold_in(jax.random.wrap_key_data(seed), position))(
        seeds, positions
    )
    return jax.vmap(lambda key: jax.random.uniform(key, shape))(keys)


def points_of_draws(seeds: jax.Array, positions: jax.Array) -> jax.Array:
    """The two random numbers of each row's first draw, and those of its second: [draw, row, 2].

    They equal the results of a call to `make_points` for each draw, but XLA compiles this in a third of the
    time. XLA expands the cipher wherever it is used, and `make_points` uses it twice: to turn seed and
    position into a key, and this key and an index into bits. Here both are iterations of one loop.
    """
    at = jnp.stack([positions, positions + SECOND_DRAW]).astype(jnp.uint32)[:, :, None]
    shape = (2, len(positions), 2)
    places = lax.broadcasted_iota(jnp.uint32, shape, 2)
    first_key, second_key = (jnp.broadcast_to(seeds[None, :, word, None], shape) for word in (0, 1))

    def shuffle(keys: Pair, words: jax.Array) -> tuple[Pair, None]:
        return _encrypt(*keys, jnp.zeros_like(words), words), None

    words = jnp.stack([jnp.broadcast_to(at, shape), places])
    (first, second), _ = lax.scan(shuffle, (first_key, second_key), words)
    mantissa = (first ^ second) >> 9 | jnp.uint32(0x3F800000)  # the bits of a float from 1 to 2
    return lax.bitcast_convert_type(mantissa, jnp.float32) - 1.0


def _encrypt(
    first_key: jax.Array, second_key: jax.Array, x: jax.Array, y: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32 with its 20 rounds, unrolled. XLA takes four times as long to compile jax's version, a
    loop over the rounds, for a CPU."""
    keys = first_key, second_key, first_key ^ second_key ^ jnp.uint32(PARITY)
    x, y = x + first_key, y + second_key
    for number in range(5):
        for count in ROTATIONS[number % 2]:
            x += y
            y = x ^ (y << jnp.uint32(count) | y >> jnp.uint32(32 - count))
        x += keys[(number + 1) % 3]
        y += keys[(number + 2) % 3] + jnp.uint32(number + 1)
    return x, y
