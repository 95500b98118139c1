"""Lists the models that requests may name: /v1/models. The views run on HTTP threads."""

from __future__ import annotations

import msgspec
from flask import Blueprint, Response
from msgspec import UNSET, UnsetType

from levserve.models.entry import ModelInfo, Status
from levserve.models.registry import Registry, model_not_found
from levserve.web.json_body import json_response


class ModelEntry(msgspec.Struct, frozen=True):
    """OpenAI's fields, vLLM's `max_model_len`, and whether the model is loaded, loading or loadable."""

    id: str
    created: int
    max_model_len: int | None
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
        return json_response(ModelList([_entry(model) for model in list_models(registry)]))

    @routes.get("/v1/models/<path:model_id>")
    def show_model(model_id: str) -> Response:
        return json_response(_entry(find_model(registry, model_id)))

    return routes


def list_models(registry: Registry) -> list[ModelInfo]:
    """Every model that a request may name; raises `Unavailable` until the first one is loaded."""
    registry.engine.require_loaded()
    registry.refresh()
    return registry.describe()


def find_model(registry: Registry, name: str) -> ModelInfo:
    models = list_models(registry)
    for model in models:
        if model.name == name:
            return model
    raise model_not_found(name, [model.name for model in models])


def _entry(model: ModelInfo) -> ModelEntry:
    served = model.resident.model if model.resident is not None else None
    return ModelEntry(
        model.name,
        served.created if served is not None else 0,
        served.max_seq_len if served is not None else None,
        status=model.status,
        progress=model.progress if model.status is not Status.LOADED and model.progress else UNSET,
        error=model.error or UNSET,
    )
