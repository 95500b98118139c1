"""Makes the Flask application: routes, request ids, and one place where errors become answers.

`create_app` is called once, in the worker. Everything registered here runs on the request's HTTP thread.
"""

from __future__ import annotations

import logging
import random
import re
import time
from collections.abc import Callable
from http import HTTPStatus

from flask import Flask, Response, current_app, g, request
from werkzeug.exceptions import HTTPException
from werkzeug.routing.exceptions import WebsocketMismatch

from levserve.engine.engine import Engine
from levserve.errors import NO_RETRY, BadRequest, NotFound, ServeError, UpgradeRequired
from levserve.models.registry import Registry
from levserve.observe.tracing import PARENT_HEADERS, Tracing
from levserve.settings.settings import Settings
from levserve.web.admin import admin_routes
from levserve.web.auth import key_check
from levserve.web.batches.disk import DiskFolder
from levserve.web.batches.files import FileStore
from levserve.web.batches.routes import batches_routes, files_routes
from levserve.web.batches.store import BatchStore
from levserve.web.batches.worker import BatchWorker
from levserve.web.call import Calls
from levserve.web.computing import computing_routes
from levserve.web.cors import Cors
from levserve.web.docs_page import docs_routes
from levserve.web.messages.errors import REQUEST_ID_HEADER, error_body, is_messages_path
from levserve.web.messages.routes import messages_routes
from levserve.web.models import models_routes
from levserve.web.native import native_routes
from levserve.web.openai import openai_routes
from levserve.web.ops import ops_routes
from levserve.web.page import page_routes
from levserve.web.rate_limits import show_limits
from levserve.web.request_log import RequestLog
from levserve.web.responses.routes import responses_routes
from levserve.web.responses.state_folder import open_state_folder
from levserve.web.responses.store import ResponseStore
from levserve.web.tokens import tokens_routes
from levserve.web.unknown_path import describe_unknown
from levserve.web.watcher import Watcher

log = logging.getLogger(__name__)

BATCHES = "levserve-batches"
"""The key in `app.extensions` of the `BatchWorker`, which must be closed with the application."""
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


def create_app(
    registry: Registry, settings: Settings, watcher: Watcher, tracing: Tracing | None = None
) -> Flask:
    from levserve.web.sock import Sockets  # the import takes 45 ms, which only the worker needs to spend

    engine = registry.engine
    app = Flask("levserve", static_folder=None)
    app.url_map.merge_slashes = False  # werkzeug would answer a path with two slashes with a redirect in HTML
    app.before_request(_begin_request)
    cors = Cors(settings.cors_origins, with_credentials=settings.cors_credentials)
    cors.install(app)
    app.before_request(key_check(settings))
    calls = Calls(registry, settings, watcher)
    app.register_blueprint(openai_routes(calls))
    app.register_blueprint(responses_routes(calls, _response_store(settings)))
    app.register_blueprint(messages_routes(calls))
    app.extensions[BATCHES] = _register_batches(app, registry, settings, cors)
    app.register_blueprint(computing_routes(calls))
    app.register_blueprint(native_routes(calls))
    app.register_blueprint(tokens_routes(calls))
    app.register_blueprint(models_routes(registry))
    app.register_blueprint(ops_routes(registry))
    app.register_blueprint(admin_routes(registry))
    app.register_blueprint(page_routes(has_ui=settings.ui))
    app.register_blueprint(docs_routes(registry, settings))
    Sockets(calls, cors, tracing).install(app)
    app.register_error_handler(ServeError, _answer_error)
    app.register_error_handler(HTTPException, _answer_http_error)
    app.register_error_handler(WebsocketMismatch, _answer_mismatch)
    app.register_error_handler(Exception, _answer_fault)
    app.after_request(_after_request(engine, tracing))
    return app


def _register_batches(app: Flask, registry: Registry, settings: Settings, cors: Cors) -> BatchWorker:
    disk = DiskFolder(settings.state_dir, settings.cache_path)
    files = FileStore(disk, settings.files_disk, settings.max_file_bytes)
    batches = BatchStore(disk)
    worker = BatchWorker(registry, settings, disk, files, batches)
    app.register_blueprint(files_routes(files, batches, cors))
    app.register_blueprint(batches_routes(files, batches, worker, settings))
    worker.wake()  # an earlier process may have left unfinished batches
    return worker


def _response_store(settings: Settings) -> ResponseStore:
    folder = open_state_folder(settings.state_dir, "responses")
    return ResponseStore(settings.max_stored_responses, settings.stored_responses_memory, folder)


def _begin_request() -> None:
    """Takes the client's request id if it fits into a header and a log line, or makes one."""
    given = request.headers.get("x-request-id", "")
    request_id = given if REQUEST_ID.fullmatch(given) else f"{random.getrandbits(64):016x}"
    g.request_log = RequestLog(request_id, request.method, request.path)
    g.request_log.begin()


def _answer_error(error: ServeError) -> Response:
    g.request_log.note_error(error)
    return Response(_body(error), error.status, error.headers, content_type="application/json")


def _body(error: ServeError, status: int = 0) -> bytes:
    """The error in the shape that clients of this path expect: Anthropic's API has its own."""
    if is_messages_path(request.path):
        return error_body(error, status or error.status, g.request_log.request_id)
    return error.body()


def _answer_http_error(error: HTTPException) -> Response:
    """Gives werkzeug's errors (404, 405, 413, 415 ...) the usual shape; keeps headers such as Allow."""
    code = error.code or 500
    if code == HTTPStatus.NOT_FOUND:
        known = (rule.rule for rule in current_app.url_map.iter_rules())
        return _answer_error(NotFound(describe_unknown(request.path, known)))
    shown = ServeError(f"{request.method} {request.path}: {error.description or HTTPStatus(code).phrase}")
    shown.type = "invalid_request_error" if code < 500 else "server_error"
    response = Response(_body(shown, code), error.code, error.get_headers())
    response.content_type = "application/json"
    return response


def _answer_mismatch(error: WebsocketMismatch) -> Response:
    if request.headers.get("Upgrade", "").lower() == "websocket":
        return _answer_error(BadRequest(f"{request.path} is not a WebSocket; /v1/ws is one."))
    return _answer_error(UpgradeRequired(f"{request.path} is a WebSocket; open it with an Upgrade request."))


def _answer_fault(error: Exception) -> Response:
    request_log: RequestLog = g.request_log
    log.error("%s %s %s failed", request_log.request_id, request.method, request.path, exc_info=error)
    request_log.error = "server_error"
    body = _body(ServeError("The server failed to handle the request."))
    return Response(body, 500, NO_RETRY, content_type="application/json")


def _after_request(engine: Engine, tracing: Tracing | None) -> Callable[[Response], Response]:
    def after_request(response: Response) -> Response:
        request_log: RequestLog = g.request_log
        milliseconds = round((time.monotonic() - request_log.started) * 1000)  # for a stream, until its head
        response.headers["x-request-id"] = request_log.request_id
        if is_messages_path(request.path):
            response.headers[REQUEST_ID_HEADER] = request_log.request_id
        response.headers["openai-processing-ms"] = str(milliseconds)
        route = request.url_rule.rule if request.url_rule is not None else "unknown"
        engine.metrics.requests.labels(route, response.status_code).inc()
        if g.get("has_rate_limits"):
            show_limits(engine.admission, response)
        request_log.route = route
        if tracing is not None:
            headers = request.headers
            request_log.carrier = {name: headers[name] for name in PARENT_HEADERS if name in headers}
        response.call_on_close(lambda: request_log.end(response.status_code, engine.metrics, tracing))
        return response

    return after_request
