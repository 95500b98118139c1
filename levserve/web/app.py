"""Makes the Flask application from its collaborators: routes, request ids, and one place where errors become answers.

`create_app` is called once, in the worker. Everything registered here runs on the request's HTTP thread.
"""

from __future__ import annotations

import logging
import random
import re
import time
from collections.abc import Callable
from http import HTTPStatus

from flask import Flask, Response, g, request
from werkzeug.exceptions import HTTPException
from werkzeug.routing.exceptions import WebsocketMismatch

from levserve.engine.engine import Engine
from levserve.errors import NO_RETRY, BadRequest, ServeError, UpgradeRequired
from levserve.models.registry import Registry
from levserve.observe.tracing import PARENT_HEADERS, Tracing
from levserve.settings.settings import Settings
from levserve.web.admin import admin_routes
from levserve.web.admit import show_limits
from levserve.web.auth import key_check
from levserve.web.cors import Cors
from levserve.web.embeddings import Embeddings
from levserve.web.native import Native
from levserve.web.openai import OpenAI
from levserve.web.ops import ops_routes
from levserve.web.request_log import RequestLog
from levserve.web.run import Runs
from levserve.web.scoring import Scoring
from levserve.web.tokens import Tokens
from levserve.web.watcher import Watcher

log = logging.getLogger(__name__)

REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


def create_app(
    registry: Registry, settings: Settings, watcher: Watcher, tracing: Tracing | None = None
) -> Flask:
    from levserve.web.sock import Sockets  # 45 ms that only the worker has to spend

    engine = registry.engine
    app = Flask("levserve", static_folder=None)
    app.url_map.merge_slashes = (
        False  # a path with two is not ours; werkzeug would answer with a redirect in HTML
    )
    app.before_request(_name_request)
    cors = Cors(settings.cors_origins)
    cors.install(app)
    app.before_request(key_check(settings))
    runs = Runs(registry, settings, watcher)
    app.register_blueprint(OpenAI(engine, settings, runs).routes())
    app.register_blueprint(Embeddings(engine, settings, runs).routes())
    app.register_blueprint(Scoring(engine, settings, runs).routes())
    app.register_blueprint(Native(engine, settings, runs).routes())
    app.register_blueprint(Tokens(engine, settings, runs).routes())
    app.register_blueprint(ops_routes(engine))
    app.register_blueprint(admin_routes(registry))
    Sockets(engine, settings, runs, cors, tracing).install(app)
    app.register_error_handler(ServeError, _answer_error)
    app.register_error_handler(HTTPException, _answer_http_error)
    app.register_error_handler(WebsocketMismatch, _answer_mismatch)
    app.register_error_handler(Exception, _answer_fault)
    app.after_request(_after_request(engine, tracing))
    return app


def _name_request() -> None:
    """Takes the client's request id if it is fit for a header and a log line, else makes one."""
    g.started = time.monotonic()
    given = request.headers.get("x-request-id", "")
    g.request_id = given if REQUEST_ID.fullmatch(given) else f"{random.getrandbits(64):016x}"
    g.record = RequestLog(g.request_id, request.method, request.path, g.started)


def _answer_error(error: ServeError) -> Response:
    g.record.note_error(error)
    return Response(error.body(), error.status, error.headers, content_type="application/json")


def _answer_http_error(error: HTTPException) -> Response:
    """What Flask and werkzeug refuse (404, 405, 413, 415 ...), in our shape; headers such as Allow are kept."""
    response = Response(status=error.code, headers=error.get_headers())
    told = ServeError(
        f"{request.method} {request.path}: {error.description or HTTPStatus(error.code or 500).phrase}"
    )
    told.type = "invalid_request_error" if (error.code or 500) < 500 else "server_error"
    response.data = told.body()
    response.content_type = "application/json"
    return response


def _answer_mismatch(error: WebsocketMismatch) -> Response:
    if request.headers.get("Upgrade", "").lower() == "websocket":
        return _answer_error(BadRequest(f"{request.path} is no WebSocket; /v1/ws is one."))
    return _answer_error(UpgradeRequired(f"{request.path} is a WebSocket; open it with an Upgrade request."))


def _answer_fault(error: Exception) -> Response:
    log.error("%s %s %s failed", g.request_id, request.method, request.path, exc_info=error)
    g.record.error = "server_error"
    body = ServeError("The server failed to handle the request.").body()
    return Response(body, 500, NO_RETRY, content_type="application/json")


def _after_request(engine: Engine, tracing: Tracing | None) -> Callable[[Response], Response]:
    def after_request(response: Response) -> Response:
        response.headers["x-request-id"] = g.request_id
        response.headers["openai-processing-ms"] = str(
            round((time.monotonic() - g.started) * 1000)
        )  # of a stream: until its head
        route = request.url_rule.rule if request.url_rule is not None else "unknown"
        engine.metrics.requests.labels(route, response.status_code).inc()
        show_limits(engine, response)
        record: RequestLog = g.record
        record.route = route
        if tracing is not None:
            record.carrier = {
                name: request.headers[name] for name in PARENT_HEADERS if name in request.headers
            }
        response.call_on_close(lambda: record.end(response.status_code, engine.metrics, tracing))
        return response

    return after_request
