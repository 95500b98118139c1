"""Checkpoints of mixtures: packed experts, layers without experts, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from levserve.errors import StartupError
from levserve.model.decoder import Decoder
from levserve.model.packed import Kept
from levserve.model.xla import XLA_ON_CPU
from levserve.weights.checkpoint import load_arrays, read_config, read_schemes
from tests.conftest import GOLDEN
from tests.tiny.test_decoder import check, run_in_chunks
from tests.tiny.test_decoder import load as load_golden

FLOAT32 = jnp.dtype(jnp.float32)


def copy(family: str, folder: Path, **changes: object) -> Path:
    """A golden checkpoint with some keys of its config changed."""
    copied = folder / family
    shutil.copytree(GOLDEN / family, copied)
    values = json.loads((copied / "config.json").read_text()) | changes
    (copied / "config.json").write_text(json.dumps(values))
    return copied


def load(path: Path, kept: Kept | None = None) -> dict[str, np.ndarray]:
    arrays = load_arrays(path, read_config(path), FLOAT32, report=lambda _: None, quantization=kept)
    return {name: np.asarray(array) for name, array in arrays.items()}


def test_experts_packed_in_four_bits_are_the_numbers_that_transformers_unpacks() -> None:
    packed, plain = load(GOLDEN / "gpt-oss-mxfp4"), load(GOLDEN / "gpt-oss")
    assert packed.keys() == plain.keys()
    for name, array in packed.items():
        np.testing.assert_array_equal(array, plain[name], err_msg=name)


def test_experts_that_stay_in_four_bits_compute_what_widened_ones_do() -> None:
    folder = GOLDEN / "gpt-oss-mxfp4"
    config = read_config(folder)
    schemes = read_schemes(folder, config, 1)
    assert {name.split(".")[-1] for name in schemes} == {"experts_gate_up", "experts_down"}
    kept = Kept(tuple(schemes.items()), FLOAT32)
    arrays = {name: jnp.asarray(array) for name, array in load(folder, kept).items()}
    assert arrays["layers.0.experts_down"].dtype == jnp.uint8
    model = Decoder.from_arrays(config, arrays, backend=XLA_ON_CPU, quantization=kept)
    case = json.loads((GOLDEN / "gpt-oss" / "golden.json").read_text())["cases"][2]
    check(case, run_in_chunks(model, case["prompt"] + case["greedy"], 128, 16))


def test_queries_without_a_short_vector_and_a_softmax_over_experts_are_served_too() -> None:
    """DeepSeek-V2-Lite is such a model; the tests of all families use V3's form."""
    model, cases = load_golden("deepseek2")
    case = cases[2]
    check(case, run_in_chunks(model, case["prompt"] + case["greedy"], 128, 16))


def test_a_layer_that_drafts_a_second_token_is_left_out(tmp_path: Path) -> None:
    folder = copy("glm4-moe", tmp_path)
    file = load_file(folder / "model.safetensors")
    drafting = {"model.layers.2.eh_proj.weight": np.zeros((64, 128), np.float32)}
    drafting["model.layers.2.self_attn.q_proj.weight"] = np.zeros((64, 64), np.float32)
    save_file(file | drafting, folder / "model.safetensors")
    assert load(folder).keys() == load(GOLDEN / "glm4-moe").keys()


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gpt-oss", {"quantization_config": {"quant_method": "bits"}}, "quant_method = 'bits'"),
        ("gpt-oss", {"swiglu_alpha": 2.0}, "swiglu_alpha = 2.0 is not supported"),
        ("glm4-moe", {"n_group": 3}, "n_group = 3 is not supported"),
        ("glm4-moe", {"n_group": 8}, "n_group = 8 is not supported"),
        ("glm4-moe", {"topk_group": 1}, "topk_group = 1 is not supported"),
        ("glm4-moe", {"topk_group": 5}, "topk_group = 5 is not supported"),
        ("deepseek2", {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc' is not supported"),
        ("deepseek2", {"topk_method": "group_limited_greedy"}, "n_group is missing"),
        ("deepseek3", {"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported"),
        ("deepseek3", {"v_head_dim": 64}, "v_head_dim = 64 is not supported"),
        ("qwen2-moe", {"mlp_only_layers": 3}, "mlp_only_layers = 3 is not a list of integers"),
        ("qwen2-moe", {"num_experts_per_tok": 7}, "7 experts per token"),
    ],
)
def test_what_is_not_served_is_refused_by_its_name(
    family: str, changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(StartupError, match=message):
        read_config(copy(family, tmp_path, **changes))


@pytest.mark.parametrize(
    ("changes", "dense"),
    [
        ({"mlp_only_layers": [], "decoder_sparse_step": 1}, ()),
        ({"mlp_only_layers": [], "decoder_sparse_step": 2}, (0,)),
        ({"mlp_only_layers": [1], "decoder_sparse_step": 2}, (0, 1)),
    ],
)
def test_layers_without_experts_are_found_in_both_ways_of_saying_it(
    changes: dict[str, object], dense: tuple[int, ...], tmp_path: Path
) -> None:
    assert read_config(copy("qwen2-moe", tmp_path, **changes)).dense_layers == dense
