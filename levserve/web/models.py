"""Lists the models that requests may name: /v1/models. The views run on HTTP threads."""

from __future__ import annotations

import msgspec
from flask import Blueprint, Response
from msgspec import UNSET, UnsetType

from levserve.models.entry import ModelInfo, Status
from levserve.models.registry import Registry
from levserve.web.json_body import json_response


class Permission(msgspec.Struct, frozen=True):
    """What OpenAI's API once said of each model and some clients still read: it may be used, nothing more."""

    id: str
    created: int
    object: str = "model_permission"
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: None = None
    is_blocking: bool = False


class ModelEntry(msgspec.Struct, frozen=True):
    """OpenAI's fields, vLLM's, and whether the model is loaded, loading or loadable.

    `root` is the model's own name, whatever it is served as. No model here is derived from another, so
    `parent` is null.
    """

    id: str
    created: int
    max_model_len: int | None
    root: str
    permission: list[Permission]
    parent: None = None
    object: str = "model"
    owned_by: str = "levserve"
    status: Status = Status.LOADED
    progress: str | UnsetType = UNSET
    error: str | UnsetType = UNSET


class ModelList(msgspec.Struct, frozen=True):
    data: list[ModelEntry]
    object: str = "list"


def models_routes(registry: Registry) -> Blueprint:
    routes = Blueprint("models", __name__)

    @routes.get("/v1/models")
    def show_models() -> Response:
        models = list_models(registry)
        return json_response(
            ModelList([_entry(model, name) for model in models for name in (model.name, *model.aliases)])
        )

    @routes.get("/v1/models/<path:model_id>")
    def show_model(model_id: str) -> Response:
        model = find_model(registry, model_id)
        return json_response(_entry(model, registry.resolve(model_id)[1]))

    return routes


def list_models(registry: Registry) -> list[ModelInfo]:
    """Every model that a request may name; raises `Unavailable` until the first one is loaded."""
    registry.engine.require_loaded()
    registry.refresh()
    return registry.describe()


def find_model(registry: Registry, name: str) -> ModelInfo:
    models = {model.name: model for model in list_models(registry)}
    return models[registry.resolve(name)[0]]


def _entry(model: ModelInfo, name: str) -> ModelEntry:
    served = model.resident.model if model.resident is not None else None
    created = served.created if served is not None else 0
    return ModelEntry(
        name,
        created,
        served.max_seq_len if served is not None else None,
        served.root or model.name if served is not None else model.name,
        [Permission(f"modelperm-{name}", created)],
        status=model.status,
        progress=model.progress if model.status is not Status.LOADED and model.progress else UNSET,
        error=model.error or UNSET,
    )
