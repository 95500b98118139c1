"""GGUF files: header, configuration, the order of rotary rows, and each way of storing numbers.

Quantised blocks are compared with decoders written here one number at a time, after ggml's reference code.
"""

from __future__ import annotations

import dataclasses
import math
import re
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter, get_tensor_name_map, quants
from gguf.constants import GGML_QUANT_SIZES, MODEL_ARCH, MODEL_ARCH_NAMES
from numpy.typing import NDArray
from safetensors.numpy import load_file

from levserve.errors import StartupError
from levserve.gguf import header
from levserve.gguf.header import Value, keep_headers, read_header
from levserve.model.config import LinearScaling, Llama3Scaling, LongScaling, Rope, YarnScaling
from levserve.model.parameter_shapes import parameter_shapes
from levserve.weights.checkpoint import load_arrays, read_config
from levserve.weights.gguf_latent import arrange_latent
from levserve.weights.gguf_tensors import read_tensors

GOLDEN = Path(__file__).parents[1] / "golden"
FLOAT32, BFLOAT16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)
ARCHITECTURES = {
    "llama": "llama",
    "llama3-rope": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "phi2": "phi2",
    "phi3": "phi3",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "granite": "granite",
    "cohere": "command-r",
    "gpt-neox": "gptneox",
    "mixtral": "llama",
    "qwen3-moe": "qwen3moe",
    "qwen2-moe": "qwen2moe",
    "glm4-moe": "glm4moe",
    "deepseek2": "deepseek2",
    "deepseek3": "deepseek2",
    "gpt-oss": "gpt-oss",
    "gpt2": "gpt2",
}

Tensors = dict[str, tuple[NDArray[np.generic], Kind]]


# Writing GGUF files as llama.cpp's converter does


