"""Kernels written for the CPU at hand give what XLA gives, for any arguments and any number of callers."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from levserve.jit import xla_call
from levserve.jit.builder import F32, I8, I32
from levserve.jit.program import Code, Program
from levserve.jit.target import Target
from levserve.jit.xla_call import Kernel
from levserve.model.backend import Likeliest
from levserve.model.cache import FP8
from levserve.model.cpu import argmax, draw, layers, refine, softmax
from levserve.model.cpu import attention as cpu_attention
from levserve.model.cpu import linear as cpu_linear
from levserve.model.cpu.block_products import block_product_for
from levserve.model.cpu.forms import Form
from levserve.model.cpu.heads import HeadShape
from levserve.model.cpu.nibble_products import nibble_product_for
from levserve.model.cpu.products import product_for
from levserve.model.hadamard import rotate
from levserve.model.int8_packing import pack
from levserve.model.quantize import STEPS, multiply_rotated
from levserve.model.search import likeliest
from levserve.model.xla import XLA_ON_CPU
from tests.targets import FOREIGN, HOST, LIKE_HOST, NAMED, RUNNABLE, on_each_target, with_examples

SHAPES, PACKED_SHAPES = ((64, 16), (8, 96), (132, 32)), ((64, 16), (32, 96), (160, 96))
"""A kernel is compiled for each size of a row."""
HEADS = ((1, 1, 16, 4), (2, 3, 64, 2), (2, 3, 64, 32), (1, 5, 48, 32))
"""Key-value heads, queries of each, head size and page size: pages shorter and longer than a vector, a
head of one vector and of several. All tests of attention share their kernels, which take half a second
each to compile."""


def matrix(out: int, size: int, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.integers(-127, 128, (out, size)), jnp.int8), jnp.asarray(
        rng.uniform(0.5, 1, out), jnp.float32
    )


multiply = functools.partial(jax.jit, static_argnames="target")(cpu_linear.multiply)
by_xla = jax.jit(multiply_rotated)
turn = jax.jit(rotate)


@functools.partial(jax.jit, static_argnames=("target", "window"))
def attend(
    q: jax.Array, pool: jax.Array, table: jax.Array, positions: jax.Array, target: Target, window: int | None
) -> jax.Array:
    return cpu_attention.paged_attention(q, pool, table, positions, target=target, window=window)


@functools.partial(jax.jit, static_argnames="target")
def best_of_rows(logits: jax.Array, num_used: jax.Array, target: Target) -> tuple[Any, Likeliest]:
    """Finds the best tokens by kernel and XLA in one program: every example has its own shape to compile."""
    return argmax.argmax_rows(logits, num_used, target=target), likeliest(logits)


@with_examples(
    20,
    st.sampled_from([(shape, False) for shape in SHAPES] + [(shape, True) for shape in PACKED_SHAPES]),
    st.sampled_from([1, 2, 17, 40]),
    st.integers(0, 2**32 - 1),
    st.floats(-30, 30),
)
def test_a_product_is_xlas_but_for_a_number_that_is_rounded_otherwise(
    target: Target, case: tuple[tuple[int, int], bool], rows: int, seed: int, power: float
) -> None:
    shape, is_packed = case
    weight, scale = matrix(*shape, seed % 100)
    x = jnp.asarray(np.random.default_rng(seed).standard_normal((rows, shape[1])) * 2.0**power, jnp.float32)
    stored = jnp.asarray(pack(np.asarray(weight))) if is_packed else weight
    got, wanted = multiply(stored, scale, x, target=target), by_xla(weight, scale, x)
    turned = np.asarray(turn(x))
    step = float(np.abs(turned).max()) / STEPS
    np.testing.assert_allclose(got, wanted, atol=step * 127, rtol=2e-6)
    exact = turned.astype(np.float64) @ np.asarray(weight, np.float64).T * np.asarray(scale)
    most = np.abs(np.asarray(weight, np.float64)).sum(1) * np.asarray(scale) * (step / 2)
    assert (np.abs(got - exact) <= most * 1.001).all()


@on_each_target
@pytest.mark.parametrize("lanes", [8, 16])
def test_a_word_of_activations_meets_each_four_numbers_of_a_matrix(lanes: int, target: Target) -> None:
    """By x86's instruction, where the target has it, and by instructions that every CPU has."""
    rng = np.random.default_rng(lanes)
    numbers, word = rng.integers(0, 256, 4 * lanes, dtype=np.uint8), rng.integers(-128, 128, 4, dtype=np.int8)
    numbers[:8], word[:2] = 255, -128
    sums = rng.integers(-(2**20), 2**20, lanes, dtype=np.int32)
    wanted = sums + numbers.reshape(lanes, 4).astype(np.int32) @ word.astype(np.int32)
    program = Program(target)
    with program.function("add", 3) as builder:
        into, x, four = map(builder.to_pointer, builder.arguments)
        dotted = builder.accumulate_dot_word(
            builder.load(into, I32, lanes), builder.load(x, I8, 4 * lanes), builder.load(four, I32)
        )
        builder.store(into, dotted)
    code = Code(program.compile())
    call_with_arrays(code.address("add"), sums, numbers, word)
    np.testing.assert_array_equal(sums, wanted)


