"""Health, readiness and metrics. Answered on HTTP threads without touching the device."""

from __future__ import annotations

from flask import Blueprint, Response
from msgspec import UNSET, Struct, UnsetType, structs

from levserve.engine.engine import Engine
from levserve.models.registry import Registry
from levserve.observe.health import Phase
from levserve.observe.metrics import CONTENT_TYPE
from levserve.web.device import ServerReport, report_server
from levserve.web.json_body import json_response
from levserve.web.quick_scrape import ROUTER_PATH

OPS_PATHS = (b"/health", b"/healthz", b"/readyz", b"/metrics", b"/metrics/router")
"""Polled every few seconds: they have their own threads and are logged at debug level."""


class Health(Struct, frozen=True):
    status: str
    heartbeat_age_seconds: float | UnsetType = UNSET
    """Set only if the device is stalled."""


class Readiness(Struct, frozen=True):
    status: str
    progress: str


class HealthReport(ServerReport, frozen=True, kw_only=True):
    status: str
    loaded_models: list[str]
    heartbeat_age_seconds: float | UnsetType = UNSET


def ops_routes(registry: Registry) -> Blueprint:
    engine = registry.engine
    routes = Blueprint("ops", __name__)

    @routes.get("/healthz")
    def show_health() -> Response:
        """503 when only a restart can help: the device thread has failed or hangs."""
        health = check(engine)
        return json_response(health, 200 if health.status == "ok" else 503)

    @routes.get("/health")
    def show_health_report() -> Response:
        """The same as /healthz, and what the server runs on."""
        health = check(engine)
        server = structs.asdict(report_server(registry))
        report = HealthReport(**server, **structs.asdict(health), loaded_models=registry.loaded_names())
        return json_response(report, 200 if health.status == "ok" else 503)

    @routes.get("/readyz")
    def show_readiness() -> Response:
        if engine.is_stalled:
            return json_response(Readiness("stalled", engine.progress), 503)
        status = 200 if engine.phase is Phase.READY else 503
        return json_response(Readiness(engine.phase, engine.progress), status)

    @routes.get("/metrics")
    def show_metrics() -> Response:
        return Response(engine.metrics.render(), content_type=CONTENT_TYPE)

    @routes.get(ROUTER_PATH)
    def show_router_metrics() -> Response:
        """Answers what `QuickScrape` leaves: unusual requests, and all with keys, debug logs or tracing."""
        return Response(engine.metrics.render_for_router(), content_type=CONTENT_TYPE)

    return routes


def check(engine: Engine) -> Health:
    if engine.phase is Phase.FAILED:
        return Health("failed")
    if engine.is_stalled:
        return Health("stalled", round(engine.heartbeat_age(), 1))
    return Health("ok")
