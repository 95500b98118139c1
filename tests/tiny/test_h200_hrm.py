"""What XLA makes of a brain's run for an H200: each level is one graph, and a block is a dozen kernels.

One block per level of English-v1's shape; compiled, not run (see `h200.py`).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from levserve.device.sampling import make_masks, make_memory
from levserve.device.text_programs import Task, TextPrograms, TextShape
from levserve.device.text_rounds import TextSkeleton, TextState
from levserve.device.text_sizing import plan_text_sizes
from levserve.model.hrm import Hrm
from levserve.model.hrm_config import HrmConfig, hrm_parameter_shapes
from levserve.model.select import choose_text_backend
from levserve.observe.metrics import Metrics
from tests.h200 import HOLDERS, inside
from tests.h200_programs import Compiled, compile_on_the_card, matrices_in_bfloat16, placed

pytestmark = [
    pytest.mark.h200,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]

CONFIG = HrmConfig(5003, 512, 768, 8, 1, 1, 2, 2, num_experts=8, experts_per_token=2, max_position=1024)
ROWS, LENGTH = 32, 128
BLOCK = ["place_heads", "paged_attention", "choose_experts", "tile_pairs", "experts_up", "experts_down"]
NUM_KERNELS = 16
"""For a block: ours, three products, two norms, its input in bfloat16; for a level: what is added before
it, and its count."""


@functools.cache
def compile_there() -> Compiled:
    backend = choose_text_backend("gpu", CONFIG.block)
    arrays = matrices_in_bfloat16(hrm_parameter_shapes(CONFIG))
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
    return compile_on_the_card(lambda: programs.lower(shape), programs._compiler_options(shape))


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
