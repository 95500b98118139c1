"""All layers in one call of a kernel written for the CPU at hand give what the layers give one by one."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levserve.jit.target import AMX, Target
from levserve.model import cache
from levserve.model.config import ModelConfig
from levserve.model.cpu import layers, linear, many_queries
from levserve.model.cpu.attention import count_joined_rows
from levserve.model.cpu.backend import PLAIN_FIELDS, CpuBackend
from levserve.model.cpu.heads import HeadShape
from levserve.model.cpu.products import PackedProduct, Product
from levserve.model.cpu.tile_products import Int8Tiles
from levserve.model.decoder import Decoder
from levserve.model.quantize import NARROW, choose_quantization
from levserve.weights.checkpoint import load_arrays, read_config
from tests.conftest import GOLDEN
from tests.targets import HOST, OTHERS

PLAIN = ("llama", "llama3-rope", "mistral", "phi3", "qwen2", "qwen3")
DOT = CpuBackend(has_products=True)
PACKING = replace(DOT, packs_int8=True)
BACKENDS = {"int8": DOT, "packed": PACKING, "blocks": DOT, "packed blocks": PACKING, "none": DOT}
"""The forms that matrices are stored in, and the backend of each."""
BFLOAT16, FLOAT32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
PAGE_SIZE, WIDTH = 4, 6


@functools.cache
def arrays_of(family: str, kind: str) -> tuple[Any, dict[str, jax.Array]]:
    config = read_config(GOLDEN / family)
    quantization = choose_quantization(
        None if kind == "none" else NARROW["int8"], BACKENDS[kind], BFLOAT16, in_blocks="blocks" in kind
    )
    return config, load_arrays(
        GOLDEN / family, config, BFLOAT16, report=lambda _: None, quantization=quantization
    )


def model_of(
    family: str, kind: str, *, runs_layers: bool = True, target: Target = HOST, **changes: Any
) -> Decoder:
    config, arrays = arrays_of(family, kind)
    backend = replace(BACKENDS[kind], runs_layers=runs_layers, target=target)
    return Decoder.from_arrays(replace(config, **changes), arrays, backend=backend)


def refusal_of(family: str, kind: str, kept: jnp.dtype, **changes: Any) -> str | None:
    config = replace(read_config(GOLDEN / family), **changes)
    return BACKENDS[kind].layers_unsupported_reason(
        config, BFLOAT16 if kind == "none" else jnp.dtype(jnp.int8), kept
    )


class Ran(NamedTuple):
    hidden: np.ndarray
    before: list[np.ndarray]
    after: list[np.ndarray]
    """The pools."""


def run(model: Decoder, positions: np.ndarray, kept: jnp.dtype) -> Ran:
    """Runs random tokens over pages of random values.

    One call and the other may round a value midway between two integers differently, which moves a row by
    0.05. With this seed no value is.
    """
    rng = np.random.default_rng(1)
    rows, chunk = positions.shape
    pools = random_pools(rng, model, rows * WIDTH, PAGE_SIZE, kept)
    table = jnp.asarray(rng.permutation(rows * WIDTH).reshape(rows, WIDTH), jnp.int32)
    tokens = jnp.asarray(rng.integers(0, model.config.vocab_size, (rows, chunk)), jnp.int32)
    hidden, written = jax.jit(lambda pools: model(tokens, pools, table, jnp.asarray(positions, jnp.int32)))(
        pools
    )
    return Ran(
        np.asarray(hidden.array),
        *([np.asarray(cache.from_storage(pool), np.float32) for pool in each] for each in (pools, written)),
    )


def random_pools(
    rng: np.random.Generator, model: Decoder, num_pages: int, page_size: int, kept: jnp.dtype
) -> tuple[jax.Array, ...]:
    shape = num_pages, 2, model.config.num_kv_heads, page_size, model.config.head_dim
    return tuple(
        cache.to_storage(jnp.asarray(rng.standard_normal(shape), jnp.float32), kept) for _ in model.layers
    )


# Chunks that begin anywhere and end in padding, and a row of nothing but padding.
POSITIONS = np.array([0, 9, 17, 3])[:, None] + np.arange(5)[None]
POSITIONS[1, 3:], POSITIONS[2, 1:], POSITIONS[3] = -1, -1, -1


@functools.cache
def run_one_by_one(family: str, kind: str, kept: jnp.dtype, **changes: Any) -> Ran:
    """The result that every target's kernel is compared with."""
    return run(model_of(family, kind, runs_layers=False, **changes), POSITIONS, kept)


