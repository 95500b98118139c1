"""What the device runs where a draft model drafts: rounds of drafting and verifying, and its own prefill.

The host takes no part in a round: the draft model drafts some tokens, the model verifies them in one pass,
and both go on from there for as many turns as the round has. See `rounds.py` for what programs look like.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from levserve.device.packing import RoundInput, unpack
from levserve.device.rounds import (
    Arrays,
    ChunkOutput,
    Skeleton,
    State,
    chunk_positions,
    sample_rows,
    unpack_chunks,
    verify,
)
from levserve.device.sampling import NUM_OUTPUTS, remember
from levserve.model.decoder import Decoder
from levserve.model.feed_forward import CHUNK, ROW
from levserve.model.rules import NO_LOGPROBS, Memory, Mode

NUM_TALLIES = 3
"""The last places of a drafted round's output. Their first columns count, for each row, the tokens gained,
the drafted tokens that were verified, and how many of those were right."""


class _Turn(NamedTuple):
    """What passes from one turn to the next, [row] each."""

    state: State
    newest: jax.Array
    prior: jax.Array
    """The token before the newest one."""
    gained: jax.Array
    verified: jax.Array
    accepted: jax.Array
    outputs: jax.Array


def drafted_round(
    leaves: Arrays,
    state: State,
    packed: jax.Array,
    *,
    skeleton: Skeleton,
    num_draft: int,
    num_turns: int,
    mode: Mode,
) -> tuple[State, jax.Array]:
    """Drafts and verifies in turn; donates `state`. Returns int32 [place + NUM_TALLIES, row, outputs].

    A row gains at least one token per turn until it has gained `counts`. Its tokens are at its first places.
    The last column of `packed` is the token before the newest one.
    """
    model, draft = skeleton.model(leaves), skeleton.draft_model(leaves)
    given = unpack(packed, skeleton.table_width)
    rows, places = given.slots.shape[0], num_draft + 1
    row_numbers = jnp.arange(rows)[:, None]
    is_new = jnp.arange(places, dtype=jnp.int32)[None]

    def turn(_: jax.Array | int, carry: _Turn) -> _Turn:
        state, left = carry.state, given.counts - carry.gained
        now = given._replace(positions=given.positions + carry.gained, counts=jnp.minimum(left, places))
        tokens, draft_pools = _draft(draft, state, now, carry.newest, carry.prior, num_draft, mode)
        fed = jnp.concatenate([carry.newest[:, None], tokens], axis=1)  # [row, place]
        verified = verify(model, state, now, fed, mode)
        num_new = jnp.where(left > 0, verified.accepted + 1, 0)
        at = jnp.where(is_new < num_new[:, None], carry.gained[:, None] + is_new, len(carry.outputs))
        last = verified.accepted[:, None]
        memory = state.memory._replace(history=verified.history)
        return _Turn(
            state._replace(pools=verified.pools, memory=memory, draft_pools=draft_pools),
            jnp.where(left > 0, verified.newest, carry.newest),
            jnp.where(left > 0, jnp.take_along_axis(fed, last, axis=1)[:, 0], carry.prior),
            carry.gained + num_new,
            carry.verified + jnp.maximum(now.counts - 1, 0),
            carry.accepted + verified.accepted,
            carry.outputs.at[at, row_numbers].set(verified.outputs, mode="drop"),
        )

    none = jnp.zeros(rows, jnp.int32)
    outputs = jnp.zeros((num_turns * places, rows, NUM_OUTPUTS[mode]), jnp.int32)
    newest = state.last_tokens.at[given.slots].get(mode="clip")
    carry = _Turn(state, newest, packed[:, -1], none, none, none, outputs)
    carry = turn(0, carry) if num_turns == 1 else lax.fori_loop(0, num_turns, turn, carry)
    last_tokens = carry.state.last_tokens.at[given.slots].set(carry.newest, mode="drop")
    tallies = jnp.stack([carry.gained, carry.verified, carry.accepted])  # [tally, row]
    tallies = jnp.broadcast_to(tallies[..., None], (NUM_TALLIES, rows, NUM_OUTPUTS[mode]))
    return carry.state._replace(last_tokens=last_tokens), jnp.concatenate([carry.outputs, tallies])


def draft_prefill(
    leaves: Arrays, state: State, packed: jax.Array, *, skeleton: Skeleton
) -> tuple[State, ChunkOutput]:
    """Shows the draft model tokens that only the model has seen; donates `state`. Nothing is sampled."""
    given, tokens, is_given = unpack_chunks(packed, skeleton)
    positions = chunk_positions(given, is_given)
    draft_pools = skeleton.fill_draft(leaves, state, tokens[:, :-1], given.table, positions)
    return state._replace(draft_pools=draft_pools), ChunkOutput(jnp.zeros((len(tokens), 1), jnp.int32))


def _draft(
    draft: Decoder,
    state: State,
    given: RoundInput,
    newest: jax.Array,
    prior: jax.Array,
    num_draft: int,
    mode: Mode,
) -> tuple[jax.Array, Arrays]:
    """int32 [row, num_draft]: what may follow the newest tokens, and the draft model's pools.

    Tokens are drawn as the model draws them, with the row's own rules and seed: equal models draw equally.
    The last token of a draft may have been right, but was not fed to the draft model. So a turn begins with
    the newest token and the one before it.
    """
    num_fed = given.counts - 1
    # Log-probabilities are the model's, never the draft model's.
    silent = jnp.full_like(given.rules.logprobs, NO_LOGPROBS)
    given = given._replace(rules=given.rules._replace(logprobs=silent))

    def guess(
        number: jax.Array | int, fed: jax.Array, positions: jax.Array, pools: Arrays, memory: Memory
    ) -> tuple[jax.Array, Arrays, Memory]:
        """Feeds tokens [row, place] and draws the draft's token of this number after the last one."""
        named, pools = draft(fed, pools, given.table, positions)
        hidden = named.rearrange((ROW, CHUNK, "embed")).array[:, -1]
        following = positions[:, -1] + 1
        drawn = sample_rows(draft, hidden, given, following, state._replace(memory=memory), mode)
        token = jnp.maximum(drawn.tokens, 0)  # not `POISONED`: the model is fed these
        if mode is Mode.FULL:
            slots = jnp.where(number < num_fed, given.slots, memory.history.shape[0])
            memory = memory._replace(history=remember(memory, slots, following, token))
        return token, pools, memory

    pair = jnp.stack([prior, newest], axis=1)
    positions = jnp.stack([given.positions - 1, given.positions], axis=1)
    # Both are fed even if a row has no room for a draft: the next turn relies on it.
    positions = jnp.where(given.counts[:, None] > 0, positions, -1)
    token, pools, memory = guess(0, pair, positions, state.draft_pools, state.memory)
    tokens = jnp.zeros((len(token), num_draft), jnp.int32).at[:, 0].set(token)

    def step(number: jax.Array, carry: tuple[jax.Array, Arrays, Memory]) -> tuple[jax.Array, Arrays, Memory]:
        tokens, pools, memory = carry
        fed = lax.dynamic_slice_in_dim(tokens, number - 1, 1, axis=1)
        positions = jnp.where(number < num_fed, given.positions + number, -1)
        token, pools, memory = guess(number, fed, positions[:, None], pools, memory)
        return tokens.at[:, number].set(token), pools, memory

    tokens, pools, _ = lax.fori_loop(1, num_draft, step, (tokens, pools, memory))
    return tokens, pools
