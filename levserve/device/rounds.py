"""What the device runs in a round: prefill, decoding, both in one pass, verification of drafts, and copies.

These are pure functions, compiled ahead of time by `programs.py`. Their arguments are flat tuples of arrays,
because passing an Equinox or Haliax object to a compiled program takes a millisecond or more. State is
donated and returned, so that the KV pool is written in place. Sampled tokens stay on the device for the next
round; the host reads a copy one round later.
"""

from __future__ import annotations

from typing import NamedTuple

import haliax as hax
import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from levserve.device.packing import NUM_COLUMNS, RoundInput, unpack
from levserve.device.sampling import (
    NUM_OUTPUTS,
    SlotMasks,
    draw,
    hold_slots,
    pack_outputs,
    remember,
    score_by_tiles,
    score_wanted,
)
from levserve.model import cache
from levserve.model.backend import Backend
from levserve.model.decoder import Blueprint, Decoder
from levserve.model.feed_forward import CHUNK, ROW
from levserve.model.rules import Drawn, Memory, Mode

Arrays = tuple[jax.Array, ...]


class State(NamedTuple):
    """Everything on the device that changes from round to round."""

    pools: Arrays
    last_tokens: jax.Array
    """int32 [slot]: the newest token, not yet in the KV pool."""
    memory: Memory
    masks: SlotMasks
    draft_pools: Arrays = ()
    """A draft model's KV pools. Its pages have the same numbers as the model's and hold the same tokens."""


class Skeleton(NamedTuple):
    """How to build a model from its arrays inside a trace. Each of several devices builds its own.

    The arrays of a draft model, if there is one, follow those of the model.
    """

    blueprint: Blueprint
    names: tuple[str, ...]
    table_width: int
    draft: Blueprint | None = None
    draft_names: tuple[str, ...] = ()

    @property
    def backend(self) -> Backend:
        return self.blueprint.backend

    def model(self, leaves: Arrays) -> Decoder:
        return self.blueprint.build(dict(zip(self.names, leaves[: len(self.names)], strict=True)))

    def draft_model(self, leaves: Arrays) -> Decoder:
        assert self.draft is not None
        return self.draft.build(dict(zip(self.draft_names, leaves[len(self.names) :], strict=True)))

    def fill_draft(
        self, leaves: Arrays, state: State, tokens: jax.Array, table: jax.Array, positions: jax.Array
    ) -> Arrays:
        """The draft model's pools once it has seen these tokens too."""
        if self.draft is None:
            return state.draft_pools
        return self.draft_model(leaves)(tokens, state.draft_pools, table, positions)[1]


class ChunkOutput(NamedTuple):
    """The results of a prefill program; the host copies only what a request asked for."""

    sampled: jax.Array
    """int32 [row, outputs]: the next token of the rows that name a slot; see `NUM_OUTPUTS`."""
    scores: jax.Array | None = None
    """int32 [row, chunk, outputs]: the same for the token after each position; zeros where not wanted."""
    pooled: jax.Array | None = None
    """float32 [row, 2, embed]: the sum of the chunk's hidden states, and the last of them."""


def sample_only_prefill(
    leaves: Arrays, state: State, packed: jax.Array, *, skeleton: Skeleton
) -> tuple[State, ChunkOutput]:
    """Like `prefill_chunk`, for requests that want the next token and nothing else, drawn in plain mode.

    A GPU runs this as one graph. `prefill_chunk` has branches, and at each of them the GPU waits for the host
    to decide.
    """
    model = skeleton.model(leaves)
    given, tokens, is_given = unpack_chunks(packed, skeleton)
    ends = jnp.maximum(given.counts - 1, 0)
    positions = chunk_positions(given, is_given)
    named, pools = model(tokens[:, :-1], state.pools, given.table, positions, ends)
    hidden = named.rearrange((ROW, CHUNK, "embed")).array[:, 0]
    drawn = sample_rows(model, hidden, given, given.positions + given.counts, state, Mode.PLAIN)
    last_tokens = state.last_tokens.at[given.slots].set(drawn.tokens, mode="drop")
    draft_pools = skeleton.fill_draft(leaves, state, tokens[:, :-1], given.table, positions)
    state = state._replace(pools=pools, last_tokens=last_tokens, draft_pools=draft_pools)
    return state, ChunkOutput(pack_outputs(drawn))


