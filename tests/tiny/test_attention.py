"""Paged attention against a dense one, over tables and lengths of every kind."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

from levserve.model import cache
from levserve.model.backend import HeadNorms
from levserve.model.cpu.backend import CpuBackend
from levserve.model.gpu.decode_attention import decode_attention
from levserve.model.gpu.heads import place_heads
from levserve.model.gpu.paged_attention import (
    LOG2_E,
    ONE_QUERY_PROGRAMS,
    choose_splits,
    choose_tiling,
    paged_attention,
    split_steps,
)
from levserve.model.rotary import Angles, rotate
from levserve.model.xla import XLA_ON_CPU, XlaBackend

LLVM = CpuBackend()


def mix(backend: XlaBackend, *given: Any, **limits: Any) -> np.ndarray:
    """Calls `mix_values` in one jitted program: outside one, jax would compile every operation separately."""
    return np.asarray(jax.jit(functools.partial(backend.mix_values, **limits))(*given))


def store(numbers: np.ndarray, storage: Any) -> jax.Array:
    return jax.jit(cache.to_storage, static_argnums=1)(numbers, jnp.dtype(storage))


def dense(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    positions: np.ndarray,
    window: int | None,
    softcap: float | None = None,
) -> np.ndarray:
    """One query at a time in float64: q [chunk, kv, group, size], keys and values [length, kv, size]."""
    out = np.zeros(q.shape)
    for index, position in enumerate(positions):
        if position < 0:
            continue
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(q.shape[1]):
            scores = keys[first : position + 1, head].astype(np.float64) @ q[index, head].T.astype(np.float64)
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            weights = np.exp(scores - scores.max(0))
            out[index, head] = (weights / weights.sum(0)).T @ values[first : position + 1, head]
    return out


@pytest.mark.parametrize(
    ("page_size", "backend"), [(4, XLA_ON_CPU), (16, XLA_ON_CPU), (32, XLA_ON_CPU), (16, LLVM)]
)
@pytest.mark.parametrize(("kv_heads", "group", "size"), [(1, 1, 64), (2, 3, 32), (1, 8, 80)])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (7, None), (7, 2.0)])
def test_paged_attention_equals_dense_attention(
    page_size: int,
    kv_heads: int,
    group: int,
    size: int,
    window: int | None,
    softcap: float | None,
    backend: XlaBackend,
) -> None:
    rng = np.random.default_rng(page_size * 100 + group)
    chunk, lengths = 3, [3, page_size + 3, 2 * page_size, 290]
    width = -(-max(lengths) // page_size) + 1
    num_pages = width * len(lengths) + 3
    table = rng.permutation(num_pages)[: width * len(lengths)].reshape(len(lengths), width).astype(np.int32)
    pool = jnp.asarray(rng.standard_normal((num_pages, 2, kv_heads, page_size, size), dtype=np.float32))
    q = rng.standard_normal((len(lengths), chunk, kv_heads, group, size), dtype=np.float32)
    positions = np.stack([np.arange(length - chunk, length) for length in lengths]).astype(np.int32)
    positions[2, 2] = -1  # padding
    got = mix(backend, q, pool, table, positions, window=window, softcap=softcap)
    for row, length in enumerate(lengths):
        whole = (
            np.asarray(pool)[table[row]].transpose(1, 0, 3, 2, 4).reshape(2, -1, kv_heads, size)[:, :length]
        )
        np.testing.assert_allclose(
            got[row], dense(q[row], *whole, positions[row], window, softcap), atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize(
    ("storage", "backend"),
    [
        (jnp.uint16, XLA_ON_CPU),
        (jnp.bfloat16, XLA_ON_CPU),
        (jnp.uint16, LLVM),
        (jnp.bfloat16, LLVM),
    ],
)
@pytest.mark.parametrize(
    ("chunk", "kv_heads", "group"), [(1, 2, 1), (1, 3, 3), (5, 1, 3), (1, 1, 16), (1, 2, 17), (40, 1, 2)]
)
def test_bfloat16_is_mixed_like_the_numbers_it_stands_for(
    chunk: int, kv_heads: int, group: int, storage: type, backend: XlaBackend
) -> None:
    """With one query, a few or many: each takes a different code path."""
    rng = np.random.default_rng(group)
    lengths, page_size, size = [chunk, 64, 65, 290], 32, 64
    table = rng.permutation(43)[:40].reshape(4, 10).astype(np.int32)
    numbers = rng.standard_normal((43, 2, kv_heads, page_size, size)).astype(jnp.bfloat16)
    q = rng.standard_normal((4, chunk, kv_heads, group, size)).astype(jnp.bfloat16).astype(np.float32)
    positions = np.stack([np.arange(length - chunk, length) for length in lengths]).astype(np.int32)
    positions[1, 0] = -1  # padding
    got = mix(backend, q, store(numbers, storage), table, positions)
    for row, length in enumerate(lengths):
        whole = (
            numbers.astype(np.float32)[table[row]]
            .transpose(1, 0, 3, 2, 4)
            .reshape(2, -1, kv_heads, size)[:, :length]
        )
        np.testing.assert_allclose(got[row], dense(q[row], *whole, positions[row], None), atol=8e-3)


@pytest.mark.parametrize(
    ("chunk", "page_size", "kv_heads", "group", "size", "window", "softcap", "splits"),
    [
        (1, 32, 2, 4, 64, None, None, None),
        (1, 32, 3, 3, 64, 40, None, 1),
        (1, 4, 2, 2, 80, None, 1.5, 2),
        (1, 128, 1, 2, 256, 40, None, 4),
        (32, 32, 2, 3, 64, None, 1.5, 1),
        (32, 16, 1, 1, 128, 40, None, 2),
        (16, 64, 1, 8, 96, 40, None, 1),
    ],
)
def test_the_gpu_kernel_equals_the_plain_one(
    chunk: int,
    page_size: int,
    kv_heads: int,
    group: int,
    size: int,
    window: int | None,
    softcap: float | None,
    splits: int | None,
) -> None:
    rng = np.random.default_rng(group)
    lengths = np.asarray([1, page_size, page_size + 1, 130, 0])[:, None]  # the last row is padding
    width = -(-130 // page_size) + 1
    num_pages = width * len(lengths) + 2
    table = rng.permutation(num_pages)[: width * len(lengths)].reshape(len(lengths), width).astype(np.int32)
    pool = jnp.asarray(rng.standard_normal((num_pages, 2, kv_heads, page_size, size), dtype=np.float32))
    q = rng.standard_normal((len(lengths), chunk, kv_heads, group, size), dtype=np.float32)
    q *= np.float32(size**-0.5)
    positions = np.maximum(lengths - chunk, 0) + np.arange(chunk)[None]
    positions = np.where(positions < lengths, positions, -1).astype(np.int32)
    sinks = rng.standard_normal(kv_heads * group, np.float32) + 1 if window else None
    limits: dict[str, Any] = dict(window=window, softcap=softcap)
    plain = mix(XLA_ON_CPU, q, pool, table, positions, sinks=sinks, **limits)
    attend = functools.partial(paged_attention, splits=splits, interpret=True, **limits)
    kernel = np.asarray(jax.jit(attend)(q * np.float32(LOG2_E), pool, table, positions, sinks))
    is_given = positions >= 0
    np.testing.assert_allclose(kernel[is_given], plain[is_given], atol=1e-5, rtol=1e-5)


def mapping_of(function: Callable[..., Any], *given: jax.Array) -> Any:
    """The grid mapping of `function`'s kernel. A GPU starts programs with the first dimension fastest."""
    (inner,) = (equation.params["jaxpr"] for equation in jax.make_jaxpr(function)(*given).eqns)
    (call,) = (equation for equation in inner.eqns if equation.primitive.name == "pallas_call")
    return call.params["grid_mapping"]


