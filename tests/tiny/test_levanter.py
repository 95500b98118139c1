"""Checkpoints of Levanter's trainer: which one is taken, what model it is, and that it computes the same."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from levserve.errors import StartupError
from levserve.settings.settings import Settings
from levserve.weights.checkpoint import load_arrays, load_order, read_config
from levserve.weights.levanter_folder import newest_checkpoint
from levserve.weights.source import ModelFiles, find_source
from tests.conftest import GOLDEN
from tests.levanter_files import read_model, write_checkpoint
from tests.tiny.test_decoder import SHAPE, check, load, run_in_chunks

FAMILIES = (
    *("llama", "llama-blocks", "qwen", "qwen3", "mistral", "mixtral"),
    *("gemma", "gemma2", "gemma3", "olmo2", "gpt2"),
)
LLAMA = GOLDEN / "levanter-llama"
FLOAT32, BFLOAT16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)


def find(path: Path | str, **settings: str) -> ModelFiles:
    return find_source(Settings(checkpoint_path=str(path), **settings), lambda _: None)


def arrays_of(folder: Path, dtype: jnp.dtype = FLOAT32) -> dict[str, np.ndarray]:
    arrays = load_arrays(folder, read_config(folder), dtype, report=lambda _: None)
    return {name: np.asarray(array) for name, array in arrays.items()}


def change_config(folder: Path, **changes: object) -> Path:
    """Writes `changes` into the model part of a run's config.yaml; a value of `...` removes the key."""
    values = yaml.safe_load((folder / "config.yaml").read_text())
    values["model"] = {
        key: value for key, value in {**values["model"], **changes}.items() if value is not ...
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    return folder


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return Path(shutil.copytree(LLAMA, tmp_path / "llama"))


@pytest.fixture(scope="module")
def model() -> dict[str, np.ndarray]:
    return read_model(LLAMA)


@pytest.fixture
def old(tmp_path: Path, model: dict[str, np.ndarray]) -> Path:
    """The same model in the older layout: a folder for each array, with the run's config above it."""
    chunks = {"model/transformer/layers/stacked/mlp/up_proj/weight": [1, 64, 32]}
    shutil.copy(LLAMA / "config.yaml", tmp_path)
    shutil.copytree(LLAMA / "tokenizer", tmp_path / "tokenizer")
    return write_checkpoint(tmp_path / "step-7", model, 7, chunks=chunks)


# What it computes


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_computes_what_levanter_does(family: str) -> None:
    model, cases = load(f"levanter-{family}")
    for case in cases:
        check(case, run_in_chunks(model, case["prompt"] + case["greedy"], SHAPE, 16))


def test_the_older_layout_gives_the_same_arrays(old: Path) -> None:
    wanted, found = arrays_of(LLAMA), arrays_of(old)
    assert wanted.keys() == found.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(array, found[name])


def test_matrices_are_served_in_bfloat16_and_norms_in_float32() -> None:
    wanted = arrays_of(LLAMA)
    for name, array in arrays_of(LLAMA, BFLOAT16).items():
        assert array.dtype == (BFLOAT16 if array.ndim > 1 else FLOAT32)
        np.testing.assert_array_equal(
            array.astype(np.float32), wanted[name].astype(array.dtype).astype(np.float32)
        )


def test_nothing_but_the_model_is_read(old: Path, llama: Path) -> None:
    broken = old / "optimizer" / "mu" / "transformer" / "norm" / "weight"
    broken.mkdir(parents=True)
    (broken / ".zarray").write_text("not an array")
    arrays_of(old)
    assert "optimizer" not in str(arrays_of(llama).keys())


def test_layers_are_loaded_kind_by_kind() -> None:
    names = ["embed", "layers.0.qkv", "layers.0.out", "layers.1.qkv", "layers.1.out", "head"]
    assert load_order(names) == [
        "embed",
        "layers.0.qkv",
        "layers.1.qkv",
        "layers.0.out",
        "layers.1.out",
        "head",
    ]


# Which checkpoint


def test_a_folder_of_checkpoints_means_the_newest_complete_one(
    tmp_path: Path, model: dict[str, np.ndarray]
) -> None:
    small = {"model/embeddings/token_embeddings/weight": np.ones((2, 2), np.float32)}
    for step in (90, 200, 1000):
        write_checkpoint(tmp_path / f"step-{step}", small, step)
    (tmp_path / "step-1000" / "metadata.json").unlink()  # interrupted: it is written last
    (tmp_path / "logs").mkdir()
    assert newest_checkpoint(tmp_path) == tmp_path / "step-200"


def test_a_run_is_served_under_its_own_name(tmp_path: Path, old: Path, llama: Path) -> None:
    assert find(old).name == tmp_path.name
    assert find(llama).name == "llama"


@pytest.mark.parametrize("content", [None, "", "metadata"])
def test_a_folder_without_a_complete_checkpoint_is_refused(tmp_path: Path, content: str | None) -> None:
    folder = tmp_path / "run"
    if content is not None:
        folder.mkdir()
    if content == "metadata":
        (folder / "metadata.json").write_text("{}")
    with pytest.raises(StartupError, match="does not exist|no complete Levanter checkpoint"):
        find(folder)


# Its config and tokenizer


def test_the_config_is_found_in_the_checkpoint_or_above_it_or_where_the_flag_says(
    tmp_path: Path, old: Path, llama: Path
) -> None:
    assert find(llama).config_file == llama / "config.yaml"
    assert find(old).config_file == tmp_path / "config.yaml"
    moved = (tmp_path / "config.yaml").rename(tmp_path / "elsewhere.yaml")
    assert find(old, model_config=str(moved)).config_file == moved
    shutil.rmtree(llama)
    with pytest.raises(
        StartupError,
        match="no config.yaml in the checkpoint or the two folders above it; give the run's config with",
    ):
        find(old)


def test_a_hugging_face_config_serves_as_well(llama: Path) -> None:
    assert read_config(llama, GOLDEN / "llama" / "config.json") == read_config(llama)


def test_the_tokenizer_is_the_one_the_run_names_or_the_flag(llama: Path) -> None:
    assert find(llama).tokenizer == llama / "tokenizer"
    assert find(GOLDEN / "levanter-qwen3").tokenizer == GOLDEN / "levanter-qwen3" / ".." / "llama"
    assert find(llama, tokenizer=str(GOLDEN / "qwen3")).tokenizer == GOLDEN / "qwen3"


@pytest.mark.parametrize("name", ["/no/such/folder", "http://127.0.0.1:9/tokenizer", None])
def test_a_tokenizer_that_cannot_be_had_is_told_with_the_way_out(
    llama: Path, tmp_path: Path, name: str | None
) -> None:
    values = yaml.safe_load((llama / "config.yaml").read_text()) | {"tokenizer": name}
    (llama / "config.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(StartupError, match="tokenizer.*give one with --tokenizer"):
        find(llama, cache_dir=str(tmp_path))


def test_numbers_that_arrays_tell_are_taken_from_them() -> None:
    config = read_config(GOLDEN / "levanter-qwen3")
    assert (config.vocab_size, config.head_dim, config.tied_head, config.qk_norm) == (384, 16, False, True)
    assert read_config(GOLDEN / "levanter-mistral").windows == ()  # Levanter's Mistral attends to everything


def test_enums_that_levanter_writes_as_python_objects_are_read_as_data(llama: Path) -> None:
    text = (llama / "config.yaml").read_text()
    (llama / "config.yaml").write_text(text.replace("silu", "!!python/object/apply:os.system\n  - silu"))
    assert read_config(llama) == read_config(LLAMA)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"type": "snowball"},
            "type = 'snowball' is not supported; supported are llama, mistral, qwen, qwen3",
        ),
        ({"hybrid_norm": True}, "hybrid_norm = True is not supported"),
        ({"input_embedding_norm": True}, "input_embedding_norm = True is not supported"),
        ({"use_bias": True}, "use_bias = True is not supported"),
        ({"activation_function": "relu"}, "activation_function = 'relu' is not supported"),
        ({"rope": {"type": "yarn", "factor": 2.0}}, "rope: type = 'yarn' is not supported"),
        ({"rope": {"type": "linear", "factor": 2.0}}, "rope: factor = 2.0 is not supported"),
        ({"hidden_dim": ...}, "hidden_dim is missing"),
        ({"num_layers": "three"}, "num_layers = 'three' is not an integer"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused_by_its_own_words(
    llama: Path, changes: dict[str, object], told: str
) -> None:
    with pytest.raises(StartupError) as refusal:
        read_config(change_config(llama, **changes))
    assert told in str(refusal.value) and "config.yaml" in str(refusal.value)


@pytest.mark.parametrize("text", ["[1, 2", "- a list", "\x00"])
def test_a_config_that_is_no_yaml_is_refused(llama: Path, text: str) -> None:
    (llama / "config.yaml").write_text(text)
    with pytest.raises(StartupError, match="cannot read .*config.yaml"):
        read_config(llama)


def test_rotary_scaling_of_llama_3_is_read() -> None:
    scaling = read_config(GOLDEN / "levanter-llama-blocks").rope_scaling
    assert scaling is not None and dataclasses.astuple(scaling) == (4.0, 1.0, 4.0, 32)


# What is wrong with it


def refusal_of(folder: Path) -> str:
    with pytest.raises(StartupError) as refusal:
        arrays_of(folder)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


def test_a_missing_array_is_named(old: Path) -> None:
    shutil.rmtree(old / "model/transformer/layers/stacked/mlp/up_proj")
    assert "missing model.layers.0.mlp.up_proj.weight, model.layers.1.mlp.up_proj.weight" in refusal_of(old)


def test_a_mismatch_with_the_config_is_named(llama: Path) -> None:
    told = refusal_of(change_config(llama, intermediate_dim=96))
    assert "wrong shape: model.layers.0.mlp.gate_proj.weight is [128, 64], expected [96, 64]" in told


def test_an_array_that_nobody_expects_is_named(tmp_path: Path, model: dict[str, np.ndarray]) -> None:
    extra = {"model/transformer/layers/stacked/post_mlp_layernorm/weight": np.ones((3, 64), np.float32)}
    folder = write_checkpoint(tmp_path / "step-1", model | extra, 1)
    shutil.copy(LLAMA / "config.yaml", folder)
    assert "unexpected model.layers.0.post_mlp_layernorm.weight" in refusal_of(folder)


def test_a_lost_piece_of_a_matrix_is_not_taken_for_zeros(old: Path) -> None:
    (old / "model/transformer/layers/stacked/mlp/up_proj/weight/1.1.0").unlink()
    told = refusal_of(old)
    assert str(old) in told and "transformer/layers/stacked/mlp/up_proj/weight" in told and "1.1.0" in told


def test_a_norm_of_nothing_but_zeros_needs_no_piece(old: Path, model: dict[str, np.ndarray]) -> None:
    path = "model/transformer/norm/weight"
    write_checkpoint(old, {path: np.zeros_like(model[path])}, 7, fill_value=0.0, dtype="<f4")
    assert not any((old / path).glob("[0-9]*"))
    assert not arrays_of(old)["final_norm"].any()


def test_a_cut_file_of_the_database_is_named(llama: Path) -> None:
    largest = max((llama / "d").iterdir(), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:1000])
    assert str(llama) in refusal_of(llama)


