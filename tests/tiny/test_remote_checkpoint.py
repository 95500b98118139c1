"""Levanter checkpoints in stores: which step is chosen, and what is fetched of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from levserve.errors import StartupError
from levserve.models.catalogue import Catalogue
from levserve.settings.parse import parse_settings
from levserve.weights.levanter_folder import is_levanter_checkpoint
from levserve.weights.source import find_source
from tests.conftest import GOLDEN
from tests.pure.test_remote import LLAMA, Cache
from tests.stores import WebServer, amazon_store, google_store, upload, web_store


@pytest.fixture(scope="module")
def google() -> Iterator[Any]:
    with google_store() as files:
        upload(files, LLAMA, "models/names/org-llama")
        yield files


@pytest.fixture(scope="module")
def amazon() -> Iterator[Any]:
    with amazon_store() as files:
        yield files


@pytest.fixture
def web(tmp_path: Path) -> Iterator[WebServer]:
    (tmp_path / "web").mkdir()
    with web_store(tmp_path / "web") as server:
        yield server


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


def test_a_checkpoint_comes_from_a_store_with_the_config_above_it(
    google: Any, amazon: Any, cache: Cache
) -> None:
    golden = GOLDEN / "levanter-llama"
    for address, files in (("gs://models/runs/one", google), ("s3://models/runs/one", amazon)):
        target = address.partition("://")[2]
        upload(files, golden, f"{target}/step-100")
        files.pipe_file(f"{target}/step-100/metadata.json", b'{"step": 100}')
        files.pipe_file(f"{target}/step-90/metadata.json", b'{"step": 90}')
        files.rm_file(f"{target}/step-100/config.yaml")
        files.pipe_file(f"{target}/step-200/manifest.json", b"{}")  # not complete
        files.pipe_file(f"{target}/config.yaml", (golden / "config.yaml").read_bytes())
        found = cache.find_run(address)
        assert found.name == "one" and "step-100" in found.path.name
        assert found.config_file == found.path / "config.yaml" and found.tokenizer == found.path / "tokenizer"
        assert (found.path / "manifest.ocdbt").read_bytes() == (golden / "manifest.ocdbt").read_bytes()


def test_runs_in_a_folder_of_models_are_found_where_a_model_is_expected(google: Any, cache: Cache) -> None:
    upload(google, GOLDEN / "levanter-llama", "models/mixed/run/step-7")
    upload(google, GOLDEN / "levanter-llama", "models/mixed/single")
    catalogue = Catalogue(
        parse_settings(["--models-dir", "gs://models/mixed", "--cache-dir", str(cache.path)], {})
    )
    assert catalogue.names() == ["run", "single"]
    for name in catalogue.names():
        settings = catalogue.find(name)
        assert settings is not None and settings.main_name == name
        found = find_source(settings, lambda _: None)
        assert found.name == name and is_levanter_checkpoint(found.path)
        assert found.config_file == found.path / "config.yaml"
    assert is_levanter_checkpoint(cache.find("run", model_store="gs://models/mixed").path)


def test_of_a_checkpoint_in_the_older_layout_only_the_model_is_fetched(web: WebServer, cache: Cache) -> None:
    folder = web.folder / "run" / "step-5"
    for name in (
        "model/norm/weight/.zarray",
        "model/norm/weight/0",
        "opt_state/mu/weight/0",
        "training_key/0",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")
    (folder / "metadata.json").write_text('{"step": 5}')
    (folder / "config.yaml").write_text("tokenizer: /")
    found = cache.find_run(f"{web.address}/run", tokenizer=str(LLAMA))
    names = {str(path.relative_to(found.path)) for path in found.path.rglob("*") if path.is_file()}
    assert names == {
        ".address",
        ".lock",
        "config.yaml",
        "metadata.json",
        "model/norm/weight/0",
        "model/norm/weight/.zarray",
    }


def test_a_run_without_a_complete_checkpoint_is_told(google: Any, cache: Cache) -> None:
    with pytest.raises(StartupError, match="gs://models/names holds no complete Levanter checkpoint"):
        cache.find_run("gs://models/names")
