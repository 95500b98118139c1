"""The operator's endpoints, under /admin: reload weights, load and unload models, see what takes the memory.

They have their own keys (see `auth.py`). A reload reads the new weights on its HTTP thread, which may take
minutes; `/readyz` shows its progress. A load waits for the loader; `/v1/models` shows its progress.
"""

from __future__ import annotations

from flask import Blueprint, Response
from msgspec import Struct

from levserve.device.host import process_memory
from levserve.errors import BadRequest, ConfigError, Conflict, StartupError
from levserve.models.entry import Counts, ModelInfo, Status
from levserve.models.registry import Registry
from levserve.request.decode import decode
from levserve.web.device import ServerReport, report_server
from levserve.web.json_body import json_response, read_body
from levserve.web.models import find_model, list_models

MAX_BODY_BYTES = 1 << 16


class ReloadBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the new weights are, as in the settings; by default where the old ones came from.

    `name` is the name of the model in requests; it may be left out while only one model is loaded.
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
    backend: str | None
    """Which kernels compute it; null while it is not loaded."""
    weight_bytes: int
    kv_bytes: int
    kv_pages: int | None
    """Null for a model without a KV cache."""
    kv_pages_used: int | None
    running: int
    waiting: int
    requests: int
    """Requests that hold the model: running, waiting for a row or for loading, or still being written."""
    idle_seconds: float | None
    """Since the last use; null if it was never used."""


class MemoryStats(Struct, frozen=True):
    process_bytes: int
    """The process's resident memory on the host."""
    models_bytes: int
    """Weights and KV pages of all loaded models, on the device."""


class Stats(Struct, frozen=True):
    phase: str
    server: ServerReport
    memory: MemoryStats
    models: list[ModelStats]


def _stats(one: ModelInfo) -> ModelStats:
    resident = one.resident
    counts = Counts(0, 0, 0, 0)
    if resident is not None and resident.counts is not None:
        counts = resident.counts()
    return ModelStats(
        id=one.name,
        status=one.status,
        progress=one.progress,
        error=one.error,
        backend=None if resident is None else resident.backend or None,
        weight_bytes=0 if resident is None else resident.weight_bytes,
        kv_bytes=0 if resident is None else resident.kv_bytes,
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
                f"Nothing was reloaded; the old weights go on serving: {error}.", code="reload_refused"
            ) from error
        return json_response(reloaded)

    @routes.get("/admin/stats")
    def show_stats() -> Response:
        models = list_models(registry)
        model_bytes = sum(one.resident.num_bytes for one in models if one.resident is not None)
        stats = [_stats(one) for one in models]
        memory = MemoryStats(process_memory(), model_bytes)
        return json_response(Stats(engine.phase, report_server(registry), memory, stats))

    @routes.post("/admin/load/<path:model_id>")
    def load(model_id: str) -> Response:
        """Waits until the model is loaded; tries again even right after a failure."""
        engine.require_loaded()
        with registry.borrow(model_id, insists=True) as handle:
            handle.wait(None)
            _ = handle.resident  # raises an error that says why it did not load
        return json_response(_stats(find_model(registry, model_id)))

    @routes.post("/admin/unload/<path:model_id>")
    def unload(model_id: str) -> Response:
        """Waits until the model's memory is free; 409 if a request uses the model."""
        engine.require_loaded()
        registry.unload(model_id)
        return json_response(_stats(find_model(registry, model_id)))

    return routes
