"""Draws one token per row from its logits, on the device, each row by its own rules.

Of three modes the host picks the cheapest that serves every row: greedy, plain (temperature, top-k, top-p and
min-p) and full (everything). Full mode skips at run time what no row asks for, so that one program is enough
on a CPU. A row draws the same token in any mode that can serve it, next to any neighbours: the draw is an
inverse CDF at random numbers that depend on the request's seed and the position alone. The vocabulary is
never sorted.

A row may be held to a mask of tokens at one position. It draws as always, and if the mask does not allow the
token it draws once more from what the mask allows. For a greedy row that is the likeliest allowed token, and
for others a draw from the allowed ones: p + (1 - a) p / a = p / a, if a is what all of them have together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from levserve.model.backend import Backend, Likeliest

NUM_TOP = 20
"""Alternatives returned with every token in full mode: the most that OpenAI's API lets a client ask for."""
NUM_CANDIDATES = 128
"""Likeliest tokens looked at for top-k and top-p before falling back to a search over the vocabulary."""
CHUNK, SMALL_CHUNK = 256, 32
"""Tokens of the vocabulary looked at together, at most, to find one of them or several."""
NUM_ATTEMPTS = 8
"""Draws with fresh random numbers that a kernel makes until one is in the nucleus of top-p: each is with
probability top_p."""
MOST_LOGITS = 2**18
"""Logits that a CPU edits at once: more memory would be taken from the system and returned at every step."""
SECOND_DRAW = 2**30
"""Added to a position for other random numbers; no sequence is as long."""
MAX_EDITS = 332
"""Logit edits a row may have: 300 biases, 16 stop ids, and the model's own end tokens."""
BANNED = -1e30
POISONED = -1
"""Stands for a token where the row's logits are not finite."""


class Mode(StrEnum):
    GREEDY = "greedy"
    PLAIN = "plain"
    FULL = "full"


Floats = Annotated[jax.Array, np.float32]
Ints = Annotated[jax.Array, np.int32]
Seeds = Annotated[jax.Array, np.uint64]
"""As two words, uint32 [row, 2]."""


class Rules(NamedTuple):
    """How each row is sampled; every field is [row]. Annotations name the types in which `device/rules.py`
    packs them."""

    temperature: Floats
    top_k: Ints
    top_p: Floats
    min_p: Floats
    presence: Floats
    frequency: Floats
    repetition: Floats
    prompt_len: Ints
    num_edits: Ints
    wants_logprobs: Ints
    is_constrained: Ints
    seed: Seeds


class Memory(NamedTuple):
    """What full mode remembers of each row: its tokens by position, the logits to edit, and a mask.

    An edit adds `values` to the logit of `ids` while the position is below `until`. The mask holds for the
    one position `mask_at` of a row that is constrained.
    """

    history: jax.Array
    """int32 [row, max_seq_len]"""
    edit_ids: jax.Array
    edit_values: jax.Array
    edit_until: jax.Array
    """[row, MAX_EDITS]"""
    mask: jax.Array
    """uint32 [row, vocab / 32]: a bit for every token that may be drawn, the first in the lowest bit."""
    mask_at: jax.Array
    """int32 [row]"""


class Drawn(NamedTuple):
    """Tokens [row]; in full mode also their raw log-probabilities [row] and the likeliest [row, NUM_TOP]."""

    tokens: jax.Array
    logprobs: jax.Array | None = None
    top_ids: jax.Array | None = None
    top_logprobs: jax.Array | None = None


def sample(
    logits: jax.Array,
    positions: jax.Array,
    rules: Rules,
    memory: Memory | None,
    mode: Mode,
    backend: Backend,
    num_used: jax.Array | None = None,
) -> Drawn:
    """Draws the token for `positions` [row] from float32 logits [row, vocab]; `POISONED` where they are not
    finite.

    Rows after the first `num_used` [1] are padding.
    """
    if backend.draws_tokens and mode is not Mode.GREEDY:
        return _sample_by_kernel(logits, positions, rules, memory, backend)
    best = backend.likeliest(logits, num_used)
    if mode is Mode.GREEDY:
        return Drawn(_mark_poisoned(best.tokens, best))
    if mode is Mode.PLAIN:
        floor = _floor(logits, rules)
        return Drawn(_mark_poisoned(choose(logits, floor, best, positions, rules), best))
    assert memory is not None
    if backend.traits.has_all_modes:
        drawn = _sample_fully(logits, positions, rules, memory)
    else:  # this program also serves rows that ask for less, for which copying all logits would be a waste
        drawn = _sample_as_asked(logits, best, positions, rules, memory)
    return drawn._replace(tokens=_mark_poisoned(drawn.tokens, best))


