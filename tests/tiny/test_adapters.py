"""LoRA adapters of PEFT, merged while weights are read: the arrays equal those that NumPy merged."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from levserve.errors import ConfigError, StartupError
from levserve.models.choose import describe
from levserve.models.describe import Description
from levserve.settings.parse import parse_settings
from levserve.weights import prepared
from levserve.weights.checkpoint import load_arrays, read_config
from levserve.weights.fingerprint import fingerprint
from levserve.weights.model_files import ModelFiles
from levserve.weights.source import check_source, find_source
from tests.adapters import ALPHA, LLAMA, RANK, Tensors, make_halves, merge, write_adapter
from tests.conftest import GOLDEN

MODULES = {
    "llama": LLAMA,
    "qwen3": [name for name in LLAMA if "layers.1." in name],
    "phi3": ["model.layers.0.self_attn.qkv_proj", "model.layers.1.mlp.gate_up_proj"],
    "gpt2": ["transformer.h.0.attn.c_attn", "transformer.h.1.attn.c_proj", "transformer.h.1.mlp.c_fc"],
    "gpt-neox": ["gpt_neox.layers.0.attention.query_key_value", "gpt_neox.layers.1.mlp.dense_4h_to_h"],
}


def merged_folder(folder: Path, family: str, tensors: Tensors) -> Path:
    shutil.copytree(GOLDEN / family, folder)
    save_file(
        {name: np.ascontiguousarray(array) for name, array in tensors.items()}, folder / "model.safetensors"
    )
    return folder


def base_of(family: str) -> Tensors:
    return load_file(GOLDEN / family / "model.safetensors")


def load(path: Path, adapter: Path | None = None) -> dict[str, NDArray[Any]]:
    float32 = jnp.dtype(jnp.float32)
    arrays = load_arrays(path, read_config(path), float32, report=lambda _: None, adapter=adapter)
    return {name: np.asarray(array) for name, array in arrays.items()}


def assert_same(found: dict[str, NDArray[Any]], wanted: dict[str, NDArray[Any]]) -> None:
    assert found.keys() == wanted.keys()
    for name, array in found.items():
        np.testing.assert_array_equal(array, wanted[name], err_msg=name)


def check(tmp_path: Path, family: str, scale: float = ALPHA / RANK, **fields: object) -> None:
    base, modules = base_of(family), MODULES[family]
    halves = make_halves(base, modules)
    adapter = write_adapter(tmp_path / "adapter", halves, **fields)
    found = load(GOLDEN / family, adapter)
    wanted = load(merged_folder(tmp_path / "merged", family, merge(base, halves, modules, scale)))
    assert_same(found, wanted)
    plain = load(GOLDEN / family)
    assert any(not np.allclose(array, plain[name]) for name, array in found.items())


@pytest.mark.parametrize("family", MODULES)
def test_arrays_are_those_of_a_merged_checkpoint(family: str, tmp_path: Path) -> None:
    check(tmp_path, family, fan_in_fan_out=family == "gpt2")


def test_rank_stabilized_scale_is_by_the_root_of_the_rank(tmp_path: Path) -> None:
    check(tmp_path, "llama", ALPHA / math.sqrt(RANK), use_rslora=True)


def test_modules_may_have_a_rank_and_an_alpha_of_their_own(tmp_path: Path) -> None:
    base = base_of("llama")
    queries = [name for name in LLAMA if name.endswith("q_proj")]
    others = [name for name in LLAMA if name not in queries]
    wide, narrow = make_halves(base, queries, 8), make_halves(base, others)
    adapter = write_adapter(
        tmp_path / "adapter",
        wide | narrow,
        rank_pattern={"q_proj": 8},
        alpha_pattern={r"layers\.\d+\.self_attn.q_proj": 2},
    )
    merged = merge(merge(base, wide, queries, 2 / 8), narrow, others, ALPHA / RANK)
    assert_same(load(GOLDEN / "llama", adapter), load(merged_folder(tmp_path / "merged", "llama", merged)))


def test_saved_modules_replace_those_of_the_model(tmp_path: Path) -> None:
    base = base_of("llama")
    norm = "model.layers.2.input_layernorm"
    halves = make_halves(base, LLAMA[:1])
    saved = {f"base_model.model.{norm}.modules_to_save.default.weight": np.full(64, 2.0, ml_dtypes.bfloat16)}
    adapter = write_adapter(tmp_path / "adapter", halves | saved, modules_to_save=[norm])
    merged = merge(base, halves, LLAMA[:1], ALPHA / RANK) | {f"{norm}.weight": np.full(64, 2.0, np.float32)}
    assert_same(load(GOLDEN / "llama", adapter), load(merged_folder(tmp_path / "merged", "llama", merged)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_dora": True}, "use_dora = True is not supported"),
        ({"bias": "all"}, "bias = 'all' is not supported"),
        ({"peft_type": "IA3"}, "peft_type = 'IA3' is not supported"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights = 'pissa_niter_16' is not supported"),
        ({"target_parameters": ["mlp.experts"]}, "target_parameters = .* is not supported"),
        ({"lora_alpha": "x"}, "lora_alpha = 'x' is not a number above 0"),
        ({"r": 5}, r"down_proj have the shapes \[4, 128\] and \[64, 4\], expected \[5, 128\] and \[64, 5\]"),
        ({"rank_pattern": {"q_proj(": 8}}, "rank_pattern = .* is not regular expressions"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern has 0 for model.layers.0.self_attn.q_proj"),
    ],
)
def test_kinds_that_are_not_supported_are_refused_by_field(
    fields: dict[str, object], message: str, tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "adapter", make_halves(base_of("llama"), LLAMA), **fields)
    with pytest.raises(StartupError, match=message):
        load(GOLDEN / "llama", adapter)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"base_model.model.model.layers.7.mlp.up_proj.lora_A.weight": (4, 64)},
            "does not have: model.layers.7.mlp",
        ),
        (
            {"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": (4, 64)},
            "mlp.up_proj has no lora_B.weight",
        ),
        ({"model.layers.0.mlp.up_proj.lora_A.weight": (4, 64)}, "does not begin with base_model.model."),
        (
            {"base_model.model.model.embed_tokens.lora_embedding_A": (4, 384)},
            "lora_embedding_A is not supported",
        ),
        (
            {"base_model.model.lm_head.weight": (384, 64)},
            "lm_head.weight is not supported: .*tied to its embedding",
        ),
        (
            {"base_model.model.model.norm.weight": (65,)},
            r"model.norm.weight has the shape \[65\], and \[64\]",
        ),
    ],
)
def test_tensors_that_fit_nothing_are_refused_by_name(
    change: dict[str, tuple[int, ...]], message: str, tmp_path: Path
) -> None:
    more = {name: np.ones(shape, np.float32) for name, shape in change.items()}
    adapter = write_adapter(tmp_path / "adapter", make_halves(base_of("llama"), LLAMA) | more)
    with pytest.raises(StartupError, match=message):
        load(GOLDEN / "llama", adapter)


def describe_with(settings_flags: list[str], cache: Path) -> Description:
    settings = parse_settings([*settings_flags, "--cache-dir", str(cache), "--device", "cpu"], {})
    check_source(settings)
    found = describe(settings, find_source(settings, lambda _: None))
    assert isinstance(found, Description)
    return found


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    halves = make_halves(base_of("llama"), LLAMA)
    return write_adapter(tmp_path / "tuned", halves, base_model_name_or_path=str(GOLDEN / "llama"))


def test_an_adapter_is_a_model_that_names_its_base(adapter: Path, tmp_path: Path) -> None:
    alone = describe_with(["--model", str(adapter)], tmp_path / "cache")
    both = describe_with(["--model", str(GOLDEN / "llama"), "--adapter", str(adapter)], tmp_path / "cache")
    assert alone.files == ModelFiles("tuned", GOLDEN / "llama", adapter=adapter)
    assert both.files == ModelFiles("llama", GOLDEN / "llama", adapter=adapter)
    assert f"adapter     {adapter}" in alone.lines()
    wanted = alone.load_arrays(lambda _: None)
    leaves = both.read_leaves(both.settings, both.files, lambda _: None)  # as a reload reads them
    for leaf, name in zip(leaves, sorted(wanted), strict=True):
        np.testing.assert_array_equal(leaf, np.asarray(wanted[name]))


@pytest.mark.parametrize("quantize", ["none", "int8", "int8-blocks"])
def test_what_is_quantized_is_the_sum(quantize: str, adapter: Path, tmp_path: Path) -> None:
    base = base_of("llama")
    merged = merged_folder(
        tmp_path / "merged",
        "llama",
        merge(base, load_file(adapter / "adapter_model.safetensors"), LLAMA, 1.5),
    )
    found = describe_with(["--model", str(adapter), "--quantize", quantize], tmp_path).load_arrays(
        lambda _: None
    )
    wanted = describe_with(["--model", str(merged), "--quantize", quantize], tmp_path).load_arrays(
        lambda _: None
    )
    assert_same(*({name: np.asarray(array) for name, array in arrays.items()} for arrays in (found, wanted)))


def test_prepared_weights_of_another_adapter_are_not_taken(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared, "SMALLEST_BYTES", 0)
    monkeypatch.setattr(prepared, "FREE_SHARE", 0.0)
    monkeypatch.setattr(prepared, "IN_MEMORY", ())
    flags = ["--model", str(adapter), "--quantize", "int8"]
    first = describe_with(flags, tmp_path)
    arrays = first.load_arrays(lambda _: None)
    halves = load_file(adapter / "adapter_model.safetensors")
    write_adapter(
        adapter,
        {name: -half if "lora_B" in name else half for name, half in halves.items()},
        base_model_name_or_path=str(GOLDEN / "llama"),
    )
    second = describe_with(flags, tmp_path)
    others = second.load_arrays(lambda _: None)
    assert len(list((tmp_path / "weights").glob("*/weights"))) == 2
    assert any(np.any(np.asarray(array) != np.asarray(others[name])) for name, array in arrays.items())
    assert len({fingerprint(second.files), fingerprint(ModelFiles("llama", GOLDEN / "llama"))}) == 2


@pytest.mark.parametrize("base", ["", "/where/it/was/trained", "./nowhere"])
def test_a_base_that_is_not_here_is_asked_for(base: str, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "tuned", {}, base_model_name_or_path=base or None)
    settings = parse_settings(["--model", str(folder)], {})
    check_source(settings)
    with pytest.raises(StartupError, match="base_model_name_or_path .*--model BASE --adapter"):
        find_source(settings, lambda _: None)


def test_an_adapter_of_itself_is_refused(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "tuned", {}, base_model_name_or_path=".")
    with pytest.raises(StartupError, match="is an adapter as well"):
        find_source(parse_settings(["--model", str(folder)], {}), lambda _: None)


def test_bases_that_cannot_take_an_adapter_are_refused(adapter: Path, tmp_path: Path) -> None:
    quantized = next(path for path in (GOLDEN / "quantized").iterdir() if path.name.startswith("gptq"))
    config = read_config(GOLDEN / "llama")
    for path, message in (
        (tmp_path / "x.gguf", "is a GGUF file"),
        (next((GOLDEN / "levanter-llama").glob("**/metadata.json")).parent, "is a Levanter checkpoint"),
        (quantized, "quantized already"),
    ):
        with pytest.raises(StartupError, match=message):
            load_arrays(path, config, jnp.dtype(jnp.float32), report=print, adapter=adapter)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--adapter", "/no/such"], "--adapter /no/such does not exist"),
        (
            ["--adapter", str(GOLDEN / "llama")],
            "is not a PEFT adapter: expected a folder with adapter_config.json",
        ),
    ],
)
def test_what_is_no_adapter_is_refused_before_the_start(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_source(parse_settings(["--model", str(GOLDEN / "llama"), *flags], {}))