def test_the_gpu_kernel_for_decoding_begins_a_row_when_all_before_it_have_begun() -> None:
    rows, kv_heads, splits = 5, 2, 4
    qkv, pool, table = (
        jnp.zeros((rows, 4 * kv_heads, 64)),
        jnp.zeros((9, 2, kv_heads, 32, 64)),
        jnp.zeros((rows, 8), jnp.int32),
    )
    decode = functools.partial(decode_attention, kv_heads=kv_heads, scale=1.0, splits=splits)
    assert mapping_of(decode, qkv, pool, table, jnp.zeros(rows, jnp.int32)).grid == (kv_heads, splits, rows)


@pytest.mark.parametrize(("group", "blocks"), [(1, 1), (2, 2), (4, 4), (8, 4)])
def test_the_gpu_kernel_for_prompts_takes_more_queries_together_where_a_group_is_small(
    group: int, blocks: int
) -> None:
    """Programs start with the last queries, which see the most keys, in all heads."""
    rows, chunk, kv_heads, splits = 3, 64, 2, 2
    q, pool = jnp.zeros((rows, chunk, kv_heads, group, 64)), jnp.zeros((9, 2, kv_heads, 32, 64))
    attention = functools.partial(paged_attention, splits=splits)
    mapping = mapping_of(
        attention, q, pool, jnp.zeros((rows, 8), jnp.int32), jnp.zeros((rows, chunk), jnp.int32)
    )
    assert mapping.grid == (kv_heads, splits, rows * blocks)
    of_queries = jaxpr_as_fun(mapping.block_mappings[0].index_map_jaxpr)
    taken = [int(of_queries(0, 0, block)[0]) for block in range(rows * blocks)]
    assert taken == list(reversed(range(rows * blocks)))