def _sample_by_kernel(
    logits: jax.Array, positions: jax.Array, rules: Rules, memory: Memory | None, backend: Backend
) -> Drawn:
    def draw(logits: jax.Array, positions: jax.Array) -> jax.Array:
        points = _points(positions, rules, NUM_ATTEMPTS, 2)
        best = backend.draw(logits, rules.temperature, rules.top_k, rules.top_p, rules.min_p, points)
        return _mark_poisoned(best.tokens, best)

    if memory is None:
        return Drawn(draw(logits, positions))
    edited = _edit(logits, positions, rules, memory)
    tokens = draw(edited, positions)
    is_misfit = _find_misfits(tokens, positions, rules, memory)

    def redraw() -> jax.Array:
        return jnp.where(is_misfit, draw(_mask(edited, memory), positions + SECOND_DRAW), tokens)

    tokens = lax.cond(is_misfit.any(), redraw, lambda: tokens)
    return Drawn(tokens, *_logprobs_if_wanted(logits, tokens, rules))


def _sample_as_asked(
    logits: jax.Array, best: Likeliest, positions: jax.Array, rules: Rules, memory: Memory
) -> Drawn:
    def sample_plainly(logits: jax.Array, positions: jax.Array, rules: Rules, _: Memory) -> Drawn:
        tokens = choose(logits, None, best, positions, rules)
        return Drawn(tokens, *_no_logprobs(logits, tokens))

    def sample_by_parts(*given: Any) -> Drawn:
        rows, vocab = logits.shape
        size = math.gcd(rows, 2 ** int(math.log2(max(MOST_LOGITS // vocab, 1))))
        parts = jax.tree.map(lambda array: array.reshape(-1, size, *array.shape[1:]), given)
        drawn = lax.map(lambda part: _sample_fully(*part), parts)
        return jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:]), drawn)

    is_changed = _is_penalised(rules) | _is_truncated(rules) | (rules.num_edits > 0)
    is_asked = is_changed | (rules.wants_logprobs != 0) | _is_held(positions, rules, memory)
    drawn: Drawn = lax.cond(is_asked.any(), sample_by_parts, sample_plainly, logits, positions, rules, memory)
    return drawn


def _sample_fully(logits: jax.Array, positions: jax.Array, rules: Rules, memory: Memory) -> Drawn:
    edited = _edit(logits, positions, rules, memory)

    def draw(
        attempt: jax.Array, tokens: jax.Array, is_misfit: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The second attempt is under the masks, for rows whose first token did not fit. The two are one
        loop because their code takes a second to compile."""
        allowed = lax.cond(attempt > 0, lambda: _mask(edited, memory), lambda: edited)
        best = likeliest(allowed)
        found = choose(allowed, _floor(allowed, rules), best, positions + attempt * SECOND_DRAW, rules)
        tokens = jnp.where(is_misfit, _mark_poisoned(found, best), tokens)
        return attempt + 1, tokens, _find_misfits(tokens, positions, rules, memory)

    def has_next(attempt: jax.Array, _: jax.Array, is_misfit: jax.Array) -> jax.Array:
        return (attempt == 0) | ((attempt == 1) & is_misfit.any())

    rows = logits.shape[0]
    start = jnp.int32(0), jnp.zeros(rows, jnp.int32), jnp.ones(rows, bool)
    _, tokens, _ = lax.while_loop(lambda carry: has_next(*carry), lambda carry: draw(*carry), start)
    return Drawn(tokens, *_logprobs_if_wanted(logits, tokens, rules))


def _is_held(positions: jax.Array, rules: Rules, memory: Memory) -> jax.Array:
    """Whether the row's draw for this position has a mask."""
    return (rules.is_constrained != 0) & (positions == memory.mask_at)


def _find_misfits(tokens: jax.Array, positions: jax.Array, rules: Rules, memory: Memory) -> jax.Array:
    """Whether the row's mask does not allow its token."""
    word = jnp.take_along_axis(memory.mask, jnp.maximum(tokens, 0)[:, None] >> 5, axis=1)[:, 0]
    is_allowed = (word >> (tokens & 31).astype(jnp.uint32)) & 1
    return _is_held(positions, rules, memory) & (tokens != POISONED) & (is_allowed == 0)


def _mask(logits: jax.Array, memory: Memory) -> jax.Array:
    """The logits of what the masks allow, and minus infinity for the rest."""
    bits = memory.mask[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None] & 1
    is_allowed = bits.reshape(bits.shape[0], -1)[:, : logits.shape[1]] == 1
    return jnp.where(is_allowed, logits, -jnp.inf)


def _is_penalised(rules: Rules) -> jax.Array:
    return (rules.presence != 0) | (rules.frequency != 0) | (rules.repetition != 1)


def _is_truncated(rules: Rules) -> jax.Array:
    return (rules.top_k > 0) | (rules.top_p < 1) | (rules.min_p > 0)


def _mark_poisoned(tokens: jax.Array, best: Likeliest) -> jax.Array:
    """A NaN anywhere makes the row's largest logit one; single tokens may well be -inf."""
    return jnp.where(jnp.isfinite(best.values), tokens, POISONED)


def likeliest(logits: jax.Array) -> Likeliest:
    """The largest entry of each row, in two levels: several times faster than one argmax on CPU."""
    chunks = _chunked(logits, -jnp.inf)
    tops = chunks.max(-1)
    best = jnp.argmax(tops, axis=-1)
    tokens = best * chunks.shape[-1] + jnp.argmax(_row_of(chunks, best), axis=-1)
    return Likeliest(tokens.astype(jnp.int32), tops.max(-1))


def largest(x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The largest entries of each row in descending order, and their places, as `lax.top_k` gives, which
    sorts on a GPU.

    They lie in the chunks with the largest maxima. Of equal entries the first counts, in chunks as in
    entries.
    """
    chunks = _chunked(x, -jnp.inf, SMALL_CHUNK)
    if chunks.shape[1] <= 2 * count:
        values, places = lax.top_k(x, count)
        return values, places.astype(jnp.int32)
    chosen = jnp.sort(lax.top_k(chunks.max(-1), count)[1], axis=-1)
    near = jnp.take_along_axis(chunks, chosen[:, :, None], axis=1).reshape(x.shape[0], -1)
    values, at = lax.top_k(near, count)
    size = chunks.shape[-1]
    places = jnp.take_along_axis(chosen, at // size, axis=1) * size + at % size
    return values, places.astype(jnp.int32)


def logprobs_of(logits: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The model's own log-probabilities: of the tokens [row], and of the likeliest, ids and values [row,
    NUM_TOP].

    A token that is also among the likeliest has the very same number in both.
    """
    total = jax.nn.logsumexp(logits, axis=-1)
    top, top_ids = largest(logits, NUM_TOP)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
    return chosen - total, top_ids, top - total[:, None]


def _logprobs_if_wanted(
    logits: jax.Array, tokens: jax.Array, rules: Rules
) -> tuple[jax.Array, jax.Array, jax.Array]:
    found: tuple[jax.Array, jax.Array, jax.Array] = lax.cond(
        (rules.wants_logprobs != 0).any(), logprobs_of, _no_logprobs, logits, tokens
    )
    return found


def _no_logprobs(logits: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    top = jnp.zeros((logits.shape[0], NUM_TOP), jnp.float32)
    return top[:, 0], top.astype(jnp.int32), top


def choose(
    logits: jax.Array, floor: jax.Array | None, best: Likeliest, positions: jax.Array, rules: Rules
) -> jax.Array:
    """Greedy for rows at temperature 0, else a draw from the softmax of what is not below the floor [row], if
    there is one."""

    def draw() -> jax.Array:
        weights = jnp.exp((logits - best.values[:, None]) / _divisor(rules))
        if floor is not None:
            weights = jnp.where(logits / _divisor(rules) >= floor[:, None], weights, 0.0)
        points = _points(positions, rules, 2)
        return jnp.where(rules.temperature > 0, _draw(weights, points), best.tokens)

    return lax.cond((rules.temperature > 0).any(), draw, lambda: best.tokens)


def _points(positions: jax.Array, rules: Rules, *shape: int) -> jax.Array:
    """Random numbers for each row, at least 0 and below 1: [row, *shape]."""
    keys = jax.vmap(lambda seed, position: jax.random.fold_in(jax.random.wrap_key_data(seed), position))(
        rules.seed, positions
    )
    return jax.vmap(lambda key: jax.random.uniform(key, shape))(keys)


def _draw(weights: jax.Array, points: jax.Array) -> jax.Array:
    """Inverse CDF in two levels: a chunk of the vocabulary, then a token in it, by a random number each."""
    chunks = _chunked(weights, 0.0)
    chunk = _first_beyond(chunks.sum(-1), points[:, 0])
    within = _first_beyond(_row_of(chunks, chunk), points[:, 1])
    return (chunk * chunks.shape[-1] + within).astype(jnp.int32)


def _first_beyond(weights: jax.Array, point: jax.Array) -> jax.Array:
    """Index of the first running sum above `point` of the whole; the heaviest if rounding leaves none."""
    sums = jnp.cumsum(weights, axis=-1)
    is_beyond = (sums > point[:, None] * sums[:, -1:]) & (weights > 0)
    return jnp.where(is_beyond.any(-1), jnp.argmax(is_beyond, axis=-1), jnp.argmax(weights, axis=-1))


def _edit(logits: jax.Array, positions: jax.Array, rules: Rules, memory: Memory) -> jax.Array:
    """Penalties and the rows' own edits."""

    def edit(logits: jax.Array) -> jax.Array:
        number = jnp.arange(MAX_EDITS, dtype=jnp.int32)[None]
        is_active = (number < rules.num_edits[:, None]) & (positions[:, None] < memory.edit_until)
        rows = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
        logits = lax.cond(
            _is_penalised(rules).any(), lambda: _penalise(logits, positions, rules, memory), lambda: logits
        )
        return logits.at[rows, memory.edit_ids].add(
            jnp.where(is_active, memory.edit_values, 0.0), mode="drop"
        )

    return lax.cond((_is_penalised(rules) | (rules.num_edits > 0)).any(), edit, lambda logits: logits, logits)


def _penalise(logits: jax.Array, positions: jax.Array, rules: Rules, memory: Memory) -> jax.Array:
    """Presence and frequency count what was generated; repetition counts the prompt as well."""
    at = jnp.arange(memory.history.shape[1], dtype=jnp.int32)[None]
    is_known = at < positions[:, None]
    is_generated = is_known & (at >= rules.prompt_len[:, None])
    rows = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    nothing = jnp.zeros(logits.shape, jnp.int32)
    known = nothing.at[rows, memory.history].add(is_known.astype(jnp.int32), mode="drop")
    generated = nothing.at[rows, memory.history].add(is_generated.astype(jnp.int32), mode="drop")
    repeated = jnp.where(logits > 0, logits / rules.repetition[:, None], logits * rules.repetition[:, None])
    logits = jnp.where(known > 0, repeated, logits)
    logits -= rules.frequency[:, None] * generated.astype(jnp.float32)
    return logits - rules.presence[:, None] * (generated > 0).astype(jnp.float32)


def _divisor(rules: Rules) -> jax.Array:
    """Of logits [row, vocab] before they are weighed."""
    return jnp.maximum(rules.temperature, 1e-5)[:, None]


def _floor(logits: jax.Array, rules: Rules) -> jax.Array:
    """The lowest logit of each row, over the temperature, that top-k, then top-p, then min-p allow."""

    def find() -> jax.Array:
        scaled = logits / _divisor(rules)
        vocab = logits.shape[1]
        top_k = jnp.where(rules.top_k > 0, jnp.minimum(rules.top_k, vocab), vocab)
        candidates, _ = largest(scaled, min(NUM_CANDIDATES, vocab))
        floor = _top_k_floor(scaled, candidates, top_k)
        floor = jnp.maximum(floor, _top_p_floor(scaled, candidates, floor, rules.top_p))
        return jnp.maximum(floor, candidates[:, 0] + jnp.log(rules.min_p))

    return lax.cond(_is_truncated(rules).any(), find, lambda: jnp.full(logits.shape[0], -jnp.inf))


def _top_k_floor(scaled: jax.Array, candidates: jax.Array, top_k: jax.Array) -> jax.Array:
    """The k-th largest value of each row."""
    num = candidates.shape[1]
    near = jnp.take_along_axis(candidates, jnp.minimum(top_k, num)[:, None] - 1, axis=1)[:, 0]
    is_far = (top_k > num) & (top_k < scaled.shape[1])

    def search() -> jax.Array:
        return _lowest_floor(scaled, lambda keep: keep.sum(-1) >= top_k)

    far = lax.cond(is_far.any(), search, lambda: near)
    return jnp.where(is_far, far, jnp.where(top_k <= num, near, -jnp.inf))


def _top_p_floor(scaled: jax.Array, candidates: jax.Array, floor: jax.Array, top_p: jax.Array) -> jax.Array:
    """The value of the last token in the smallest set that reaches top_p, among those not below `floor`."""
    top = candidates[:, :1]
    weights = jnp.where(scaled >= floor[:, None], jnp.exp(scaled - top), 0.0)
    wanted = top_p * weights.sum(-1)
    reached = jnp.cumsum(jnp.where(candidates >= floor[:, None], jnp.exp(candidates - top), 0.0), axis=-1)
    is_reached = reached >= wanted[:, None]
    near = jnp.take_along_axis(candidates, jnp.argmax(is_reached, axis=-1)[:, None], axis=1)[:, 0]
    is_far = ~is_reached.any(-1) & (top_p < 1)

    def search() -> jax.Array:
        return _lowest_floor(scaled, lambda keep: jnp.where(keep, weights, 0.0).sum(-1) >= wanted)

    far = lax.cond(is_far.any(), search, lambda: near)
    return jnp.where(top_p >= 1, -jnp.inf, jnp.where(is_far, far, near))


def _lowest_floor(scaled: jax.Array, is_enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """The highest floor [row] that keeps enough, by search over the float32 numbers themselves.

    It settles two bits of the floor at a time, which reads the logits half as often as one.
    """
    ordered = _ordered(scaled)

    def narrow(step: jax.Array | int, floor: jax.Array) -> jax.Array:
        unit = jnp.uint32(1) << (30 - 2 * jnp.uint32(step))
        raised = (floor + unit * jnp.uint32(times) for times in (1, 2, 3))
        return floor + unit * sum(
            is_enough(ordered >= higher[:, None]).astype(jnp.uint32) for higher in raised
        )

    floor = lax.fori_loop(0, 16, narrow, jnp.zeros(scaled.shape[0], jnp.uint32))
    return _from_ordered(jnp.maximum(floor, ordered.min(-1)))


def _ordered(x: jax.Array) -> jax.Array:
    """Float32 as uint32 that compare in the same order."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _from_ordered(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(
        jnp.where(bits >> 31 == 1, bits & jnp.uint32((1 << 31) - 1), ~bits), jnp.float32
    )


def _chunked(x: jax.Array, fill: float, size: int = CHUNK) -> jax.Array:
    """[row, vocab] as [row, chunk, size]; with smaller chunks, down to a quarter, if those divide the
    vocabulary evenly.

    Otherwise the end is padded, for which a CPU copies all of it: a draw for 32 rows of 151,936 tokens then
    takes more than three times as long.
    """
    fitting = math.gcd(size, x.shape[1])
    size = fitting if 4 * fitting >= size else size
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % size)), constant_values=fill)
    return x.reshape(x.shape[0], -1, size)


def _row_of(chunks: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.take_along_axis(chunks, index[:, None, None], axis=1)[:, 0]
