"""Scores of a chunk by tiles: wanted scores are the same, and the others are not computed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levserve.device.sampling import score_by_tiles, score_wanted

ROWS, CHUNK, EMBED, VOCAB = 2, 24, 8, 40
TILE = 8


@pytest.mark.parametrize(
    ("wanted", "tiles"),
    [
        ((range(0), range(0)), []),
        ((range(5), range(0)), [0]),
        ((range(7, 9), range(23, 24)), [0, 1, 5]),
        ((range(24), range(16)), [0, 1, 2, 3, 4]),
    ],
)
def test_only_tiles_with_a_wanted_position_are_scored(wanted: tuple[range, ...], tiles: list[int]) -> None:
    keys = jax.random.split(jax.random.key(7), 3)
    hidden = jax.random.normal(keys[0], (ROWS, CHUNK, EMBED))
    head = jax.random.normal(keys[1], (EMBED, VOCAB))
    following = jax.random.randint(keys[2], (ROWS, CHUNK), 0, VOCAB)
    is_wanted = np.zeros((ROWS, CHUNK), bool)
    for row, places in enumerate(wanted):
        is_wanted[row, list(places)] = True
    computed: list[int] = []

    def logits_of(states: jax.Array) -> jax.Array:
        jax.debug.callback(lambda _: computed.append(len(states)), states[0, 0])
        return states @ head

    scores = score_wanted(logits_of, hidden, following, jnp.asarray(is_wanted), TILE)
    jax.effects_barrier()
    assert computed == [TILE] * len(tiles)
    every = score_by_tiles(lambda states: states @ head, hidden, following).reshape(
        -1, TILE, scores.shape[-1]
    )
    for number, tile in enumerate(scores.reshape(-1, TILE, scores.shape[-1])):
        expected = every[number] if number in tiles else jnp.zeros_like(tile)
        np.testing.assert_allclose(
            _floats(tile), _floats(expected), rtol=1e-5, err_msg=f"tile {number}", equal_nan=False
        )
        assert (tile[:, 0] == expected[:, 0]).all()


def _floats(outputs: jax.Array) -> np.ndarray:
    """The log-probability of each position's next token, which is stored as its bits."""
    return np.asarray(outputs[:, 1]).view(np.float32)
