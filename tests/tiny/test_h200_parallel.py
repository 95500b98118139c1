"""What XLA makes of a model that two or four H200s share: what each reads and computes, and what they exchange.

Two layers of Llama-3.1-8B's shape with our kernels inside `shard_map`; compiled, not run (see `h200.py`).
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from levserve.device.programs import Programs, Shape
from levserve.device.rounds import Skeleton, State
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

pytestmark = [
    pytest.mark.h200,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]

CONFIG = ModelConfig(128256, 4096, 14336, 2, 32, 8, 128, 1e-5, 5e5, 8192, False)
ROWS, NUM_PAGES = 64, 2048
DECODE, PREFILL = Shape(ROWS, Mode.GREEDY), Shape(4096, is_sample_only=True)
COUNTS = (2, 4)


class Cost(NamedTuple):
    """Of one device."""

    argument_bytes: int
    alias_bytes: int
    state_bytes: int
    flops: float
    read_bytes: float
    text: str


def make_programs(count: int) -> tuple[Programs, State]:
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
    return Programs(leaves, state, skeleton, sizes, Metrics()), state


@functools.cache
def compile_there(shape: Shape, count: int) -> Cost:
    programs, state = make_programs(count)
    assert shape in programs.all_shapes, "a server has this program"
    card = jax.sharding.AbstractDevice("NVIDIA H200", num_cores=132, platform="gpu")
    axes = ((), ()) if count == 1 else ((count,), (AXIS,))
    with jax.sharding.use_abstract_mesh(AbstractMesh(*axes, abstract_device=card)):
        compiled = programs.lower(shape).compile(programs._compiler_options(shape))
    memory, costs = compiled.memory_analysis(), compiled.cost_analysis()
    return Cost(
        memory.argument_size_in_bytes,
        memory.alias_size_in_bytes,
        sum(local_bytes(leaf) for leaf in jax.tree.leaves(state)),
        costs["flops"],
        costs["bytes accessed"],
        compiled.as_text(),
    )


def local_bytes(array: jax.ShapeDtypeStruct) -> int:
    return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("shape", [DECODE, PREFILL], ids=str)
def test_what_each_card_holds_and_computes_falls_as_their_number_grows(shape: Shape, count: int) -> None:
    alone, shared = compile_there(shape, 1), compile_there(shape, count)
    # Norms, tables and what sampling remembers are whole on each; of flops, the draws are.
    assert shared.argument_bytes <= 1.02 * alone.argument_bytes / count
    assert shared.flops <= 1.05 * alone.flops / count


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
    assert shared.alias_bytes == shared.state_bytes
    assert "paged_attention" in shared.text or "decode_attention" in shared.text