def check(family: str, kind: str, kept: jnp.dtype, target: Target = HOST, **changes: Any) -> None:
    is_given = POSITIONS >= 0
    assert refusal_of(family, kind, kept, **changes) is None
    together = run(model_of(family, kind, target=target, **changes), POSITIONS, kept)
    apart = run_one_by_one(family, kind, kept, **changes)
    tolerance = 0.002 if kept == FLOAT32 else 0.03
    np.testing.assert_allclose(together.hidden[is_given], apart.hidden[is_given], atol=tolerance)
    for before, mine, theirs in zip(together.before, together.after, apart.after):
        np.testing.assert_allclose(mine, theirs, atol=tolerance)
        is_written = (mine != before).any((1, 2, 4))  # [page, slot]
        assert is_written.sum() == is_given.sum(), "what nobody wrote is what it was"


@pytest.mark.parametrize(
    ("family", "kind", "kept"),
    [
        *((family, "int8", BFLOAT16) for family in PLAIN),
        ("qwen3", "packed", BFLOAT16),
        ("qwen2", "blocks", BFLOAT16),
        ("llama", "packed blocks", FLOAT32),
        ("qwen3", "none", BFLOAT16),
        ("qwen2", "none", FLOAT32),
        ("mistral", "int8", FLOAT32),
        ("qwen3", "int8", cache.INT8),
        ("llama", "none", cache.INT8),
    ],
)
def test_all_layers_in_one_call_give_what_they_give_one_by_one(
    family: str, kind: str, kept: jnp.dtype
) -> None:
    check(family, kind, kept)


TURNS = tuple(zip(OTHERS.values(), itertools.cycle([BFLOAT16, cache.INT8])))
"""The two types of KV cache, alternating. Each target has one in the first of the two tests below and the
other one in the second: a kernel takes two seconds to compile, and every target has code of its own for
both."""
OTHER_TURNS = tuple((target, BFLOAT16 if kept == cache.INT8 else cache.INT8) for target, kept in TURNS)


@pytest.mark.parametrize(("target", "kept"), TURNS, ids=OTHERS)
def test_all_layers_in_one_call_give_the_same_for_other_targets(target: Target, kept: jnp.dtype) -> None:
    check("qwen3", "int8", kept, target)


def test_only_a_part_of_a_head_may_be_rotated() -> None:
    check("qwen3", "int8", FLOAT32, rotary_size=8)


@pytest.mark.parametrize(
    ("target", "kept"),
    [(HOST, BFLOAT16), (HOST, cache.INT8), *OTHER_TURNS],
    ids=["host with bfloat16", "host with int8", *OTHERS],
)
def test_a_prompts_tokens_get_the_same_in_rows_of_their_own_beside_others_as_in_a_chunk(
    target: Target, kept: jnp.dtype
) -> None:
    """Equal to the last bit, wherever the prompt begins in its page, and whether neighbours are attended
    together or not."""
    model, rng, page_size, width, start, count = (
        model_of("llama", "int8", target=target),
        np.random.default_rng(0),
        32,
        3,
        9,
        70,
    )
    pools = random_pools(rng, model, 3 * width, page_size, kept)
    table, positions = rng.permutation(3 * width).reshape(3, width), np.arange(start, start + count)
    tokens = rng.integers(0, model.config.vocab_size, count)
    order = np.roll(np.arange(count), 1)  # the last, whose next token is sampled, comes first
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


@pytest.mark.parametrize("vector_bytes", [32, 64])
def test_neighbours_of_a_prompt_are_attended_together_and_others_are_not(vector_bytes: int) -> None:
    target = replace(HOST, vector_bytes=vector_bytes)
    heads = HeadShape(kv_heads=1, group=3, size=64, page_size=32, dtype=BFLOAT16, target=target)
    own = [100, 90, *range(4, 30)]  # two streams and a prompt of 26 tokens
    table = jnp.asarray([[7] * 4, [8] * 4, *[[0, 1, 2, 3]] * 26, [0] * 4], jnp.int32)
    pool = jnp.zeros((9, 2, 1, 32, 64), jnp.uint16)
    place = cache.place(table, jnp.asarray([*own, -1], jnp.int32)[:, None], pool)
    together = np.asarray(count_joined_rows(place, heads)).tolist()
    most = many_queries.max_queries(target) // 3 // 4 * 4  # a page is cut evenly
    assert together[:2] == [1, 1] and together[-1] == 1 and sum(together) == 29 and max(together) == most


