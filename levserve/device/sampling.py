"""What follows the logits, for every kind of model: sampling by each row's rules, masks, scores, and outputs.

Some of these functions are parts of compiled programs, others small programs that update the state of slots.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from levserve.device.packing import RoundInput
from levserve.model.backend import Backend
from levserve.model.rules import FREE, MAX_EDITS, NUM_TOP, Drawn, Masks, Memory, Mode
from levserve.model.sampler import logprobs_of, sample

SCORE_TILE = 128
"""Positions scored together; their logits take 25 MB with the bundled model."""
NUM_OUTPUTS = {Mode.GREEDY: 1, Mode.PLAIN: 1, Mode.FULL: 2 + 2 * NUM_TOP}
"""Columns of an output: the token; in full mode also its log-probability, and the ids and log-probabilities
of the likeliest tokens."""


class SlotMasks(NamedTuple):
    """The mask for the next token of each slot with a constraint; see `model/rules.py`."""

    words: jax.Array
    """uint32 [slot, vocab / 32]"""
    at: jax.Array
    """int32 [slot]: the one position that the words are for."""


def make_memory(num_slots: int, max_seq_len: int) -> Memory:
    """An empty memory, on the device."""
    return Memory(
        history=jnp.zeros((num_slots, max_seq_len), jnp.int32),
        edit_ids=jnp.zeros((num_slots, MAX_EDITS), jnp.int32),
        edit_values=jnp.zeros((num_slots, MAX_EDITS), jnp.float32),
        edit_until=jnp.zeros((num_slots, MAX_EDITS), jnp.int32),
    )


def make_masks(num_slots: int, vocab_size: int) -> SlotMasks:
    """No masks, on the device."""
    return SlotMasks(
        words=jnp.zeros((num_slots, -(-vocab_size // 32)), jnp.uint32), at=jnp.zeros(num_slots, jnp.int32)
    )


def draw(
    logits: jax.Array,
    given: RoundInput,
    positions: jax.Array,
    memory: Memory,
    masks: SlotMasks,
    mode: Mode,
    backend: Backend,
    num_used: jax.Array | None = None,
) -> Drawn:
    """Draws the token at `positions` [row] from logits [row, vocab] by the rules of each row's slot."""
    of_rows = held = None
    if mode is Mode.FULL:
        of_rows = Memory(*(array.at[given.slots].get(mode="clip") for array in memory))
    if mode is not Mode.GREEDY:
        held = Masks(*masks, jnp.where(given.rules.is_constrained != 0, given.slots, FREE))
    return sample(logits, positions, given.rules, of_rows, held, mode, backend, num_used)


def score_by_tiles(
    logits_of: Callable[[jax.Array], jax.Array], hidden: jax.Array, following: jax.Array
) -> jax.Array:
    """Outputs [row, chunk, outputs] for the token after each position of hidden [row, chunk, embed].

    Computed in tiles, because all logits at once would be too large.
    """
    rows, chunk, _ = hidden.shape
    tile = math.gcd(chunk, SCORE_TILE)

    def score_tile(given: tuple[jax.Array, jax.Array]) -> jax.Array:
        return _score_tile(logits_of, *given)

    tiles = (hidden.reshape(-1, tile, hidden.shape[-1]), following.reshape(-1, tile))
    return lax.map(score_tile, tiles).reshape(rows, chunk, -1)


def score_wanted(
    logits_of: Callable[[jax.Array], jax.Array],
    hidden: jax.Array,
    following: jax.Array,
    is_wanted: jax.Array,
    tile: int,
) -> jax.Array:
    """Like `score_by_tiles`, with zeros for tiles in which no position is wanted; is_wanted: [row, chunk]."""
    rows, chunk, embed = hidden.shape
    tile = math.gcd(chunk, tile)

    def score_tile(given: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        states, tokens, is_any_wanted = given
        return lax.cond(
            is_any_wanted,
            lambda: _score_tile(logits_of, states, tokens),
            lambda: jnp.zeros((tile, NUM_OUTPUTS[Mode.FULL]), jnp.int32),
        )

    are_wanted = is_wanted.reshape(-1, tile).any(axis=1)
    tiles = hidden.reshape(-1, tile, embed), following.reshape(-1, tile), are_wanted
    return lax.map(score_tile, tiles).reshape(rows, chunk, -1)


def _score_tile(
    logits_of: Callable[[jax.Array], jax.Array], states: jax.Array, tokens: jax.Array
) -> jax.Array:
    return pack_outputs(Drawn(tokens, *logprobs_of(logits_of(states), tokens)))


def remember(memory: Memory, slots: jax.Array, positions: jax.Array, tokens: jax.Array) -> jax.Array:
    """The history with these tokens added; slots and positions that do not exist are skipped."""
    return memory.history.at[slots, positions].set(tokens, mode="drop")


def pack_outputs(drawn: Drawn) -> jax.Array:
    """A row's results side by side, floats as their bits, so that the host copies one array."""
    if drawn.logprobs is None or drawn.top_ids is None or drawn.top_logprobs is None:
        return drawn.tokens[:, None]
    floats = jnp.concatenate([drawn.logprobs[:, None], drawn.top_logprobs], axis=1)
    bits = lax.bitcast_convert_type(floats, jnp.int32)
    return jnp.concatenate([drawn.tokens[:, None], bits[:, :1], drawn.top_ids, bits[:, 1:]], axis=1)


def set_memory(
    memory: Memory, slot: jax.Array, history: jax.Array, ids: jax.Array, values: jax.Array, until: jax.Array
) -> Memory:
    """Gives a slot the tokens and logit edits of its new sequence; donates `memory`."""
    return Memory(
        history=memory.history.at[slot].set(history),
        edit_ids=memory.edit_ids.at[slot].set(ids),
        edit_values=memory.edit_values.at[slot].set(values),
        edit_until=memory.edit_until.at[slot].set(until),
    )


def hold_slots(masks: SlotMasks, packed: jax.Array, words: jax.Array) -> SlotMasks:
    """Sets the masks of some slots' next draws, uint32 [row, vocab / 32]; donates all masks.

    packed: int32 [row, 3], the slot, the position that is drawn, and the newest token before it. Rows with a
    slot that does not exist are dropped.
    """
    slots, positions, _ = packed.T
    return SlotMasks(
        words=masks.words.at[slots].set(words, mode="drop"),
        at=masks.at.at[slots].set(positions, mode="drop"),
    )
