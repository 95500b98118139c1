"""Which model a request means, by its names and by what people type instead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from levserve.engine.engine import Engine
from levserve.engine.served_model import ServedModel
from levserve.errors import ModelNotFound
from levserve.models.entry import Resident
from levserve.models.names import similar_names
from levserve.models.registry import Registry
from levserve.observe.metrics import Metrics
from tests.fake_app import App, serving
from tests.fake_device import serve_toy

NAMES = ["Qwen/Qwen3-0.6B", "a/tiny", "b/tiny", "Tiny", "local"]


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("qwen3-0.6b", ["Qwen/Qwen3-0.6B"]),
        ("Qwen3-0.6B", ["Qwen/Qwen3-0.6B"]),
        ("qwen/qwen3-0.6b", ["Qwen/Qwen3-0.6B"]),
        ("other/qwen3-0.6b", []),
        ("me/local", ["local"]),
        ("tiny", ["Tiny"]),
        ("A/TINY", ["a/tiny"]),
        ("c/tiny", ["Tiny"]),
        ("qwen", []),
        ("Qwen/", []),
        ("", []),
    ],
)
def test_case_and_a_missing_organization_do_not_matter(asked: str, found: list[str]) -> None:
    assert similar_names(asked, NAMES) == found


def test_a_slash_and_the_hyphen_that_stores_have_for_it_are_the_same() -> None:
    assert similar_names("org/Llama", ["org-llama", "llama", "org-other"]) == ["org-llama"]
    assert similar_names("org-llama", ["org/llama"]) == ["org/llama"]
    assert similar_names("org/llama", ["org-llama-2"]) == []


def test_a_last_part_that_several_models_have_means_none_of_them() -> None:
    assert similar_names("tiny", ["a/tiny", "b/Tiny"]) == ["a/tiny", "b/Tiny"]


def resident(name: str, *aliases: str) -> Resident:
    nothing: Any = SimpleNamespace()
    return Resident(model=ServedModel(name, nothing, 64, 4, 0, nothing, nothing, aliases=aliases))


def test_a_registry_knows_all_names_of_a_model_and_lists_candidates() -> None:
    registry = Registry(Engine(max_inflight=1, metrics=Metrics()))
    registry.put(resident("a/tiny", "main", "also"))
    registry.put(resident("b/Tiny"))
    assert registry.resolve("also") == ("a/tiny", "also")
    assert registry.resolve("MAIN") == ("a/tiny", "main")
    assert registry.resolve("A/tiny") == ("a/tiny", "a/tiny")
    with pytest.raises(ModelNotFound, match="'tiny' may mean several models: 'a/tiny', 'b/Tiny'"):
        registry.resolve("tiny")
    with pytest.raises(ModelNotFound, match="this server has .*'also'"):
        registry.resolve("other")
    with registry.borrow("Also") as handle:
        assert (handle.name, handle.model.name) == ("also", "a/tiny")


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with serving() as app:
        entry = Resident(model=replace(serve_toy("toy", 64), aliases=("Org/Pet",)))
        app.registry.put(entry)
        yield app


@pytest.mark.parametrize(
    ("asked", "answered"), [("toy", "toy"), ("TOY", "toy"), ("Org/Pet", "Org/Pet"), ("pet", "Org/Pet")]
)
def test_an_answer_has_the_name_that_was_meant(app: App, asked: str, answered: str) -> None:
    body = {"model": asked, "prompt": "t17", "max_tokens": 2}
    assert app.complete("t17", model=asked, max_tokens=1)["model"] == answered
    assert {chunk["model"] for chunk in app.stream("/v1/completions", body)} == {answered}
    embedded = app.post("/v1/embeddings", {"model": asked, "input": "t17"}).json
    assert embedded is not None and embedded["model"] == answered


def test_all_names_are_listed(app: App) -> None:
    listed = app.client.get("/v1/models").json
    assert listed is not None
    assert [(one["id"], one["root"], one["parent"]) for one in listed["data"]] == [
        ("toy", "toy", None),
        ("Org/Pet", "toy", None),
    ]
    assert all(one["max_model_len"] == 64 for one in listed["data"])
    assert all(one["permission"][0]["allow_sampling"] for one in listed["data"])
    one = app.client.get("/v1/models/pet").json
    assert one is not None and one["id"] == "Org/Pet"
    assert app.client.get("/v1/models/else").status_code == 404
