"""Draws a token for every row in one Pallas kernel for NVIDIA GPUs: the likeliest, or by top-k, top-p and
min-p.

Every program of the grid takes a row and reads its logits several times: for the largest, for their weights,
with top-p for the total weight of the tokens likelier than the drawn one, and with top-k for the lowest logit
that may be drawn. In XLA each of these is several kernels.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from levserve.model.gpu.paged_attention import LOG2_E, power_of_two

LINES, COLUMNS = 16, 1024
"""Logits that a program reads in one step, as lines and columns; sums over lines stay within a thread."""
NUM_WARPS = 8
NEARLY_EQUAL = 1e-12
"""Logits that differ by no more than this are kept or dropped together; floats near 0 lie much closer."""
NEGLIGIBLE = 17.0
"""All logits more than `temperature * (NEGLIGIBLE + log(vocab))` below the largest have together less weight
than float32 resolves."""


class Range(NamedTuple):
    """Bounds of the floor: the highest value known to keep enough logits, the lowest known not to, and how
    many logits each keeps."""

    low: jax.Array
    high: jax.Array
    num_low: jax.Array
    num_high: jax.Array


class Attempt(NamedTuple):
    """A drawn token, and the number of the next attempt."""

    token: jax.Array
    logit: jax.Array
    is_taken: jax.Array
    next_number: jax.Array


@functools.partial(jax.jit, static_argnames=("lines", "columns", "num_warps", "interpret"))
def draw_tokens(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    points: jax.Array,
    positions: jax.Array,
    words: jax.Array,
    at: jax.Array,
    slots: jax.Array,
    *,
    lines: int = LINES,
    columns: int = COLUMNS,
    num_warps: int = NUM_WARPS,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Tokens [row] from float32 logits [row, vocab], by rules [row] as in `rules.Rules`, and each row's
    largest logit, which is not finite if the row cannot be drawn from.

    At temperature 0 the token is the likeliest. Otherwise the inverse CDF is applied in two levels, first to
    lines and then to the tokens of a line. `points` [row, number, 2], at least 0 and below 1, are tried in
    order until one gives a token in the nucleus of top-p.

    A row with a mask for its position (see `rules.Masks`) draws again if the mask does not allow its token.
    The first half of the points serves the first draw, the second half the second.
    """
    rows = len(logits)

    def of_row(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, *shape), lambda row: (row, *(0 for _ in shape)))

    given = (logits, temperature, top_k, top_p, min_p, points, positions, slots)
    of_slots = [pl.BlockSpec(words.shape, lambda row: (0, 0)), pl.BlockSpec(at.shape, lambda row: (0,))]
    tokens, tops = pl.pallas_call(
        functools.partial(_kernel, lines=lines, columns=columns),
        grid=(rows,),
        in_specs=[*(of_row(*array.shape[1:]) for array in given), *of_slots],
        out_specs=[of_row()] * 2,
        out_shape=[jax.ShapeDtypeStruct((rows,), jnp.int32), jax.ShapeDtypeStruct((rows,), jnp.float32)],
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        name="draw_tokens",
    )(*given, words, at)
    return tokens, tops