def prefill_chunk(
    leaves: Arrays, state: State, packed: jax.Array, *, skeleton: Skeleton
) -> tuple[State, ChunkOutput]:
    """Computes one chunk per row and samples after those that name a slot; donates `state`."""
    model = skeleton.model(leaves)
    given, tokens, is_given = unpack_chunks(packed, skeleton)
    rows = tokens.shape[0]
    positions = chunk_positions(given, is_given)
    named, pools = model(tokens[:, :-1], state.pools, given.table, positions)
    hidden = named.rearrange((ROW, CHUNK, "embed")).array
    # [row, embed]: logits for every position would take as long as the chunk.
    hidden_last = hidden[jnp.arange(rows), jnp.maximum(given.counts - 1, 0)]
    num_slots = state.last_tokens.shape[0]

    def draw_last() -> tuple[jax.Array, jax.Array, jax.Array]:
        drawn = sample_rows(model, hidden_last, given, given.positions + given.counts, state, Mode.FULL)
        last_tokens = state.last_tokens.at[given.slots].set(drawn.tokens, mode="drop")
        history = remember(state.memory, given.slots, given.positions + given.counts, drawn.tokens)
        return last_tokens, history, pack_outputs(drawn)

    def skip() -> tuple[jax.Array, jax.Array, jax.Array]:
        return state.last_tokens, state.memory.history, jnp.zeros((rows, NUM_OUTPUTS[Mode.FULL]), jnp.int32)

    last_tokens, history, outputs = lax.cond((given.slots < num_slots).any(), draw_last, skip)
    # Without the constraint jax 0.12 changes the layout of all layers' activations on a GPU for this sum.
    as_computed = with_layout_constraint(hidden, Layout((0, 1, 2)))
    pooled = jnp.stack([jnp.where(is_given[..., None], as_computed, 0.0).sum(1), hidden_last], axis=1)
    output = ChunkOutput(outputs, _score(model, hidden, tokens[:, 1:], given), pooled)
    draft_pools = skeleton.fill_draft(leaves, state, tokens[:, :-1], given.table, positions)
    return _next_state(state._replace(draft_pools=draft_pools), pools, last_tokens, history), output


def unpack_chunks(packed: jax.Array, skeleton: Skeleton) -> tuple[RoundInput, jax.Array, jax.Array]:
    """The columns, the tokens [row, chunk + 1], and which are not padding [row, chunk]."""
    given = unpack(packed, skeleton.table_width)
    tokens = packed[:, NUM_COLUMNS + skeleton.table_width :]
    places = jnp.arange(tokens.shape[1] - 1, dtype=jnp.int32)[None]
    return given, tokens, places < given.counts[:, None]


def chunk_positions(given: RoundInput, is_given: jax.Array) -> jax.Array:
    places = jnp.arange(is_given.shape[1], dtype=jnp.int32)[None]
    return jnp.where(is_given, given.positions[:, None] + places, -1)


def _score(model: Decoder, hidden: jax.Array, following: jax.Array, given: RoundInput) -> jax.Array:
    """Log-probabilities of the token after each position, if any is wanted."""
    rows, chunk, _ = hidden.shape

    def logits_of(states: jax.Array) -> jax.Array:
        return model.logits(hax.named(states, (ROW, model.config.Embed)))

    def skip() -> jax.Array:
        return jnp.zeros((rows, chunk, NUM_OUTPUTS[Mode.FULL]), jnp.int32)

    tile = model.backend.traits.score_tile
    if tile is None:
        is_any_wanted = (given.scored > 0).any()
        return lax.cond(is_any_wanted, lambda: score_by_tiles(logits_of, hidden, following), skip)
    until_end = given.counts[:, None] - jnp.arange(chunk, dtype=jnp.int32)[None]
    is_wanted = (until_end > 0) & (until_end <= given.scored[:, None])
    return score_wanted(logits_of, hidden, following, is_wanted, tile)