def metadata_of(family: str) -> dict[str, Value]:
    config, arch = read_config(GOLDEN / family), ARCHITECTURES[family]
    own: dict[str, Value] = {
        "block_count": config.num_layers,
        "context_length": config.max_position,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
    }
    norm = "layer_norm" if config.has_layer_norms else "layer_norm_rms"
    own[f"attention.{norm}_epsilon"] = config.norm_eps
    if config.rope_theta is not None:
        rotary_size = config.rotary_size or config.head_dim
        own |= {"rope.dimension_count": rotary_size, "rope.freq_base": config.rope_theta}
    if config.num_experts:
        own |= {"expert_count": config.num_experts, "expert_used_count": config.experts_per_token}
    if family == "gpt-oss":
        own |= {"expert_feed_forward_length": config.intermediate_size, "attention.sliding_window": 8}
        own |= {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_beta_fast": 8.0}
        own |= {"rope.scaling.original_context_length": 64}
    if arch == "qwen3moe":
        own |= {"expert_feed_forward_length": config.intermediate_size, "feed_forward_length": 128}
    if arch in ("qwen2moe", "glm4moe", "deepseek2"):
        own |= {"expert_feed_forward_length": config.intermediate_size}
        own |= {"feed_forward_length": config.dense_size, "leading_dense_block_count": 1}
    if arch == "qwen2moe":
        own["expert_shared_feed_forward_length"] = config.shared_size
    if arch == "glm4moe":
        own |= {"block_count": config.num_layers + 1, "nextn_predict_layers": 1}
    if config.latent is not None:
        own |= {"attention.kv_lora_rank": config.latent.kv_rank, "attention.head_count_kv": 1}
        own |= {
            "attention.key_length_mla": config.head_dim,
            "attention.value_length_mla": config.latent.value_size,
        }
        own |= {"attention.key_length": 40, "attention.value_length": 32}
        if config.latent.query_rank:
            own["attention.q_lora_rank"] = config.latent.query_rank
    if family == "deepseek3":
        own |= {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_beta_fast": 8.0}
        own |= {"rope.scaling.original_context_length": 64, "rope.scaling.yarn_log_multiplier": 0.09}
    if arch in ("glm4moe", "deepseek2"):
        routing = config.routing
        own |= {"expert_shared_count": config.shared_size // config.intermediate_size}
        own |= {"expert_weights_norm": routing.renormalises, "expert_weights_scale": routing.scale}
        own |= {"expert_gating_func": 1 if family == "deepseek2" else 2}
        own["expert_group_count"] = routing.num_groups
        own["expert_group_used_count"] = routing.groups_per_token
    if arch in ("gemma2", "gemma3"):
        own["attention.sliding_window"] = 8
    if family == "olmo3":
        own |= {"attention.sliding_window": 8, "attention.sliding_window_pattern": [True, False, True]}
        own |= {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_beta_fast": 8.0}
        own |= {"rope.scaling.original_context_length": 64}
    if arch == "granite":
        own |= {"embedding_scale": 6.0, "attention.scale": 0.2, "residual_scale": 0.4, "logit_scale": 1.5}
    if arch == "command-r":
        own["logit_scale"] = 0.5
    if arch == "gptneox":
        own["use_parallel_residual"] = True
    if arch == "gemma2":
        own |= {"attn_logit_softcapping": 30.0, "final_logit_softcapping": 20.0}
    return {
        "general.architecture": arch,
        **{f"{arch}.{key}": value for key, value in own.items()},
        "tokenizer.ggml.tokens": [f"t{token}" for token in range(config.vocab_size)],
    }


def tensors_of(family: str) -> Tensors:
    """A golden folder's weights as llama.cpp's converter writes them, under the gguf package's names."""
    arch, file = ARCHITECTURES[family], load_file(GOLDEN / family / "model.safetensors")
    config = read_config(GOLDEN / family)
    names = get_tensor_name_map(
        next(key for key, name in MODEL_ARCH_NAMES.items() if name == arch), config.num_layers + 1
    )
    plain_names = get_tensor_name_map(MODEL_ARCH.QWEN2, config.num_layers)  # of layers without experts
    experts: dict[str, list[NDArray[np.float32]]] = {}
    tensors: Tensors = {}
    for name in sorted(
        file, key=lambda name: [int(word) if word.isdigit() else 0 for word in name.split(".")]
    ):
        tensor = file[name]
        if family == "gpt-oss" and "experts." in name:
            tensors |= {part: (matrix, Kind.F32) for part, matrix in split_experts(name, tensor)}
            continue
        if family == "gpt-oss" and name.endswith("sinks"):
            name += ".weight"
        if arch in ("llama", "granite") and (".q_proj" in name or ".k_proj" in name):
            tensor = permute(tensor, config.num_heads if ".q_proj" in name else config.num_kv_heads)
        if "query_key_value" in name:
            by_head = tensor.reshape(config.num_heads, 3, config.head_dim, -1)
            tensor = np.ascontiguousarray(by_head.swapaxes(0, 1)).reshape(tensor.shape)
        if arch == "gpt2" and re.search(r"\.c_\w+\.weight", name):
            tensor = np.ascontiguousarray(tensor.T)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
        if (family == "gemma2" and ".q_proj" in name) or (family == "gemma3" and ".q_norm" in name):
            tensor = tensor * np.float32(
                (config.head_dim / 24) ** 0.5
            )  # llama.cpp only scales by the head size
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        if name.endswith("shared_expert_gate.weight"):
            tensor = tensor[0]
        if name.endswith("kv_b_proj.weight"):
            layer = name.split(".")[2]
            keys, values = np.split(tensor.reshape(config.num_heads, -1, tensor.shape[-1]), [24], axis=1)
            tensors[f"blk.{layer}.attn_k_b.weight"] = np.ascontiguousarray(keys.swapaxes(1, 2)), Kind.F32
            tensors[f"blk.{layer}.attn_v_b.weight"] = np.ascontiguousarray(values), Kind.F32
            continue
        general = re.sub(r"experts\.\d+\.", "experts.", name)
        ends = (".weight", ".bias")
        converted = names.get_name(general, ends) or plain_names.get_name(general, ends)
        assert converted is not None, name
        if ".experts." in name:
            experts.setdefault(converted, []).append(tensor)
        else:
            tensors[converted] = (tensor, Kind.F32)
    return tensors | {name: (np.stack(stacked), Kind.F32) for name, stacked in experts.items()}


def split_experts(name: str, tensor: NDArray[np.float32]) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Splits gpt-oss's experts [expert, in, out], whose gate and up rows alternate, as llama.cpp does."""
    layer, is_bias = name.split(".")[2], name.endswith("_bias")
    rows = tensor if is_bias else tensor.swapaxes(1, 2)
    parts = {"gate": rows[:, ::2], "up": rows[:, 1::2]} if "gate_up" in name else {"down": rows}
    for part, found in parts.items():
        yield f"blk.{layer}.ffn_{part}_exps.{'bias' if is_bias else 'weight'}", np.ascontiguousarray(found)


def permute(weights: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """convert_hf_to_gguf.py's LlamaModel.permute."""
    halves = weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weights.shape))


def write_gguf(path: Path, metadata: dict[str, Value], tensors: Tensors, max_tensors: int = 0) -> Path:
    """Writes one file, or files of at most `max_tensors` tensors, named by the gguf package after `path`."""
    writer = GGUFWriter(path, str(metadata["general.architecture"]), split_max_tensors=max_tensors)
    for key, value in metadata.items():
        if key != "general.architecture":
            add_value(writer, key, value)
    for name, (tensor, kind) in tensors.items():
        writer.add_tensor(name, tensor, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_value(writer: GGUFWriter, key: str, value: Value) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)


def golden_gguf(folder: Path, family: str = "llama", changes: dict[str, Value] | None = None) -> Path:
    """A golden folder as a GGUF file; `changes` are keys of the architecture."""
    own: dict[str, Value] = {
        f"{ARCHITECTURES[family]}.{key}": value for key, value in (changes or {}).items()
    }
    return write_gguf(folder / "model.gguf", metadata_of(family) | own, tensors_of(family))


# The header


def test_metadata_and_tensors_come_back_as_written(tmp_path: Path) -> None:
    metadata: dict[str, Value] = {
        "general.architecture": "llama",
        "a.text": "grüße",
        "a.flag": True,
        "a.whole": 7,
        "a.real": 0.5,
    }
    metadata |= {"a.words": ["a", "", "ü"], "a.numbers": [1, -2, 3], "a.reals": [0.5, 0.25]}
    numbers = np.arange(6, dtype=np.float32).reshape(2, 3)
    header = read_header(
        write_gguf(tmp_path / "x.gguf", metadata, {"t": (numbers, Kind.F32), "u": (numbers, Kind.F32)})
    )
    assert header.metadata == metadata
    assert header.tensors["u"].shape == (2, 3)
    np.testing.assert_array_equal(header.tensors["u"].data.view(np.float32), numbers.reshape(-1))


def test_header_is_read_once_while_it_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "x.gguf", {"general.architecture": "llama"}, {})
    read: list[Path] = []
    read_file = header._read_file

    def count(path: Path) -> header.GGUFHeader:
        read.append(path)
        return read_file(path)

    monkeypatch.setattr(header, "_read_file", count)
    assert read_header(path) is not read_header(path) and len(read) == 2
    with keep_headers():
        with keep_headers():
            first = read_header(path)
        assert read_header(path) is first and len(read) == 3
        write_gguf(path, {"general.architecture": "llama", "a.whole": 7}, {})
        assert read_header(path).metadata["a.whole"] == 7 and len(read) == 4
        with pytest.raises(StartupError, match="cannot read"):
            read_header(tmp_path / "none.gguf")
    assert read_header(path) is not read_header(path)


def test_alignment_of_the_file_is_followed(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_custom_alignment(256)
    for name in "ab":
        writer.add_tensor(name, np.full(3, ord(name), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensors = read_header(tmp_path / "x.gguf").tensors
    assert [tensors[name].data.view(np.float32)[0] for name in "ab"] == [97, 98]


def test_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"PK\3\4 something else")
    with pytest.raises(StartupError, match="is not a GGUF file"):
        read_config(tmp_path / "x.gguf")


def test_first_version_of_the_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0))
    with pytest.raises(StartupError, match="GGUF version 1 is not supported"):
        read_config(tmp_path / "x.gguf")


@pytest.mark.parametrize("kept", [4, 10, 30, 200, 5_000, -1])
def test_file_that_is_cut_short_is_one_line(kept: int, tmp_path: Path) -> None:
    path = golden_gguf(tmp_path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(StartupError, match=r"cannot read .*model\.gguf: .+") as refusal:
        read_config(path)
    assert "\n" not in str(refusal.value)


def test_file_that_ends_within_its_header_is_called_that_wherever_it_ends(tmp_path: Path) -> None:
    metadata: dict[str, Value] = {
        "general.architecture": "llama",
        "a.words": ["grüße", "ü" * 20],
        "a.numbers": [1, -2, 3],
    }
    path = write_gguf(tmp_path / "x.gguf", metadata, {"t": (np.zeros(4, np.float32), Kind.F32)})
    whole = path.read_bytes()
    for kept in range(4, whole.index(b"t" + struct.pack("<IQ", 1, 4)) + 13):
        path.write_bytes(whole[:kept])
        with pytest.raises(StartupError, match="it ends in the middle of its header"):
            read_header(path)


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("a.nested", struct.pack("<IIQ", 9, 9, 1) * 2000, "an array of arrays"),
        ("split.count", struct.pack("<IIQ", 9, 4, 0), r"split.count = \[\] is not a number"),
        ("split.count", struct.pack("<IQ", 8, 1) + b"x", "split.count = 'x' is not a number"),
    ],
)
def test_odd_values_in_a_header_are_refused(key: str, value: bytes, named: str, tmp_path: Path) -> None:
    name = struct.pack("<Q", len(key)) + key.encode()
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + name + value)
    with pytest.raises(StartupError, match=named):
        read_header(tmp_path / "x.gguf")


