"""Makes the Flask application from its collaborators: routes, request ids, and one place where errors become answers.

`create_app` is called once, in the worker. Everything registered here runs on the request's HTTP thread.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable
from http import HTTPStatus

from flask import Flask, Response, g, request
from werkzeug.exceptions import HTTPException

from levserve.config import Settings
from levserve.engine.engine import Engine
from levserve.errors import DeadlineExceeded, RetryLater, ServeError, Unauthorized
from levserve.metrics import Metrics
from levserve.web.answer import error_body
from levserve.web.auth import key_check
from levserve.web.openai import OpenAI
from levserve.web.run import Runs
from levserve.web.ops import ops_routes
from levserve.web.watcher import Watcher

log = logging.getLogger(__name__)

REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
NO_RETRY = {"x-should-retry": "false"}  # OpenAI's SDK would send the request again, to fail again


def create_app(engine: Engine, settings: Settings, watcher: Watcher) -> Flask:
    app = Flask("levserve", static_folder=None)
    app.before_request(_name_request)
    app.before_request(key_check(settings.api_key))
    app.register_blueprint(OpenAI(engine, settings, Runs(engine, settings, watcher)).routes())
    app.register_blueprint(ops_routes(engine))
    app.register_error_handler(ServeError, _answer_error)
    app.register_error_handler(HTTPException, _answer_http_error)
    app.register_error_handler(Exception, _answer_fault)
    app.after_request(_after_request(engine.metrics))
    return app


def _name_request() -> None:
    """Takes the client's request id if it is fit for a header and a log line, else makes one."""
    given = request.headers.get("x-request-id", "")
    g.request_id = given if REQUEST_ID.fullmatch(given) else os.urandom(8).hex()


def _answer_error(error: ServeError) -> Response:
    return Response(error_body(error), error.status, _headers(error), content_type="application/json")


def _answer_http_error(error: HTTPException) -> Response:
    """What Flask and werkzeug refuse (404, 405, 413, 415 ...), in our shape; headers such as Allow are kept."""
    response = Response(status=error.code, headers=error.get_headers())
    told = ServeError(f"{request.method} {request.path}: {error.description or HTTPStatus(error.code or 500).phrase}")
    told.type = "invalid_request_error" if (error.code or 500) < 500 else "server_error"
    response.data = error_body(told)
    response.content_type = "application/json"
    return response


def _answer_fault(error: Exception) -> Response:
    log.error("%s %s %s failed", g.request_id, request.method, request.path, exc_info=error)
    body = error_body(ServeError("The server failed to handle the request."))
    return Response(body, 500, NO_RETRY, content_type="application/json")


def _headers(error: ServeError) -> dict[str, str]:
    match error:
        case Unauthorized():
            return {"WWW-Authenticate": "Bearer"}
        case RetryLater(retry_after_seconds=seconds):
            return {"Retry-After": str(math.ceil(seconds)), "retry-after-ms": str(math.ceil(seconds * 1000))}
        case DeadlineExceeded():
            return NO_RETRY
    return {}


def _after_request(metrics: Metrics) -> Callable[[Response], Response]:
    def after_request(response: Response) -> Response:
        response.headers["x-request-id"] = g.request_id
        route = request.url_rule.rule if request.url_rule is not None else "unknown"
        metrics.requests.labels(route, response.status_code).inc()
        return response

    return after_request
