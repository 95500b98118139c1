"""Hugging Face folders: what config.json may say, and which rows of which tensor land where."""

from __future__ import annotations

import dataclasses
import json
import math
import mmap
import shutil
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

import levserve.weights.mapping
from levserve.device.host import process_memory
from levserve.errors import StartupError
from levserve.model.config import (
    Activation,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    ModelConfig,
    YarnScaling,
)
from levserve.model.parameter_shapes import parameter_shapes
from levserve.model.rotary import angles_at, inverse_frequencies
from levserve.weights.checkpoint import load_arrays, read_config
from levserve.weights.hf_tensors import find_files, read_tensors
from levserve.weights.mapping import release_pages
from levserve.weights.progress import Progress
from levserve.weights.tensor_names import Format, find_targets
from tests.conftest import FAMILIES, GOLDEN
from tests.torch_files import write_archive, write_torch_file

FLOAT32, BFLOAT16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)

LLAMA = ModelConfig(
    vocab_size=384,
    hidden_size=64,
    intermediate_size=128,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    norm_eps=1e-5,
    rope_theta=10_000.0,
    max_position=256,
    tied_head=True,
)


GEMMA = dataclasses.replace(
    LLAMA,
    activation=Activation.GELU_TANH,
    has_offset_norms=True,
    has_post_norms=True,
    embed_scale=8.0,
    attention_scale=24**-0.5,
)


NEWER = dataclasses.replace(LLAMA, intermediate_size=96)
UNGATED = dataclasses.replace(
    NEWER,
    num_kv_heads=4,
    tied_head=False,
    has_layer_norms=True,
    is_parallel=True,
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    is_gated=False,
)


def load(path: Path, dtype: jnp.dtype = FLOAT32) -> dict[str, jax.Array]:
    return load_arrays(path, read_config(path), dtype, report=lambda _: None)


def change_config(folder: Path, **changes: object) -> Path:
    """Writes `changes` into a folder's config.json; a value of `...` removes the key."""
    path = folder / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))
    return folder


def change_tensors(folder: Path, changes: dict[str, NDArray[np.generic] | None]) -> Path:
    """Writes `changes` into a folder's weights; None removes the tensor."""
    path = folder / "model.safetensors"
    tensors = {**load_file(path), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)
    return folder


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "llama", tmp_path / "llama"))


def folder_of(family: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / family, tmp_path / family))


# The configuration


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", LLAMA),
        (
            "llama3-rope",
            dataclasses.replace(
                LLAMA,
                head_dim=32,
                rope_theta=500_000.0,
                tied_head=False,
                rope_scaling=Llama3Scaling(
                    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=32
                ),
            ),
        ),
        ("mistral", dataclasses.replace(LLAMA, tied_head=False, windows=(8, 8, 8))),
        ("qwen2", dataclasses.replace(LLAMA, qkv_bias=True)),
        ("qwen3", dataclasses.replace(LLAMA, head_dim=32, qk_norm=True)),
        (
            "gemma2",
            dataclasses.replace(GEMMA, windows=(8, None, 8), attention_softcap=30.0, logit_softcap=20.0),
        ),
        (
            "gemma3",
            dataclasses.replace(
                GEMMA,
                num_layers=7,
                windows=(8, 8, 8, 8, 8, None, 8),
                rope_theta=1e6,
                local_rope_theta=10_000.0,
                qk_norm=True,
            ),
        ),
        ("phi3", dataclasses.replace(LLAMA, tied_head=False)),
        (
            "olmo2",
            dataclasses.replace(
                LLAMA,
                tied_head=False,
                has_pre_norms=False,
                has_post_norms=True,
                qk_norm=True,
                qk_norm_spans_heads=True,
            ),
        ),
        (
            "mixtral",
            dataclasses.replace(LLAMA, tied_head=False, rope_theta=1e6, num_experts=4, experts_per_token=2),
        ),
        (
            "qwen3-moe",
            dataclasses.replace(
                LLAMA, tied_head=False, intermediate_size=96, qk_norm=True, num_experts=6, experts_per_token=2
            ),
        ),
        (
            "gemma",
            dataclasses.replace(
                NEWER,
                head_dim=32,
                activation=Activation.GELU_TANH,
                has_offset_norms=True,
                embed_scale=8.0,
            ),
        ),
        (
            "granite",
            dataclasses.replace(
                NEWER,
                norm_eps=1e-6,
                embed_scale=6.0,
                attention_scale=0.2,
                residual_scale=0.4,
                logit_scale=1 / 1.5,
            ),
        ),
        (
            "olmo3",
            dataclasses.replace(
                NEWER,
                tied_head=False,
                has_pre_norms=False,
                has_post_norms=True,
                qk_norm=True,
                qk_norm_spans_heads=True,
                windows=(8, None, 8),
                local_rope_theta=10_000.0,
                rope_scaling=YarnScaling(4.0, 64, 0.1 * math.log(4.0) + 1, beta_fast=8.0),
            ),
        ),
        (
            "cohere",
            dataclasses.replace(
                NEWER,
                rope_theta=5e5,
                logit_scale=0.5,
                is_parallel=True,
                shares_norm=True,
                has_layer_norms=True,
                has_norm_biases=False,
                has_interleaved_heads=True,
            ),
        ),
        ("gpt-neox", dataclasses.replace(UNGATED, rotary_size=4, activation=Activation.GELU)),
        (
            "phi2",
            dataclasses.replace(
                UNGATED,
                rotary_size=8,
                activation=Activation.GELU_TANH,
                shares_norm=True,
                head_bias=True,
            ),
        ),
        (
            "gpt2",
            dataclasses.replace(
                LLAMA,
                num_kv_heads=4,
                intermediate_size=256,
                rope_theta=None,
                has_position_table=True,
                has_layer_norms=True,
                qkv_bias=True,
                out_bias=True,
                mlp_bias=True,
                is_gated=False,
                activation=Activation.GELU_TANH,
            ),
        ),
    ],
)
def test_config_of_each_family_is_read(family: str, expected: ModelConfig) -> None:
    assert read_config(GOLDEN / family) == expected


