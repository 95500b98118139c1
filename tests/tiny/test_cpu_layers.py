"""All layers in one call of a kernel that is written for the CPU at hand: what it gives is what the layers give one by one."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levserve.model import cache
from levserve.model.attention import Kernel
from levserve.model.cpu import many_queries as cpu_many_queries
from levserve.model.cpu.attention import HAS_MANY, join
from levserve.model.cpu.heads import Heads
from levserve.model.decoder import Decoder
from levserve.model.quantize import NARROW, choose_quantization
from levserve.weights.load import load_arrays, read_config
from tests.conftest import GOLDEN

PLAIN = ("llama", "llama3-rope", "mistral", "phi3", "qwen2", "qwen3")
KERNELS = {"int8": Kernel.LLVM_DOT, "packed": Kernel.LLVM_VNNI, "none": Kernel.LLVM_DOT}
"""What matrices become, and which kernel takes them."""
BFLOAT16, FLOAT32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
PAGE_SIZE, WIDTH = 4, 6


@functools.cache
def arrays_of(family: str, kind: str) -> tuple[Any, dict[str, jax.Array]]:
    config = read_config(GOLDEN / family)
    quantization = choose_quantization(
        NARROW.get("int8" if kind == "packed" else kind), "cpu", BFLOAT16, KERNELS[kind]
    )
    return config, load_arrays(
        GOLDEN / family, config, BFLOAT16, report=lambda _: None, quantization=quantization
    )


def model_of(family: str, kind: str, **changes: Any) -> Decoder:
    config, arrays = arrays_of(family, kind)
    return Decoder.from_arrays(dataclasses.replace(config, **changes), arrays, kernel=KERNELS[kind])


class Ran(NamedTuple):
    hidden: np.ndarray
    before: list[np.ndarray]
    after: list[np.ndarray]
    """The pools."""


def run(model: Decoder, positions: np.ndarray, kept: jnp.dtype) -> Ran:
    """Random tokens over pages that hold random numbers."""
    rng = np.random.default_rng(0)
    rows, chunk = positions.shape
    shape = cache.make_pool(model.config, rows * WIDTH, PAGE_SIZE, kept)[0].shape
    pools = tuple(jnp.asarray(rng.standard_normal(shape), kept) for _ in model.layers)
    table = jnp.asarray(rng.permutation(rows * WIDTH).reshape(rows, WIDTH), jnp.int32)
    tokens = jnp.asarray(rng.integers(0, model.config.vocab_size, (rows, chunk)), jnp.int32)
    hidden, written = jax.jit(lambda pools: model(tokens, pools, table, jnp.asarray(positions, jnp.int32)))(
        pools
    )
    return Ran(
        np.asarray(hidden.array),
        *([np.asarray(pool, np.float32) for pool in each] for each in (pools, written)),
    )


def check(model: Decoder, kept: jnp.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """On chunks that begin anywhere, with padding at their ends and a row of nothing else."""
    positions = np.array([0, 9, 17, 3])[:, None] + np.arange(5)[None]
    positions[1, 3:], positions[2, 1:], positions[3] = -1, -1, -1
    is_given = positions >= 0
    assert model.skips_padding(kept)
    together = run(model, positions, kept)
    monkeypatch.setattr(Decoder, "skips_padding", lambda self, kept: False)
    apart = run(model, positions, kept)
    tolerance = 0.03 if kept == BFLOAT16 else 0.002
    np.testing.assert_allclose(together.hidden[is_given], apart.hidden[is_given], atol=tolerance)
    for before, mine, theirs in zip(together.before, together.after, apart.after):
        np.testing.assert_allclose(mine, theirs, atol=tolerance)
        is_written = (mine != before).any((1, 2, 4))  # [page, slot]
        assert is_written.sum() == is_given.sum(), "what nobody wrote is what it was"


@pytest.mark.parametrize(
    ("family", "kind", "kept"),
    [
        *((family, "int8", BFLOAT16) for family in PLAIN),
        *((family, "packed", BFLOAT16) for family in ("llama", "qwen3")),
        ("qwen3", "none", BFLOAT16),
        ("qwen2", "none", FLOAT32),
        ("mistral", "int8", FLOAT32),
    ],
)
def test_all_layers_in_one_call_give_what_they_give_one_by_one(
    family: str, kind: str, kept: jnp.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(model_of(family, kind), kept, monkeypatch)


def test_only_a_part_of_a_head_may_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    check(model_of("qwen3", "int8", rotary_size=8), FLOAT32, monkeypatch)


def test_a_prompts_tokens_get_the_same_in_rows_of_their_own_beside_others_as_in_a_chunk() -> None:
    """To the last bit, wherever the prompt begins in its page, and whether neighbours are attended together or not."""
    model, rng, page_size, width, start, count = (
        model_of("llama", "int8"),
        np.random.default_rng(0),
        32,
        3,
        9,
        70,
    )
    shape = cache.make_pool(model.config, 3 * width, page_size, BFLOAT16)[0].shape
    pools = tuple(jnp.asarray(rng.standard_normal(shape), BFLOAT16) for _ in model.layers)
    table, positions = rng.permutation(3 * width).reshape(3, width), np.arange(start, start + count)
    tokens = rng.integers(0, model.config.vocab_size, count)
    order = np.roll(np.arange(count), 1)  # the last, which is sampled after, comes first
    rows = {
        "tokens": [[3], [4], *tokens[order, None]],
        "table": [table[1], table[2], *[table[0]] * count],
        "positions": [[50], [60], *positions[order, None]],
    }
    compute = jax.jit(lambda tokens, table, positions: model(tokens, pools, table, positions))
    in_chunk, written = compute(
        *(jnp.asarray(given, jnp.int32)[None] for given in (tokens, table[0], positions))
    )
    in_rows, written_by_rows = compute(*(jnp.asarray(np.array(given), jnp.int32) for given in rows.values()))
    np.testing.assert_array_equal(in_rows.array[2:, 0], in_chunk.array[0, order])
    for mine, theirs in zip(written_by_rows, written, strict=True):
        np.testing.assert_array_equal(mine[table[0]], theirs[table[0]])


@pytest.mark.skipif(not HAS_MANY, reason="this CPU takes all queries one by one")
def test_neighbours_of_a_prompt_are_attended_together_and_others_are_not() -> None:
    heads = Heads(kv_heads=1, group=3, size=64, page_size=32, numbers=BFLOAT16)
    own = [100, 90, *range(4, 30)]  # two streams and a prompt of 26 tokens
    table = jnp.asarray([[7] * 4, [8] * 4, *[[0, 1, 2, 3]] * 26, [0] * 4], jnp.int32)
    pool = jnp.zeros((9, 2, 1, 32, 64), jnp.uint16)
    place = cache.place(table, jnp.asarray([*own, -1], jnp.int32)[:, None], pool)
    together = np.asarray(join(place, heads)).tolist()
    most = cpu_many_queries.MOST // 3 // 4 * 4  # of a page, cut evenly
    assert together[:2] == [1, 1] and together[-1] == 1 and sum(together) == 29 and max(together) == most


def test_a_row_gets_the_same_whoever_is_beside_it() -> None:
    model, positions = model_of("qwen3", "int8"), np.array([[7], [3], [-1], [-1]])
    both = run(model, positions, FLOAT32)
    positions[1] = -1
    alone = run(model, positions, FLOAT32)
    np.testing.assert_array_equal(alone.hidden[0], both.hidden[0])


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "mixtral", "olmo2"])
def test_layers_that_are_not_plain_are_left_to_xla(family: str) -> None:
    assert not model_of(family, "none").skips_padding(BFLOAT16)


def test_a_kv_cache_in_fp8_is_left_to_xla() -> None:
    assert not model_of("llama", "int8").skips_padding(cache.FP8)


def test_what_is_not_finite_spoils_its_own_row_alone_and_is_kept_as_it_is() -> None:
    model = model_of("llama", "int8")
    spoilt = dataclasses.replace(model, embed=model.embed.at["vocab", 5].set(jnp.nan))
    pools = cache.make_pool(model.config, 2, PAGE_SIZE, BFLOAT16)
    tokens, table, positions = (
        jnp.asarray(numbers, jnp.int32)[:, None] for numbers in ([5, 6], [0, 1], [2, 2])
    )
    hidden, written = jax.jit(lambda pools: spoilt(tokens, pools, table, positions))(pools)
    assert np.isnan(hidden.array[0]).all() and np.isfinite(hidden.array[1]).all()
    assert all(np.isnan(np.asarray(pool[0, :, :, 2], np.float32)).all() for pool in written)