def test_text_in_a_header_that_is_not_utf_8_is_called_damage(tmp_path: Path) -> None:
    metadata: dict[str, Value] = {"general.architecture": "llama", "a.word": "grüße"}
    path = write_gguf(tmp_path / "x.gguf", metadata, {"t": (np.zeros(4, np.float32), Kind.F32)})
    path.write_bytes(path.read_bytes().replace("ü".encode(), b"\xff\xff"))
    with pytest.raises(StartupError, match="its header is damaged; a text in it is not UTF-8"):
        read_header(path)


def test_tensor_that_lies_beyond_the_end_is_named_with_its_place(tmp_path: Path) -> None:
    path = golden_gguf(tmp_path, "qwen3-moe")
    size = path.stat().st_size
    last = list(read_header(path).tensors)[-1]
    path.write_bytes(path.read_bytes()[: size - 1000])
    with pytest.raises(
        StartupError,
        match=rf"it has {size - 1000:,} bytes, but {re.escape(last)} is at [\d,]+ to {size:,}: ",
    ):
        read_config(path)


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [(32, 33, "b starts at .*, not at a multiple of 32"), (b"b", b"a", "a occurs twice")],
)
def test_tensor_in_a_wrong_place_is_named(
    old: int | bytes, new: int | bytes, named: str, tmp_path: Path
) -> None:
    def entry(name: int | bytes, offset: int | bytes) -> bytes:
        return struct.pack(
            "<Q1sIQIQ",
            1,
            name if isinstance(name, bytes) else b"b",
            1,
            4,
            0,
            offset if isinstance(offset, int) else 32,
        )

    path = write_gguf(
        tmp_path / "x.gguf",
        {"general.architecture": "llama"},
        {name: (np.zeros(4, np.float32), Kind.F32) for name in "ab"},
    )
    whole = path.read_bytes()
    assert whole.count(entry(old, old)) == 1
    path.write_bytes(whole.replace(entry(old, old), entry(new, new)))
    with pytest.raises(StartupError, match=named):
        read_header(path)


def test_damaged_header_is_never_more_than_one_line(tmp_path: Path) -> None:
    """With a damaged name or number, a file may still be read; other damage is refused like any bad file."""
    path, random = golden_gguf(tmp_path), np.random.default_rng(0)
    whole = np.frombuffer(path.read_bytes(), np.uint8)
    for _ in range(300):
        damaged = whole.copy()
        damaged[random.integers(4, 1_000, 3)] = random.integers(0, 256, 3)
        path.write_bytes(damaged.tobytes())
        try:
            read_config(path)
        except StartupError as refusal:
            assert "\n" not in str(refusal)


# The configuration and whole models


WHOLE = (
    *("llama", "qwen2", "qwen3", "phi2", "phi3", "olmo2", "olmo3", "mixtral", "qwen3-moe", "gpt2", "gemma"),
    *("granite", "gpt-neox", "cohere", "qwen2-moe", "glm4-moe", "deepseek2"),
)
"""Families that a GGUF file describes completely."""


