"""A model's fingerprint: the same on every machine that has the same weights, and on no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from levserve.errors import StartupError
from levserve.weights.fingerprint import PART_BYTES, fingerprint
from levserve.weights.model_files import ModelFiles


def folder_with(path: Path, **files: bytes) -> ModelFiles:
    path.mkdir()
    for name, content in files.items():
        (path / name.replace("_", ".")).write_bytes(content)
    return ModelFiles(path.name, path)


def test_only_the_weights_and_the_config_count(tmp_path: Path) -> None:
    one = folder_with(tmp_path / "one", config_json=b"{}", model_safetensors=b"weights")
    other = folder_with(
        tmp_path / "other",
        config_json=b"{}",
        model_safetensors=b"weights",
        README_md=b"x",
        tokenizer_json=b"y",
    )
    assert fingerprint(one) == fingerprint(other)


@pytest.mark.parametrize(
    "files",
    [
        {"config_json": b"{ }", "model_safetensors": b"a" * (3 * PART_BYTES)},
        {"config_json": b"{}", "model_safetensors": b"a" * (3 * PART_BYTES - 1) + b"b"},
        {"config_json": b"{}", "model_safetensors": b"b" + b"a" * (3 * PART_BYTES - 1)},
        {"config_json": b"{}", "model_safetensors": b"a" * (3 * PART_BYTES + 1)},
        {"config_json": b"{}", "part_safetensors": b"a" * (3 * PART_BYTES)},
    ],
)
def test_another_config_beginning_end_length_or_name_is_another_model(
    tmp_path: Path, files: dict[str, bytes]
) -> None:
    one = folder_with(tmp_path / "one", config_json=b"{}", model_safetensors=b"a" * (3 * PART_BYTES))
    assert fingerprint(one) != fingerprint(folder_with(tmp_path / "other", **files))


def test_every_part_of_a_model_in_several_files_counts(tmp_path: Path) -> None:
    first, second = (tmp_path / f"tiny-0000{number}-of-00002.gguf" for number in (1, 2))
    first.write_bytes(b"GGUF one")
    second.write_bytes(b"GGUF two")
    before = fingerprint(ModelFiles("tiny", first))
    second.write_bytes(b"GGUF 2nd")
    assert fingerprint(ModelFiles("tiny", first)) != before


def test_a_file_is_the_same_under_another_name(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF weights")
    one, other = (fingerprint(ModelFiles(name, tmp_path / name)) for name in ("a.gguf", "b.gguf"))
    assert one == other


def test_a_levanter_checkpoint_is_known_by_its_database_and_its_config(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("model: a")
    files = folder_with(tmp_path / "step-1", metadata_json=b'{"step": 1}', manifest_ocdbt=b"1")
    before = fingerprint(ModelFiles("run", files.path, config))
    (files.path / "manifest.ocdbt").write_bytes(b"2")
    after = fingerprint(ModelFiles("run", files.path, config))
    config.write_text("model: b")
    assert len({before, after, fingerprint(ModelFiles("run", files.path, config))}) == 3


def test_files_that_cannot_be_read_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="cannot read"):
        fingerprint(ModelFiles("gone", tmp_path / "gone"))