def decode_round(
    leaves: Arrays, state: State, packed: jax.Array, *, skeleton: Skeleton, num_steps: int, mode: Mode
) -> tuple[State, jax.Array]:
    """Runs `num_steps` decode steps for every row; donates `state`. Returns int32 [step, row, outputs].

    After its own number of steps a row idles to the end of the round: it writes nothing and its tokens are
    void.
    """
    model = skeleton.model(leaves)
    given = unpack(packed, skeleton.table_width)
    rows = given.slots.shape[0]
    tokens = state.last_tokens.at[given.slots].get(mode="clip")
    outputs = jnp.zeros((num_steps, rows, NUM_OUTPUTS[mode]), jnp.int32)

    def step(
        number: jax.Array | int, carry: tuple[jax.Array, Arrays, jax.Array, jax.Array]
    ) -> tuple[jax.Array, Arrays, jax.Array, jax.Array]:
        tokens, pools, history, outputs = carry
        is_active = number < given.counts
        positions = jnp.where(is_active, given.positions + number, -1)
        hidden, pools = model(tokens[:, None], pools, given.table, positions[:, None])
        so_far = state._replace(memory=state.memory._replace(history=history))
        drawn = sample_rows(model, hidden.array[:, 0], given, positions + 1, so_far, mode)
        if mode is Mode.FULL:
            slots = jnp.where(is_active, given.slots, history.shape[0])
            history = remember(so_far.memory, slots, positions + 1, drawn.tokens)
        tokens = jnp.where(is_active, drawn.tokens, tokens)
        return tokens, pools, history, outputs.at[number].set(pack_outputs(drawn))

    carry = (tokens, state.pools, state.memory.history, outputs)
    carry = step(0, carry) if num_steps == 1 else lax.fori_loop(0, num_steps, step, carry)
    tokens, pools, history, outputs = carry
    last_tokens = state.last_tokens.at[given.slots].set(tokens, mode="drop")
    return _next_state(state, pools, last_tokens, history), outputs


def mixed_round(
    leaves: Arrays, state: State, packed: jax.Array, *, skeleton: Skeleton, num_sampled: int, mode: Mode
) -> tuple[State, tuple[jax.Array, jax.Array]]:
    """One decode step and prefill in one pass, so that the weights are read once; donates `state`.

    Returns int32 [1, row, outputs] of the first `num_sampled` rows, and the same as [row, outputs].
    """
    model = skeleton.model(leaves)
    given, fed = unpack(packed, skeleton.table_width), packed[:, -1]
    tokens = jnp.where(fed < 0, state.last_tokens.at[given.slots].get(mode="clip"), fed)
    positions = jnp.where(given.counts > 0, given.positions, -1)
    hidden, pools = model(tokens[:, None], state.pools, given.table, positions[:, None])
    sampled = jax.tree.map(lambda array: array[:num_sampled], given)
    following = jnp.where(sampled.slots < state.last_tokens.shape[0], positions[:num_sampled] + 1, 0)
    drawn = sample_rows(model, hidden.array[:num_sampled, 0], sampled, following, state, mode)
    history = state.memory.history
    if mode is Mode.FULL:
        history = remember(state.memory, sampled.slots, following, drawn.tokens)
    last_tokens = state.last_tokens.at[sampled.slots].set(drawn.tokens, mode="drop")
    outputs = pack_outputs(drawn)
    return _next_state(state, pools, last_tokens, history), (outputs[None], outputs)


def verify_round(
    leaves: Arrays, state: State, packed: jax.Array, *, skeleton: Skeleton
) -> tuple[State, jax.Array]:
    """Feeds every row's newest token and its draft at once, and draws after each; donates `state`.

    Returns int32 [place, row, outputs]. A draw depends only on its position and the tokens before it, so the
    draws equal those of decode steps as long as they agree with the draft, and for one more token. The KV of
    later places is overwritten when decoding gets there.
    """
    model = skeleton.model(leaves)
    given = unpack(packed, skeleton.table_width)
    draft = packed[:, NUM_COLUMNS + skeleton.table_width :]
    newest_tokens = state.last_tokens.at[given.slots].get(mode="clip")
    fed = jnp.concatenate([newest_tokens[:, None], draft], axis=1)  # [row, place]
    verified = verify(model, state, given, fed, Mode.FULL)
    last_tokens = state.last_tokens.at[given.slots].set(verified.newest, mode="drop")
    state = _next_state(state, verified.pools, last_tokens, verified.history)
    return state, verified.outputs.swapaxes(0, 1)


class Verified(NamedTuple):
    """The result of checking drafts with the model."""

    pools: Arrays
    history: jax.Array
    outputs: jax.Array
    """int32 [row, place, outputs]: what is drawn after each place."""
    accepted: jax.Array
    """int32 [row]: how many leading tokens of the draft the model drew too."""
    newest: jax.Array
    """int32 [row]: the token drawn after those."""


