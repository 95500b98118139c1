"""What an operator may do to a running server: swap in newer weights, load and unload models, see what takes the memory.

Under /admin, with keys of its own (see `auth.py`). A reload reads the new weights on its HTTP thread, which may take minutes,
and `/readyz` tells how far it is; a load waits for the loader, and `/v1/models` tells how far that is.
"""

from __future__ import annotations

from flask import Blueprint, Response
from msgspec import Struct

from levserve.device.sizing import process_memory
from levserve.errors import BadRequest, ConfigError, Conflict, StartupError
from levserve.models.entry import Counts, ModelInfo, Status
from levserve.models.registry import Registry
from levserve.web.body import read_body
from levserve.web.json_body import decode
from levserve.web.openai import find_model, list_models
from levserve.web.ops import json_response

MAX_BODY_BYTES = 1 << 16


class ReloadBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the weights are, in the words of the settings; by default where they came from.

    `name` is what requests call the model that gets them; it may be left out while one is loaded.
    """

    name: str | None = None
    model: str | None = None
    checkpoint_path: str | None = None
    revision: str | None = None

    def __post_init__(self) -> None:
        if self.model and self.checkpoint_path:
            raise BadRequest("'model' and 'checkpoint_path' exclude each other.", param="checkpoint_path")


class ModelStats(Struct, frozen=True):
    id: str
    status: Status
    progress: str
    error: str | None
    weight_bytes: int
    kv_bytes: int
    kv_pages: int
    kv_pages_used: int
    running: int
    waiting: int
    requests: int
    """That hold the model: the running and waiting ones, and those that wait for it to be loaded or are being written."""
    idle_seconds: float | None
    """Since it was last used; null if it never was."""


class MemoryStats(Struct, frozen=True):
    process_bytes: int
    """Resident in the host's memory."""
    models_bytes: int
    """Weights and KV pages of all loaded models, on the device."""


class Stats(Struct, frozen=True):
    phase: str
    memory: MemoryStats
    models: list[ModelStats]


def _stats(one: ModelInfo) -> ModelStats:
    resident = one.resident
    counts = resident.counts() if resident is not None and resident.counts is not None else Counts(0, 0, 0, 0)
    return ModelStats(
        id=one.name,
        status=one.status,
        progress=one.progress,
        error=one.error,
        weight_bytes=resident.weight_bytes if resident is not None else 0,
        kv_bytes=resident.kv_bytes if resident is not None else 0,
        kv_pages=counts.pages_total,
        kv_pages_used=counts.pages_used,
        running=counts.running,
        waiting=counts.waiting,
        requests=one.num_handles,
        idle_seconds=None if one.idle_seconds is None else round(one.idle_seconds, 3),
    )


def admin_routes(registry: Registry) -> Blueprint:
    engine = registry.engine
    routes = Blueprint("admin", __name__)

    @routes.post("/admin/reload")
    def reload() -> Response:
        body = decode(read_body(MAX_BODY_BYTES) or b"{}", ReloadBody)
        try:
            reloaded = registry.reload(
                body.name or "",
                model=body.model or "",
                checkpoint_path=body.checkpoint_path or "",
                revision=body.revision or "",
            )
        except ConfigError as error:
            raise BadRequest(f"Nothing was reloaded: {error}.", code="reload_refused") from error
        except StartupError as error:
            raise Conflict(
                f"Nothing was reloaded, the old weights go on serving: {error}.", code="reload_refused"
            ) from error
        return json_response(reloaded)

    @routes.get("/admin/stats")
    def show_stats() -> Response:
        models = list_models(registry)
        memory = MemoryStats(
            process_memory(), sum(one.resident.num_bytes for one in models if one.resident is not None)
        )
        return json_response(Stats(engine.phase, memory, [_stats(one) for one in models]))

    @routes.post("/admin/load/<path:model_id>")
    def load(model_id: str) -> Response:
        """Waits until the model is loaded, also if it has just failed to."""
        engine.require_loaded()
        with registry.borrow(model_id, insists=True) as handle:
            handle.wait(None)
            _ = handle.resident  # raises why there is none
        return json_response(_stats(find_model(registry, model_id)))

    @routes.post("/admin/unload/<path:model_id>")
    def unload(model_id: str) -> Response:
        """Waits until its memory is free; 409 if anyone uses the model."""
        engine.require_loaded()
        registry.unload(model_id)
        return json_response(_stats(find_model(registry, model_id)))

    return routes
