"""What the device runs for a model that computes whole texts: runs, draws and scores.

A run leaves the logits after each of its texts in a buffer on the device; draws and scores read them from
there. So equal texts are computed once, however many tokens are drawn after them, and everything after the
logits is the same as for models with a KV cache. Pure functions over flat tuples of arrays.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from levserve.device.packing import unpack
from levserve.device.sampling import SlotMasks, draw, pack_outputs, remember, score_by_tiles
from levserve.model.backend import Backend
from levserve.model.rules import Drawn, Memory, Mode
from levserve.model.sampler import logprobs_of

Arrays = tuple[jax.Array, ...]

TARGET, LENGTH, TOKENS = 0, 1, 2
"""Columns of a run's packed array: the row of the buffer, the text's length, and its tokens from there on."""


class TextModel(Protocol):
    """All that the engine asks of a model that computes whole texts."""

    def __call__(self, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        """The last states [row, place, embed] of texts [row, place] with these lengths [row]."""

    def logits(self, states: jax.Array) -> jax.Array:
        """float32 [row, vocab] of states [row, embed]."""


class TextState(NamedTuple):
    """Everything on the device that changes from round to round."""

    logits: jax.Array
    """float32 [row, vocab]: those of the round's texts."""
    memory: Memory
    masks: SlotMasks


class TextSkeleton(NamedTuple):
    """How to rebuild a model from its leaves inside a trace."""

    tree: jax.tree_util.PyTreeDef
    backend: Backend

    def model(self, leaves: Arrays) -> TextModel:
        model: TextModel = jax.tree.unflatten(self.tree, leaves)
        return model


def run_texts(
    leaves: Arrays, logits: jax.Array, packed: jax.Array, *, skeleton: TextSkeleton
) -> tuple[jax.Array, jax.Array]:
    """Computes texts; donates the buffer of logits, and returns it with the rows that the texts name filled.

    Also returns float32 [text, 2, embed]: the mean of each text's last states, and that of its last token.
    Padding names a row that does not exist.
    """
    model = skeleton.model(leaves)
    tokens, lengths = packed[:, TOKENS:], jnp.maximum(packed[:, LENGTH], 1)
    states = model(tokens, lengths)
    count, size = tokens.shape
    last = states[jnp.arange(count), lengths - 1]
    # On a CPU, a product of one row is slower than one of two rows.
    found = model.logits(jnp.concatenate([last, last]) if count == 1 else last)[:count]
    is_real = jnp.arange(size, dtype=jnp.int32)[None] < lengths[:, None]
    mean = jnp.where(is_real[..., None], states, 0.0).sum(1) / lengths.astype(jnp.float32)[:, None]
    return logits.at[packed[:, TARGET]].set(found, mode="drop"), jnp.stack([mean, last], axis=1)


def draw_texts(
    logits: jax.Array,
    memory: Memory,
    masks: SlotMasks,
    packed: jax.Array,
    *,
    backend: Backend,
    mode: Mode,
) -> tuple[Memory, jax.Array]:
    """Draws a token for each row, from the logits of the text that its last column names; donates `memory`.

    Returns int32 [row, outputs].
    """
    given = unpack(packed[:, :-1], 0)
    of_rows = logits.at[packed[:, -1]].get(mode="clip")
    drawn = draw(of_rows, given, given.positions, memory, masks, mode, backend)
    history = memory.history
    if mode is Mode.FULL:
        history = remember(memory, given.slots, given.positions, drawn.tokens)
    return memory._replace(history=history), pack_outputs(drawn)


def score_texts(logits: jax.Array, packed: jax.Array) -> jax.Array:
    """Outputs, int32 [row, outputs], for tokens: packed [row, 2] has a row of `logits` and the token."""
    rows, tokens = packed.T
    of_rows = logits.at[rows].get(mode="clip")
    return pack_outputs(Drawn(tokens, *logprobs_of(of_rows, tokens)))


def score_in_one_pass(leaves: Arrays, packed: jax.Array, *, skeleton: TextSkeleton) -> jax.Array:
    """Outputs, int32 [place, outputs], for the token after each place of one text.

    Every place sees the whole text, also what follows it.
    """
    model = skeleton.model(leaves)
    tokens, lengths = packed[:, TOKENS:], jnp.maximum(packed[:, LENGTH], 1)
    following = jnp.roll(tokens, -1, axis=1)
    return score_by_tiles(model.logits, model(tokens, lengths), following)[0]
