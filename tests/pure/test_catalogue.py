"""Which models a server knows, from settings sections and from a folder, and which one is the default."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from levserve.errors import ConfigError
from levserve.models.catalogue import Catalogue, check_models
from levserve.settings.parse import parse_settings
from levserve.settings.settings import Settings
from tests.conftest import GOLDEN


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Hugging Face folder, GGUF files, a Levanter run, and entries that are no models."""
    (tmp_path / "beta").symlink_to(GOLDEN / "llama")
    (tmp_path / "gamma.gguf").touch()
    (tmp_path / "theta-00001-of-00002.gguf").touch()
    (tmp_path / "theta-00002-of-00002.gguf").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "step-7").symlink_to(GOLDEN / "levanter-llama")
    (tmp_path / "notes").mkdir()
    (tmp_path / ".hidden").symlink_to(GOLDEN / "llama")
    (tmp_path / "README.md").touch()
    return tmp_path


def settings_of(*argv: str) -> Settings:
    return parse_settings(argv, {})


def found(catalogue: Catalogue, name: str) -> Settings:
    settings = catalogue.find(name)
    assert settings is not None
    return settings


def test_a_folder_offers_every_model_in_it_and_the_first_is_the_default(folder: Path) -> None:
    catalogue = Catalogue(
        settings_of("--models-dir", str(folder), "--tokenizer", "/not/for/them", "--dtype", "float32")
    )
    assert catalogue.names() == ["beta", "gamma", "run", "theta"] and catalogue.default == "beta"
    beta, run = found(catalogue, "beta"), found(catalogue, "run")
    assert (beta.model, beta.checkpoint_path, beta.tokenizer, beta.dtype) == (
        str(folder / "beta"),
        "",
        "",
        "float32",
    )
    assert run.checkpoint_path == str(folder / "run") and run.served_model_name == ("run",)
    assert catalogue.find("notes") is None


def test_what_is_put_there_later_is_found_and_what_is_gone_is_not(folder: Path) -> None:
    catalogue = Catalogue(settings_of("--models-dir", str(folder)))
    (folder / "alpha").symlink_to(GOLDEN / "qwen2")
    (folder / "gamma.gguf").unlink()
    assert catalogue.names() == ["beta", "alpha", "run", "theta"]


def test_a_folder_that_vanishes_takes_no_model_with_it(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    catalogue = Catalogue(settings_of("--models-dir", str(folder)))
    folder.rename(folder.parent / "elsewhere")
    assert catalogue.names() == ["beta", "gamma", "run", "theta"]
    assert "keeping the old list of models" in caplog.text


def test_the_model_that_is_named_beside_a_folder_is_the_default(folder: Path) -> None:
    inside = Catalogue(settings_of("--models-dir", str(folder), "--model", "gamma"))
    assert inside.default == "gamma" and inside.names() == ["gamma", "beta", "run", "theta"]
    beside = Catalogue(settings_of("--models-dir", str(folder), "--model", str(GOLDEN / "qwen2")))
    assert beside.names() == ["qwen2", "beta", "gamma", "run", "theta"] and found(
        beside, "qwen2"
    ).model == str(GOLDEN / "qwen2")
    hub = Catalogue(settings_of("--models-dir", str(folder), "--model", "org/name"))
    assert hub.default == "org/name"
    (folder / "org-name").symlink_to(GOLDEN / "llama")
    stored = Catalogue(settings_of("--models-dir", str(folder), "--model", "org/name"))
    assert stored.names() == ["org-name", "beta", "gamma", "run", "theta"]


def test_sections_come_before_the_folder(folder: Path) -> None:
    base = settings_of("--models-dir", str(folder))
    catalogue = Catalogue(
        replace(base, models={"mine": base.for_model("mine", model="org/mine", load="start")})
    )
    assert catalogue.names() == ["mine", "beta", "gamma", "run", "theta"] and catalogue.names_at_start() == []
    assert Catalogue(replace(base, load="start")).names_at_start() == ["gamma", "run", "theta"]


def test_a_default_that_cannot_be_is_refused_and_of_others_one_is_warned(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = settings_of("--models-dir", str(folder))
    good, bad = (
        base.for_model("good", model=str(GOLDEN / "llama")),
        base.for_model("bad", model="/no/such/model.gguf"),
    )
    with caplog.at_level(logging.WARNING):
        check_models(replace(base, models={"good": good, "bad": bad}))
    assert "[model.bad]: model '/no/such/model.gguf' does not exist" in caplog.text
    with pytest.raises(ConfigError, match="does not exist"):
        check_models(replace(base, models={"bad": bad, "good": good}))


def test_a_name_of_two_models_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "serve.ini"
    config.write_text(f"[model.gpt]\nmodel = {GOLDEN / 'qwen2'}\n")
    flags = ["--config", str(config), "--model", str(GOLDEN / "llama"), "--served-model-name"]
    with pytest.raises(ConfigError, match=r"served as gpt, and a section \[model\.gpt\] serves another one"):
        Catalogue(settings_of(*flags, "gpt"))
    assert Catalogue(settings_of(*flags, "other")).names() == ["other", "gpt"]


def test_a_folder_without_models_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no model"):
        Catalogue(settings_of("--models-dir", str(tmp_path)))
    with pytest.raises(ConfigError, match="No such file or directory"):
        Catalogue(settings_of("--models-dir", str(tmp_path / "missing")))
