"""What XLA makes of a brain's run for an H200: each level is one graph, and a block is a dozen kernels.

One block a level of English-v1's shape; compiled, not run (see `h200.py`).
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies

from levserve.device.sampling import make_masks, make_memory
from levserve.device.text_programs import Task, TextPrograms, TextShape
from levserve.device.text_rounds import TextSkeleton, TextState
from levserve.device.text_sizing import plan_text_sizes
from levserve.model.hrm import Hrm
from levserve.model.hrm_config import HrmConfig, hrm_parameter_shapes
from levserve.model.select import choose_text_backend
from levserve.observe.metrics import Metrics
from tests.h200 import HOLDERS, SPECIFICATION, Thunk, inside, read_thunks
from tests.tiny.test_h200 import on_the_card

pytestmark = [
    pytest.mark.h200,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]

CONFIG = HrmConfig(5003, 512, 768, 8, 1, 1, 2, 2, num_experts=8, experts_per_token=2, max_position=1024)
ROWS, LENGTH = 32, 128
BLOCK = ["place_heads", "paged_attention", "choose_experts", "tile_pairs", "experts_up", "experts_down"]
NUM_KERNELS = 16
"""Of a block: ours, three products, two norms, what it reads in bfloat16; and of a level what is added before it and its count."""


class Compiled(NamedTuple):
    thunks: list[Thunk]
    temp_bytes: int


@functools.cache
def compile_there() -> Compiled:
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=SPECIFICATION.read_text(), topology="1x1x1"
    )
    there = jax.sharding.SingleDeviceSharding(topology.devices[0])

    def placed(array: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=there)

    backend = choose_text_backend("gpu", CONFIG.block)
    arrays = {
        name: jax.ShapeDtypeStruct(shape, jnp.bfloat16 if len(shape) > 1 else jnp.float32)
        for name, shape in hrm_parameter_shapes(CONFIG).items()
    }
    model = jax.eval_shape(lambda arrays: Hrm.from_arrays(CONFIG, arrays, backend=backend), arrays)
    sizes = plan_text_sizes(
        backend.traits,
        rows=ROWS,
        max_seq_len=CONFIG.max_position,
        vocab_size=CONFIG.vocab_size,
        weight_bytes=0,
    )

    def make_state() -> TextState:
        logits = jnp.zeros((ROWS, CONFIG.vocab_size), jnp.float32)
        return TextState(logits, make_memory(ROWS, sizes.max_seq_len), make_masks(ROWS, CONFIG.vocab_size))

    leaves, tree = jax.tree.flatten(jax.tree.map(placed, model))
    state = jax.tree.map(placed, jax.eval_shape(make_state))
    programs = TextPrograms(tuple(leaves), state, TextSkeleton(tree, backend), sizes, Metrics())
    shape = TextShape(Task.RUN, ROWS, LENGTH)
    assert shape in programs.all_shapes, "a server has this program"
    with tempfile.TemporaryDirectory() as folder, on_the_card():
        compiled = programs.lower(shape).compile(
            programs._compiler_options(shape) | {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        )
        thunks = read_thunks(Path(folder))
    return Compiled(thunks, compiled.memory_analysis().temp_size_in_bytes)


def graphs() -> list[list[str]]:
    """The kernels of each graph that has a block in it."""
    thunks = compile_there().thunks
    held = [inside(thunks, index) for index, thunk in enumerate(thunks) if thunk.kind == "kCommandBuffer"]
    names = [[thunk.name for thunk in graph if thunk.kind not in HOLDERS] for graph in held]
    return [graph for graph in names if "paged_attention" in graph]


def test_each_level_is_one_graph_of_the_kernels_for_nvidia_gpus() -> None:
    assert len(graphs()) == 2
    for graph in graphs():
        assert [name for name in graph if name in BLOCK] == BLOCK
        assert len(graph) <= NUM_KERNELS, graph


def test_nothing_waits_for_a_number_from_the_card() -> None:
    loops = [thunk for thunk in compile_there().thunks if thunk.kind == "kWhile"]
    assert len(loops) == 2, "the cycles, of which there are always as many"


def test_no_scores_are_kept() -> None:
    hidden = CONFIG.hidden_size
    of_token = 4 * 4 * hidden + 2 * 3 * hidden + 2 * 2 * hidden + 2 * (2 * 768 + 2 * hidden)
    scores = ROWS * CONFIG.num_heads * LENGTH * LENGTH * 4
    assert compile_there().temp_bytes <= ROWS * LENGTH * of_token + scores // 2