@pytest.mark.parametrize("family", WHOLE)
def test_gguf_says_the_same_as_the_folder_it_came_from(family: str, tmp_path: Path) -> None:
    assert read_config(golden_gguf(tmp_path, family)) == read_config(GOLDEN / family)


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_gguf_of_a_gemma_says_all_but_the_scale_of_scores(family: str, tmp_path: Path) -> None:
    expected = dataclasses.replace(read_config(GOLDEN / family), attention_scale=0.25)
    assert read_config(golden_gguf(tmp_path, family)) == expected


def test_gguf_of_gpt_oss_says_all_but_the_limit_of_its_gate(tmp_path: Path) -> None:
    config = read_config(golden_gguf(tmp_path, "gpt-oss"))
    assert config == dataclasses.replace(read_config(GOLDEN / "gpt-oss"), gate_limit=7.0)
    assert isinstance(config.rope_scaling, YarnScaling) and not config.rope_scaling.truncates


def test_gguf_of_a_deepseek_whose_context_was_stretched_has_no_factor_for_rotary_positions(
    tmp_path: Path,
) -> None:
    """llama.cpp takes the factors of positions and scores to be equal, as they are in published models."""
    config, folder = read_config(golden_gguf(tmp_path, "deepseek3")), read_config(GOLDEN / "deepseek3")
    assert isinstance(config.rope_scaling, YarnScaling) and isinstance(folder.rope_scaling, YarnScaling)
    assert config.rope_scaling.attention_factor == 1.0
    assert config.attention_scale == pytest.approx(folder.attention_scale, rel=1e-6)
    expected = dataclasses.replace(
        folder, rope_scaling=config.rope_scaling, attention_scale=config.attention_scale
    )
    assert config == expected


def test_early_files_of_deepseek_have_the_expanding_matrix_whole(tmp_path: Path) -> None:
    folder = GOLDEN / "deepseek2"
    config, stored = read_config(folder), load_file(folder / "model.safetensors")
    metadata, tensors = metadata_of("deepseek2"), tensors_of("deepseek2")
    for key in ("attention.key_length_mla", "attention.value_length_mla", "expert_gating_func"):
        del metadata[f"deepseek2.{key}"]
    metadata |= {"deepseek2.attention.key_length": config.head_dim, "deepseek2.attention.value_length": 16}
    metadata["deepseek2.attention.head_count_kv"] = config.num_heads
    for layer in range(config.num_layers):
        del tensors[f"blk.{layer}.attn_k_b.weight"], tensors[f"blk.{layer}.attn_v_b.weight"]
        whole = stored[f"model.layers.{layer}.self_attn.kv_b_proj.weight"]
        tensors[f"blk.{layer}.attn_kv_b.weight"] = whole, Kind.F32
    path = write_gguf(tmp_path / "early.gguf", metadata, tensors)
    assert read_config(path) == config
    arrays, expected = (load_arrays(at, config, FLOAT32, report=print) for at in (path, folder))
    np.testing.assert_array_equal(arrays["layers.1.kv_up"], expected["layers.1.kv_up"])


def test_expanding_matrix_is_read_in_pieces_of_any_size(tmp_path: Path) -> None:
    path = golden_gguf(tmp_path, "deepseek2")
    config = read_config(path)
    stored = dict(arrange_latent(read_tensors(path, config.head_dim), config))["blk.1.attn_kv_b.weight"]
    whole = load_file(GOLDEN / "deepseek2" / "model.safetensors")["model.layers.1.self_attn.kv_b_proj.weight"]
    assert stored.shape == whole.shape
    for start, stop in ((0, len(whole)), (0, 1), (39, 41), (50, 155)):
        np.testing.assert_array_equal(stored.read(start, stop), whole[start:stop])


def test_a_layer_of_glm_that_drafts_is_left_out(tmp_path: Path) -> None:
    tensors = tensors_of("glm4-moe")
    extra = {"blk.2.nextn.eh_proj.weight": (64, 128), "blk.2.attn_q.weight": (64, 64)}
    tensors |= {name: (np.zeros(shape, np.float32), Kind.F32) for name, shape in extra.items()}
    path = write_gguf(tmp_path / "model.gguf", metadata_of("glm4-moe"), tensors)
    assert read_config(path).num_layers == 2
    assert not any("layers.2" in name for name in load_arrays(path, read_config(path), FLOAT32, report=print))


@pytest.mark.parametrize("family", [family for family in ARCHITECTURES if family not in ("gemma2", "gemma3")])
def test_gguf_loads_to_the_same_arrays_as_the_folder(family: str, tmp_path: Path) -> None:
    path, folder = golden_gguf(tmp_path, family), GOLDEN / family
    arrays = load_arrays(path, read_config(path), FLOAT32, report=print)
    expected = load_arrays(folder, read_config(folder), FLOAT32, report=print)
    assert arrays.keys() == expected.keys()
    for name in arrays:
        np.testing.assert_array_equal(arrays[name], expected[name], err_msg=name)


def test_rotary_order_is_restored_in_pieces_of_any_size(tmp_path: Path) -> None:
    stored = dict(read_tensors(golden_gguf(tmp_path), head_dim=16))["blk.1.attn_q.weight"]
    expected = load_file(GOLDEN / "llama" / "model.safetensors")["model.layers.1.self_attn.q_proj.weight"]
    for start, stop in ((0, 64), (0, 1), (3, 21), (63, 64)):
        np.testing.assert_array_equal(stored.read(start, stop), expected[start:stop])


