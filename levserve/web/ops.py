"""Health, readiness and metrics. Answered on HTTP threads without touching the device."""

from __future__ import annotations

from flask import Blueprint, Response, current_app
from prometheus_client import CONTENT_TYPE_LATEST

from levserve import __version__
from levserve.engine.engine import Engine
from levserve.observe.health import Phase
from levserve.web.json_body import json_response

OPS_PATHS = (b"/health", b"/healthz", b"/readyz", b"/metrics")
"""Polled every few seconds: they have threads of their own and are logged at debug level."""


def ops_routes(engine: Engine) -> Blueprint:
    routes = Blueprint("ops", __name__)

    @routes.get("/healthz")
    @routes.get("/health")
    def show_health() -> Response:
        """503 when only a restart can help: the device thread has failed or hangs."""
        if engine.phase is Phase.FAILED:
            return json_response({"status": "failed"}, 503)
        if engine.is_stalled:
            return json_response(
                {"status": "stalled", "heartbeat_age_seconds": round(engine.heartbeat_age(), 1)}, 503
            )
        return json_response({"status": "ok"})

    @routes.get("/readyz")
    def show_readiness() -> Response:
        if engine.is_stalled:
            return json_response({"status": "stalled", "progress": engine.progress}, 503)
        status = 200 if engine.phase is Phase.READY else 503
        return json_response({"status": engine.phase, "progress": engine.progress}, status)

    @routes.get("/metrics")
    def show_metrics() -> Response:
        return Response(engine.metrics.render(), content_type=CONTENT_TYPE_LATEST)

    @routes.get("/")
    def show_endpoints() -> Response:
        endpoints = sorted({rule.rule for rule in current_app.url_map.iter_rules()})
        return json_response({"name": "levserve", "version": __version__, "endpoints": endpoints})

    return routes
