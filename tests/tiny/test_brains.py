"""Brains on disk: every form of brain.json, both weight formats, foreign tokenizers, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  numpy's bfloat16, which safetensors needs
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from levserve.errors import ConfigError, StartupError
from levserve.models.choose import describe
from levserve.settings.parse import parse_settings
from levserve.weights.brain_config import BrainConfig, read_brain_config
from levserve.weights.brain_folder import find_brain, find_brain_tokenizer, is_brain
from levserve.weights.source import check_source, find_source
from tests.conftest import GOLDEN
from tests.torch_files import dumps, write_archive

MOE = GOLDEN / "hrm-tiny-moe"
STUDENT = "actv1_student.safetensors"


class Evil:
    """Runs a command in a process that unpickles it without care."""

    def __init__(self, command: str) -> None:
        self._command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self._command,)


@pytest.fixture
def brain(tmp_path: Path) -> Path:
    """A copy of a brain that tests may change."""
    return Path(shutil.copytree(MOE, tmp_path / "brain"))


def read(folder: Path, *flags: str) -> BrainConfig:
    return read_brain_config(find_brain(folder), parse_settings([*flags], {}))


def change(folder: Path, **fields: Any) -> None:
    path = folder / "brain.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change_tensors(folder: Path, **tensors: Any) -> None:
    """Adds or replaces tensors, or removes those that are None."""
    found = load_file(folder / STUDENT)
    for name, value in tensors.items():
        found.pop(name, None)
        if value is not None:
            found[name] = value
    save_file(found, folder / STUDENT)


@pytest.mark.parametrize(
    ("name", "heads", "cycles", "experts", "context"),
    [
        ("hrm-tiny-moe", 2, (2, 2), (8, 2), 2048),
        ("hrm-tiny-dense-pt", 2, (2, 2), (0, 0), 64),
        ("hrm-tiny-odd", 3, (3, 1), (3, 2), 40),
        ("hrm-tiny-bare-fp16", 8, (2, 2), (8, 2), 2048),
        ("hrm-tiny-trained", 2, (2, 2), (4, 2), 64),
    ],
)
def test_each_form_of_brain_json_is_read(
    name: str, heads: int, cycles: tuple[int, int], experts: tuple[int, int], context: int
) -> None:
    config = read(GOLDEN / name).config
    assert (config.num_heads, config.max_position) == (heads, context)
    assert (config.h_cycles, config.l_cycles) == cycles
    assert (config.num_experts, config.experts_per_token) == experts


def test_every_value_is_told_with_its_source() -> None:
    lines = "\n".join(read(GOLDEN / "hrm-tiny-odd", "--hrm-experts-per-token", "1").lines)
    assert "3 (brain.json: arch.num_heads)" in lines and "high 3 (brain.json: arch.H_cycles)" in lines
    assert "1 a token (--hrm-experts-per-token)" in lines and "40 (brain.json: max_seq_len)" in lines
    assert "8 (default)" in "\n".join(read(GOLDEN / "hrm-tiny-bare-fp16").lines)


def test_options_override_the_brain() -> None:
    config = read(MOE, "--hrm-heads", "4", "--hrm-cycles", "3,1", "--max-seq-len", "100").config
    assert (config.num_heads, config.h_cycles, config.l_cycles, config.max_position) == (4, 3, 1, 100)
    assert read(MOE, "--hrm-cycles", "5").config.l_cycles == 5


def test_null_and_zero_count_as_absent_and_steps_stand_in_for_cycles(brain: Path) -> None:
    change(brain, num_heads=None, heads=4, h_cycles=0, l_cycles=None, halt_max_steps=3, max_seq_len=0)
    config = read(brain).config
    assert (config.num_heads, config.h_cycles, config.l_cycles, config.max_position) == (4, 3, 3, 2048)


def test_a_brain_without_a_description_takes_the_defaults(brain: Path) -> None:
    (brain / "brain.json").unlink()
    assert is_brain(brain) and read(brain, "--hrm-heads", "2").config.h_cycles == 2


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_prefixes_of_wrappers_are_dropped(prefix: str, brain: Path) -> None:
    save_file({prefix + name: value for name, value in load_file(brain / STUDENT).items()}, brain / STUDENT)
    assert read(brain).config == read(MOE).config


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"num_heads": 3}, "cannot be divided by 3 (brain.json: num_heads) heads; give .* --hrm-heads"),
        ({"num_heads": 8}, "heads are 1 wide, and rotary positions need pairs"),
        ({"num_heads": "two"}, "num_heads = 'two' is not an integer"),
        ({"arch": [1], "num_heads": None}, "arch = .* is not an object"),
    ],
)
def test_values_that_cannot_be_are_refused(fields: dict[str, Any], expected: str, brain: Path) -> None:
    change(brain, **fields)
    with pytest.raises(StartupError, match=expected.replace("(", r"\(").replace(")", r"\)")):
        read(brain)


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ({"inner.embed_pos.embedding_weight": np.zeros((4, 8), np.float32)}, "learned positions"),
        ({"inner.puzzle_emb.weights": np.zeros((4, 8), np.float32)}, "puzzle checkpoint of sapientinc/HRM"),
        ({"inner.H_level.layers.0.self_attn.qkv_proj.lora_A.weight": np.zeros((4, 8), np.float32)}, "PEFT"),
        ({"inner.H_level.layers.0.mlp.base_layer.weight": np.zeros((4, 8), np.float32)}, "PEFT"),
        ({"inner.embed_tokens.embedding_weight": None}, "not an ACT v1 brain"),
        ({"inner.H_level.layers.2.self_attn.o_proj.weight": np.zeros((8, 8), np.float32)}, "not consecutive"),
        ({"inner.L_level.layers.0.mlp.gate_up_proj.weight": np.zeros((8, 8), np.float32)}, "some have none"),
        ({"inner.lm_head.weight": np.zeros((97, 8), np.int64)}, "stored as I64"),
    ],
)
def test_files_that_are_something_else_are_refused_with_the_reason(
    tensors: dict[str, Any], expected: str, brain: Path
) -> None:
    change_tensors(brain, **tensors)
    with pytest.raises(StartupError, match=expected):
        read(brain)


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ({"inner.lm_head.weight": None}, "tensors of head are missing"),
        ({"inner.lm_head.weight": np.zeros((97, 4), np.float32)}, r"is of shape \[97, 4\], not \[97, 8\]"),
        ({"inner.surplus": np.zeros(4, np.float32)}, "no place in the model for the tensor inner.surplus"),
        ({"inner.H_init": np.full(8, np.nan, np.float32)}, "not finite"),
    ],
)
def test_weights_that_do_not_fit_are_refused(tensors: dict[str, Any], expected: str, brain: Path) -> None:
    change_tensors(brain, **tensors)
    settings = parse_settings(["--model", str(brain)], {})
    with pytest.raises(StartupError, match=expected):
        describe(settings, find_source(settings, lambda _: None)).load_arrays(lambda _: None)


def test_experts_are_numbered_without_a_hole(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(GOLDEN / "hrm-tiny-moe", tmp_path / "brain"))
    tensors = load_file(folder / STUDENT)
    kept = {name: value for name, value in tensors.items() if ".experts.1." not in name}
    save_file(kept, folder / STUDENT)
    with pytest.raises(StartupError, match=r"its experts are \[0, 2.*\], which are not consecutive from 0"):
        read(folder)


def test_a_malicious_pt_file_is_refused_and_nothing_in_it_runs(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    folder = Path(shutil.copytree(GOLDEN / "hrm-tiny-dense-pt", tmp_path / "brain"))
    pickled = dumps({"inner.embed_tokens.embedding_weight": Evil(f"touch {marker}")})
    write_archive(folder / "actv1_student.pt", pickled, {})
    with pytest.raises(StartupError, match="which is not part of a tensor; nothing was run"):
        read(folder)
    assert not marker.exists()


@pytest.mark.parametrize("content", [b"", b"PK\3\4 rubbish", b"\0" * 4096])
@pytest.mark.parametrize("name", ["actv1_student.pt", STUDENT])
def test_a_damaged_file_is_one_sentence(content: bytes, name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(StartupError, match=str(tmp_path)):
        read(tmp_path)


def test_the_weights_are_those_that_the_description_names_and_never_a_backup(brain: Path) -> None:
    (brain / STUDENT).rename(brain / "other.safetensors")
    with pytest.raises(StartupError, match="a brain without weights"):
        find_brain(brain)
    (brain / "actv1_student.safetensors.prev").write_bytes(b"")
    with pytest.raises(StartupError, match="a brain without weights"):
        find_brain(brain)
    change(brain, checkpoint_file="C:\\AI-OS\\artifacts\\other.safetensors")
    assert find_brain(brain).weights == brain / "other.safetensors"
    assert find_brain(brain / "other.safetensors").fields.get("num_heads") == 2


def test_a_starter_brain_is_told_what_to_serve(tmp_path: Path) -> None:
    (tmp_path / "starter_brain.json").write_text("{}")
    with pytest.raises(StartupError, match="serve the model's own folder"):
        find_brain(tmp_path)
    with pytest.raises(ConfigError, match="serve the model's own folder"):
        check_source(parse_settings(["--model", str(tmp_path)], {}))


@pytest.mark.parametrize(
    "named",
    [
        "artifacts/hf_implant/base_model",
        "C:\\Users\\someone\\AI-OS\\artifacts\\hf_implant\\base_model",
        "/home/someone/AI-OS/artifacts/hf_implant/base_model",
    ],
)
def test_a_tokenizer_is_found_below_any_folder_above_the_brain(named: str, tmp_path: Path) -> None:
    root = tmp_path / "AI-OS"
    folder = Path(shutil.copytree(MOE, root / "artifacts" / "brains" / "actv1" / "Tiny"))
    place = root / "artifacts" / "hf_implant" / "base_model"
    change(folder, tokenizer_model=named)
    assert find_brain_tokenizer(find_brain(folder)) == folder / "tokenizer"
    shutil.copytree(folder / "tokenizer", place)
    assert find_brain_tokenizer(find_brain(folder)) == place


def test_a_missing_tokenizer_names_all_places(brain: Path) -> None:
    shutil.rmtree(brain / "tokenizer")
    with pytest.raises(StartupError, match="--tokenizer") as caught:
        find_brain_tokenizer(find_brain(brain))
    assert str(brain / "tokenizer") in str(caught.value) and "hf_implant" in str(caught.value)


def test_options_that_a_model_has_no_use_for_are_refused(brain: Path) -> None:
    for flags in (("--quantize", "int8"), ("--speculate", "4"), ("--kv-dtype", "fp8")):
        settings = parse_settings(["--model", str(brain), *flags], {})
        with pytest.raises(ConfigError, match=f"{flags[0]} does not apply"):
            describe(settings, find_source(settings, lambda _: None))
    settings = parse_settings(["--model", str(GOLDEN / "llama"), "--hrm-heads", "4"], {})
    with pytest.raises(ConfigError, match="--hrm-heads is for HRM brains"):
        describe(settings, find_source(settings, lambda _: None))


def test_a_brain_is_named_by_its_folder_or_by_its_file() -> None:
    for path in (MOE, MOE / STUDENT):
        files = find_source(parse_settings(["--model-path", str(path)], {}), lambda _: None)
        assert files.name == "hrm-tiny-moe" and files.tokenizer == MOE / "tokenizer"