def _kernel(
    logits_ref: jax.Ref,
    temperature_ref: jax.Ref,
    top_k_ref: jax.Ref,
    top_p_ref: jax.Ref,
    min_p_ref: jax.Ref,
    point_ref: jax.Ref,
    position_ref: jax.Ref,
    slot_ref: jax.Ref,
    word_ref: jax.Ref,
    at_ref: jax.Ref,
    token_ref: jax.Ref,
    top_ref: jax.Ref,
    *,
    lines: int,
    columns: int,
) -> None:
    (vocab,) = logits_ref.shape
    num_steps = -(-vocab // (lines * columns))
    line_start = lax.broadcasted_iota(jnp.int32, (lines, columns), 0) * columns
    token = line_start + lax.broadcasted_iota(jnp.int32, (lines, columns), 1)

    num_points = point_ref.shape[0] // 2
    slot = jnp.maximum(slot_ref[...], 0)
    has_mask = (slot_ref[...] >= 0) & (at_ref[slot] == position_ref[...])

    def is_allowed(token: jax.Array) -> jax.Array:
        """Whether the bit of a token, or of each of several, is set in the row's mask."""
        word = plgpu.load(word_ref.at[slot, token >> 5])
        return (word >> (token & 31).astype(jnp.uint32)) & 1 == 1

    def draw_once(is_held: bool) -> tuple[jax.Array, jax.Array]:
        """A token and the largest logit, of all tokens or of those that the mask allows."""
        first_point = num_points if is_held else 0

        def load(at: jax.Array) -> jax.Array:
            x = plgpu.load(logits_ref.at[at], mask=at < vocab, other=-jnp.inf)
            return jnp.where(is_allowed(jnp.minimum(at, vocab - 1)), x, -jnp.inf) if is_held else x

        def load_step(step: jax.Array) -> jax.Array:
            return load(step * lines * columns + token)

        def find_top(step: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            tops, steps = carry
            x = load_step(step)
            top = jnp.where(x == x, x, jnp.inf).max(0)  # the maximum of a NaN and a number is the number here
            return jnp.maximum(tops, top), jnp.where(top > tops, step, steps)

        tops, steps = lax.fori_loop(
            0, num_steps, find_top, (jnp.full(columns, -jnp.inf, jnp.float32), jnp.zeros(columns, jnp.int32))
        )
        top = tops.max()
        first = jnp.where(tops == top, steps, num_steps).min()
        best = first * lines * columns + jnp.where(load_step(first) == top, token, vocab).min()

        temperature, top_k, top_p = temperature_ref[...], top_k_ref[...], top_p_ref[...]
        factor = LOG2_E / jnp.maximum(temperature, 1e-5)

        def weigh(x: jax.Array, floor: jax.Array) -> jax.Array:
            return jnp.where(x >= floor, jnp.exp2((x - top) * factor), 0.0)

        def keep_top_k(floor: jax.Array) -> jax.Array:
            """The highest floor that `top_k` logits reach, or a lower one with no other logits between.

            Each iteration tries three floors between the known bounds, until at most one logit lies between
            them.
            """

            def is_open(known: Range) -> jax.Array:
                middle = known.low + (known.high - known.low) / 2
                is_wide = known.high - known.low > NEARLY_EQUAL
                is_between = is_wide & (middle > known.low) & (middle < known.high)
                return is_between & (known.num_low - known.num_high > 1)

            def narrow(known: Range) -> Range:
                floors = [known.low + (known.high - known.low) / 4 * quarter for quarter in (1, 2, 3)]

                def count(step: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                    x = load_step(step)
                    return tuple(
                        number + (x >= floor).astype(jnp.int32).sum(0) for number, floor in zip(sums, floors)
                    )

                sums = lax.fori_loop(0, num_steps, count, (jnp.zeros(columns, jnp.int32),) * 3)
                low, high, num_low, num_high = known
                found = [(floor, number.sum()) for floor, number in zip(floors, sums)]
                for floor, number in found:
                    low = jnp.where(number >= top_k, floor, low)
                    num_low = jnp.where(number >= top_k, number, num_low)
                for floor, number in reversed(found):
                    high = jnp.where(number < top_k, floor, high)
                    num_high = jnp.where(number < top_k, number, num_high)
                return Range(low, high, num_low, num_high)

            above_all = top + jnp.maximum(temperature, 1e-5)
            return lax.while_loop(
                is_open, narrow, Range(floor, above_all, jnp.int32(vocab), jnp.int32(0))
            ).low

        def first_beyond(weights: jax.Array, point: jax.Array) -> jax.Array:
            """Like `sampler._first_beyond`, for a single row."""
            sums, number = jnp.cumsum(weights), lax.iota(jnp.int32, weights.shape[0])
            is_beyond = (sums > point * sums.max()) & (weights > 0)
            heaviest = jnp.where(weights == weights.max(), number, weights.shape[0]).min()
            found = jnp.where(is_beyond, number, weights.shape[0]).min()
            return jnp.where(found < weights.shape[0], found, heaviest)

        def draw_from(floor: jax.Array, excluded: jax.Array, number: jax.Array) -> jax.Array:
            """Draws a token whose logit is at least `floor` and above `excluded`, by one pair of points."""

            def weigh_candidates(x: jax.Array) -> jax.Array:
                return jnp.where(x > excluded, weigh(x, floor), 0.0)

            step_number = lax.broadcasted_iota(jnp.int32, (power_of_two(num_steps), lines), 0)

            def weigh_lines(step: jax.Array, sums: jax.Array) -> jax.Array:
                return jnp.where(step_number == step, weigh_candidates(load_step(step)).sum(1)[None, :], sums)

            sums = lax.fori_loop(0, num_steps, weigh_lines, jnp.zeros(step_number.shape, jnp.float32))
            line = first_beyond(sums.reshape(-1), point_ref[number, 0])
            in_line = line * columns + lax.iota(jnp.int32, columns)
            return line * columns + first_beyond(weigh_candidates(load(in_line)), point_ref[number, 1])

        def is_in_nucleus(logit: jax.Array, floor: jax.Array) -> jax.Array:
            """Whether the logits above this one have less than `top_p` of the weight that reaches `floor`."""

            def add(step: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                weights = weigh(x := load_step(step), floor)
                return sums[0] + jnp.where(x > logit, weights, 0.0).sum(0), sums[1] + weights.sum(0)

            zeros = jnp.zeros(columns, jnp.float32)
            above, total = lax.fori_loop(0, num_steps, add, (zeros, zeros))
            return (above.sum() < top_p * total.sum()) | (logit >= top)

        def draw() -> jax.Array:
            """A token outside the nucleus, and everything below it, is excluded from the next attempt."""
            floor = top - temperature * (NEGLIGIBLE + math.log(vocab))
            floor = lax.cond((top_k > 0) & (top_k < vocab), keep_top_k, lambda floor: floor, floor)
            likely_enough = jnp.maximum(floor, top + jnp.log(min_p_ref[...]) * temperature)

            def attempt(last: Attempt) -> Attempt:
                token = draw_from(likely_enough, last.logit, last.next_number % num_points + first_point)
                logit = logits_ref[token]
                # Without top-p any token that was drawn is taken.
                is_taken = lax.cond(top_p < 1, is_in_nucleus, lambda logit, _: logit > -jnp.inf, logit, floor)
                return Attempt(token, logit, is_taken, last.next_number + 1)

            none = Attempt(best, jnp.float32(-jnp.inf), jnp.bool_(False), jnp.int32(0))
            return lax.while_loop(lambda last: ~last.is_taken, attempt, none).token

        return lax.cond((temperature > 0) & (jnp.abs(top) < jnp.inf), draw, lambda: best), top

    token_drawn, top_drawn = draw_once(is_held=False)
    is_drawn = jnp.abs(top_drawn) < jnp.inf  # otherwise the token may be out of range
    is_fitting = is_allowed(jnp.minimum(token_drawn, vocab - 1))
    token_ref[...], top_ref[...] = lax.cond(
        has_mask & is_drawn & ~is_fitting,
        lambda: draw_once(is_held=True),
        lambda: (token_drawn, top_drawn),
    )