def prepare(x: jax.Array, weight: jax.Array | None, angles: Angles | None) -> jax.Array:
    """Heads [row, chunk, head, head_size], normed by `weight` and rotated by `angles`, where given."""
    if weight is not None:
        x = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-3) * weight[None, None, None]
    return x if angles is None else rotate(x, angles)


@pytest.mark.parametrize(
    ("rows", "chunk", "page_size", "kv_heads", "group", "size", "turned", "is_normed", "storage"),
    [
        (3, 32, 16, 2, 4, 64, 64, False, jnp.float32),
        (2, 16, 4, 3, 3, 64, 64, True, jnp.float32),
        (3, 5, 32, 2, 1, 80, 40, True, jnp.float32),
        (1, 48, 16, 1, 2, 96, 0, True, cache.FP8),
        (2, 24, 16, 2, 2, 128, 128, False, jnp.bfloat16),
    ],
)
def test_the_gpu_kernel_for_heads_equals_norming_turning_and_writing(
    rows: int,
    chunk: int,
    page_size: int,
    kv_heads: int,
    group: int,
    size: int,
    turned: int,
    is_normed: bool,
    storage: type,
) -> None:
    rng = np.random.default_rng(group)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    width = -(-chunk // page_size) + 1
    num_pages = width * rows + 1
    table = rng.permutation(num_pages)[: width * rows].reshape(rows, width).astype(np.int32)
    pool = store(normal(num_pages, 2, kv_heads, page_size, size), storage)
    positions = np.arange(chunk)[None] + np.arange(rows)[:, None]
    positions[-1, chunk // 2 :] = -1  # padding, which is written nowhere
    place = jax.jit(cache.place)(table, positions.astype(np.int32), pool)
    heads, by = normal(rows, chunk, (group + 2) * kv_heads, size), normal(rows, chunk, 1, turned // 2)
    angles = Angles(np.cos(by), np.sin(by)) if turned else None
    norms = HeadNorms(normal(size), normal(size)) if is_normed else None
    flat = heads.reshape(rows * chunk, -1, size)
    put_heads = functools.partial(place_heads, kv_heads=kv_heads, scale=0.25, eps=1e-3, interpret=True)
    got, written = jax.jit(put_heads)(flat, pool, place, angles, norms)

    @jax.jit
    def put_plainly(heads: jax.Array, pool: jax.Array) -> tuple[jax.Array, jax.Array]:
        queries, keys, values = jnp.split(heads, [group * kv_heads, (group + 1) * kv_heads], axis=2)
        weights = norms or (None, None)
        queries, keys = (prepare(x, weight, angles) for x, weight in zip((queries, keys), weights))
        scaled = queries.reshape(rows, chunk, kv_heads, group, size) * (0.25 * LOG2_E)
        return scaled, cache.write(pool, keys, values, place)

    wanted, wanted_pool = put_plainly(heads, pool)
    spread = {jnp.float32: 2e-6, jnp.bfloat16: 2**-8, cache.FP8: 2**-11}[
        storage
    ]  # fp8 is multiplied in float16
    np.testing.assert_allclose(np.asarray(got, np.float32), wanted, atol=2e-6, rtol=spread)
    put, wanted_put = (np.asarray(array, np.float32) for array in (written, wanted_pool))
    assert (put != np.asarray(pool, np.float32)).any((0, 3, 4)).all(), "keys and values of every head"
    np.testing.assert_allclose(
        put, wanted_put, atol=2e-6, rtol={jnp.float32: 1e-5, jnp.bfloat16: 2**-7, cache.FP8: 0.13}[storage]
    )
    assert storage is jnp.float32 or (put != wanted_put).mean() < 1e-3, (
        "but for what rounding makes of a sum in another order"
    )


@pytest.mark.parametrize(
    (
        "page_size",
        "kv_heads",
        "group",
        "size",
        "turned",
        "is_normed",
        "window",
        "softcap",
        "splits",
        "storage",
    ),
    [
        (32, 2, 4, 64, 64, False, None, None, None, jnp.float32),
        (32, 3, 3, 64, 64, True, 40, None, 1, jnp.float32),
        (4, 2, 2, 80, 40, False, None, 1.5, 2, jnp.float32),
        (128, 1, 2, 256, 256, True, 40, None, 4, jnp.float32),
        (16, 1, 8, 96, 96, True, None, None, 1, cache.FP8),
        (16, 2, 1, 96, 0, False, 20, None, 2, cache.FP8),
    ],
)
def test_the_gpu_kernel_for_decoding_equals_norming_turning_writing_and_attending(
    page_size: int,
    kv_heads: int,
    group: int,
    size: int,
    turned: int,
    is_normed: bool,
    window: int | None,
    softcap: float | None,
    splits: int | None,
    storage: type,
) -> None:
    rng = np.random.default_rng(group)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    lengths = np.asarray([1, page_size, page_size + 1, 130, 0])  # the last row is padding
    rows, width = len(lengths), -(-130 // page_size) + 1
    num_pages = width * rows + 2
    table = rng.permutation(num_pages)[: width * rows].reshape(rows, width).astype(np.int32)
    pool = store(normal(num_pages, 2, kv_heads, page_size, size), storage)
    heads, positions = normal(rows, (group + 2) * kv_heads, size), (lengths - 1).astype(np.int32)
    by = normal(rows, 1, 1, turned // 2)
    angles = Angles(np.cos(by), np.sin(by)) if turned else None
    norms = HeadNorms(normal(size), normal(size)) if is_normed else None
    sinks = normal(kv_heads * group) + 1 if window else None
    rules: dict[str, Any] = dict(scale=size**-0.5, window=window, softcap=softcap)
    decode = functools.partial(
        decode_attention, kv_heads=kv_heads, eps=1e-3, splits=splits, interpret=True, **rules
    )
    got, written = jax.jit(decode)(heads, pool, table, positions, angles, norms, sinks)

    @jax.jit
    def decode_plainly(heads: jax.Array, pool: jax.Array) -> tuple[jax.Array, jax.Array]:
        queries, keys, values = jnp.split(heads, [group * kv_heads, (group + 1) * kv_heads], axis=1)
        weights = norms or (None, None)
        queries, keys = (prepare(x[:, None], weight, angles) for x, weight in zip((queries, keys), weights))
        at = jnp.asarray(positions)[:, None]
        pool = cache.write(pool, keys, values[:, None], cache.place(jnp.asarray(table), at, pool))
        scaled = queries.reshape(rows, 1, kv_heads, group, size) * rules["scale"]
        limits = {name: rules.get(name) for name in ("window", "softcap")}
        mixed = XLA_ON_CPU.mix_values(scaled, pool, jnp.asarray(table), at, sinks=sinks, **limits)
        return mixed.reshape(got.shape), pool

    wanted, wanted_pool = decode_plainly(heads, pool)
    is_exact = storage is jnp.float32
    shown, wanted_shown = (np.asarray(array, np.float32)[:-1] for array in (got, wanted))
    np.testing.assert_allclose(shown, wanted_shown, atol=2e-5 if is_exact else 2e-2)
    put, wanted_put = (np.asarray(array, np.float32) for array in (written, wanted_pool))
    np.testing.assert_allclose(put, wanted_put, atol=1e-6, rtol=1e-5 if is_exact else 0.13)
    assert is_exact or (put != wanted_put).sum() <= 2, "but for what rounding makes of a sum in another order"


@pytest.mark.parametrize("splits", [1, 2, 8])
@pytest.mark.parametrize(("start", "end"), [(0, 0), (0, 1), (0, 7), (3, 64)])
def test_splits_have_equal_parts_of_the_steps_a_row_has(start: int, end: int, splits: int) -> None:
    """Not of the steps of the longest context: if a model takes 128,000 tokens, one split would get all of
    a row of 1,000."""
    share = jax.jit(lambda *given: split_steps(*given, splits, 4096))
    shares = [share(*map(np.int32, (start, end, split))) for split in range(splits)]
    steps = [list(range(int(first), int(last))) for first, last in shares]
    assert list(chain.from_iterable(steps)) == list(range(start, end))
    assert max(map(len, steps)) == -(-(end - start) // splits)


@pytest.mark.parametrize(
    ("programs", "steps", "splits"),
    [(2048, 64, 1), (512, 64, 2), (256, 64, 4), (64, 64, 8), (64, 1, 1), (8, 64, 16)],
)
def test_a_few_rows_are_split_until_they_fill_the_card(programs: int, steps: int, splits: int) -> None:
    assert choose_splits(programs, steps, ONE_QUERY_PROGRAMS) == splits


@pytest.mark.parametrize(
    ("size", "dtype", "keys", "more"),
    [
        (64, jnp.bfloat16, 64, 1),
        (80, jnp.bfloat16, 64, 1),
        (128, jnp.bfloat16, 64, 1),
        (256, jnp.bfloat16, 32, 0),
        (128, cache.FP8, 32, 0),
    ],
)
def test_a_row_that_is_not_split_has_more_steps_under_way(
    size: int, dtype: Any, keys: int, more: int
) -> None:
    """Only where it pays: the programs of a long row end last, almost alone."""
    split, whole = ONE_QUERY_PROGRAMS // 2, ONE_QUERY_PROGRAMS // 2 + 1
    assert (
        choose_splits(split, 64, ONE_QUERY_PROGRAMS) == 2
        and choose_splits(whole, 64, ONE_QUERY_PROGRAMS) == 1
    )
    few, many = (choose_tiling(1, size, jnp.dtype(dtype), num_programs) for num_programs in (split, whole))
    assert few.keys == keys
    assert many == few._replace(num_stages=few.num_stages + more)


@pytest.mark.parametrize("chunk", [1, 16])
@pytest.mark.parametrize("way", ["kernel", "xla", "xla on bits", "llvm on bits"])
def test_fp8_is_mixed_like_the_numbers_it_stands_for(way: str, chunk: int) -> None:
    """By the GPU's kernel, by XLA on a GPU, and by XLA and LLVM on a CPU, which stores fp8 as bits."""
    rng = np.random.default_rng(chunk)
    lengths, page_size, size = [chunk, 64, 130], 32, 64
    table = rng.permutation(17)[:15].reshape(3, 5).astype(np.int32)
    given = rng.standard_normal((17, 2, 2, page_size, size)).astype(np.float32)
    backend = LLVM if way == "llvm on bits" else XlaBackend("cpu" if way == "xla on bits" else "gpu")
    pool = store(given, backend.kv_storage(cache.FP8))
    q = (rng.standard_normal((3, chunk, 2, 3, size)) / 8).astype(jnp.bfloat16).astype(np.float32)
    positions = np.stack([np.arange(length - chunk, length) for length in lengths]).astype(np.int32)
    if way == "kernel":
        attend = jax.jit(functools.partial(paged_attention, interpret=True))
        got = np.asarray(attend(q * np.float32(LOG2_E), pool, table, positions))
        assert got.dtype == np.float16
    else:
        got = mix(backend, q, pool, table, positions)
    numbers = given.astype(cache.FP8).astype(np.float32)
    assert (numbers != given).mean() > 0.9
    for row, length in enumerate(lengths):
        whole = numbers[table[row]].transpose(1, 0, 3, 2, 4).reshape(2, -1, 2, size)[:, :length]
        wanted = dense(q[row], *whole, positions[row], None)
        np.testing.assert_allclose(got[row].astype(np.float32), wanted, atol=1e-2)


def test_writes_go_to_their_page_and_padding_goes_nowhere() -> None:
    pool = jnp.zeros((5, 2, 1, 4, 2), jnp.float32)
    table = jnp.asarray([[3, 1], [0, 2]], jnp.int32)
    positions = jnp.asarray([[3, 4], [1, -1]], jnp.int32)
    keys = np.arange(8, dtype=np.float32).reshape(2, 2, 1, 2) + 1
    write = jax.jit(lambda pool, *given: cache.write(pool, *given, cache.place(table, positions, pool)))
    written = np.asarray(write(pool, keys, -keys))
    expected = np.zeros((5, 2, 1, 4, 2), np.float32)
    expected[3, 0, 0, 3], expected[1, 0, 0, 0], expected[0, 0, 0, 1] = (1, 2), (3, 4), (5, 6)
    expected[:, 1] = -expected[:, 0]
    np.testing.assert_array_equal(written, expected)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_fp8_has_no_number_that_is_too_large_and_keeps_what_is_none(platform: str) -> None:
    given = jnp.asarray([0.0, 0.3, -17.0, 2.0**-9, 448.0, 460.0, 1e9, -jnp.inf, jnp.nan], jnp.float32)
    stored = cache.to_storage(given, XlaBackend(platform).kv_storage(cache.FP8))
    assert stored.dtype == (jnp.uint8 if platform == "cpu" else cache.FP8)
    wanted = np.asarray([0.0, 0.3125, -16.0, 2.0**-9, 448.0, 448.0, 448.0, -448.0, np.nan], np.float32)
    np.testing.assert_array_equal(cache.from_storage(stored).astype(jnp.float32), wanted)


def test_all_bits_of_fp8_are_read_as_the_number_they_stand_for() -> None:
    bits = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(
        cache.from_storage(jnp.asarray(bits)), bits.view(cache.FP8).astype(np.float32)
    )


def test_bfloat16_survives_its_storage_as_bits() -> None:
    numbers = jnp.asarray([0.0, -0.0, 1.5, -3.25e-20, 3e38, 1 / 3], jnp.bfloat16)
    bits = cache.to_storage(numbers, cache.BITS[jnp.dtype(jnp.bfloat16)])
    assert bits.dtype == jnp.uint16
    np.testing.assert_array_equal(cache.from_storage(bits), numbers.astype(jnp.float32))
