"""What XLA makes of the programs for an H200: their kernels, memory, and what is written in place.

Two layers of Llama-3.2-1B's shape, as a server on that GPU would hold them; compiled, not run (see
`h200.py`). The limits are the present numbers of kernels: raise them only on purpose, and lower them when a
change needs fewer.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from levserve.device.programs import Shape
from levserve.model import cache
from levserve.model.config import ModelConfig
from levserve.model.gpu.decode_attention import decode_attention
from levserve.model.gpu.paged_attention import WIDEN_FP8, paged_attention
from levserve.model.rules import Mode
from tests.h200 import HOLDERS, inside
from tests.h200_programs import Compiled, Given, compile_on_the_card, on_the_card, programs_of
from tests.hlo import Instruction, computed

pytestmark = [
    pytest.mark.h200,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]

CONFIG = ModelConfig(128256, 2048, 8192, 2, 32, 8, 64, 1e-5, 5e5, 8192, True)
ROWS = 256
NUM_PAGES = 5003  # so that nothing else has the pool's shape
FEW, MANY, MOST = (Shape(rows, Mode.GREEDY) for rows in (8, 64, ROWS))
DRAWN, ANYHOW = Shape(64, Mode.PLAIN), Shape(8, Mode.FULL)
PREFILL, QUIET = Shape(4096), Shape(4096, is_sample_only=True)
ATTENTION = ("paged_attention", "decode_attention")
LAYER_KERNELS = {FEW: 12, MANY: 9, MOST: 8, DRAWN: 9, ANYHOW: 12, PREFILL: 9, QUIET: 9}
"""Four products, attention, two norms and the gated activation. Prefill has a kernel that rotates queries
and keys and writes to the cache; up to 64 rows have one that merges attention's splits; few rows have a
sum for the residual stream, which larger products include, and one of a product's parts."""
OTHER_KERNELS = {FEW: 11, MANY: 11, MOST: 11, DRAWN: 11, ANYHOW: 17, PREFILL: 25, QUIET: 17}
"""Without the kernels for what a row may ask for. Where tokens are sampled, one of them finds the mask of
each row; in full mode two look up whether it allows the token."""
WORKSPACE_BYTES = 4 << 20
"""The workspace of the library for large products."""


@functools.cache
def given() -> Given:
    return programs_of(CONFIG, rows=ROWS, num_pages=NUM_PAGES)


@functools.cache
def compile_there(shape: Shape) -> Compiled:
    programs = given().programs
    assert shape in programs.all_shapes, "a server has this program"
    return compile_on_the_card(lambda: programs.lower(shape), programs._compiler_options(shape))


@functools.cache
def made(shape: Shape) -> list[Instruction]:
    return computed(compile_there(shape).text)


def kernels(shape: Shape) -> list[str]:
    """The kernels that always run in the graph that holds all layers: a step, or prefill."""
    thunks = compile_there(shape).thunks
    graphs = [inside(thunks, index) for index, thunk in enumerate(thunks) if thunk.kind == "kCommandBuffer"]
    of_layers = [graph for graph in graphs if any(thunk.name.startswith(ATTENTION) for thunk in graph)]
    assert len(of_layers) == 1, "all layers are in one graph, and attention is the kernel for NVIDIA GPUs"
    (graph,) = of_layers
    return [thunk.name for thunk in graph if thunk.depth == graph[0].depth and thunk.kind not in HOLDERS]


@pytest.mark.parametrize("shape", [FEW, MANY, MOST, DRAWN, ANYHOW], ids=str)
def test_a_decode_step_is_one_graph_that_needs_no_host(shape: Shape) -> None:
    thunks = compile_there(shape).thunks
    loops = [index for index, thunk in enumerate(thunks) if thunk.kind == "kWhile"]
    assert len(loops) == 1, "the steps of a round are the only loop"
    steps = inside(thunks, loops[0])
    assert [thunk.kind for thunk in steps if thunk.depth == steps[0].depth] == [
        "kCustomKernel",
        "kCommandBuffer",
    ], "the count and a step"


def test_prefill_of_which_only_the_next_token_is_wanted_is_one_graph() -> None:
    thunks = compile_there(QUIET).thunks
    assert [thunk.kind for thunk in thunks if thunk.depth == 0] == ["kCommandBuffer"]


