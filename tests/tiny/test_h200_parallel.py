"""What XLA makes of a model that two or four H200s share: what each reads and computes, and what they exchange.

Two layers of Llama-3.1-8B's shape with our kernels inside `shard_map`; compiled, not run (see `h200.py`).
"""

from __future__ import annotations

import functools
import math
import re
from contextlib import nullcontext
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from levserve.device.programs import Programs, Shape
from levserve.device.rounds import Arrays, Skeleton, State
from levserve.device.runner import make_state
from levserve.device.sizing import plan_sizes
from levserve.model import cache
from levserve.model.config import ModelConfig, parameter_shapes
from levserve.model.decoder import Blueprint
from levserve.model.placement import BY_HEADS, STACKED, WHOLE, make_mesh
from levserve.model.sampler import Mode
from levserve.model.select import choose_backend
from levserve.model.sharding import AXIS, find_cut, local_config
from levserve.observe.metrics import Metrics
from levserve.settings.parse import parse_settings
from tests.h200 import SPECIFICATION
from tests.tiny.test_h200 import on_the_card

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


class Given(NamedTuple):
    """What programs are compiled for."""

    programs: Programs
    leaves: Arrays
    state: State

    @property
    def argument_bytes(self) -> int:
        """Of weights and state, on each card."""
        return sum(map(local_bytes, (*self.leaves, *jax.tree.leaves(self.state))))


class Compiled(NamedTuple):
    argument_bytes: int
    alias_bytes: int
    text: str


@functools.cache
def given(count: int) -> Given:
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=SPECIFICATION.read_text(), topology=f"1x1x{count}"
    )
    mesh = make_mesh(topology.devices)
    local = local_config(CONFIG, count)
    backend, _ = choose_backend("gpu", local)
    dtype = jnp.dtype(jnp.bfloat16)
    storage = backend.kv_storage(dtype)

    def placed(array: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        if mesh is None:
            sharding = SingleDeviceSharding(topology.devices[0])
            return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
        whole = list(array.shape)
        if AXIS in spec:
            whole[spec.index(AXIS)] *= count
        return jax.ShapeDtypeStruct(tuple(whole), array.dtype, sharding=NamedSharding(mesh, spec))

    settings = parse_settings(["--kv-pages", str(NUM_PAGES)], {})
    sizes = plan_sizes(
        settings,
        backend.traits,
        free_bytes=100 << 30,
        rows=ROWS,
        max_position=CONFIG.max_position,
        page_bytes=cache.page_bytes(local, settings.page_size, storage),
        weight_bytes=0,
    )
    arrays = {}
    for name, shape in parameter_shapes(local).items():
        array = jax.ShapeDtypeStruct(shape, dtype if len(shape) > 1 else jnp.float32)
        arrays[name] = placed(array, WHOLE if find_cut(name, CONFIG) is None else STACKED)
    state = jax.eval_shape(lambda: make_state(local, sizes, storage))
    state = jax.tree.map(lambda array: placed(array, BY_HEADS if array.ndim == 5 else WHOLE), state)
    leaves = tuple(arrays.values())
    skeleton = Skeleton(Blueprint(local, backend), tuple(arrays), sizes.table_width)
    return Given(Programs(leaves, state, skeleton, sizes, Metrics()), leaves, state)


@functools.cache
def lower_there(shape: Shape, count: int) -> jax.stages.Lowered:
    programs = given(count).programs
    assert shape in programs.all_shapes, "a server has this program"
    # The mesh of several cards says what they are; for one, Pallas would look for it here.
    with on_the_card() if count == 1 else nullcontext():
        return programs.lower(shape)


@functools.cache
def compile_there(shape: Shape, count: int) -> Compiled:
    options = given(count).programs._compiler_options(shape)
    compiled = lower_there(shape, count).compile(options)
    memory = compiled.memory_analysis()
    return Compiled(memory.argument_size_in_bytes, memory.alias_size_in_bytes, compiled.as_text())


def product_flops(lowered: jax.stages.Lowered) -> int:
    """Of all products with matrices, those of layers once: a layer is a function that is called for each."""
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
    alone_bytes = given(1).argument_bytes
    # Norms, tables and what sampling remembers are whole on each.
    assert compile_there(shape, count).argument_bytes <= 1.02 * alone_bytes / count
    alone, shared = (product_flops(lower_there(shape, number)) for number in (1, count))
    assert alone > 2 * shape.size * 4 * CONFIG.hidden_size * CONFIG.intermediate_size // 2
    assert shared * count == alone


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
