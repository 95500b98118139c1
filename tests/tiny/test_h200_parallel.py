"""What XLA makes of a model that two or four H200s share: what each computes, and what they exchange.

Two layers of Llama-3.1-8B's shape with our kernels inside `shard_map`; compiled, not run (see `h200.py`).
"""

from __future__ import annotations

import functools
import math
import re
from contextlib import nullcontext
from typing import NamedTuple

import jax
import pytest

from levserve.device.programs import Shape
from levserve.model.config import ModelConfig
from levserve.model.rules import Mode
from tests.h200_programs import Given, on_the_card, programs_of

pytestmark = [
    pytest.mark.h200,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]

CONFIG = ModelConfig(128256, 4096, 14336, 2, 32, 8, 128, 1e-5, 5e5, 8192, False)
ROWS, NUM_PAGES = 64, 2048
DECODE, PREFILL = Shape(ROWS, Mode.GREEDY), Shape(4096, is_sample_only=True)
COUNTS = (2, 4)


PRODUCT = re.compile(
    r"dot_general .*contracting_dims = \[(\d+)\] x \[\d+\].* : \(tensor<([\dx]+)x\w+>, .*\) -> tensor<([\dx]+)x\w+>"
)


class Compiled(NamedTuple):
    argument_bytes: int
    alias_bytes: int
    text: str


@functools.cache
def given(count: int) -> Given:
    return programs_of(CONFIG, rows=ROWS, num_pages=NUM_PAGES, count=count)


@functools.cache
def lower_there(shape: Shape, count: int) -> jax.stages.Lowered:
    programs = given(count).programs
    assert shape in programs.all_shapes, "a server has this program"
    # A mesh of several GPUs says what they are; for one, Pallas would look on this machine.
    with on_the_card() if count == 1 else nullcontext():
        return programs.lower(shape)


@functools.cache
def compile_there(shape: Shape, count: int) -> Compiled:
    options = given(count).programs._compiler_options(shape)
    compiled = lower_there(shape, count).compile(options)
    memory = compiled.memory_analysis()
    return Compiled(memory.argument_size_in_bytes, memory.alias_size_in_bytes, compiled.as_text())


def product_flops(lowered: jax.stages.Lowered) -> int:
    """The FLOPs of all products with matrices; those of layers count once, as layers call one function."""
    total = 0
    for axis, left, result in PRODUCT.findall(lowered.as_text()):
        left_sizes, result_sizes = ([int(size) for size in sizes.split("x")] for sizes in (left, result))
        total += 2 * math.prod(result_sizes) * left_sizes[int(axis)]
    return total


def local_bytes(array: jax.ShapeDtypeStruct) -> int:
    return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("shape", [DECODE, PREFILL], ids=str)
def test_what_each_card_holds_and_multiplies_falls_as_their_number_grows(shape: Shape, count: int) -> None:
    alone = given(1)
    alone_bytes = sum(map(local_bytes, (*alone.leaves, *jax.tree.leaves(alone.state))))
    # Norms, tables and what sampling remembers are whole on each.
    assert compile_there(shape, count).argument_bytes <= 1.02 * alone_bytes / count
    alone_flops, shared_flops = (product_flops(lower_there(shape, number)) for number in (1, count))
    assert alone_flops > 2 * shape.size * 4 * CONFIG.hidden_size * CONFIG.intermediate_size // 2
    assert shared_flops * count == alone_flops


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("shape", [DECODE, PREFILL], ids=str)
def test_cards_exchange_two_sums_a_layer_one_for_the_embedding_and_the_logits(
    shape: Shape, count: int
) -> None:
    text = compile_there(shape, count).text
    assert count_of("all-reduce", text) == 2 * CONFIG.num_layers + 1
    assert count_of("all-gather", text) == 1
    for other in ("all-to-all", "collective-permute", "reduce-scatter"):
        assert count_of(other, text) == 0


def count_of(operation: str, text: str) -> int:
    return text.count(f" {operation}(") + text.count(f" {operation}-start(")


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("shape", [DECODE, PREFILL], ids=str)
def test_each_card_writes_its_state_in_place_with_our_kernels(shape: Shape, count: int) -> None:
    shared = compile_there(shape, count)
    assert shared.alias_bytes == sum(map(local_bytes, jax.tree.leaves(given(count).state)))
    assert "paged_attention" in shared.text or "decode_attention" in shared.text