@pytest.mark.parametrize("shape", [FEW, MANY, MOST, DRAWN, ANYHOW, QUIET, PREFILL], ids=str)
def test_a_program_has_no_more_kernels_than_it_had(shape: Shape) -> None:
    names = kernels(shape)
    assert sum(name.startswith(ATTENTION) for name in names) == CONFIG.num_layers
    assert sum(name.startswith("draw_tokens") for name in names) == (
        shape.mode is not Mode.GREEDY and shape != PREFILL
    )
    assert len(names) <= CONFIG.num_layers * LAYER_KERNELS[shape] + OTHER_KERNELS[shape], names


@pytest.mark.parametrize("shape", LAYER_KERNELS, ids=str)
def test_state_is_written_in_place(shape: Shape) -> None:
    compiled, state = compile_there(shape), given().state
    alias_bytes = compiled.alias_bytes
    assert alias_bytes == sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    of_pool = [instruction for instruction in made(shape) if instruction.holds(state.pools[0].shape)]
    assert len(of_pool) == CONFIG.num_layers, [instruction.text for instruction in of_pool]
    assert {instruction.operation for instruction in of_pool} <= {
        "scatter",
        "custom-call",
    }  # by XLA, or by a kernel


@pytest.mark.parametrize("shape", LAYER_KERNELS, ids=str)
def test_weights_are_read_as_they_lie(shape: Shape) -> None:
    weights = {leaf.shape for leaf in given().leaves if leaf.ndim == 2}
    assert [instruction.text for instruction in made(shape) if any(map(instruction.holds, weights))] == []
    sizes = {math.prod(weight) for weight in weights}  # a product's parts see them in other shapes
    moved = [instruction for instruction in made(shape) if instruction.operation in ("copy", "transpose")]
    assert [
        instruction.text
        for instruction in moved
        if any(math.prod(shape) in sizes for shape in instruction.shapes)
    ] == []


@pytest.mark.parametrize("shape", LAYER_KERNELS, ids=str)
def test_the_memory_in_between_is_a_layer_or_the_logits(shape: Shape) -> None:
    narrow, wide = CONFIG.hidden_size, CONFIG.intermediate_size
    if (
        shape.is_prefill
    ):  # gate and up, their product, the hidden states before and after attention, and normed
        of_each = 2 * 2 * wide + 2 * wide + (4 + 4 + 2) * narrow
    else:  # the logits; in full mode also changed, sorted and with their token ids
        of_each = 4 * CONFIG.vocab_size * (6 if shape.mode is Mode.FULL else 1) + 4 * narrow
    temp_bytes = compile_there(shape).temp_bytes
    assert temp_bytes <= shape.size * of_each + WORKSPACE_BYTES + (1 << 20)


@pytest.mark.parametrize("size", [64, 80, 128])
def test_the_kernels_take_a_cache_in_fp8_and_widen_it_by_instructions_of_their_own(size: int) -> None:
    rows, chunk, heads, group, width = 8, 64, 4, 2, 8

    def placed(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=given().leaves[0].sharding)

    pool, table = placed(99, 2, heads, 32, size, dtype=cache.FP8), placed(rows, width)
    decode = jax.jit(functools.partial(decode_attention, kv_heads=heads, scale=1.0), donate_argnums=1)
    qkv, q = (
        placed(rows, heads * (group + 2), size, dtype=jnp.bfloat16),
        placed(rows, chunk, heads, group, size, dtype=jnp.bfloat16),
    )
    with on_the_card():
        for lowered in (
            decode.lower(qkv, pool, table, placed(rows)),
            paged_attention.lower(q, pool, table, placed(rows, chunk)),
        ):
            assert WIDEN_FP8 in lowered.as_text()
            lowered.compile()


@pytest.mark.parametrize(("group", "size"), [(48, 128), (64, 128), (16, 256), (64, 256)])
def test_prompts_of_many_query_heads_on_one_key_fit_into_shared_memory(group: int, size: int) -> None:
    rows, chunk = 8, 64

    def placed(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=given().leaves[0].sharding)

    with on_the_card():
        compiled = paged_attention.lower(
            placed(rows, chunk, 1, group, size, dtype=jnp.bfloat16),
            placed(NUM_PAGES, 2, 1, 32, size, dtype=jnp.bfloat16),
            placed(rows, 8),
            placed(rows, chunk),
        ).compile()
    assert "paged_attention" in compiled.as_text()
