"""What XLA makes of a draft model's programs for an H200: graphs that need no host, caches written in place.

Two layers each of shapes like Llama's 1B and of half its width, compiled, not run (see `h200.py`).
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies

from levserve.device.programs import Programs, Shape
from levserve.device.rounds import Skeleton
from levserve.device.runner import DraftModel, make_state
from levserve.device.sizing import plan_sizes
from levserve.model import cache
from levserve.model.config import ModelConfig
from levserve.model.decoder import Blueprint
from levserve.model.parameter_shapes import parameter_shapes
from levserve.model.rules import Mode
from levserve.model.select import choose_backend
from levserve.observe.metrics import Metrics
from levserve.settings.parse import parse_settings
from tests.h200 import SPECIFICATION, inside
from tests.h200_programs import Compiled, Given, compile_on_the_card
from tests.hlo import computed
from tests.tiny.test_h200 import CONFIG, NUM_PAGES

pytestmark = [
    pytest.mark.h200,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]

DRAFT = ModelConfig(128256, 1024, 4096, 2, 16, 4, 64, 1e-5, 5e5, 8192, True)
ONE, CATCH_UP = Shape(2, Mode.PLAIN, is_verify=True, is_draft=True), Shape(64, is_draft=True)


@functools.cache
def given() -> Given:
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=SPECIFICATION.read_text(), topology="1x1x1"
    )
    there = jax.sharding.SingleDeviceSharding(topology.devices[0])

    def placed(array: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=there)

    dtype = jnp.dtype(jnp.bfloat16)
    served, draft = (Blueprint(config, choose_backend("gpu", config)[0]) for config in (CONFIG, DRAFT))
    storage = served.backend.kv_storage(dtype)
    settings = parse_settings(["--kv-pages", str(NUM_PAGES)], {})
    page_bytes, draft_page_bytes = (
        cache.page_bytes(config, settings.page_size, storage) for config in (CONFIG, DRAFT)
    )
    sizes = plan_sizes(
        settings,
        served.backend.traits,
        free_bytes=100 << 30,
        rows=256,
        max_position=CONFIG.max_position,
        page_bytes=page_bytes + draft_page_bytes,
        weight_bytes=0,
        draft_page_bytes=draft_page_bytes,
    )
    leaves = tuple(
        placed(jax.ShapeDtypeStruct(shape, dtype if len(shape) > 1 else jnp.float32))
        for config in (CONFIG, DRAFT)
        for shape in parameter_shapes(config).values()
    )
    beside = DraftModel(draft, {}, storage)
    state = jax.tree.map(placed, jax.eval_shape(lambda: make_state(CONFIG, sizes, storage, None, beside)))
    skeleton = Skeleton(
        served, tuple(parameter_shapes(CONFIG)), sizes.table_width, draft, tuple(parameter_shapes(DRAFT))
    )
    return Given(Programs(leaves, state, skeleton, sizes, Metrics()), leaves, state)


@functools.cache
def compile_there(shape: Shape) -> Compiled:
    programs = given().programs
    assert shape in programs.all_shapes, "a server has this program"
    return compile_on_the_card(lambda: programs.lower(shape), programs._compiler_options(shape))


def test_a_round_is_turns_of_graphs_that_need_no_host() -> None:
    thunks = compile_there(ONE).thunks
    loops = [index for index, thunk in enumerate(thunks) if thunk.kind == "kWhile"]
    turn = inside(thunks, loops[0])
    kinds = [thunk.kind for thunk in turn if thunk.depth == turn[0].depth]
    assert kinds.count("kWhile") == 1, "the steps of the draft model"
    steps = inside(thunks, loops[1])
    assert [thunk.kind for thunk in steps if thunk.depth == steps[0].depth][-1] == "kCommandBuffer"
    assert set(kinds) <= {"kCustomKernel", "kKernel", "kCommandBuffer", "kWhile"}, kinds


@pytest.mark.parametrize("shape", [ONE, CATCH_UP], ids=str)
def test_both_caches_are_written_in_place(shape: Shape) -> None:
    compiled, state = compile_there(shape), given().state
    wanted = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert compiled.alias_bytes == wanted
    made = computed(compiled.text)
    for pools, written in ((state.pools, 1), (state.draft_pools, 2)):
        of_pool = [instruction for instruction in made if instruction.holds(pools[0].shape)]
        assert len(of_pool) <= written * len(pools), [instruction.text for instruction in of_pool]
        assert {instruction.operation for instruction in of_pool} <= {"scatter", "custom-call"}
    pool_bytes = math.prod(state.draft_pools[0].shape) * state.draft_pools[0].dtype.itemsize
    assert compiled.temp_bytes < pool_bytes / 2, "no copy of a pool"