def test_a_broken_list_of_arrays_is_named(llama: Path) -> None:
    data = bytearray((llama / "manifest.ocdbt").read_bytes())
    data[len(data) // 2] ^= 0xFF
    (llama / "manifest.ocdbt").write_bytes(data)
    assert "cannot read its list of arrays" in refusal_of(llama)


def test_numbers_that_are_not_finite_are_refused(old: Path, model: dict[str, np.ndarray]) -> None:
    path = "model/transformer/layers/stacked/mlp/down_proj/weight"
    broken = model[path].copy()
    broken[1, 5, 7] = np.nan
    write_checkpoint(old, {path: broken}, 7)
    assert "model.layers.1.mlp.down_proj.weight is corrupt" in refusal_of(old)


def test_integers_are_refused_by_their_type(old: Path, model: dict[str, np.ndarray]) -> None:
    path = "model/transformer/norm/weight"
    write_checkpoint(old, {path: model[path].astype(np.int32)}, 7)
    assert "transformer/norm/weight is stored as int32; supported are float32" in refusal_of(old)


def test_a_later_format_is_refused(llama: Path) -> None:
    manifest = json.loads((llama / "manifest.json").read_text()) | {"format_version": 2}
    (llama / "manifest.json").write_text(json.dumps(manifest))
    assert "format 2 with zarr3 arrays; supported is format 1" in refusal_of(llama)


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield
