"""Draws one token per row from its logits, on the device, each row by its own rules.

There are three modes: greedy, plain (temperature, top-k, top-p, min-p and masks) and full (everything). The
host picks the cheapest one that serves every row. Full mode skips at run time what no row asks for, so that
one program is enough on a CPU. A row draws the same token in every mode that can serve it, whatever its
neighbours are: the draw inverts the cumulative distribution at random numbers that depend on nothing but the
request's seed and the position.

A row may be held to a mask of tokens at one position. It draws as always, and if the mask does not allow the
token, it draws once more from the allowed ones. For a greedy row the result is the likeliest allowed token.
For other rows it is distributed as a single draw from the allowed tokens would be: where p is a token's
probability and a that of all allowed tokens together, p + (1 - a) p / a = p / a.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from levserve.model.backend import Backend, Likeliest
from levserve.model.points import make_points, points_of_draws
from levserve.model.rules import (
    FREE,
    MAX_EDITS,
    NO_LOGPROBS,
    NUM_TOP,
    POISONED,
    PROCESSED_LOGPROBS,
    Drawn,
    Masks,
    Memory,
    Mode,
    Rules,
)
from levserve.model.search import chunked, entry_of, largest, likeliest, row_of
from levserve.model.truncation import find_floor, sort_for_floor

NUM_ATTEMPTS = 8
"""The most draws that a kernel makes, each with fresh random numbers, until one lies in the nucleus of top-p.
Each of them does so with a probability of at least top_p."""
MOST_LOGITS = 2**18
"""The most logits that a CPU edits at once. A larger buffer would be requested from the operating system and
returned to it at every step."""


@functools.partial(jax.jit, static_argnames=("mode", "backend"))  # programs of equal sizes share the trace
def sample(
    logits: jax.Array,
    positions: jax.Array,
    rules: Rules,
    memory: Memory | None,
    masks: Masks | None,
    mode: Mode,
    backend: Backend,
    num_used: jax.Array | None = None,
) -> Drawn:
    """Draws the token at `positions` [row] from float32 logits [row, vocab]; it is `POISONED` if the row's
    logits are not finite.

    Only full mode needs `memory`; plain and full mode need `masks`. Rows after the first `num_used` [1] are
    padding.
    """
    if mode is Mode.GREEDY:
        best = backend.likeliest(logits, num_used)
        return Drawn(_mark_poisoned(best.tokens, best))
    assert masks is not None
    if backend.samples_rows and logits.shape[1] >= NUM_TOP:
        return _sample_by_rows(logits, positions, rules, memory, masks, backend, num_used)
    if backend.draws_tokens:
        return _sample_by_kernel(logits, positions, rules, memory, masks, backend)
    best = backend.likeliest(logits, num_used)
    if mode is Mode.PLAIN:
        points = _points_if_drawn(positions, rules)
        tokens = choose(logits, _floor(logits, rules), best, points[0], rules)
        return Drawn(_mark_poisoned(_redraw_misfits(logits, tokens, positions, points, rules, masks), best))
    assert memory is not None
    points = _points_if_drawn(positions, rules)
    if backend.traits.has_all_modes:
        drawn = _sample_fully(logits, positions, points, rules, memory, masks)
    else:  # this program also serves rows that ask for less, which need no copy of the logits
        drawn = _sample_as_asked(logits, best, positions, points, rules, memory, masks)
    return drawn._replace(tokens=_mark_poisoned(drawn.tokens, best))


def _sample_by_rows(
    logits: jax.Array,
    positions: jax.Array,
    rules: Rules,
    memory: Memory | None,
    masks: Masks,
    backend: Backend,
    num_used: jax.Array | None,
) -> Drawn:
    rows = logits.shape[0]
    nothing = jnp.zeros((rows, 0), jnp.int32)
    given = memory or Memory(nothing, nothing, nothing.astype(jnp.float32), nothing)
    used = jnp.full(1, rows, jnp.int32) if num_used is None else num_used
    drawn = backend.sample_rows(logits, positions, rules, given, masks, used)
    return Drawn(drawn.tokens) if memory is None else drawn


def _sample_by_kernel(
    logits: jax.Array,
    positions: jax.Array,
    rules: Rules,
    memory: Memory | None,
    masks: Masks,
    backend: Backend,
) -> Drawn:
    """The kernel draws a second time by itself where a mask does not allow the first token."""
    given = logits if memory is None else _edit(logits, positions, rules, memory)
    points = make_points(rules.seed, positions, 2 * NUM_ATTEMPTS, 2)
    cuts = rules.temperature, rules.top_k, rules.top_p, rules.min_p
    best = backend.draw(given, *cuts, points, positions, *masks)
    tokens = _mark_poisoned(best.tokens, best)
    if memory is None:
        return Drawn(tokens)

    def find_floor_again() -> jax.Array:
        return sort_for_floor(given / _divisor(rules), rules.top_k, rules.top_p, rules.min_p)

    return Drawn(tokens, *_logprobs_if_wanted(logits, given, find_floor_again, tokens, rules))


def _redraw_misfits(
    logits: jax.Array,
    tokens: jax.Array,
    positions: jax.Array,
    points: jax.Array,
    rules: Rules,
    masks: Masks,
) -> jax.Array:
    held = _held_slots(positions, masks)
    is_misfit = _find_misfits(tokens, held, masks)

    def redraw() -> jax.Array:
        allowed = _mask(logits, held, masks)
        best = likeliest(allowed)
        found = choose(allowed, _floor(allowed, rules), best, points[1], rules)
        return jnp.where(is_misfit, _mark_poisoned(found, best), tokens)

    redrawn: jax.Array = lax.cond(is_misfit.any(), redraw, lambda: tokens)
    return redrawn


def _sample_as_asked(
    logits: jax.Array,
    best: Likeliest,
    positions: jax.Array,
    points: jax.Array,
    rules: Rules,
    memory: Memory,
    masks: Masks,
) -> Drawn:
    def sample_plainly(logits: jax.Array, positions: jax.Array, *_: Any) -> Drawn:
        tokens = choose(logits, None, best, points[0], rules)
        return Drawn(tokens, *_no_logprobs(logits, tokens))

    def sample_by_parts(*given: Any) -> Drawn:
        rows, vocab = logits.shape
        size = math.gcd(rows, 2 ** int(math.log2(max(MOST_LOGITS // vocab, 1))))
        parts = jax.tree.map(lambda array: array.reshape(-1, size, *array.shape[1:]), given)

        def sample_part(part: tuple[jax.Array, jax.Array, jax.Array, Rules, Memory, jax.Array]) -> Drawn:
            logits, positions, points, rules, memory, slots = part
            held = masks._replace(slots=slots)
            return _sample_fully(logits, positions, points.swapaxes(0, 1), rules, memory, held)

        drawn = lax.map(sample_part, parts)
        return jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:]), drawn)

    is_changed = _is_penalised(rules) | _is_truncated(rules) | (rules.num_edits > 0)
    is_asked = is_changed | (rules.logprobs != NO_LOGPROBS) | (_held_slots(positions, masks) != FREE)
    given = (logits, positions, points.swapaxes(0, 1), rules, memory, masks.slots)
    drawn: Drawn = lax.cond(is_asked.any(), sample_by_parts, sample_plainly, *given)
    return drawn


def _sample_fully(
    logits: jax.Array, positions: jax.Array, points: jax.Array, rules: Rules, memory: Memory, masks: Masks
) -> Drawn:
    edited = _edit(logits, positions, rules, memory)
    held = _held_slots(positions, masks)

    def draw(
        attempt: jax.Array, tokens: jax.Array, is_misfit: jax.Array, first_floor: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Draws under the masks at the second attempt, for rows whose first token did not fit. The attempts
        are a loop because compiling the code of a draw twice would take a second longer."""
        allowed = lax.cond(attempt > 0, lambda: _mask(edited, held, masks), lambda: edited)
        best = likeliest(allowed)
        floor = _floor(allowed, rules)
        found = choose(allowed, floor, best, points[attempt], rules)
        tokens = jnp.where(is_misfit, _mark_poisoned(found, best), tokens)
        first_floor = jnp.where(attempt == 0, floor, first_floor)
        return attempt + 1, tokens, _find_misfits(tokens, held, masks), first_floor

    def has_next(attempt: jax.Array, _: jax.Array, is_misfit: jax.Array, __: jax.Array) -> jax.Array:
        return (attempt == 0) | ((attempt == 1) & is_misfit.any())

    rows = logits.shape[0]
    start = jnp.int32(0), jnp.zeros(rows, jnp.int32), jnp.ones(rows, bool), jnp.zeros(rows, jnp.float32)
    _, tokens, _, floor = lax.while_loop(lambda carry: has_next(*carry), lambda carry: draw(*carry), start)
    return Drawn(tokens, *_logprobs_if_wanted(logits, edited, lambda: floor, tokens, rules))


def _held_slots(positions: jax.Array, masks: Masks) -> jax.Array:
    """The slot whose mask the row's draw for this position is held to, or `FREE`."""
    return jnp.where(masks.at.at[masks.slots].get(mode="clip") == positions, masks.slots, FREE)


def _find_misfits(tokens: jax.Array, held: jax.Array, masks: Masks) -> jax.Array:
    """Whether the row's mask does not allow its token."""
    word = masks.words.at[jnp.maximum(held, 0), jnp.maximum(tokens, 0) >> 5].get(mode="promise_in_bounds")
    is_allowed = (word >> (tokens & 31).astype(jnp.uint32)) & 1
    return (held != FREE) & (tokens != POISONED) & (is_allowed == 0)


def _mask(logits: jax.Array, held: jax.Array, masks: Masks) -> jax.Array:
    """The logits of allowed tokens, and minus infinity for the rest; meaningless for rows without a mask."""
    words = masks.words.at[jnp.maximum(held, 0)].get(mode="promise_in_bounds")
    bits = words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None] & 1
    is_allowed = bits.reshape(bits.shape[0], -1)[:, : logits.shape[1]] == 1
    return jnp.where(is_allowed, logits, -jnp.inf)


def _is_penalised(rules: Rules) -> jax.Array:
    return (rules.presence != 0) | (rules.frequency != 0) | (rules.repetition != 1)


