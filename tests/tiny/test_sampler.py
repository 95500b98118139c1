"""The sampler: each rule against its distribution, and the same tokens in any company."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levserve.device.malloc import LARGE_BYTES
from levserve.model.backend import Likeliest
from levserve.model.cpu.backend import fit_target
from levserve.model.gpu.backend import GpuBackend
from levserve.model.gpu.draw import draw_tokens
from levserve.model.points import SECOND_DRAW, make_points, points_of_draws
from levserve.model.rules import FREE, MAX_EDITS, NUM_TOP, POISONED, Drawn, Masks, Memory, Mode, Rules
from levserve.model.sampler import choose, sample
from levserve.model.search import largest, likeliest
from levserve.model.truncation import NUM_CANDIDATES
from levserve.model.xla import XLA_ON_CPU
from tests.targets import HOST

VOCAB = 300
DRAWS = 2_000
ROWS_AT_A_TIME = 250
NUM_SLOTS = 6
"""Slots for masks, whatever the number of rows, so that tests with masks and others share programs."""
LOGITS = np.concatenate([np.linspace(3, 0, 12), np.full(VOCAB - 12, -9.0)]).astype(np.float32)
"""Twelve tokens of some weight and a long flat tail that together weighs little."""


WAYS = ("xla", "cpu", "gpu")
"""The implementations of sampling: XLA's, the kernel of CPUs, and the kernel of NVIDIA's GPUs."""
by_all = pytest.mark.parametrize("way", WAYS)
on_a_cpu = pytest.mark.parametrize("way", WAYS[:2])


class SmallSteps(GpuBackend):
    """The kernel for NVIDIA GPUs in small steps: a small vocabulary takes several, and the last is not full.

    The interpreter copies all arguments for each row, so many rows are sampled some at a time: with jax
    0.11 this file then takes 60 CPU-seconds instead of 160.
    """

    def draw(self, *given: jax.Array) -> Likeliest:
        *before, words, at, slots = given
        rows = len(slots)
        count = rows // ROWS_AT_A_TIME if rows % ROWS_AT_A_TIME == 0 else 1

        def draw_some(some: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
            *before, slots = some
            return draw_tokens(*before, words, at, slots, lines=2, columns=64, interpret=True)

        parts = [array.reshape(count, rows // count, *array.shape[1:]) for array in (*before, slots)]
        tokens, tops = jax.lax.map(draw_some, parts)
        return Likeliest(tokens.reshape(rows), tops.reshape(rows))


BACKENDS = {"xla": XLA_ON_CPU, "cpu": fit_target(HOST), "gpu": SmallSteps()}


def sample_by(
    logits: jax.Array, positions: jax.Array, rules: Rules, memory: Memory, masks: Masks, mode: Mode, way: str
) -> Drawn:
    given = memory if mode is Mode.FULL else None
    return sample(logits, positions, rules, given, masks, mode, BACKENDS[way])


sample_some_rows = jax.jit(sample_by, static_argnames=("mode", "way"))
sample_many_rows = jax.jit(
    sample_by, static_argnames=("mode", "way"), compiler_options={"xla_backend_optimization_level": 1}
)
"""Takes a third of the time for thousands of rows, but three times as long to compile: for frequent sizes."""


def draw(
    logits: jax.Array,
    positions: jax.Array,
    rules: Rules,
    memory: Memory,
    mode: Mode,
    way: str = "xla",
    masks: Masks | None = None,
) -> Drawn:
    rows, vocab = logits.shape
    function = sample_many_rows if (rows, vocab) == (DRAWS, VOCAB) else sample_some_rows
    return function(logits, positions, rules, memory, masks or free_masks(rows, vocab), mode, way)


def free_masks(rows: int, vocab: int) -> Masks:
    free = jnp.full(rows, FREE, jnp.int32)
    return Masks(jnp.zeros((NUM_SLOTS, -(-vocab // 32)), jnp.uint32), jnp.zeros(NUM_SLOTS, jnp.int32), free)


def make_rules(rows: int, **given: object) -> Rules:
    defaults = dict(
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        presence=0.0,
        frequency=0.0,
        repetition=1.0,
        prompt_len=0,
        num_edits=0,
        logprobs=1,
        is_constrained=0,
    )
    integers = {"top_k", "prompt_len", "num_edits", "logprobs", "is_constrained"}
    columns = {
        name: jnp.asarray(
            np.broadcast_to(given.get(name, value), rows), jnp.int32 if name in integers else jnp.float32
        )
        for name, value in defaults.items()
    }
    seeds = np.stack([np.zeros(rows), np.arange(rows)], axis=1)
    return Rules(**columns, seed=jnp.asarray(seeds, jnp.uint32))


def make_memory(
    rows: int,
    history: list[int] = [],  # noqa: B006
    edits: list[tuple[int, float, int]] = [],  # noqa: B006
    vocab: int = VOCAB,
) -> Memory:
    padded = np.zeros((rows, 16), np.int32)
    padded[:, : len(history)] = history
    columns = np.zeros((3, rows, MAX_EDITS))
    for index, edit in enumerate(edits):
        columns[:, :, index] = np.asarray(edit)[:, None]
    ids, values, until = columns
    edit_arrays = ids.astype(np.int32), values.astype(np.float32), until.astype(np.int32)
    return Memory(*map(jnp.asarray, (padded, *edit_arrays)))


@by_all
@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("place", [0, 17, VOCAB - 1])
def test_a_row_that_is_not_finite_is_marked_and_no_other_row_changes(
    mode: Mode, place: int, way: str
) -> None:
    rules = make_rules(6, top_k=[0, 3, 0, 3, 0, 3], top_p=[1, 1, 0.9, 0.9, 0.9, 0.9])
    memory, positions = make_memory(6), jnp.full(6, 5, jnp.int32)
    clean = np.tile(LOGITS, (6, 1))
    clean[4, 20:] = -np.inf  # a token that cannot be sampled is not an error
    broken = clean.copy()
    broken[1, place], broken[2, place], broken[3] = np.nan, np.inf, -np.inf
    wanted = np.asarray(draw(jnp.asarray(clean), positions, rules, memory, mode, way).tokens)
    got = np.asarray(draw(jnp.asarray(broken), positions, rules, memory, mode, way).tokens)
    assert got.tolist() == [wanted[0], POISONED, POISONED, POISONED, wanted[4], wanted[5]]
    assert POISONED not in wanted


def test_a_nan_is_seen_in_any_of_many_rows() -> None:
    """For 16 rows of 384, XLA finds the largest with code for large arrays, which overlooks NaN."""
    logits = np.random.default_rng(0).standard_normal((16, 384)).astype(np.float32)
    logits[np.arange(15), np.arange(15) * 25] = np.nan
    values = jax.jit(XLA_ON_CPU.likeliest)(logits).values
    assert np.isnan(values).tolist() == [True] * 15 + [False]


def draw_many(
    logits: np.ndarray = LOGITS,
    mode: Mode = Mode.FULL,
    position: int = 5,
    memory: Memory | None = None,
    way: str = "xla",
    masks: Masks | None = None,
    **rules: object,
) -> np.ndarray:
    """Samples one token for each of DRAWS seeds."""
    rows = jnp.broadcast_to(jnp.asarray(logits), (DRAWS, len(logits)))
    positions = jnp.full(DRAWS, position, jnp.int32)
    given = make_rules(DRAWS, **rules), memory or make_memory(DRAWS)
    return np.asarray(draw(rows, positions, *given, mode, way, masks).tokens)


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return weights / weights.sum()


def check_distribution(tokens: np.ndarray, probabilities: np.ndarray) -> None:
    """Chi-square at about five sigma, with rare tokens lumped together; nothing impossible was sampled."""
    counts = np.bincount(tokens, minlength=len(probabilities))
    assert counts[probabilities == 0].sum() == 0
    common = probabilities * len(tokens) >= 5
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(probabilities[common], probabilities[~common].sum()) * len(tokens)
    observed, expected = observed[expected > 0], expected[expected > 0]
    chi_square = ((observed - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    assert chi_square < freedom + 5 * math.sqrt(2 * max(freedom, 1)) + 10, (observed, expected)


def keep_top_k(probabilities: np.ndarray, k: int) -> np.ndarray:
    kept = np.where(probabilities >= np.sort(probabilities)[-k], probabilities, 0)
    return kept / kept.sum()


def keep_top_p(probabilities: np.ndarray, p: float) -> np.ndarray:
    order = np.argsort(-probabilities, kind="stable")
    count = int(np.searchsorted(np.cumsum(probabilities[order]), p)) + 1
    kept = np.where(probabilities >= probabilities[order[count - 1]], probabilities, 0)
    return kept / kept.sum()


@by_all
@pytest.mark.parametrize("mode", [Mode.PLAIN, Mode.FULL])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_temperature_draws_from_the_softened_softmax(mode: Mode, temperature: float, way: str) -> None:
    check_distribution(draw_many(way=way, mode=mode, temperature=temperature), softmax(LOGITS / temperature))


@pytest.mark.parametrize(
    ("vocab", "way"),
    [
        *((vocab, way) for vocab in (301, 320, 384, 512) for way in ("xla", "cpu")),
        (301, "gpu"),
        (384, "gpu"),
    ],
)
def test_a_draw_is_from_the_softmax_however_the_vocabulary_divides(vocab: int, way: str) -> None:
    logits = np.linspace(0, 2, vocab).astype(np.float32)
    check_distribution(draw_many(logits, Mode.PLAIN, way=way), softmax(logits))


def test_the_numbers_of_both_draws_are_those_of_jax() -> None:
    rng = np.random.default_rng(0)
    seeds = jnp.asarray(rng.integers(0, 2**32, (40, 2), dtype=np.uint32))
    positions = np.concatenate([[0, 1, SECOND_DRAW - 1], rng.integers(0, SECOND_DRAW, 37)]).astype(np.int32)
    first, second = jax.jit(points_of_draws)(seeds, positions)
    make = jax.jit(make_points, static_argnums=2)
    np.testing.assert_array_equal(first, make(seeds, positions, 2))
    np.testing.assert_array_equal(second, make(seeds, positions + SECOND_DRAW, 2))
    assert len(np.unique(np.stack([first, second]))) > 150


def test_a_vocabulary_that_chunks_divide_is_not_copied() -> None:
    rows, vocab = 8, 151_936  # 1,187 chunks of 128
    logits, given = (
        jax.ShapeDtypeStruct((rows, vocab), jnp.float32),
        (jnp.zeros((rows, 2), jnp.float32), make_rules(rows)),
    )
    drawing = jax.jit(lambda logits, points, rules: choose(logits, None, likeliest(logits), points, rules))
    needed = drawing.lower(logits, *given).compile().memory_analysis().temp_size_in_bytes
    assert needed < 1.5 * 4 * rows * vocab, "the weights, and no more"


@by_all
@pytest.mark.parametrize("top_k", [1, 3, 12, VOCAB])
def test_top_k_keeps_the_k_likeliest(top_k: int, way: str) -> None:
    check_distribution(draw_many(way=way, top_k=top_k), keep_top_k(softmax(LOGITS), top_k))


@by_all
def test_top_k_beyond_the_candidates_is_exact_too(way: str) -> None:
    logits = np.linspace(1, 0, VOCAB).astype(np.float32)
    top_k = NUM_CANDIDATES + 40
    check_distribution(draw_many(logits, way=way, top_k=top_k), keep_top_k(softmax(logits), top_k))


@by_all
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9])
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, way: str) -> None:
    check_distribution(draw_many(way=way, top_p=top_p), keep_top_p(softmax(LOGITS), top_p))


@by_all
def test_top_p_beyond_the_candidates_is_exact_too(way: str) -> None:
    logits = np.linspace(1, 0, VOCAB).astype(np.float32)
    check_distribution(draw_many(logits, way=way, top_p=0.8), keep_top_p(softmax(logits), 0.8))


@by_all
def test_equals_are_kept_or_left_out_together(way: str) -> None:
    logits = np.repeat(np.array([2.0, 1.0, 0.0], np.float32), [3, 5, VOCAB - 8])
    probabilities = softmax(logits)
    check_distribution(draw_many(logits, way=way, top_k=4), keep_top_k(probabilities, 4))
    check_distribution(draw_many(logits, way=way, top_p=0.1), keep_top_p(probabilities, 0.1))
    level = np.zeros(VOCAB, np.float32)
    check_distribution(draw_many(level, way=way, top_k=7, top_p=0.5), softmax(level))


@by_all
@pytest.mark.parametrize("rule", [{"top_p": 0.0}, {"top_k": 1}, {"min_p": 1.0}, {"temperature": 1e-6}])
def test_the_strictest_rules_leave_the_best(rule: dict[str, float], way: str) -> None:
    assert (draw_many(way=way, **rule) == 0).all()


@by_all
def test_top_p_counts_what_top_k_left(way: str) -> None:
    check_distribution(
        draw_many(way=way, top_k=4, top_p=0.6), keep_top_p(keep_top_k(softmax(LOGITS), 4), 0.6)
    )


@by_all
def test_min_p_keeps_what_is_likely_enough_beside_the_best(way: str) -> None:
    probabilities = softmax(LOGITS)
    kept = np.where(probabilities >= 0.3 * probabilities.max(), probabilities, 0)
    check_distribution(draw_many(way=way, min_p=0.3), kept / kept.sum())


@by_all
def test_presence_and_frequency_count_generated_tokens_only(way: str) -> None:
    history = [0, 0, 1, 1, 2]  # two of the prompt, three generated
    expected = LOGITS.copy()
    expected[1] -= 1.0 + 2 * 0.5
    expected[2] -= 1.0 + 0.5
    tokens = draw_many(
        way=way,
        memory=make_memory(DRAWS, history),
        position=5,
        prompt_len=2,
        presence=1.0,
        frequency=0.5,
    )
    check_distribution(tokens, softmax(expected))


@on_a_cpu
def test_repetition_counts_the_prompt_as_well(way: str) -> None:
    expected = LOGITS.copy()
    expected[0] /= 1.8
    expected[20] *= 1.8
    tokens = draw_many(way=way, memory=make_memory(DRAWS, [0, 20]), position=2, prompt_len=2, repetition=1.8)
    check_distribution(tokens, softmax(expected))


@by_all
def test_a_bias_moves_its_token(way: str) -> None:
    expected = LOGITS.copy()
    expected[7] += 2.5
    tokens = draw_many(way=way, memory=make_memory(DRAWS, edits=[(7, 2.5, 2**31 - 1)]), num_edits=1)
    check_distribution(tokens, softmax(expected))


@on_a_cpu
def test_a_banned_token_comes_back_when_its_time_is_over(way: str) -> None:
    memory = make_memory(DRAWS, edits=[(0, -1e30, 6)])
    assert (draw_many(way=way, memory=memory, position=5, num_edits=1) != 0).all()
    check_distribution(draw_many(way=way, memory=memory, position=6, num_edits=1), softmax(LOGITS))


@on_a_cpu
def test_edits_of_an_earlier_guest_of_the_slot_do_nothing(way: str) -> None:
    check_distribution(
        draw_many(way=way, memory=make_memory(DRAWS, edits=[(0, -1e30, 99)]), num_edits=0), softmax(LOGITS)
    )


@by_all
@pytest.mark.parametrize("mode", list(Mode))
def test_temperature_zero_takes_the_best_in_every_mode(mode: Mode, way: str) -> None:
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((6, VOCAB)).astype(np.float32)
    got = draw(
        jnp.asarray(logits),
        jnp.zeros(6, jnp.int32),
        make_rules(6, temperature=0.0),
        make_memory(6),
        mode,
        way,
    )
    assert got.tokens.tolist() == logits.argmax(-1).tolist()


@by_all
def test_a_draw_depends_on_seed_and_position_alone(way: str) -> None:
    together = draw_many(way=way, top_p=np.where(np.arange(DRAWS) % 2, 0.7, 1.0))
    plain = draw_many(way=way, mode=Mode.PLAIN)
    assert (together[::2] == plain[::2]).all()
    for mode in (Mode.PLAIN, Mode.FULL):
        assert (
            together == draw_many(way=way, mode=mode, top_p=np.where(np.arange(DRAWS) % 2, 0.7, 1.0))
        ).all()
    assert (draw_many(way=way, position=5) != draw_many(way=way, position=6)).any()


@by_all
def test_seeds_and_positions_are_not_confused(way: str) -> None:
    at_five, at_six = (
        draw_many(way=way, position=5),
        draw_many(way=way, position=6),
    )
    assert (at_five[1:] != at_six[:-1]).any()


@pytest.mark.parametrize("vocab", [9_999, 9_992, 9_984])
@pytest.mark.parametrize("count", [NUM_TOP, NUM_CANDIDATES])
def test_the_largest_are_found_in_order_and_of_equals_the_first(count: int, vocab: int) -> None:
    rng = np.random.default_rng(count)
    rows = np.stack([rng.integers(0, 40, vocab), rng.integers(0, 5_000, vocab), np.arange(vocab)]).astype(
        np.float32
    )
    rows[0, 100:] = -np.inf  # fewer values than are wanted
    values, places = jax.jit(largest, static_argnums=1)(rows, count)
    wanted = np.argsort(-rows, axis=1, kind="stable")[:, :count]
    np.testing.assert_array_equal(places, wanted)
    np.testing.assert_array_equal(values, np.take_along_axis(rows, wanted, axis=1))


@on_a_cpu
def test_logprobs_are_the_raw_models_and_hold_the_best(way: str) -> None:
    memory = make_memory(6, edits=[(0, -5.0, 99)])
    got = draw(
        jnp.asarray(np.tile(LOGITS, (6, 1))),
        jnp.zeros(6, jnp.int32),
        make_rules(6, temperature=0.0, num_edits=1),
        memory,
        Mode.FULL,
        way,
    )
    expected = np.log(softmax(LOGITS))
    assert got.logprobs is not None and got.top_ids is not None and got.top_logprobs is not None
    assert got.tokens.tolist() == [1] * 6
    np.testing.assert_allclose(got.logprobs[0], expected[1], atol=1e-5)
    assert got.top_ids.shape == (6, NUM_TOP) and got.top_ids[0, :12].tolist() == list(range(12))
    np.testing.assert_allclose(got.top_logprobs[0, :12], expected[:12], atol=1e-5)


def test_malloc_keeps_what_sampling_many_rows_needs_from_step_to_step() -> None:
    """Larger memory is taken from the system and returned each time, which took 8 ms of a step of 32 rows."""
    rows, vocab = 32, 49_152
    logits = jax.ShapeDtypeStruct((rows, vocab), jnp.float32)
    given = jnp.zeros(rows, jnp.int32), make_rules(rows), make_memory(rows, vocab=vocab)
    lowered = sample_some_rows.lower(logits, *given, free_masks(rows, vocab), Mode.FULL, "xla")
    needed = lowered.compile().memory_analysis().temp_size_in_bytes
    assert needed + 4 * rows * vocab < LARGE_BYTES


def mask_of(rules: Rules, allowed: list[int], at: int) -> Masks:
    """Masks that allow constrained rows only these tokens, at the position `at`."""
    rows = len(rules.is_constrained)
    words = np.zeros((NUM_SLOTS, -(-VOCAB // 32)), np.uint32)
    for token in allowed:
        words[:, token // 32] |= np.uint32(1 << token % 32)
    slots = jnp.where(rules.is_constrained != 0, jnp.arange(rows, dtype=jnp.int32) % NUM_SLOTS, FREE)
    return Masks(jnp.asarray(words), jnp.full(NUM_SLOTS, at, jnp.int32), slots)


masked_ways = pytest.mark.parametrize(
    "mode, way",
    [
        (Mode.PLAIN, "gpu"),
        (Mode.PLAIN, "xla"),
        (Mode.FULL, "xla"),
        (Mode.PLAIN, "cpu"),
        (Mode.FULL, "cpu"),
    ],
)


@masked_ways
def test_a_masked_greedy_draw_is_the_likeliest_allowed_token(mode: Mode, way: str) -> None:
    logits = jax.random.normal(jax.random.key(1), (6, VOCAB))
    allowed = [3, 31, 32, 77, VOCAB - 1]
    rules = make_rules(6, temperature=0.0, is_constrained=np.array([1, 1, 0, 1, 0, 1]))
    positions = jnp.array([5, 6, 5, 5, 5, 4], jnp.int32)
    masks = mask_of(rules, allowed, at=5)
    drawn = draw(logits, positions, rules, make_memory(6), mode, way, masks)
    best = np.argmax(logits, axis=1)
    held = np.array(allowed)[np.argmax(np.asarray(logits)[:, allowed], axis=1)]
    assert drawn.tokens.tolist() == [held[0], best[1], best[2], held[3], best[4], best[5]], (
        "only the mask's own position is held"
    )
    if mode is Mode.FULL:
        assert drawn.logprobs is not None
        expected = jax.nn.log_softmax(logits)[jnp.arange(6), drawn.tokens]
        np.testing.assert_allclose(drawn.logprobs, expected, rtol=1e-5, atol=1e-5)


@masked_ways
def test_masked_draws_have_the_probabilities_of_the_allowed_tokens(mode: Mode, way: str) -> None:
    allowed = [2, 40, 41, 60]
    masks = mask_of(make_rules(DRAWS, is_constrained=1), allowed, at=5)
    tokens = draw_many(mode=mode, way=way, masks=masks, is_constrained=1)
    masked = np.full(VOCAB, -np.inf, np.float32)
    masked[allowed] = LOGITS[allowed]
    check_distribution(tokens, softmax(masked))


@masked_ways
def test_a_mask_that_allows_nothing_poisons_its_own_row_alone(mode: Mode, way: str) -> None:
    logits = jax.random.normal(jax.random.key(3), (6, VOCAB))
    rules = make_rules(6, temperature=0.0, is_constrained=np.array([1, 0, 0, 0, 0, 0]))
    positions = jnp.full(6, 4, jnp.int32)
    masks = mask_of(rules, [], at=4)
    drawn = draw(logits, positions, rules, make_memory(6), mode, way, masks)
    assert drawn.tokens.tolist() == [POISONED, *np.argmax(logits[1:], axis=1).tolist()]