def test_older_rope_keys_mean_the_same_as_rope_parameters(tmp_path: Path) -> None:
    folder = folder_of("llama3-rope", tmp_path)
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    for key in ("rope_type", "type"):
        change_config(
            folder, rope_parameters=..., rope_theta=500_000, rope_scaling={key: "llama3", **scaling}
        )
        assert read_config(folder) == read_config(GOLDEN / "llama3-rope")


def test_older_config_without_scaling_is_read(llama: Path) -> None:
    assert (
        read_config(change_config(llama, rope_parameters=..., rope_theta=10_000.0, rope_scaling=None))
        == LLAMA
    )


def test_absent_head_counts_follow_from_the_others(llama: Path) -> None:
    config = read_config(change_config(llama, head_dim=..., num_key_value_heads=...))
    assert (config.head_dim, config.num_kv_heads) == (16, 4)


def test_absent_theta_and_tie_take_the_defaults_of_transformers(llama: Path) -> None:
    config = read_config(change_config(llama, rope_parameters=..., tie_word_embeddings=...))
    assert (config.rope_theta, config.tied_head) == (10_000.0, False)


def test_keys_that_do_not_change_the_result_are_accepted(llama: Path) -> None:
    change_config(
        llama, attention_dropout=0.1, torch_dtype="float16", _name_or_path="x", pretraining_tp=2, unheard_of=1
    )
    assert read_config(llama) == LLAMA


@pytest.mark.parametrize(("window", "expected"), [(None, ()), (..., (4096,) * 3), (16, (16,) * 3)])
def test_window_of_mistral_is_in_every_layer_or_none(
    window: object, expected: tuple[int, ...], tmp_path: Path
) -> None:
    assert (
        read_config(change_config(folder_of("mistral", tmp_path), sliding_window=window)).windows == expected
    )


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_window_of_qwen_starts_at_max_window_layers(family: str, tmp_path: Path) -> None:
    folder = change_config(
        folder_of(family, tmp_path), layer_types=..., sliding_window=8, max_window_layers=2
    )
    assert read_config(folder).windows == ()
    assert read_config(change_config(folder, use_sliding_window=True)).windows == (None, None, 8)
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    assert read_config(change_config(folder, layer_types=types)).windows == (8, None, 8)


@pytest.mark.parametrize(("family", "windows"), [("qwen3-moe", (8, 8, 8)), ("qwen2-moe", (8, None))])
def test_windows_of_mixtures_of_qwen_are_their_own(
    family: str, windows: tuple[int | None, ...], tmp_path: Path
) -> None:
    folder = change_config(
        folder_of(family, tmp_path), layer_types=..., sliding_window=8, max_window_layers=3
    )
    assert read_config(folder).windows == ()
    assert read_config(change_config(folder, use_sliding_window=True)).windows == windows


def test_layer_types_say_nothing_about_windows_of_qwen3_moe(tmp_path: Path) -> None:
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    folder = folder_of("qwen3-moe", tmp_path)
    num_layers = read_config(folder).num_layers
    change_config(folder, use_sliding_window=True, sliding_window=8, layer_types=types[:num_layers])
    with pytest.raises(StartupError, match="layer_types"):
        read_config(folder)


def test_absent_head_size_of_qwen3_is_128(tmp_path: Path) -> None:
    assert read_config(change_config(folder_of("qwen3", tmp_path), head_dim=...)).head_dim == 128


def test_absent_theta_of_mixtral_is_a_million(tmp_path: Path) -> None:
    folder = change_config(folder_of("mixtral", tmp_path), rope_parameters=..., rope_theta=...)
    assert read_config(folder).rope_theta == 1e6


def test_attention_bias_brings_biases_on_both_sides(llama: Path, tmp_path: Path) -> None:
    for folder in (llama, folder_of("qwen3", tmp_path)):
        config = read_config(change_config(folder, attention_bias=True))
        assert config.qkv_bias and config.out_bias


def test_linear_scaling_is_read(llama: Path) -> None:
    config = read_config(
        change_config(llama, rope_parameters=..., rope_scaling={"type": "linear", "factor": 2})
    )
    assert config.rope_scaling == LinearScaling(2.0)


def test_context_of_yarn_is_the_original_one_times_its_factor(llama: Path) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    config = read_config(change_config(llama, rope_parameters=..., rope_scaling=scaling))
    assert (config.max_position, config.rope_scaling) == (
        512,
        YarnScaling(4.0, 128, 0.1 * math.log(4.0) + 1),
    )
    unscaled = read_config(change_config(llama, rope_scaling={"type": "yarn", "factor": 2.0}))
    assert unscaled.max_position == 512, (
        "the original context is max_position_embeddings if nothing else says it"
    )


def test_dynamic_scaling_goes_by_the_length_that_is_served(llama: Path) -> None:
    config = read_config(
        change_config(llama, rope_parameters=..., rope_scaling={"type": "dynamic", "factor": 3.0})
    )
    assert (config.max_position, config.rope_scaling) == (768, DynamicScaling(3.0, 256, 768))
    assert config.stretched_for(400).rope_scaling == DynamicScaling(3.0, 256, 400)
    short = config.stretched_for(100).rope(0)
    assert short is not None
    np.testing.assert_array_equal(
        inverse_frequencies(short), inverse_frequencies(dataclasses.replace(short, scaling=None))
    )


ROPES = json.loads((GOLDEN / "rope.json").read_text())


@pytest.mark.parametrize("case", ROPES["cases"], ids=lambda case: case["rope_parameters"]["rope_type"])
def test_rotary_frequencies_are_those_of_transformers(case: dict[str, Any], tmp_path: Path) -> None:
    folder, rope = folder_of("phi3", tmp_path), case["rope_parameters"]
    change_config(
        folder,
        head_dim=ROPES["head_dim"],
        max_position_embeddings=ROPES["max_position_embeddings"],
        original_max_position_embeddings=...,
        rope_parameters=rope,
    )
    served = read_config(folder).stretched_for(case["max_seq_len"]).rope(0)
    assert served is not None
    np.testing.assert_allclose(inverse_frequencies(served), case["frequencies"], rtol=1e-5)
    cos, _ = angles_at(jnp.zeros((1, 1), jnp.int32), served)
    assert float(cos[0, 0, 0, 0]) == pytest.approx(case["attention_factor"], rel=1e-6)


