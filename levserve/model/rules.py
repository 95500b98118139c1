"""The arrays on the device that sampling reads and writes: how each row is sampled, what is remembered of it,
which tokens it may draw, and what was drawn.

`sampler.py` uses them. The host packs rules in `device/rules.py`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, NamedTuple

import jax
import numpy as np

NUM_TOP = 20
"""Alternatives returned with every token in full mode: the most that OpenAI's API lets a client ask for."""
MAX_EDITS = 332
"""The most logit edits that a row may have: 300 biases, 16 stop ids, and the model's own end tokens."""
BANNED = -1e30
"""Added to the logit of a token that must not be drawn."""
POISONED = -1
"""Stands for the token of a row whose logits are not finite."""
FREE = -1
"""Stands for the slot of a row that has no mask."""
NO_LOGPROBS, RAW_LOGPROBS, PROCESSED_LOGPROBS = range(3)
"""Which log-probabilities a row wants for its tokens: none, the model's own, or those of the distribution
that the token was drawn from."""


class Mode(StrEnum):
    GREEDY = "greedy"
    PLAIN = "plain"
    FULL = "full"


Floats = Annotated[jax.Array, np.float32]
Ints = Annotated[jax.Array, np.int32]
Seeds = Annotated[jax.Array, np.uint64]
"""On the device a seed is two words: uint32 [row, 2]."""


class Rules(NamedTuple):
    """How each row is sampled; every field is [row]. An annotation names the type that `device/rules.py`
    packs the field as."""

    temperature: Floats
    top_k: Ints
    top_p: Floats
    min_p: Floats
    presence: Floats
    frequency: Floats
    repetition: Floats
    prompt_len: Ints
    num_edits: Ints
    logprobs: Ints
    is_constrained: Ints
    seed: Seeds


class Memory(NamedTuple):
    """What full mode remembers of each row: its tokens by position, and its logit edits.

    An edit adds its value to the logit of its id at positions below its `until`.
    """

    history: jax.Array
    """int32 [row, max_seq_len]"""
    edit_ids: jax.Array
    edit_values: jax.Array
    edit_until: jax.Array
    """[row, MAX_EDITS]"""


class Masks(NamedTuple):
    """What constrained rows may draw. A slot's words are for one position, so a step has few masks."""

    words: jax.Array
    """uint32 [slot, vocab / 32]: a bit for every token that may be drawn, the first in the lowest bit."""
    at: jax.Array
    """int32 [slot]: the position that the words are for."""
    slots: jax.Array
    """int32 [row]: the slot of a constrained row, or `FREE`."""


class Drawn(NamedTuple):
    """Tokens [row]; in full mode also their log-probabilities [row] and the likeliest tokens with theirs
    [row, NUM_TOP]."""

    tokens: jax.Array
    logprobs: jax.Array | None = None
    top_ids: jax.Array | None = None
    top_logprobs: jax.Array | None = None