def test_biases_of_a_llama_are_found_and_put_in_order(tmp_path: Path) -> None:
    bias = np.arange(64, dtype=np.float32)
    tensors = tensors_of("llama")
    for layer in range(3):
        tensors |= {
            f"blk.{layer}.attn_q.bias": (permute(bias, 4), Kind.F32),
            f"blk.{layer}.attn_output.bias": (bias + 100, Kind.F32),
        }
        tensors |= {
            f"blk.{layer}.attn_k.bias": (permute(bias[:32], 2), Kind.F32),
            f"blk.{layer}.attn_v.bias": (bias[:32], Kind.F32),
        }
    path = write_gguf(tmp_path / "model.gguf", metadata_of("llama"), tensors)
    arrays = load_arrays(path, read_config(path), FLOAT32, report=print)
    np.testing.assert_array_equal(arrays["layers.2.qkv_bias"], np.concatenate([bias, bias[:32], bias[:32]]))
    np.testing.assert_array_equal(arrays["layers.0.out_bias"], bias + 100)


def llama3_factors(head_dim: int, theta: float, factor: float, original: int) -> NDArray[np.float32]:
    """The factors as convert_hf_to_gguf.py computes them, frequency by frequency."""
    factors = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (index / head_dim)
        if wavelength < original / 4.0:
            factors.append(1.0)
        elif wavelength > original / 1.0:
            factors.append(factor)
        else:
            smooth = (original / wavelength - 1.0) / (4.0 - 1.0)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


@pytest.mark.parametrize(("factor", "original"), [(8.0, 8192), (32.0, 8192), (8.0, 32)])
def test_llama3_scaling_is_known_by_its_factors(factor: float, original: int, tmp_path: Path) -> None:
    metadata = metadata_of("llama3-rope") | (
        {} if original == 8192 else {"llama.rope.scaling.original_context_length": original}
    )
    tensors = tensors_of("llama3-rope") | {
        "rope_freqs.weight": (llama3_factors(32, 500_000.0, factor, original), Kind.F32)
    }
    path = write_gguf(tmp_path / "model.gguf", metadata, tensors)
    config = read_config(path)
    assert config.rope_scaling == Llama3Scaling(
        factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=original
    )
    assert load_arrays(path, config, FLOAT32, report=print).keys() == parameter_shapes(config).keys()


def test_factors_that_are_all_one_mean_no_scaling(tmp_path: Path) -> None:
    tensors = tensors_of("llama") | {"rope_freqs.weight": (np.ones(8, np.float32), Kind.F32)}
    assert (
        read_config(write_gguf(tmp_path / "model.gguf", metadata_of("llama"), tensors)).rope_scaling is None
    )


def test_other_rotary_factors_are_refused(tmp_path: Path) -> None:
    tensors = tensors_of("llama") | {"rope_freqs.weight": (np.linspace(1, 8, 8, dtype=np.float32), Kind.F32)}
    with pytest.raises(StartupError, match=r"rope_freqs\.weight does not follow Llama 3"):
        read_config(write_gguf(tmp_path / "model.gguf", metadata_of("llama"), tensors))


def test_head_counts_written_once_a_layer_are_read_when_equal(tmp_path: Path) -> None:
    assert (
        read_config(golden_gguf(tmp_path, changes={"attention.head_count_kv": [2, 2, 2]})).num_kv_heads == 2
    )
    with pytest.raises(StartupError, match=r"attention\.head_count_kv = \[2, 1, 2\]"):
        read_config(golden_gguf(tmp_path, changes={"attention.head_count_kv": [2, 1, 2]}))


def test_absent_optional_keys_follow_from_the_others(tmp_path: Path) -> None:
    optional = (
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "rope.dimension_count",
        "rope.freq_base",
    )
    metadata = {
        key: value
        for key, value in metadata_of("llama").items()
        if key.removeprefix("llama.") not in optional
    }
    config = read_config(write_gguf(tmp_path / "model.gguf", metadata, tensors_of("llama")))
    assert (config.num_kv_heads, config.head_dim, config.rope_theta) == (4, 16, 10_000.0)


REFUSED: list[tuple[str, Value]] = [
    ("rope.scaling.type", "longrope"),
    ("rope.scaling.yarn_log_multiplier", 0.1),
    ("rope.scale_linear", 2.0),
    ("rope.dimension_count", 8),
    ("attention.value_length", 32),
    ("attention.sliding_window", 4096),
    ("attention.causal", False),
    ("attn_logit_softcapping", 50.0),
    ("final_logit_softcapping", 30.0),
    ("logit_scale", 0.0625),
    ("expert_used_count", 0),
    ("something_new", 3),
    ("block_count", 0),
]


@pytest.mark.parametrize(("key", "value"), REFUSED)
def test_unsupported_metadata_is_refused_by_name_and_value(key: str, value: Value, tmp_path: Path) -> None:
    with pytest.raises(StartupError) as refusal:
        read_config(golden_gguf(tmp_path, changes={"expert_count": 4} | {key: value}))
    assert f"llama: {key} = {value!r}" in str(refusal.value)


def test_keys_of_one_architecture_are_refused_in_another(tmp_path: Path) -> None:
    for family, key in (
        ("qwen2", "expert_count"),
        ("qwen3", "attention.sliding_window"),
        ("llama", "residual_scale"),
        ("gemma", "use_parallel_residual"),
        ("phi3", "attn_logit_softcapping"),
    ):
        with pytest.raises(StartupError, match=f"{ARCHITECTURES[family]}: {key} = 8 is not supported"):
            read_config(golden_gguf(tmp_path, family, {key: 8}))


def test_linear_scaling_is_read(tmp_path: Path) -> None:
    config = read_config(
        golden_gguf(tmp_path, "gemma3", {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0})
    )
    assert config.rope_scaling == LinearScaling(8.0)
    assert config.rope(0) == Rope(16, 10_000.0, None) and config.rope(5) == Rope(16, 1e6, LinearScaling(8.0))