def test_rope_scaling_may_say_all_that_rope_parameters_may(llama: Path, tmp_path: Path) -> None:
    scaling = {"type": "linear", "factor": 2.0, "rope_theta": 777.0}
    older = read_config(change_config(llama, rope_parameters=..., rope_scaling=scaling))
    assert (older.rope_theta, older.rope_scaling) == (777.0, LinearScaling(2.0))
    both = change_config(llama, rope_parameters={"type": "linear", "factor": 3.0, "rope_theta": 5e5})
    assert read_config(both) == older, "as in transformers"
    partly = folder_of("phi3", tmp_path)
    change_config(partly, rope_parameters=..., rope_scaling={"type": "default", "partial_rotary_factor": 0.5})
    assert read_config(partly).rotary_size == 8


def test_original_context_in_two_places_must_be_the_same(llama: Path) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    change_config(llama, rope_scaling=scaling, original_max_position_embeddings=64)
    assert read_config(llama).max_position == 256
    with pytest.raises(StartupError, match="rope_scaling: original_max_position_embeddings = 64"):
        read_config(change_config(llama, original_max_position_embeddings=32))


@pytest.mark.parametrize("family", ["deepseek2", "deepseek3"])
def test_long_scaling_of_latent_attention_has_factors_for_the_rotated_dimensions(
    family: str, tmp_path: Path
) -> None:
    scaling = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    folder = change_config(
        folder_of(family, tmp_path), head_dim=..., rope_parameters=..., rope_scaling=scaling
    )
    rope = read_config(folder).rope(0)
    assert rope is not None and len(inverse_frequencies(rope)) == 4


def test_gpt_oss_must_say_its_rotary_scaling(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="rope_scaling is missing"):
        read_config(change_config(folder_of("gpt-oss", tmp_path), rope_parameters=...))


def test_older_keys_of_gpt_neox_mean_the_same_as_rope_parameters(tmp_path: Path) -> None:
    folder = folder_of("gpt-neox", tmp_path)
    change_config(folder, rope_parameters=..., rotary_pct=0.25, rotary_emb_base=10_000)
    assert read_config(folder) == read_config(GOLDEN / "gpt-neox")
    other = read_config(
        change_config(
            folder, rotary_pct=..., rotary_emb_base=500, use_parallel_residual=False, hidden_act="gelu_fast"
        )
    )
    assert (other.rotary_size, other.rope_theta, other.is_parallel) == (4, 500.0, False)
    assert other.activation is Activation.GELU_TANH


def test_masks_in_a_published_file_of_gpt_neox_are_left_out(tmp_path: Path) -> None:
    folder = folder_of("gpt-neox", tmp_path)
    expected = load(folder)
    change_tensors(
        folder,
        {
            "gpt_neox.layers.0.attention.bias": np.zeros((1, 1, 4, 4), np.uint8),
            "gpt_neox.layers.0.attention.masked_bias": np.zeros((), np.float32),
            "gpt_neox.layers.0.attention.rotary_emb.inv_freq": np.zeros(2, np.float32),
        },
    )
    assert load(folder).keys() == expected.keys()


def test_heads_that_are_stored_one_after_the_other_are_sorted_in_pieces_of_any_size() -> None:
    stored = dict(read_tensors(GOLDEN / "gpt-neox", read_config(GOLDEN / "gpt-neox")))[
        "gpt_neox.layers.1.attention.query_key_value.weight"
    ]
    whole = stored.read(0, 192)
    for start, stop in ((0, 1), (3, 21), (60, 130), (191, 192)):
        np.testing.assert_array_equal(stored.read(start, stop), whole[start:stop])


@pytest.mark.parametrize("act", ["gelu", "gelu_pytorch_tanh"])
def test_first_releases_of_gemma_are_read(act: str, tmp_path: Path) -> None:
    folder = change_config(
        folder_of("gemma", tmp_path), hidden_act=act, hidden_activation=None, tie_word_embeddings=...
    )
    assert read_config(folder) == read_config(GOLDEN / "gemma")


def test_older_form_of_olmo3_means_the_same_as_the_newer(tmp_path: Path) -> None:
    folder = folder_of("olmo3", tmp_path)
    scaling = dict(json.loads((folder / "config.json").read_text())["rope_parameters"]["full_attention"])
    change_config(folder, rope_parameters=..., rope_theta=scaling.pop("rope_theta"), rope_scaling=scaling)
    assert read_config(folder) == read_config(GOLDEN / "olmo3")
    config = read_config(change_config(folder, layer_types=..., num_hidden_layers=5))
    assert config.windows == (8, 8, 8, None, 8)
    assert config.rope(0) != config.rope(3), "layers with a window are not scaled"


def test_older_form_of_gemma3_means_the_same_as_the_newer(tmp_path: Path) -> None:
    folder = folder_of("gemma3", tmp_path)
    change_config(
        folder, rope_parameters=..., layer_types=..., _sliding_window_pattern=..., tie_word_embeddings=...
    )
    change_config(folder, rope_theta=1_000_000, rope_local_base_freq=10_000, sliding_window_pattern=6)
    assert read_config(folder) == read_config(GOLDEN / "gemma3")
    scaled = read_config(change_config(folder, rope_scaling={"rope_type": "linear", "factor": 8.0}))
    assert scaled.rope(0) == read_config(GOLDEN / "gemma3").rope(0)
    assert scaled.rope(5) == dataclasses.replace(
        read_config(GOLDEN / "gemma3").rope(5), scaling=LinearScaling(8.0)
    )