def _is_truncated(rules: Rules) -> jax.Array:
    return (rules.top_k > 0) | (rules.top_p < 1) | (rules.min_p > 0)


def _mark_poisoned(tokens: jax.Array, best: Likeliest) -> jax.Array:
    """Looks at the largest logit alone: a NaN anywhere in a row makes it NaN, and others may be -inf."""
    return jnp.where(jnp.isfinite(best.values), tokens, POISONED)


def logprobs_of(logits: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The log-probabilities that the logits stand for: those of the tokens [row], and the ids and
    log-probabilities of the likeliest [row, NUM_TOP].

    A token that is also among the likeliest has exactly the same value in both.
    """
    total = jax.nn.logsumexp(logits, axis=-1)
    top, top_ids = largest(logits, NUM_TOP)
    return entry_of(logits, tokens) - total, top_ids, top - total[:, None]


def _logprobs_if_wanted(
    logits: jax.Array,
    edited: jax.Array,
    get_floor: Callable[[], jax.Array],
    tokens: jax.Array,
    rules: Rules,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The log-probabilities that each row wants, of the model's logits or of the edited ones that are not
    below the floor."""

    def find() -> tuple[jax.Array, jax.Array, jax.Array]:
        is_processed = rules.logprobs == PROCESSED_LOGPROBS
        shown = lax.cond(
            is_processed.any(),
            lambda: jnp.where(is_processed[:, None], _as_drawn(edited, get_floor(), tokens, rules), logits),
            lambda: logits,
        )
        return logprobs_of(shown, tokens)

    found: tuple[jax.Array, jax.Array, jax.Array] = lax.cond(
        (rules.logprobs != NO_LOGPROBS).any(), find, lambda: _no_logprobs(logits, tokens)
    )
    return found


def _as_drawn(edited: jax.Array, floor: jax.Array, tokens: jax.Array, rules: Rules) -> jax.Array:
    """The logits of the distribution that tokens are drawn from, but without masks.

    A row at temperature 0 draws nothing and gets the edited logits as they are. The drawn token is never cut
    off: a kernel may round a little differently at the floor.
    """
    is_drawn = rules.temperature > 0
    scaled = jnp.where(is_drawn[:, None], edited / _divisor(rules), edited)
    lowest = jnp.where(is_drawn, jnp.minimum(floor, entry_of(scaled, tokens)), -jnp.inf)
    return jnp.where(scaled >= lowest[:, None], scaled, -jnp.inf)


def _no_logprobs(logits: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    top = jnp.zeros((logits.shape[0], NUM_TOP), jnp.float32)
    return top[:, 0], top.astype(jnp.int32), top


def choose(
    logits: jax.Array, floor: jax.Array | None, best: Likeliest, points: jax.Array, rules: Rules
) -> jax.Array:
    """The likeliest token for a row at temperature 0. Other rows draw, with random numbers [row, 2], from the
    softmax over the tokens that are not below `floor` [row], or over all of them if there is no floor."""

    def draw() -> jax.Array:
        weights = jnp.exp((logits - best.values[:, None]) / _divisor(rules))
        if floor is not None:
            weights = jnp.where(logits / _divisor(rules) >= floor[:, None], weights, 0.0)
        return jnp.where(rules.temperature > 0, _draw(weights, points), best.tokens)

    return lax.cond((rules.temperature > 0).any(), draw, lambda: best.tokens)


def _points_if_drawn(positions: jax.Array, rules: Rules) -> jax.Array:
    """See `points_of_draws`; zeros if every row is at temperature 0."""
    return lax.cond(
        (rules.temperature > 0).any(),
        lambda: points_of_draws(rules.seed, positions),
        lambda: jnp.zeros((2, len(positions), 2), jnp.float32),
    )


def _draw(weights: jax.Array, points: jax.Array) -> jax.Array:
    """Draws a chunk of the vocabulary and then a token in it, with a random number for each."""
    chunks = chunked(weights, 0.0)
    chunk = _first_beyond(chunks.sum(-1), points[:, 0])
    within = _first_beyond(row_of(chunks, chunk), points[:, 1])
    return (chunk * chunks.shape[-1] + within).astype(jnp.int32)


def _first_beyond(weights: jax.Array, point: jax.Array) -> jax.Array:
    """The first index at which the running sum exceeds the share `point` of the total; if rounding leaves
    none, the index of the largest weight."""
    sums = jnp.cumsum(weights, axis=-1)
    is_beyond = (sums > point[:, None] * sums[:, -1:]) & (weights > 0)
    return jnp.argmax(jnp.where(is_beyond, jnp.inf, weights), axis=-1)


def _edit(logits: jax.Array, positions: jax.Array, rules: Rules, memory: Memory) -> jax.Array:
    """The logits after penalties, and after each row's own edits."""

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
    """Presence and frequency penalties count generated tokens; repetition counts the prompt as well."""
    at = jnp.arange(memory.history.shape[1], dtype=jnp.int32)[None]
    is_known = at < positions[:, None]
    is_generated = is_known & (at >= rules.prompt_len[:, None])
    rows = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    seen = jnp.stack([is_known, is_generated], axis=-1).astype(jnp.int32)
    counts = jnp.zeros((*logits.shape, 2), jnp.int32).at[rows, memory.history].add(seen, mode="drop")
    known, generated = counts[..., 0], counts[..., 1]
    repeated = jnp.where(logits > 0, logits / rules.repetition[:, None], logits * rules.repetition[:, None])
    logits = jnp.where(known > 0, repeated, logits)
    logits -= rules.frequency[:, None] * generated.astype(jnp.float32)
    return logits - rules.presence[:, None] * (generated > 0).astype(jnp.float32)


def _divisor(rules: Rules) -> jax.Array:
    """What logits [row, vocab] are divided by: the temperature, kept away from 0."""
    return jnp.maximum(rules.temperature, 1e-5)[:, None]


def _floor(logits: jax.Array, rules: Rules) -> jax.Array:
    """The lowest logit of each row, divided by the temperature, that may be drawn; -inf if all may."""

    def find() -> jax.Array:
        return find_floor(logits / _divisor(rules), rules.top_k, rules.top_p, rules.min_p)

    return lax.cond(_is_truncated(rules).any(), find, lambda: jnp.full(logits.shape[0], -jnp.inf))