def test_layers_with_a_window_may_be_listed(tmp_path: Path) -> None:
    pattern: list[Value] = [True, False] * 3 + [True]
    config = read_config(golden_gguf(tmp_path, "gemma3", {"attention.sliding_window_pattern": pattern}))
    assert config.windows == (8, None) * 3 + (8,)
    with pytest.raises(StartupError, match=r"sliding_window_pattern = \[True\]"):
        read_config(golden_gguf(tmp_path, "gemma3", {"attention.sliding_window_pattern": [True]}))


def test_largest_gemmas_scale_scores_by_their_width(tmp_path: Path) -> None:
    path = golden_gguf(
        tmp_path, "gemma2", {"block_count": 46, "embedding_length": 4608, "attention.head_count": 32}
    )
    assert read_config(path).attention_scale == 144**-0.5


def test_factors_of_phi3_are_read_and_counted(tmp_path: Path) -> None:
    def write(num_factors: int) -> Path:
        factors = {
            f"rope_factors_{kind}.weight": np.full(num_factors, size, np.float32)
            for kind, size in (("short", 1.5), ("long", 4))
        }
        metadata = metadata_of("phi3") | {
            "phi3.rope.scaling.original_context_length": 64,
            "phi3.rope.scaling.attn_factor": 1.25,
        }
        return write_gguf(
            tmp_path / "model.gguf",
            metadata,
            tensors_of("phi3") | {name: (f, Kind.F32) for name, f in factors.items()},
        )

    path = write(8)
    config = read_config(path)
    assert config.rope_scaling == LongScaling((1.5,) * 8, (4.0,) * 8, 64, 1.25)
    assert load_arrays(path, config, FLOAT32, report=print).keys() == parameter_shapes(config).keys()
    with pytest.raises(
        StartupError, match="rope_factors_short.weight and rope_factors_long.weight must have 8 numbers each"
    ):
        read_config(write(7))


def test_experts_in_tensors_of_their_own_are_read(tmp_path: Path) -> None:
    tensors = tensors_of("mixtral")
    for name in [name for name in tensors if "_exps" in name]:
        stacked, kind = tensors.pop(name)
        tensors |= {
            name.replace("_exps", f".{expert}"): (matrix, kind) for expert, matrix in enumerate(stacked)
        }
    path = write_gguf(tmp_path / "model.gguf", metadata_of("mixtral"), tensors)
    arrays, expected = (
        load_arrays(at, read_config(at), FLOAT32, report=print) for at in (path, GOLDEN / "mixtral")
    )
    for name in expected:
        np.testing.assert_array_equal(arrays[name], expected[name], err_msg=name)


def test_neutral_metadata_is_accepted(tmp_path: Path) -> None:
    path = golden_gguf(tmp_path, changes={"rope.scaling.type": "none", "expert_count": 0, "vocab_size": 384})
    assert read_config(path) == read_config(GOLDEN / "llama")


def test_other_architecture_is_refused_with_the_list_of_ours(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "model.gguf", metadata_of("llama") | {"general.architecture": "mamba"}, tensors_of("llama")
    )
    with pytest.raises(
        StartupError,
        match="'mamba' is not supported; supported are llama, qwen2, qwen3, qwen3moe, qwen2moe, glm4moe, deepseek2, gpt-oss",
    ):
        read_config(path)


def split_gguf(folder: Path) -> list[Path]:
    write_gguf(folder / "tiny.gguf", metadata_of("llama"), tensors_of("llama"), max_tensors=12)
    return sorted(folder.iterdir())


def test_a_model_in_parts_is_the_model_in_one_file(tmp_path: Path) -> None:
    first, *others = split_gguf(tmp_path)
    assert first.name == "tiny-00001-of-00003.gguf" and len(others) == 2
    config = read_config(first)
    assert config == read_config(GOLDEN / "llama")
    arrays = load_arrays(first, config, FLOAT32, report=print)
    expected = load_arrays(GOLDEN / "llama", config, FLOAT32, report=print)
    assert arrays.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(arrays[name], expected[name], err_msg=name)


def test_parts_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    first, second, third = split_gguf(tmp_path)
    with pytest.raises(
        StartupError, match=r"name the first of them, whose name ends in -00001-of-00003\.gguf"
    ):
        read_header(second)
    renamed = first.rename(tmp_path / "tiny.gguf")
    with pytest.raises(StartupError, match="tiny.gguf is one of 3 files that make up a model"):
        read_header(renamed)
    renamed.rename(first)
    kept = third.read_bytes()
    third.write_bytes(second.read_bytes())
    with pytest.raises(StartupError, match=r"00003-of-00003\.gguf: split\.no = 1, expected 2"):
        read_header(first)
    third.write_bytes(kept)
    second.unlink()
    with pytest.raises(StartupError, match=r"cannot read .*-00002-of-00003\.gguf: .*No such file"):
        read_header(first)


def test_missing_extra_and_misshapen_tensors_are_listed(tmp_path: Path) -> None:
    tensors = tensors_of("llama")
    del tensors["blk.1.ffn_up.weight"]
    zeros = np.zeros((2, 32), np.float32)
    tensors |= {"blk.0.ffn_gate_inp.weight": (zeros, Kind.F32), "output_norm.weight": (zeros[0], Kind.F32)}
    path = write_gguf(tmp_path / "model.gguf", metadata_of("llama"), tensors)
    with pytest.raises(StartupError) as refusal:
        load_arrays(path, read_config(path), FLOAT32, report=print)
    for part in (
        "missing blk.1.ffn_up.weight",
        "unexpected blk.0.ffn_gate_inp.weight",
        "output_norm.weight is [32], expected [64]",
    ):
        assert part in str(refusal.value)


# Quantised blocks, one number at a time


def half(block: bytes, offset: int) -> float:
    (value,) = struct.unpack_from("<e", block, offset)
    return float(value)