def test_text_model_inside_a_gemma3_that_sees_is_found(tmp_path: Path) -> None:
    folder = folder_of("gemma3", tmp_path)
    text = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    for prefix in ("language_model.model.", "model.language_model."):
        (folder / "config.json").write_text(
            json.dumps({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text})
        )
        inside = {prefix + name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        save_file(
            inside | {"vision_tower.embedding.weight": np.zeros((2, 2), np.float32)},
            folder / "model.safetensors",
        )
        assert read_config(folder) == read_config(GOLDEN / "gemma3")
        np.testing.assert_array_equal(
            load(folder)["layers.6.down"], tensors["model.layers.6.mlp.down_proj.weight"]
        )


def test_head_of_a_gemma3_that_sees_is_tied_or_not_as_the_whole_model_says(tmp_path: Path) -> None:
    folder = folder_of("gemma3", tmp_path)
    text = json.loads((folder / "config.json").read_text())
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(whole | {"text_config": text}))
    assert text["tie_word_embeddings"] and not read_config(folder).tied_head
    (folder / "config.json").write_text(
        json.dumps(whole | {"text_config": text | {"final_logit_softcapping": 30.0}})
    )
    with pytest.raises(StartupError, match="final_logit_softcapping"):
        read_config(folder)


def test_a_head_that_is_not_the_embedding_it_is_tied_to_is_left_out_with_a_warning(
    llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    embed = load_file(llama / "model.safetensors")["model.embed_tokens.weight"]
    change_tensors(llama, {"lm_head.weight": embed.astype(np.float16)})
    assert "head" not in load(llama)
    assert caplog.text == ""
    for other in (embed[::-1], embed[:-1]):
        caplog.clear()
        change_tensors(llama, {"lm_head.weight": np.ascontiguousarray(other)})
        assert "head" not in load(llama)
        assert "lm_head.weight is not used" in caplog.text and "tie_word_embeddings to false" in caplog.text


def test_absent_keys_of_a_gemma2_take_the_defaults_of_transformers(tmp_path: Path) -> None:
    absent = (
        "layer_types",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "query_pre_attn_scalar",
        "sliding_window",
    )
    config = read_config(change_config(folder_of("gemma2", tmp_path), **dict.fromkeys(absent, ...)))
    assert (config.windows, config.attention_softcap, config.logit_softcap) == (
        (4096, None, 4096),
        50.0,
        30.0,
    )
    assert config.attention_scale == 1 / 16


@pytest.mark.parametrize("kind", ["longrope", "su"])
def test_long_scaling_of_phi3_is_read(kind: str, tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 6, "long_factor": [1.0, 2, 3, 4, 5, 6]}
    folder = change_config(
        folder_of("phi3", tmp_path),
        rope_parameters=...,
        rope_scaling={"type": kind, **factors},
        partial_rotary_factor=0.75,
        original_max_position_embeddings=64,
    )
    config = read_config(folder)
    scaling = LongScaling(
        (1.0,) * 6, (1.0, 2.0, 3.0, 4.0, 5.0, 6.0), 64, math.sqrt(1 + math.log(4) / math.log(64))
    )
    assert (config.rope_scaling, config.rotary_size) == (scaling, 12)
    assert config.stretched_for(64).rope_scaling == dataclasses.replace(scaling, is_long=False)
    assert config.stretched_for(65) == config
    factors["long_factor"] = [1.0] * 8
    with pytest.raises(StartupError, match="long_factor = .* is not a list of 6 numbers"):
        read_config(change_config(folder, rope_scaling={"type": kind, **factors}))


def test_gpt2_as_first_published_has_bare_names_and_masks(tmp_path: Path) -> None:
    folder = folder_of("gpt2", tmp_path)
    expected, file = load(folder), load_file(folder / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in file.items()}
    save_file(bare | {"h.0.attn.bias": np.zeros((1, 1, 4, 4), np.uint8)}, folder / "model.safetensors")
    arrays = load(folder)
    for name in expected:
        np.testing.assert_array_equal(arrays[name], expected[name], err_msg=name)


REFUSED: list[tuple[str, str, object]] = [
    ("llama", "hidden_act", "gelu"),
    ("llama", "mlp_bias", True),
    ("llama", "partial_rotary_factor", 0.5),
    ("llama", "attn_logit_softcapping", 50.0),
    ("llama", "final_logit_softcapping", 30.0),
    ("llama", "num_local_experts", 8),
    ("llama", "sliding_window", 4096),
    ("llama", "layer_types", ["full_attention", "sliding_attention", "full_attention"]),
    ("llama", "layer_types", ["full_attention"]),
    ("llama", "tie_word_embeddings", "yes"),
    ("llama", "hidden_size", 0),
    ("llama", "vocab_size", "many"),
    ("llama", "rms_norm_eps", float("nan")),
    ("llama", "rope_parameters", 10_000.0),
    ("mistral", "sliding_window", -1),
    ("mistral", "layer_types", ["full_attention"] * 3),
    ("qwen2", "layer_types", ["sliding_attention"] * 3),
    ("qwen3", "layer_types", ["chunked_attention"] * 3),
    ("gemma2", "hidden_activation", "gelu"),
    ("gemma2", "query_pre_attn_scalar", 0),
    ("gemma2", "final_logit_softcapping", -1.0),
    ("gemma2", "layer_types", ["sliding_attention"] * 2),
    ("gemma3", "use_bidirectional_attention", True),
    ("gemma3", "attn_logit_softcapping", 50.0),
    ("gemma3", "rope_local_base_freq", "low"),
    ("phi3", "partial_rotary_factor", "half"),
    ("gemma", "hidden_act", "silu"),
    ("granite", "mlp_bias", True),
    ("granite", "residual_multiplier", 0),
    ("granite", "num_local_experts", 8),
    ("olmo3", "layer_types", ["chunked_attention"] * 3),
    ("cohere", "use_qk_norm", True),
    ("cohere", "logit_scale", 0),
    ("gpt-neox", "hidden_act", "relu"),
    ("gpt-neox", "use_parallel_residual", "yes"),
    ("phi2", "qk_layernorm", True),
    ("phi2", "tie_word_embeddings", True),
    ("olmo2", "sliding_window", 64),
    ("olmo2", "hidden_act", "gelu"),
    ("mixtral", "num_local_experts", 0),
    ("mixtral", "num_experts_per_tok", None),
    ("qwen3-moe", "norm_topk_prob", "yes"),
    ("gpt2", "activation_function", "relu"),
    ("gpt2", "n_embd", 0),
    ("gpt2", "scale_attn_by_inverse_layer_idx", True),
    ("gpt2", "add_cross_attention", True),
]


@pytest.mark.parametrize(("family", "key", "value"), REFUSED)
def test_unsupported_value_is_refused_by_name_and_value(
    family: str, key: str, value: object, tmp_path: Path
) -> None:
    folder = folder_of(family, tmp_path)
    if key == "rope_local_base_freq":
        change_config(folder, rope_parameters=...)
    with pytest.raises(StartupError) as refusal:
        read_config(change_config(folder, **{key: value}))
    assert key in str(refusal.value) and (repr(value) in str(refusal.value) or value is None)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("form", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize(
    ("rope", "key"),
    [
        ({"rope_type": "proportional", "factor": 4.0}, "rope_type"),
        ({"type": "linear"}, "factor"),
        ({"type": "dynamic"}, "factor"),
        ({"type": "ntk", "factor": 2.0}, "type"),
        ({"type": "dynamic", "factor": 2.0, "alpha": 1000.0}, "alpha"),
        ({"type": "yarn", "factor": 2.0, "beta_fast": "fast"}, "beta_fast"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_type": "default", "mrope_section": [16, 24, 24]}, "mrope_section"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor"),
    ],
)
def test_unsupported_rotary_scaling_is_refused_by_name(
    form: str, rope: dict[str, object], key: str, llama: Path
) -> None:
    with pytest.raises(StartupError, match=rf"{form}: {key}"):
        read_config(change_config(llama, **{form: rope}))


@pytest.mark.parametrize(
    "architectures", [["MambaForCausalLM"], ["LlamaForSequenceClassification"], [], None, ..., [[]], [{}]]
)
def test_other_architecture_is_refused_with_the_list_of_ours(architectures: object, llama: Path) -> None:
    with pytest.raises(
        StartupError,
        match="supported are LlamaForCausalLM, MistralForCausalLM.*Phi3ForCausalLM.*GPT2LMHeadModel$",
    ):
        read_config(change_config(llama, architectures=architectures))


@pytest.mark.parametrize(
    "key", ["vocab_size", "hidden_size", "num_hidden_layers", "rms_norm_eps", "max_position_embeddings"]
)
def test_missing_key_is_named(key: str, llama: Path) -> None:
    with pytest.raises(StartupError, match=f"{key} is missing"):
        read_config(change_config(llama, **{key: ...}))


def test_heads_that_do_not_divide_are_refused(llama: Path) -> None:
    with pytest.raises(StartupError, match="4 query heads cannot share 3"):
        read_config(change_config(llama, num_key_value_heads=3))


@pytest.mark.parametrize("size", [10**30, 2**31])
@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"])
def test_a_size_beyond_all_arrays_is_refused(key: str, size: int, llama: Path) -> None:
    with pytest.raises(StartupError, match=f"{key} = {size} is not an integer of at most"):
        read_config(change_config(llama, **{key: size}))


def test_yarn_needs_pairs_that_turn_at_different_speeds(llama: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1}
    with pytest.raises(StartupError, match="YaRN needs a rope_theta of more than 1"):
        read_config(change_config(llama, rope_parameters=rope))


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_broken_config_is_one_line(text: str, llama: Path) -> None:
    (llama / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(StartupError, match=r"cannot read .*config.json: .+") as refusal:
        read_config(llama)
    assert "\n" not in str(refusal.value)


# The table of names


@pytest.mark.parametrize("file_format", list(Format))
@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_of_a_checkpoint_fill_every_number_once(family: str, file_format: Format) -> None:
    config = dataclasses.replace(read_config(GOLDEN / family), out_bias=True, qkv_bias=True)
    filled = {name: np.zeros(shape, np.int64) for name, shape in parameter_shapes(config).items()}
    for target in find_targets(config, file_format, ()).values():
        assert filled[target.array][target.index].shape == target.shape
        filled[target.array][target.index] += 1
    assert all((numbers == 1).all() for numbers in filled.values())


def test_tensors_are_looked_for_under_the_names_the_checkpoint_uses() -> None:
    config = read_config(GOLDEN / "llama")
    fused = find_targets(config, Format.HUGGING_FACE, ["model.layers.2.self_attn.qkv_proj.weight"])
    assert {name for name in fused if "self_attn" in name and "o_proj" not in name} == {
        f"model.layers.{layer}.self_attn.qkv_proj.weight" for layer in range(3)
    }
    apart = find_targets(
        config, Format.HUGGING_FACE, [f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv"]
    )
    assert "model.layers.0.self_attn.k_proj.weight" in apart


# The arrays

ROUTERS = {"mixtral": "block_sparse_moe.gate", "gpt-oss": "mlp.router"}


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize("family", FAMILIES)
def test_arrays_have_the_names_shapes_and_types_of_the_model(family: str, dtype: jnp.dtype) -> None:
    arrays = load(GOLDEN / family, dtype)
    assert {name: array.shape for name, array in arrays.items()} == parameter_shapes(
        read_config(GOLDEN / family)
    )
    bits = np.dtype(np.uint16) if dtype == BFLOAT16 else dtype
    for name, array in arrays.items():
        is_vector = array.ndim == 1 or name.endswith("_bias")
        assert array.dtype == (FLOAT32 if is_vector else {2: dtype, 3: bits}[array.ndim]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_lands_where_it_should(family: str) -> None:
    """States again, in the reference's terms, what is stacked, transposed or stored less one."""
    arrays, file = load(GOLDEN / family), load_file(GOLDEN / family / "model.safetensors")
    config = read_config(GOLDEN / family)
    gpt2, gemma = family == "gpt2", family.startswith("gemma")
    neox, phi2 = family == "gpt-neox", family == "phi2"

    def stored(*names: str) -> NDArray[np.float32]:
        found = [
            file[name].T if gpt2 and ".c_" in name and name.endswith("weight") else file[name]
            for name in names
        ]
        return np.concatenate(
            [
                tensor + 1 if gemma and name.endswith("norm.weight") else tensor
                for name, tensor in zip(names, found)
            ]
        )

    def expected(layer: int, name: str) -> NDArray[np.float32]:
        at, style = f"model.layers.{layer}.", "post" if config.has_post_norms else "pre"
        if gpt2:
            at, bias = f"transformer.h.{layer}.", "bias" if name.endswith("bias") else "weight"
            parts = {"input_norm": "ln_1", "mlp_norm": "ln_2", "qkv": "attn.c_attn", "out": "attn.c_proj"}
            parts |= {"gate_up": "mlp.c_fc", "down": "mlp.c_proj"}
            return stored(f"{at}{parts[name.removesuffix('_bias')]}.{bias}")
        if neox or phi2:
            at, bias = f"{'gpt_neox' if neox else 'model'}.layers.{layer}.", name.endswith("_bias")
            parts = {"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
            parts |= {"qkv": "attention.query_key_value", "out": "attention.dense"}
            parts |= {"gate_up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h"}
            if phi2:
                parts |= {"out": "self_attn.dense", "gate_up": "mlp.fc1", "down": "mlp.fc2"}
            if phi2 and name.startswith("qkv"):
                return stored(
                    *(f"{at}self_attn.{part}_proj.{'bias' if bias else 'weight'}" for part in "qkv")
                )
            whole = stored(f"{at}{parts[name.removesuffix('_bias')]}.{'bias' if bias else 'weight'}")
            if not name.startswith("qkv"):
                return whole
            by_head = whole.reshape(config.num_heads, 3, config.head_dim, -1)
            return by_head.swapaxes(0, 1).reshape(whole.shape)
        if config.has_transposed_experts and name.startswith("experts"):
            words = name.removeprefix("experts_").removesuffix("_bias")
            whole = file[f"{at}mlp.experts.{words}_proj{'_bias' if name.endswith('_bias') else ''}"]
            whole = whole if name.endswith("bias") else whole.swapaxes(1, 2)
            return np.concatenate([whole[:, ::2], whole[:, 1::2]], 1) if "gate_up" in name else whole
        if name.startswith("experts"):
            mixtral = {"gate": "w1", "up": "w3", "down": "w2"}
            own = {"experts_down": ["down"], "experts_gate_up": ["gate", "up"]}[name]
            form = "block_sparse_moe.experts.{}.{}" if family == "mixtral" else "mlp.experts.{}.{}_proj"
            words = [mixtral[word] if family == "mixtral" else word for word in own]
            names = [
                [f"{at}{form.format(e, word)}.weight" for word in words] for e in range(config.num_experts)
            ]
            return np.stack([stored(*of_expert) for of_expert in names])
        if family == "cohere" and name == "qkv":
            q, k, v = (stored(f"{at}self_attn.{part}_proj.weight") for part in "qkv")
            pairs = [part.reshape(-1, config.head_dim // 2, 2, 64).swapaxes(1, 2) for part in (q, k)]
            return np.concatenate([*(part.reshape(-1, 64) for part in pairs), v])
        if config.latent is not None and name in ("q", "kv_down"):
            whole = stored(
                at + "self_attn." + ("q_b_proj" if name == "q" else "kv_a_proj_with_mqa") + ".weight"
            )
            blocks = whole.reshape(config.num_heads if name == "q" else 1, -1, whole.shape[1])
            plain, turned = blocks[:, :-8], blocks[:, -8:]
            parts = (
                [turned[:, ::2], turned[:, 1::2], plain]
                if name == "q"
                else [plain, turned[:, ::2], turned[:, 1::2]]
            )
            return np.concatenate(parts, 1).reshape(whole.shape)
        fused = family == "phi3"
        shared = "mlp.shared_expert" if family == "qwen2-moe" else "mlp.shared_experts"
        return stored(
            *{
                "input_norm": [at + "input_layernorm.weight"],
                "mlp_norm": [
                    at + ("pre_feedforward" if style == "post" else "post_attention") + "_layernorm.weight"
                ],
                "attention_post_norm": [at + "post_attention_layernorm.weight"],
                "mlp_post_norm": [at + "post_feedforward_layernorm.weight"],
                "qkv": [f"{at}self_attn.{part}_proj.weight" for part in (["qkv"] if fused else "qkv")],
                "qkv_bias": [f"{at}self_attn.{part}_proj.bias" for part in "qkv"],
                "q_norm": [at + "self_attn.q_norm.weight"],
                "k_norm": [at + "self_attn.k_norm.weight"],
                "out": [at + "self_attn.o_proj.weight"],
                "q_down": [at + "self_attn.q_a_proj.weight"],
                "q_down_norm": [at + "self_attn.q_a_layernorm.weight"],
                "kv_down_norm": [at + "self_attn.kv_a_layernorm.weight"],
                "kv_up": [at + "self_attn.kv_b_proj.weight"],
                "out_bias": [at + "self_attn.o_proj.bias"],
                "sinks": [at + "self_attn.sinks"],
                "router": [at + ROUTERS.get(family, "mlp.gate") + ".weight"],
                "router_bias": [at + "mlp.router.bias"],
                "router_correction": [at + "mlp.gate.e_score_correction_bias"],
                "shared_gate_up": [f"{at}{shared}.{part}_proj.weight" for part in ("gate", "up")],
                "shared_down": [f"{at}{shared}.down_proj.weight"],
                "shared_gate": [at + "mlp.shared_expert_gate.weight"],
                "gate_up": [
                    f"{at}mlp.{part}_proj.weight" for part in (["gate_up"] if fused else ["gate", "up"])
                ],
                "down": [at + "mlp.down_proj.weight"],
            }[name]
        )

    for name, array in arrays.items():
        if name.startswith("layers."):
            _, layer, own = name.split(".")
            np.testing.assert_array_equal(array, expected(int(layer), own), err_msg=name)
    outer = {
        "embed": "model.embed_tokens.weight",
        "final_norm": "model.norm.weight",
        "head": "lm_head.weight",
    }
    if gpt2:
        outer = {
            "embed": "wte.weight",
            "positions": "wpe.weight",
            "final_norm": "ln_f.weight",
            "final_norm_bias": "ln_f.bias",
        }
        outer = {name: f"transformer.{tensor}" for name, tensor in outer.items()}
    if neox:
        outer = {"embed": "embed_in.weight", "final_norm": "final_layer_norm.weight"}
        outer |= {"final_norm_bias": "final_layer_norm.bias"}
        outer = {name: f"gpt_neox.{tensor}" for name, tensor in outer.items()} | {"head": "embed_out.weight"}
    if phi2:
        outer |= {"final_norm": "model.final_layernorm.weight", "head_bias": "lm_head.bias"}
        outer |= {"final_norm_bias": "model.final_layernorm.bias"}
    assert {name for name in arrays if not name.startswith("layers.")} == {
        name for name, tensor in outer.items() if tensor in file
    }
    for name, tensor in outer.items():
        if name in arrays:
            np.testing.assert_array_equal(arrays[name], stored(tensor), err_msg=name)


@pytest.mark.parametrize("stored", [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_half_precision_files_are_read_exactly(
    stored: np.dtype[np.generic], dtype: jnp.dtype, llama: Path
) -> None:
    file = {name: tensor.astype(stored) for name, tensor in load_file(llama / "model.safetensors").items()}
    save_file(file, llama / "model.safetensors")
    arrays = load(llama, dtype)
    embed, norm = file["model.embed_tokens.weight"], file["model.norm.weight"]
    np.testing.assert_array_equal(arrays["embed"], embed.astype(np.float32).astype(dtype))
    np.testing.assert_array_equal(arrays["final_norm"], norm.astype(np.float32))


def test_biases_of_the_output_projection_are_read(llama: Path) -> None:
    change_config(llama, attention_bias=True)
    sizes = {"q": 64, "k": 32, "v": 32, "o": 64}
    change_tensors(
        llama,
        {
            f"model.layers.{layer}.self_attn.{part}_proj.bias": np.full(size, layer + size, np.float32)
            for layer in range(3)
            for part, size in sizes.items()
        },
    )
    arrays = load(llama)
    np.testing.assert_array_equal(arrays["layers.1.out_bias"], np.full(64, 65.0))
    np.testing.assert_array_equal(arrays["layers.2.qkv_bias"], np.repeat([66.0, 34.0], [64, 64]))


def test_sharded_checkpoint_equals_the_single_file(llama: Path) -> None:
    expected = load(llama)
    shard(llama)
    arrays = load(llama)
    assert arrays.keys() == expected.keys()
    for name in arrays:
        np.testing.assert_array_equal(arrays[name], expected[name])


def shard(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {
        name: f"model-{index % 2 + 1:05}-of-00002.safetensors" for index, name in enumerate(tensors)
    }
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )


@pytest.mark.parametrize("is_sharded", [False, True])
def test_files_of_pytorch_load_to_the_same_arrays(is_sharded: bool, llama: Path) -> None:
    expected, tensors = load(llama), load_file(llama / "model.safetensors")
    (llama / "model.safetensors").unlink()
    names = ["pytorch_model.bin"]
    if is_sharded:
        names = [f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)]
        weight_map = {name: names[index % 2] for index, name in enumerate(tensors)}
        (llama / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for number, name in enumerate(names):
        part = list(tensors.items())[number :: len(names)]
        write_torch_file(llama / name, {key: np.asarray(tensor, np.float16) for key, tensor in part})
    arrays = load(llama)
    assert arrays.keys() == expected.keys()
    for name in arrays:
        np.testing.assert_array_equal(arrays[name], np.asarray(expected[name], np.float16))


def test_malicious_file_of_pytorch_is_refused_by_name(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    write_archive(llama / "pytorch_model.bin", b"cposix\nsystem\n(S'touch ran'\ntR.", {})
    with pytest.raises(StartupError, match=r"pytorch_model\.bin: it asks for posix\.system.*nothing was run"):
        load(llama)


def test_safetensors_are_read_where_both_are_there(llama: Path) -> None:
    (llama / "pytorch_model.bin").write_bytes(b"not even looked at")
    assert load(llama)["embed"].shape == (384, 64)


def test_shard_that_is_not_there_is_named(llama: Path) -> None:
    shard(llama)
    (llama / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(StartupError, match=r"do not exist: model-00002-of-00002\.safetensors"):
        load(llama)


@pytest.mark.parametrize("name", [5, None, ["a"]])
def test_an_index_that_names_no_file_is_one_line(name: object, llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": name}}
    (llama / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(StartupError, match="expected a table weight_map of tensors and files"):
        load(llama)


def test_a_stray_file_is_not_taken_for_the_weights(llama: Path) -> None:
    shutil.copy(GOLDEN / "torch-state-dict.bin", llama / "pytorch_model.bin")
    (llama / "model.safetensors").rename(llama / "optimizer.safetensors")
    assert find_files(llama) == [llama / "pytorch_model.bin"]


def test_single_file_of_another_name_is_read(llama: Path) -> None:
    (llama / "model.safetensors").rename(llama / "weights.safetensors")
    assert load(llama)["embed"].shape == (384, 64)


def test_missing_tensors_are_listed(llama: Path) -> None:
    change_tensors(llama, {"model.norm.weight": None, "model.layers.1.self_attn.k_proj.weight": None})
    with pytest.raises(
        StartupError, match=r"missing model\.layers\.1\.self_attn\.k_proj\.weight, model\.norm\.weight$"
    ):
        load(llama)


def test_many_missing_tensors_are_counted(llama: Path) -> None:
    save_file({"model.norm.weight": np.zeros(64, np.float32)}, llama / "model.safetensors")
    with pytest.raises(StartupError, match="and 20 more"):
        load(llama)


def test_unexpected_tensors_are_listed(llama: Path) -> None:
    change_tensors(llama, {"model.layers.0.mlp.down_proj.bias": np.zeros(64, np.float32)})
    with pytest.raises(StartupError, match=r"unexpected model\.layers\.0\.mlp\.down_proj\.bias"):
        load(llama)


def test_misshapen_tensors_are_listed_with_both_shapes(llama: Path) -> None:
    change_tensors(llama, {"model.layers.2.self_attn.q_proj.weight": np.zeros((64, 32), np.float32)})
    with pytest.raises(
        StartupError, match=r"layers\.2\.self_attn\.q_proj\.weight is \[64, 32\], expected \[64, 64\]"
    ):
        load(llama)


CORRUPT: list[tuple[str, str, tuple[int, ...] | None, str]] = [
    (
        "gemma2",
        "model.layers.1.pre_feedforward_layernorm.weight",
        None,
        "missing model.layers.1.pre_feedforward_layernorm.weight",
    ),
    (
        "gemma3",
        "model.layers.6.self_attn.q_norm.weight",
        (32,),
        "self_attn.q_norm.weight is [32], expected [16]",
    ),
    (
        "phi3",
        "model.layers.2.self_attn.qkv_proj.weight",
        None,
        "missing model.layers.2.self_attn.qkv_proj.weight",
    ),
    (
        "phi3",
        "model.layers.0.mlp.gate_up_proj.weight",
        (128, 64),
        "mlp.gate_up_proj.weight is [128, 64], expected [256, 64]",
    ),
    (
        "olmo2",
        "model.layers.0.self_attn.k_norm.weight",
        (16,),
        "self_attn.k_norm.weight is [16], expected [32]",
    ),
    (
        "olmo2",
        "model.layers.0.input_layernorm.weight",
        (64,),
        "unexpected model.layers.0.input_layernorm.weight",
    ),
    (
        "mixtral",
        "model.layers.1.block_sparse_moe.experts.3.w2.weight",
        None,
        "missing model.layers.1.block_sparse_moe.experts.3.w2.weight",
    ),
    (
        "mixtral",
        "model.layers.1.block_sparse_moe.experts.4.w2.weight",
        (64, 128),
        "unexpected model.layers.1.block_sparse_moe.experts.4",
    ),
    ("qwen3-moe", "model.layers.0.mlp.gate.weight", (8, 64), "mlp.gate.weight is [8, 64], expected [6, 64]"),
    (
        "gpt2",
        "transformer.h.1.mlp.c_fc.weight",
        (256, 64),
        "h.1.mlp.c_fc.weight is [64, 256], expected [256, 64]",
    ),
    ("gpt2", "transformer.wpe.weight", None, "missing wpe.weight"),
]


@pytest.mark.parametrize(("family", "name", "shape", "message"), CORRUPT)
def test_wrong_tensors_of_a_family_are_named(
    family: str, name: str, shape: tuple[int, ...] | None, message: str, tmp_path: Path
) -> None:
    folder = change_tensors(
        folder_of(family, tmp_path), {name: None if shape is None else np.zeros(shape, np.float32)}
    )
    with pytest.raises(StartupError) as refusal:
        load(folder)
    assert message in str(refusal.value) and str(folder) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_more_experts_a_token_than_there_are_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="5 experts per token, but the model has only 4"):
        read_config(change_config(folder_of("mixtral", tmp_path), num_experts_per_tok=5))


def test_harmless_extras_are_accepted(llama: Path) -> None:
    extras = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32),
        "lm_head.weight": np.zeros((384, 64), np.float32),
    }
    assert "head" not in load(change_tensors(llama, dict(extras)))


def test_number_type_we_do_not_read_is_named(llama: Path) -> None:
    change_tensors(llama, {"model.norm.weight": np.zeros(64, np.float64)})
    with pytest.raises(
        StartupError, match=r"model\.norm\.weight is stored as F64; supported are F32, F16, BF16"
    ):
        load(llama)


def test_file_that_is_cut_short_is_one_line(llama: Path) -> None:
    path = llama / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(
        StartupError, match=r"cannot read .*model\.safetensors: .*damaged or incomplete"
    ) as refusal:
        load(llama)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_pointer_of_git_lfs_is_told_from_a_damaged_file(llama: Path, name: str) -> None:
    (llama / "model.safetensors").unlink()
    (llama / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 545456\n")
    with pytest.raises(StartupError, match="is only a pointer of Git LFS: run `git lfs pull`"):
        load(llama)


# Memory and progress


def write_big_float32_model(folder: Path) -> Path:
    """12 million parameters of zeros, most of them in one embedding; written sparsely."""
    (folder / "config.json").write_text(
        json.dumps(
            json.loads((GOLDEN / "llama" / "config.json").read_text())
            | {
                "hidden_size": 512,
                "vocab_size": 16_384,
                "intermediate_size": 512,
                "head_dim": 128,
            }
        )
    )
    entries, offset = {}, 0
    for name, target in find_targets(read_config(folder), Format.HUGGING_FACE, ()).items():
        end = offset + 4 * int(np.prod(target.shape))
        entries[name] = {"dtype": "F32", "shape": target.shape, "data_offsets": [offset, end]}
        offset = end
    header = json.dumps(entries).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(file.tell() + offset)
    return folder


def test_loading_takes_the_memory_of_one_copy(tmp_path: Path) -> None:
    folder = write_big_float32_model(tmp_path)
    load(folder, BFLOAT16)  # sets up what jax needs once
    tracemalloc.start()
    try:
        arrays = load(folder, BFLOAT16)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    size = sum(array.nbytes for array in arrays.values())
    assert size > 20_000_000
    assert peak < size + 12_000_000  # the embedding alone would be 33 million bytes in float32


def test_pages_of_a_mapped_file_are_given_up(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * (64 << 20))
    link = tmp_path / "link"
    link.symlink_to(path)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert mapped[:: mmap.PAGESIZE].count(b"x") == len(mapped) // mmap.PAGESIZE
        before = process_memory()
        release_pages([link])
        assert before - process_memory() > 60 << 20
        assert mapped[-1:] == b"x"


def test_pages_of_the_file_are_given_up_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released: list[list[Path]] = []
    monkeypatch.setattr(levserve.weights.mapping, "release_pages", released.append)
    folder = write_big_float32_model(tmp_path)
    monkeypatch.setattr(levserve.weights.mapping, "MAPPED_BYTES", 10_000_000)
    arrays = load(folder, BFLOAT16)
    assert 1 <= len(released) <= sum(array.nbytes for array in arrays.values()) // 10_000_000
    assert released[0] == [folder / "model.safetensors"]


def test_progress_is_a_sentence_a_second() -> None:
    lines: list[str] = []
    now = 0.0
    progress = Progress("loading weights", 100, lines.append, clock=lambda: now)
    for step in range(1, 13):
        now = step / 2
        progress.advance(10)
    assert lines == [f"loading weights {percent} %" for percent in (20, 40, 60, 80, 100)]
