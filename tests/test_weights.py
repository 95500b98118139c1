"""Hugging Face folders: what config.json may say, and which rows of which tensor land where."""

from __future__ import annotations

import dataclasses
import json
import shutil
import struct
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from levserve.errors import StartupError
from levserve.model.config import Llama3Scaling, ModelConfig, parameter_shapes
from levserve.weights.load import load_arrays, read_config
from levserve.weights.names import Format, expected_tensors
from levserve.weights.progress import Progress

GOLDEN = Path(__file__).parent / "golden"
FAMILIES = ("llama", "llama3-rope", "mistral", "qwen2", "qwen3")
FLOAT32, BFLOAT16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)

LLAMA = ModelConfig(
    vocab_size=384, hidden_size=64, intermediate_size=128, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16,
    norm_eps=1e-5, rope_theta=10_000.0, max_position=256, tied_head=True,
)  # fmt: skip


def load(path: Path, dtype: jnp.dtype = FLOAT32) -> dict[str, jax.Array]:
    return load_arrays(path, read_config(path), dtype, report=lambda _: None)


def change_config(folder: Path, **changes: object) -> Path:
    """Writes `changes` into a folder's config.json; a value of `...` takes the key out."""
    path = folder / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))
    return folder


def change_tensors(folder: Path, changes: dict[str, NDArray[np.generic] | None]) -> Path:
    """Writes `changes` into a folder's weights; None takes the tensor out."""
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
                LLAMA, head_dim=32, rope_theta=500_000.0, tied_head=False,
                rope_scaling=Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=32),
            ),  # fmt: skip
        ),
        ("mistral", dataclasses.replace(LLAMA, tied_head=False, windows=(8, 8, 8))),
        ("qwen2", dataclasses.replace(LLAMA, qkv_bias=True)),
        ("qwen3", dataclasses.replace(LLAMA, head_dim=32, qk_norm=True)),
    ],
)
def test_config_of_each_family_is_read(family: str, expected: ModelConfig) -> None:
    assert read_config(GOLDEN / family) == expected


def test_older_rope_keys_mean_the_same_as_rope_parameters(tmp_path: Path) -> None:
    folder = folder_of("llama3-rope", tmp_path)
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    for key in ("rope_type", "type"):
        change_config(folder, rope_parameters=..., rope_theta=500_000, rope_scaling={key: "llama3", **scaling})
        assert read_config(folder) == read_config(GOLDEN / "llama3-rope")


def test_older_config_without_scaling_is_read(llama: Path) -> None:
    assert read_config(change_config(llama, rope_parameters=..., rope_theta=10_000.0, rope_scaling=None)) == LLAMA


def test_absent_head_counts_follow_from_the_others(llama: Path) -> None:
    config = read_config(change_config(llama, head_dim=..., num_key_value_heads=...))
    assert (config.head_dim, config.num_kv_heads) == (16, 4)


def test_absent_theta_and_tie_take_the_defaults_of_transformers(llama: Path) -> None:
    config = read_config(change_config(llama, rope_parameters=..., tie_word_embeddings=...))
    assert (config.rope_theta, config.tied_head) == (10_000.0, False)


def test_keys_that_do_not_change_the_result_are_accepted(llama: Path) -> None:
    change_config(llama, attention_dropout=0.1, torch_dtype="float16", _name_or_path="x", pretraining_tp=2, unheard_of=1)
    assert read_config(llama) == LLAMA


@pytest.mark.parametrize(("window", "expected"), [(None, ()), (..., (4096,) * 3), (16, (16,) * 3)])
def test_window_of_mistral_is_in_every_layer_or_none(window: object, expected: tuple[int, ...], tmp_path: Path) -> None:
    assert read_config(change_config(folder_of("mistral", tmp_path), sliding_window=window)).windows == expected


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_window_of_qwen_starts_at_max_window_layers(family: str, tmp_path: Path) -> None:
    folder = change_config(folder_of(family, tmp_path), layer_types=..., sliding_window=8, max_window_layers=2)
    assert read_config(folder).windows == ()
    assert read_config(change_config(folder, use_sliding_window=True)).windows == (None, None, 8)
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    assert read_config(change_config(folder, layer_types=types)).windows == (8, None, 8)


def test_attention_bias_brings_biases_on_both_sides(llama: Path, tmp_path: Path) -> None:
    for folder in (llama, folder_of("qwen3", tmp_path)):
        config = read_config(change_config(folder, attention_bias=True))
        assert config.qkv_bias and config.out_bias