def decode_q4(block: bytes, *, offset: int, scale: float, low: float) -> list[float]:
    return [scale * (b & 15) + low for b in block[offset:]] + [scale * (b >> 4) + low for b in block[offset:]]


def decode_q5(block: bytes, *, offset: int, scale: float, low: float) -> list[float]:
    (high,) = struct.unpack_from("<I", block, offset)
    quads = [b & 15 for b in block[offset + 4 :]] + [b >> 4 for b in block[offset + 4 :]]
    return [scale * (quad | (high >> index & 1) << 4) + low for index, quad in enumerate(quads)]


def decode_q4_0(block: bytes) -> list[float]:
    return decode_q4(block, offset=2, scale=half(block, 0), low=-8 * half(block, 0))


def decode_q4_1(block: bytes) -> list[float]:
    return decode_q4(block, offset=4, scale=half(block, 0), low=half(block, 2))


def decode_q5_0(block: bytes) -> list[float]:
    return decode_q5(block, offset=2, scale=half(block, 0), low=-16 * half(block, 0))


def decode_q5_1(block: bytes) -> list[float]:
    return decode_q5(block, offset=4, scale=half(block, 0), low=half(block, 2))


def decode_q8_0(block: bytes) -> list[float]:
    return [half(block, 0) * number for number in struct.unpack_from("<32b", block, 2)]


def scale_and_min(scales: bytes, index: int) -> tuple[int, int]:
    """ggml's get_scale_min_k4: eight scales and eight minima of 6 bits in 12 bytes."""
    if index < 4:
        return scales[index] & 63, scales[index + 4] & 63
    return (scales[index + 4] & 15) | (scales[index - 4] >> 6) << 4, scales[index + 4] >> 4 | (
        scales[index] >> 6
    ) << 4