@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_a_matrix_is_packed_by_32_outputs_and_four_numbers_of_each(
    blocks: int, words: int, seed: int
) -> None:
    weight = np.random.default_rng(seed).integers(-128, 128, (32 * blocks, 4 * words), dtype=np.int8)
    packed = pack(weight)
    assert packed.shape == weight.shape and packed.dtype == np.uint8
    for out, size in np.ndindex(*weight.shape):
        assert (
            packed.reshape(blocks, words, 32, 4)[out // 32, size // 4, out % 32, size % 4]
            == int(weight[out, size]) + 128
        )


@with_examples(10, st.sampled_from(SHAPES), st.sampled_from([1, 2, 3, 17, 40]), st.integers(0, 2**32 - 1))
def test_a_product_with_bfloat16_is_that_of_its_numbers(
    target: Target, shape: tuple[int, int], rows: int, seed: int
) -> None:
    """None of these shapes fits tiles, which would round x first."""
    rng = np.random.default_rng(seed)
    weight = jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
    x = rng.standard_normal((rows, shape[1])).astype(np.float32)
    got = multiply(weight, None, jnp.asarray(x), target=target)
    np.testing.assert_allclose(got, x @ np.asarray(weight, np.float32).T, atol=2e-5)


@with_examples(
    10,
    st.sampled_from(HEADS),
    st.sampled_from([None, 1, 7, 40]),
    st.integers(1, 9),
    st.lists(st.integers(0, 40), min_size=1, max_size=3),
    st.integers(0, 2**32 - 1),
)
def test_attention_is_xlas_for_any_lengths_and_padding(
    target: Target,
    heads: tuple[int, int, int, int],
    window: int | None,
    chunk: int,
    befores: list[int],
    seed: int,
) -> None:
    """Including the last token of a table that is no longer than it must be."""
    (kv_heads, group, size, page_size), rows, rng = heads, len(befores), np.random.default_rng(seed)
    width = -(-(max(befores) + chunk) // page_size)
    positions = np.asarray(befores)[:, None] + np.arange(chunk)[None]
    positions[rng.random(positions.shape) < 0.2] = -1
    pool = rng.standard_normal((rows * width, 2, kv_heads, page_size, size)).astype(np.float32)
    table = rng.permutation(rows * width).reshape(rows, width).astype(np.int32)
    q = rng.standard_normal((rows, chunk, kv_heads, group, size)).astype(np.float32)

    @jax.jit
    def by_both(*given: jax.Array) -> tuple[jax.Array, jax.Array]:
        return attend(*given, target, window), XLA_ON_CPU.mix_values(*given, window=window)

    got, wanted = by_both(q, pool, table, positions.astype(np.int32))
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@with_examples(
    10,
    st.sampled_from(HEADS),
    st.sampled_from([jnp.float32, jnp.bfloat16]),
    st.sampled_from([None, 7, 40]),
    st.integers(0, 70),
    st.integers(0, 2**32 - 1),
)
def test_a_query_gets_the_same_to_the_last_bit_alone_and_beside_others(
    target: Target,
    heads: tuple[int, int, int, int],
    numbers: Any,
    window: int | None,
    before: int,
    seed: int,
) -> None:
    (kv_heads, group, size, page_size), chunk, rng = heads, 37, np.random.default_rng(seed)
    width = -(-(before + chunk) // page_size)
    pool = rng.standard_normal((width, 2, kv_heads, page_size, size)).astype(numbers)
    table = rng.permutation(width)[None].astype(np.int32)
    q = (4 * rng.standard_normal((1, chunk, kv_heads, group, size))).astype(np.float32)
    positions = np.arange(before, before + chunk, dtype=np.int32)[None]
    beside = attend(q, pool, table, positions, target, window)
    alone = attend(np.swapaxes(q, 0, 1), pool, np.repeat(table, chunk, 0), positions.T, target, window)
    np.testing.assert_array_equal(np.asarray(beside)[0], np.asarray(alone)[:, 0])


@pytest.mark.parametrize("num_used", [0, 1, 5, 17, 99])
def test_rows_that_are_not_used_are_not_looked_at(num_used: int) -> None:
    """A count above the number of rows means all rows."""
    weight, scale = matrix(132, 32)
    x = np.random.default_rng(0).standard_normal((17, 32)).astype(np.float32)
    wanted = np.asarray(multiply(weight, scale, jnp.asarray(x), target=HOST))[:num_used]
    x[num_used:] = math.nan
    used = jnp.asarray([num_used], jnp.int32)
    got = multiply(weight, scale, jnp.asarray(x), used, target=HOST)
    np.testing.assert_array_equal(np.asarray(got)[:num_used], wanted)
    assert num_used >= len(x) or not np.isnan(np.asarray(got)[num_used:]).all(), "they were multiplied"


@with_examples(30, st.integers(1, 300), st.integers(1, 5), st.integers(0, 6), st.integers(0, 2**32 - 1))
def test_the_best_of_each_row_that_is_used_is_found_and_of_equals_the_first(
    target: Target, vocab: int, rows: int, num_used: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.integers(-3, 3, (rows, vocab)).astype(np.float32)
    logits[rng.random(logits.shape) < 0.3] = -math.inf
    spoilt = rng.random(rows) < 0.3
    logits[spoilt, rng.integers(0, vocab)] = rng.choice([math.nan, math.inf])
    used = jnp.asarray([num_used], jnp.int32)
    found, best = best_of_rows(logits, used, target)
    tokens, values = (np.asarray(each)[:num_used] for each in found)
    np.testing.assert_array_equal(values, np.asarray(best.values)[:num_used])
    is_sound = np.isfinite(values)
    assert is_sound.tolist() == (~spoilt & (logits > -math.inf).any(1))[:num_used].tolist()
    np.testing.assert_array_equal(tokens[is_sound], np.asarray(best.tokens)[:num_used][is_sound])


@on_each_target
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_spoils_its_own_row_alone(bad: float, target: Target) -> None:
    weight, scale = matrix(64, 32)
    x = np.ones((5, 32), np.float32)
    x[3, 7] = bad
    got = np.asarray(multiply(weight, scale, jnp.asarray(x), target=target))
    assert not np.isfinite(got[3]).any() and np.isfinite(np.delete(got, 3, axis=0)).all()

    pool = np.ones((8, 2, 1, 4, 16), np.float32)
    pool[5, 0, 0, 1, 2] = bad  # a key of the second row
    q, table = jnp.ones((2, 1, 1, 2, 16)), jnp.arange(8, dtype=jnp.int32).reshape(2, 4)
    mixed, hidden = (
        np.asarray(attend(q, pool, table, np.array([[9], [last]], np.int32), target, None)) for last in (9, 4)
    )
    assert np.isfinite(mixed[0]).all() and np.isfinite(hidden).all(), (
        "what a query may not see does not matter"
    )
    assert bad == -math.inf or np.isnan(mixed[1]).all(), "nothing is mixed of a key that is as far as can be"


def test_many_threads_may_call_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of several models do. More helpers than XLA has threads do no harm."""
    monkeypatch.setenv("NPROC", "9")
    product = product_for(jnp.dtype(jnp.int8), 48, HOST)
    kernel = dataclasses.replace(cpu_linear.kernel_for(product), name="crowded")
    name = xla_call.register(kernel)
    weight, scale = matrix(640, 48)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 48)), jnp.float32)
    wanted = multiply_rotated(weight, scale, x)
    call = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((4, 640), jnp.float32))
    crowded = jax.jit(lambda x: call(x, jnp.asarray([4], jnp.int32), weight, scale)).lower(x).compile()
    failures: list[AssertionError] = []

    def work() -> None:
        try:
            for _ in range(200):
                np.testing.assert_allclose(crowded(x), wanted, atol=1e-4, rtol=1e-6)
        except AssertionError as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures and not any(thread.is_alive() for thread in threads)


@on_each_target
def test_powers_and_tangents_are_right_to_the_last_bits(target: Target) -> None:
    x = np.concatenate(
        [np.linspace(-90, 10, 2**12), np.linspace(-1e-3, 1e-3, 2**12), [math.nan] * 16]
    ).astype(np.float32)
    for function, wanted in (
        (softmax.exp, np.exp(np.maximum(x, -126 * math.log(2)))),
        (softmax.tanh, np.tanh(x)),
    ):
        program = Program(target)
        with program.function("apply", 2) as builder:
            given, into = map(builder.to_pointer, builder.arguments)
            with builder.loop(0, x.size, 16) as at:
                builder.store(into + at * 4, function(builder.load(given + at * 4, F32, 16)))
        code = Code(program.compile())
        got = np.zeros_like(x)
        call_with_arrays(code.address("apply"), x, got)
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-7)


def call_with_arrays(address: int, *arrays: np.ndarray) -> None:
    ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * len(arrays))(address)(
        *(array.ctypes.data for array in arrays)
    )


@pytest.mark.parametrize(("out", "size", "is_refused"), [(64, 32, False), (66, 32, True), (64, 40, True)])
def test_a_matrix_that_it_cannot_take_is_refused_by_its_size(out: int, size: int, is_refused: bool) -> None:
    assert (f"{out} x {size}" in (cpu_linear.unsupported_reason(out, size) or "")) is is_refused


@pytest.mark.parametrize(("name", "is_unrolled"), [("avx2", True), ("neon", False)])
def test_short_loops_are_unrolled_on_x86_where_a_program_gains_by_it(name: str, is_unrolled: bool) -> None:
    def count_lines(*, gains_by_unrolling: bool) -> int:
        program = Program(Target.named(name), gains_by_unrolling=gains_by_unrolling)
        with program.function("double", 2) as builder:
            numbers, count = builder.to_pointer(builder.arguments[0]), builder.arguments[1]
            with builder.loop(0, count) as at:
                doubled = builder.load(numbers + at * 4, F32) * 2
                builder.store(numbers + at * 4, doubled)
        return len(program.assembly().splitlines())

    assert (count_lines(gains_by_unrolling=True) > count_lines(gains_by_unrolling=False)) is is_unrolled


@pytest.mark.parametrize("target", FOREIGN.values(), ids=FOREIGN)
def test_kernels_are_compiled_for_cpus_of_another_kind(target: Target) -> None:
    """They are compiled to object files only, because this CPU cannot run them."""
    kernels = [*kernels_for(target), layers_for(target)]
    machine = {"x86_64": 62, "aarch64": 183}[target.arch]
    # Only layers use matrix units: all other kernels of such a target are, to the letter, those of AVX-512.
    for kernel in kernels[-1:] if target.has_amx_int8 else kernels:
        compiled = xla_call.compile_kernel(kernel)
        assert compiled[:4] == b"\x7fELF" and int.from_bytes(compiled[18:20], "little") == machine
    for kernel in kernels:
        with pytest.raises(AssertionError, match="cannot run on this CPU"):
            xla_call.register(kernel)


@pytest.mark.parametrize("name", sorted(LIKE_HOST))
def test_a_target_that_is_not_tested_has_the_code_of_this_cpu(name: str) -> None:
    def text_for(kernel: Kernel) -> str:
        return str(xla_call.write_kernel(kernel)._module).replace(kernel.name, "")  # part of messages

    assert text_for(layers_for(NAMED[name])) == text_for(layers_for(HOST))
    for mine, theirs in list(zip(kernels_for(NAMED[name]), kernels_for(HOST), strict=True))[::3]:
        assert text_for(mine) == text_for(theirs)


def kernels_for(target: Target) -> list[Kernel]:
    """One of each kind, except whole layers."""
    bfloat16 = jnp.dtype(jnp.bfloat16)
    heads = HeadShape(kv_heads=1, group=3, size=32, page_size=8, dtype=bfloat16, target=target)
    kernels = [
        cpu_linear.kernel_for(product_for(jnp.dtype(numbers), 64, target))
        for numbers in (jnp.int8, jnp.uint8, jnp.bfloat16)
    ]
    kernels += [
        cpu_linear.kernel_for(block_product_for(64, target, is_signed=is_signed, in_two_terms=in_two_terms))
        for is_signed in (True, False)
        for in_two_terms in (True, False)
    ]
    is_signed = target.arch == "aarch64"
    nibbles = nibble_product_for(64, target, is_signed=is_signed, has_middles=True)
    kernels.append(cpu_linear.kernel_for(nibbles))
    kernels += [argmax.kernel_for(target), draw.kernel_for(target), refine.kernel_for(bfloat16, target)]
    kernels += [
        cpu_attention.kernel_for(dataclasses.replace(heads, dtype=jnp.dtype(dtype)))
        for dtype in (jnp.float32, jnp.bfloat16, FP8)
    ]
    return kernels


def layers_for(target: Target) -> Kernel:
    bfloat16 = jnp.dtype(jnp.bfloat16)
    heads = HeadShape(kv_heads=1, group=3, size=32, page_size=8, dtype=bfloat16, target=target)
    norms, matrices = ("input_norm", "mlp_norm"), ("qkv", "out", "gate_up", "down")
    plan = layers.ModelShape(
        heads,
        num_layers=2,
        hidden=64,
        intermediate=128,
        rotary_size=32,
        norm_eps=1e-5,
        query_scale=0.25,
        array_names=norms + matrices,
        forms=tuple((name, Form(bfloat16)) for name in matrices),
    )
    return layers.kernel_for(plan)


def test_no_two_targets_share_the_name_of_a_kernel() -> None:
    targets = {*RUNNABLE.values(), *NAMED.values()}
    assert len({argmax.kernel_for(target).call_name for target in targets}) == len(targets)
    assert Target.named("avx2") == NAMED["avx2"] and HOST.runs_on(HOST)