REFUSED: list[tuple[str, str, object]] = [
    ("llama", "hidden_act", "gelu"),
    ("llama", "mlp_bias", True),
    ("llama", "partial_rotary_factor", 0.5),
    ("llama", "quantization_config", {"quant_method": "awq"}),
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
]


@pytest.mark.parametrize(("family", "key", "value"), REFUSED)
def test_unsupported_value_is_refused_by_name_and_value(family: str, key: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(StartupError) as refusal:
        read_config(change_config(folder_of(family, tmp_path), **{key: value}))
    assert key in str(refusal.value) and repr(value) in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("form", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize(
    ("rope", "key"),
    [
        ({"rope_type": "yarn", "factor": 4.0}, "rope_type"),
        ({"type": "linear", "factor": 2.0}, "type"),
        ({"type": "dynamic", "factor": 2.0}, "type"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_type": "default", "mrope_section": [16, 24, 24]}, "mrope_section"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor"),
    ],
)
def test_unsupported_rotary_scaling_is_refused_by_name(form: str, rope: dict[str, object], key: str, llama: Path) -> None:
    with pytest.raises(StartupError, match=rf"{form}: {key}"):
        read_config(change_config(llama, **{form: rope}))


@pytest.mark.parametrize("architectures", [["Gemma2ForCausalLM"], ["LlamaForSequenceClassification"], [], None, ...])
def test_other_architecture_is_refused_with_the_list_of_ours(architectures: object, llama: Path) -> None:
    with pytest.raises(StartupError, match="LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"):
        read_config(change_config(llama, architectures=architectures))


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_hidden_layers", "rms_norm_eps", "max_position_embeddings"])
def test_missing_key_is_named(key: str, llama: Path) -> None:
    with pytest.raises(StartupError, match=f"{key} is missing"):
        read_config(change_config(llama, **{key: ...}))


def test_heads_that_do_not_divide_are_refused(llama: Path) -> None:
    with pytest.raises(StartupError, match="4 query heads cannot share 3"):
        read_config(change_config(llama, num_key_value_heads=3))


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_broken_config_is_one_line(text: str, llama: Path) -> None:
    (llama / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(StartupError, match=r"cannot read .*config.json: .+") as refusal:
        read_config(llama)
    assert "\n" not in str(refusal.value)


# The table of names


@pytest.mark.parametrize("file_format", list(Format))
@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_of_a_checkpoint_fill_every_row_once(family: str, file_format: Format) -> None:
    config = dataclasses.replace(read_config(GOLDEN / family), out_bias=True, qkv_bias=True)
    filled = {name: np.zeros(shape[0], np.int64) for name, shape in parameter_shapes(config).items()}
    for target in expected_tensors(config, file_format).values():
        filled[target.array][target.start:target.stop] += 1
    assert all((rows == 1).all() for rows in filled.values())


# The arrays


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize("family", FAMILIES)
def test_arrays_have_the_names_shapes_and_types_of_the_model(family: str, dtype: jnp.dtype) -> None:
    arrays = load(GOLDEN / family, dtype)
    assert {name: array.shape for name, array in arrays.items()} == parameter_shapes(read_config(GOLDEN / family))
    assert all(array.dtype == (dtype if array.ndim > 1 else np.float32) for array in arrays.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_lands_where_it_should(family: str) -> None:
    arrays, file = load(GOLDEN / family), load_file(GOLDEN / family / "model.safetensors")
    config = read_config(GOLDEN / family)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        ours = {name.removeprefix(f"layers.{layer}."): array for name, array in arrays.items() if name.startswith(f"layers.{layer}.")}
        for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
            parts = [file[f"{prefix}.self_attn.{part}_proj.{kind}"] for part in "qkv"]
            np.testing.assert_array_equal(ours["qkv" if kind == "weight" else "qkv_bias"], np.concatenate(parts))
        gate_up = [file[f"{prefix}.mlp.{part}_proj.weight"] for part in ("gate", "up")]
        np.testing.assert_array_equal(ours["gate_up"], np.concatenate(gate_up))
        np.testing.assert_array_equal(ours["out"], file[f"{prefix}.self_attn.o_proj.weight"])
        np.testing.assert_array_equal(ours["down"], file[f"{prefix}.mlp.down_proj.weight"])
        np.testing.assert_array_equal(ours["input_norm"], file[f"{prefix}.input_layernorm.weight"])
        np.testing.assert_array_equal(ours["mlp_norm"], file[f"{prefix}.post_attention_layernorm.weight"])
        if config.qk_norm:
            np.testing.assert_array_equal(ours["q_norm"], file[f"{prefix}.self_attn.q_norm.weight"])
            np.testing.assert_array_equal(ours["k_norm"], file[f"{prefix}.self_attn.k_norm.weight"])
    np.testing.assert_array_equal(arrays["embed"], file["model.embed_tokens.weight"])
    np.testing.assert_array_equal(arrays["final_norm"], file["model.norm.weight"])
    if not config.tied_head:
        np.testing.assert_array_equal(arrays["head"], file["lm_head.weight"])


@pytest.mark.parametrize("stored", [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_half_precision_files_are_read_exactly(stored: np.dtype[np.generic], dtype: jnp.dtype, llama: Path) -> None:
    file = {name: tensor.astype(stored) for name, tensor in load_file(llama / "model.safetensors").items()}
    save_file(file, llama / "model.safetensors")
    arrays = load(llama, dtype)
    embed, norm = file["model.embed_tokens.weight"], file["model.norm.weight"]
    np.testing.assert_array_equal(arrays["embed"], embed.astype(np.float32).astype(dtype))
    np.testing.assert_array_equal(arrays["final_norm"], norm.astype(np.float32))


def test_biases_of_the_output_projection_are_read(llama: Path) -> None:
    change_config(llama, attention_bias=True)
    sizes = {"q": 64, "k": 32, "v": 32, "o": 64}
    change_tensors(llama, {
        f"model.layers.{layer}.self_attn.{part}_proj.bias": np.full(size, layer + size, np.float32)
        for layer in range(3) for part, size in sizes.items()
    })  # fmt: skip
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
    weight_map = {name: f"model-{index % 2 + 1:05}-of-00002.safetensors" for index, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_shard_that_is_not_there_is_named(llama: Path) -> None:
    shard(llama)
    (llama / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(StartupError, match=r"not there: model-00002-of-00002\.safetensors"):
        load(llama)


def test_single_file_of_another_name_is_read(llama: Path) -> None:
    (llama / "model.safetensors").rename(llama / "weights.safetensors")
    assert load(llama)["embed"].shape == (384, 64)


def test_missing_tensors_are_listed(llama: Path) -> None:
    change_tensors(llama, {"model.norm.weight": None, "model.layers.1.self_attn.k_proj.weight": None})
    with pytest.raises(StartupError, match=r"missing model\.layers\.1\.self_attn\.k_proj\.weight, model\.norm\.weight$"):
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
    with pytest.raises(StartupError, match=r"layers\.2\.self_attn\.q_proj\.weight is \[64, 32\], expected \[64, 64\]"):
        load(llama)


def test_harmless_extras_are_accepted(llama: Path) -> None:
    extras = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32), "lm_head.weight": np.zeros((384, 64), np.float32)}
    assert "head" not in load(change_tensors(llama, dict(extras)))


def test_number_type_we_do_not_read_is_named(llama: Path) -> None:
    change_tensors(llama, {"model.norm.weight": np.zeros(64, np.float64)})
    with pytest.raises(StartupError, match=r"model\.norm\.weight is stored as F64; supported are F32, F16, BF16"):
        load(llama)


def test_file_that_is_cut_short_is_one_line(llama: Path) -> None:
    path = llama / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(StartupError, match=r"cannot read .*model\.safetensors") as refusal:
        load(llama)
    assert "\n" not in str(refusal.value)


# Memory and progress


def write_big_float32_model(folder: Path) -> Path:
    """12 million parameters of zeros, most of them in one embedding; written sparsely."""
    (folder / "config.json").write_text(json.dumps(json.loads((GOLDEN / "llama" / "config.json").read_text()) | {
        "hidden_size": 512, "vocab_size": 16_384, "intermediate_size": 512, "head_dim": 128,
    }))  # fmt: skip
    entries, offset = {}, 0
    for name, target in expected_tensors(read_config(folder), Format.HUGGING_FACE).items():
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
    load(folder, BFLOAT16)  # whatever jax sets up once
    tracemalloc.start()
    try:
        arrays = load(folder, BFLOAT16)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    size = sum(array.nbytes for array in arrays.values())
    assert size > 20_000_000
    assert peak < size + 12_000_000  # the embedding alone would be 33 million bytes in float32


def test_progress_is_a_sentence_a_second() -> None:
    lines: list[str] = []
    now = 0.0
    progress = Progress("loading weights", 100, lines.append, clock=lambda: now)
    for step in range(1, 13):
        now = step / 2
        progress.advance(10)
    assert lines == [f"loading weights {percent} %" for percent in (20, 40, 60, 80, 100)]