def decode_k(block: bytes, high: bytes, low: bytes) -> list[float]:
    """Q4_K and Q5_K: eight groups of 32; `high` holds each value's fifth bit, `low` its other four."""
    numbers = []
    for group in range(8):
        scale, minimum = scale_and_min(block[4:16], group)
        for index in range(32):
            quad = low[group // 2 * 32 + index] >> 4 * (group % 2) & 15
            fifth = high[index] >> group & 1
            numbers.append(half(block, 0) * scale * (quad + 16 * fifth) - half(block, 2) * minimum)
    return numbers


def decode_q4_k(block: bytes) -> list[float]:
    return decode_k(block, bytes(32), block[16:])


def decode_q5_k(block: bytes) -> list[float]:
    return decode_k(block, block[16:48], block[48:])


def decode_q6_k(block: bytes) -> list[float]:
    numbers = []
    for index in range(256):
        part, quarter, column = index // 128, index % 128 // 32, index % 32
        low = block[part * 64 + quarter % 2 * 32 + column] >> 4 * (quarter // 2) & 15
        high = block[128 + part * 32 + column] >> 2 * quarter & 3
        (scale,) = struct.unpack_from("<b", block, 192 + index // 16)
        numbers.append(half(block, 208) * scale * ((low | high << 4) - 32))
    return numbers


def decode_q2_k(block: bytes) -> list[float]:
    numbers = []
    for index in range(256):
        part, quarter, column = index // 128, index % 128 // 32, index % 32
        scale = block[part * 8 + quarter * 2 + column // 16]
        number = block[16 + part * 32 + column] >> 2 * quarter & 3
        numbers.append(half(block, 80) * (scale & 15) * number - half(block, 82) * (scale >> 4))
    return numbers


def decode_q3_k(block: bytes) -> list[float]:
    numbers = []
    for index in range(256):
        part, quarter, column = index // 128, index % 128 // 32, index % 32
        at = part * 8 + quarter * 2 + column // 16
        scale = (
            block[96 + at % 8] >> 4 * (at // 8) & 15 | (block[104 + at % 4] >> 2 * (at // 4) & 3) << 4
        ) - 32
        third = block[column] >> (part * 4 + quarter) & 1
        number = (block[32 + part * 32 + column] >> 2 * quarter & 3) - (0 if third else 4)
        numbers.append(half(block, 108) * scale * number)
    return numbers


IQ4_STEPS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def decode_iq4(quads: bytes, scale: float) -> list[float]:
    return [scale * IQ4_STEPS[b & 15] for b in quads] + [scale * IQ4_STEPS[b >> 4] for b in quads]


def decode_iq4_nl(block: bytes) -> list[float]:
    return decode_iq4(block[2:], half(block, 0))


def decode_iq4_xs(block: bytes) -> list[float]:
    (high,) = struct.unpack_from("<H", block, 2)
    numbers = []
    for group in range(8):
        scale = (block[4 + group // 2] >> 4 * (group % 2) & 15 | (high >> 2 * group & 3) << 4) - 32
        numbers += decode_iq4(block[8 + 16 * group : 24 + 16 * group], half(block, 0) * scale)
    return numbers


E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def decode_mxfp4(block: bytes) -> list[float]:
    """A power of two, and values of four bits: a sign, two bits of exponent and one of mantissa."""
    quads = [b & 15 for b in block[1:]] + [b >> 4 for b in block[1:]]
    return [2.0 ** (block[0] - 127) * E2M1[quad & 7] * (-1 if quad & 8 else 1) for quad in quads]


DECODERS: dict[Kind, Callable[[bytes], list[float]]] = {
    Kind.Q8_0: decode_q8_0,
    Kind.Q4_0: decode_q4_0,
    Kind.Q4_1: decode_q4_1,
    Kind.Q5_0: decode_q5_0,
    Kind.Q5_1: decode_q5_1,
    Kind.Q2_K: decode_q2_k,
    Kind.Q3_K: decode_q3_k,
    Kind.Q4_K: decode_q4_k,
    Kind.Q5_K: decode_q5_k,
    Kind.Q6_K: decode_q6_k,
    Kind.IQ4_NL: decode_iq4_nl,
    Kind.IQ4_XS: decode_iq4_xs,
    Kind.MXFP4: decode_mxfp4,
}
HALVES = {
    Kind.Q2_K: (80, 82),
    Kind.Q3_K: (108,),
    Kind.Q4_1: (0, 2),
    Kind.Q5_1: (0, 2),
    Kind.Q4_K: (0, 2),
    Kind.Q5_K: (0, 2),
    Kind.Q6_K: (208,),
    Kind.MXFP4: (),
}


def random_blocks(kind: Kind, num_rows: int, blocks_per_row: int) -> NDArray[np.uint8]:
    """Blocks of random bits, with scales that are ordinary numbers."""
    random = np.random.default_rng(kind)
    blocks = random.integers(0, 256, (num_rows, blocks_per_row, GGML_QUANT_SIZES[kind][1]), np.uint8)
    if kind is Kind.MXFP4:
        blocks[..., 0] = random.integers(117, 137, blocks.shape[:2])
    for offset in HALVES.get(kind, (0,)):
        blocks[..., offset : offset + 2] = (
            random.uniform(-1, 1, blocks.shape[:2]).astype(np.float16)[..., None].view(np.uint8)
        )
    return blocks.reshape(num_rows, -1)


@pytest.mark.parametrize("kind", DECODERS)
def test_quantised_blocks_decode_as_ggml_says(kind: Kind, tmp_path: Path) -> None:
    packed = random_blocks(kind, num_rows=5, blocks_per_row=2)
    path = write_gguf(tmp_path / "x.gguf", {"general.architecture": "llama"}, {"t": (packed, kind)})
    tensor = dict(read_tensors(path, head_dim=16))["t"]
    block_bytes = GGML_QUANT_SIZES[kind][1]
    expected = [
        list(chain.from_iterable(DECODERS[kind](bytes(block)) for block in row.reshape(-1, block_bytes)))
        for row in packed
    ]
    assert tensor.shape == np.shape(expected)
    for start, stop in ((0, 5), (3, 4)):
        np.testing.assert_allclose(
            tensor.read(start, stop).astype(np.float64), np.array(expected[start:stop]), rtol=1e-5, atol=1e-6
        )


STEPS = [
    (Kind.Q8_0, 2 / 127),
    (Kind.Q4_0, 2 / 8),
    (Kind.Q4_1, 2 / 15),
    (Kind.Q5_0, 2 / 16),
    (Kind.Q5_1, 2 / 31),
]


@pytest.mark.parametrize(("kind", "step"), STEPS)
def test_quantised_model_loads_near_its_numbers(kind: Kind, step: float, tmp_path: Path) -> None:
    tensors = tensors_of("llama")
    for name, (tensor, _) in tensors.items():
        if tensor.ndim == 2:
            tensors[name] = (quants.quantize(np.clip(tensor, -1, 1).astype(np.float32), kind), kind)
    path = write_gguf(tmp_path / "model.gguf", metadata_of("llama"), tensors)
    arrays = load_arrays(path, read_config(path), FLOAT32, report=print)
    folder = load_arrays(GOLDEN / "llama", read_config(GOLDEN / "llama"), FLOAT32, report=print)
    for name, array in arrays.items():
        exact = np.clip(folder[name], -1, 1) if array.ndim == 2 else np.asarray(folder[name])
        np.testing.assert_allclose(array, exact, rtol=0, atol=step if array.ndim == 2 else 0, err_msg=name)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_half_precision_is_read_exactly(kind: Kind, dtype: jnp.dtype, tmp_path: Path) -> None:
    exact = np.random.default_rng(0).integers(-128, 128, (384, 64)).astype(np.float32)
    tensors = tensors_of("llama") | {"token_embd.weight": (quants.quantize(exact, kind), kind)}
    path = write_gguf(tmp_path / "model.gguf", metadata_of("llama"), tensors)
    np.testing.assert_array_equal(
        load_arrays(path, read_config(path), dtype, report=print)["embed"], exact.astype(dtype)
    )


def test_kind_we_do_not_read_is_named(tmp_path: Path) -> None:
    tensors = tensors_of("llama") | {
        "token_embd.weight": (quants.quantize(np.zeros((384, 256), np.float32), Kind.TQ1_0), Kind.TQ1_0)
    }
    path = write_gguf(tmp_path / "model.gguf", metadata_of("llama"), tensors)
    with pytest.raises(
        StartupError, match=r"token_embd\.weight is stored as TQ1_0; supported are F32, F16, BF16, Q8_0"
    ):
        load_arrays(path, read_config(path), FLOAT32, report=print)


# The bundled model


def test_bundled_model_loads_in_the_memory_of_one_copy(bundled_gguf: Path) -> None:
    config = read_config(bundled_gguf)
    tracemalloc.start()
    try:
        arrays = load_arrays(bundled_gguf, config, BFLOAT16, report=print)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    size = sum(array.nbytes for array in arrays.values())
    assert {name: array.shape for name, array in arrays.items()} == parameter_shapes(config)
    assert size == 269_100_288
    assert peak < 1.2 * size


def test_bundled_model_is_a_tied_llama(bundled_gguf: Path) -> None:
    config = read_config(bundled_gguf)
    assert (
        config.num_layers,
        config.hidden_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
    ) == (30, 576, 9, 3, 64)
    assert (config.norm_eps, config.rope_theta, config.max_position, config.tied_head) == (
        1e-5,
        100_000.0,
        8192,
        True,
    )