def test_a_row_gets_the_same_whoever_is_beside_it() -> None:
    model, positions = model_of("qwen3", "int8"), np.array([[7], [3], [-1], [-1]])
    both = run(model, positions, FLOAT32)
    positions[1] = -1
    alone = run(model, positions, FLOAT32)
    np.testing.assert_array_equal(alone.hidden[0], both.hidden[0])


def narrow_model(target: Target) -> Decoder:
    """Cuts a model until its intermediate size is its hidden size; any bytes of packed matrices will do."""
    config, arrays = arrays_of("llama", "packed")
    width = config.hidden_size
    cuts = {"gate_up": np.s_[: 2 * width], "gate_up_scale": np.s_[: 2 * width], "down": np.s_[:, :width]}
    return Decoder.from_arrays(
        replace(config, intermediate_size=width),
        {name: array[cuts.get(name.split(".")[-1], np.s_[:])] for name, array in arrays.items()},
        backend=replace(PACKING, runs_layers=True, target=target),
    )


def test_layers_by_tiles_give_the_same_to_the_last_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes two steps of 32 rows. The second is not full, so its tiles reach beyond the last row, where no
    other data may be.

    Without matrix units, plain instructions stand in for them.
    """
    positions = np.array([0, 9, 17, 3, 11])[:, None] + np.arange(7)
    plain = run(narrow_model(HOST.without(*AMX)), positions, BFLOAT16)
    tiled: list[Product] = []

    def choose_tiles(product: Product, *_: int) -> Int8Tiles:
        assert isinstance(product, PackedProduct)
        tiled.append(product)
        return Int8Tiles(product)

    kernel_for = layers.kernel_for
    monkeypatch.setattr(linear, "tile_product_for", choose_tiles)
    monkeypatch.setattr(layers, "kernel_for", lambda shape: replace(kernel_for(shape), name="tiled_layers"))
    by_tiles = run(narrow_model(HOST), positions, BFLOAT16)
    assert tiled
    np.testing.assert_array_equal(by_tiles.hidden, plain.hidden)
    for mine, theirs in zip(by_tiles.after, plain.after, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "mixtral", "olmo2"])
def test_layers_that_are_not_plain_are_left_to_xla(family: str) -> None:
    assert refusal_of(family, "none", BFLOAT16) is not None


def test_a_kv_cache_in_fp8_is_left_to_xla() -> None:
    assert refusal_of("llama", "int8", cache.FP8) is not None


@dataclass(frozen=True, slots=True)
class ExtendedConfig(ModelConfig):
    """A config with a field that may be added one day."""

    made_up: float = 0.0


def test_a_model_with_a_field_that_the_kernel_does_not_know_is_left_to_xla() -> None:
    known = read_config(GOLDEN / "llama")
    config = ExtendedConfig(**{field.name: getattr(known, field.name) for field in fields(known)})
    int8 = jnp.dtype(jnp.int8)
    assert DOT.layers_unsupported_reason(config, int8, BFLOAT16) is None, "at its default it changes nothing"
    refusal = DOT.layers_unsupported_reason(replace(config, made_up=0.5), int8, BFLOAT16)
    assert refusal == "the whole-layer kernel does not support these config fields: made_up"


def test_every_plain_field_is_a_field_of_the_config() -> None:
    assert PLAIN_FIELDS <= {field.name for field in fields(ModelConfig)}


def test_what_is_not_finite_spoils_its_own_row_alone_and_is_kept_as_it_is() -> None:
    model = model_of("llama", "int8")
    spoilt = replace(model, embed=model.embed.at["vocab", 5].set(jnp.nan))
    pools = cache.make_pool(model.config, 2, PAGE_SIZE, BFLOAT16)
    tokens, table, positions = (
        jnp.asarray(numbers, jnp.int32)[:, None] for numbers in ([5, 6], [0, 1], [2, 2])
    )
    hidden, written = jax.jit(lambda pools: spoilt(tokens, pools, table, positions))(pools)
    assert np.isnan(hidden.array[0]).all() and np.isfinite(hidden.array[1]).all()
    assert all(np.isnan(np.asarray(pool[0, :, :, 2], np.float32)).all() for pool in written)