def verify(model: Decoder, state: State, given: RoundInput, fed: jax.Array, mode: Mode) -> Verified:
    """Feeds every row's newest token and its draft [row, place], and draws after each.

    Only a row's first `given.counts` places are used; the first of them is at `given.positions`.
    """
    rows, places = fed.shape
    offsets = jnp.arange(places, dtype=jnp.int32)[None]
    is_fed = offsets < given.counts[:, None]
    positions = jnp.where(is_fed, given.positions[:, None] + offsets, -1)
    hidden, pools = model(fed, state.pools, given.table, positions)

    memory = state.memory
    if mode is Mode.FULL:
        # The sampler looks only at the history before a place's position, so the whole draft may be in it.
        nowhere = memory.history.shape[1]
        history = remember(memory, given.slots[:, None], jnp.where(is_fed, positions, nowhere), fed)
        memory = memory._replace(history=history)
    each = jax.tree.map(lambda array: jnp.repeat(array, places, axis=0), given)
    flat = hidden.rearrange((ROW, CHUNK, "embed")).array.reshape(rows * places, -1)
    drawn = sample_rows(model, flat, each, positions.reshape(-1) + 1, state._replace(memory=memory), mode)

    tokens = drawn.tokens.reshape(rows, places)
    is_right = is_drawn(fed[:, 1:], tokens[:, :-1], positions[:, 1:]) & is_fed[:, 1:]
    accepted = jnp.cumprod(is_right.astype(jnp.int32), axis=1).sum(1)
    newest = jnp.take_along_axis(tokens, accepted[:, None], axis=1)[:, 0]
    history = memory.history
    if mode is Mode.FULL:
        slots = jnp.where(given.counts > 0, given.slots, history.shape[0])
        history = remember(memory, slots, given.positions + accepted + 1, newest)
    outputs = pack_outputs(drawn).reshape(rows, places, -1)
    return Verified(pools, history, outputs, accepted, newest)


def is_drawn(draft: jax.Array, tokens: jax.Array, positions: jax.Array) -> jax.Array:
    """Whether the draft's tokens at these positions are those that were drawn; a benchmark replaces this."""
    return draft == tokens


def set_masks(
    masks: SlotMasks, last_tokens: jax.Array, packed: jax.Array, words: jax.Array
) -> tuple[SlotMasks, jax.Array]:
    """Sets the masks of some slots' next draws, uint32 [row, vocab / 32]; donates all masks and the tokens.

    packed: int32 [row, 3], the slot, the position that is drawn, and the newest token before it, in case the
    device drew another one. Rows with a slot that does not exist are dropped.
    """
    slots, _, tokens = packed.T
    return hold_slots(masks, packed, words), last_tokens.at[slots].set(tokens, mode="drop")


def fork_slot(state: State, packed: jax.Array) -> State:
    """Copies a page and sets a slot's newest token, so that the slot decodes from there; donates `state`.

    packed: int32 [4], the slot, the token, the page to read and the page to write.
    """
    slot, token, source, target = packed

    def copy_page(pool: jax.Array) -> jax.Array:
        page = lax.dynamic_slice_in_dim(pool, source, 1)
        return lax.dynamic_update_slice_in_dim(pool, page, target, 0)

    return state._replace(
        pools=tuple(map(copy_page, state.pools)),
        last_tokens=state.last_tokens.at[slot].set(token),
        draft_pools=tuple(map(copy_page, state.draft_pools)),
    )


def fill_pages(pools: Arrays, pages: jax.Array, value: jax.Array) -> Arrays:
    """Fills pages [page] of every layer with a stored value; donates `pools`. Skips pages past the last."""
    return tuple(pool.at[pages].set(value, mode="drop") for pool in pools)


def sample_rows(
    model: Decoder, hidden: jax.Array, given: RoundInput, positions: jax.Array, state: State, mode: Mode
) -> Drawn:
    rows = hidden.shape[0]
    if rows == 1:
        hidden = jnp.concatenate([hidden, hidden])  # on a CPU the product takes 50 ms for one row, 15 for two
    used = cache.num_used(positions > 0)
    logits = model.logits(hax.named(hidden, (ROW, model.config.Embed)), used)[:rows]
    return draw(logits, given, positions, state.memory, state.masks, mode, model.backend, used)


def _next_state(state: State, pools: Arrays, last_tokens: jax.Array, history: jax.Array) -> State:
    memory = state.memory._replace(history=history)
    return state._replace(pools=pools, last_tokens=last_tokens, memory=memory)
