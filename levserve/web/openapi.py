"""Describes the HTTP API in OpenAPI 3.1, made from the types that read bodies and write answers.

Used by `docs_page.py`, on the HTTP thread of the first request for it. `operations.py` has the types of each
route; a route without types is an error, so that the description is complete.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec import Struct
from werkzeug.routing import Map

from levserve import __version__, errors
from levserve.request.schema import (
    UNSUPPORTED,
    UNSUPPORTED_IN_CHAT,
    UNSUPPORTED_IN_COMPLETIONS,
    ChatBody,
    CompletionBody,
)
from levserve.settings.settings import Settings
from levserve.web.auth import ADMIN_PATHS, METRICS_PATHS, OPEN_PATHS
from levserve.web.call import TIMEOUT_HEADER
from levserve.web.descriptions import ERRORS, ROUTES, describe_field
from levserve.web.messages import body as message_body
from levserve.web.messages.errors import is_messages_path
from levserve.web.messages.objects import MessageError
from levserve.web.operations import OPERATIONS, Operation
from levserve.web.page import OPEN_PAGES
from levserve.web.responses.body import UNSUPPORTED_IN_RESPONSES, ResponseBody

REFERENCE = "#/components/schemas/{name}"
LINK = re.compile(r"\[(.+?)\]\(.+?\)")
VERSIONED = "; also under `/v1`"
MESSAGES_SHAPE = "messages-"
"""Prefix of the names of the error responses of Anthropic's paths, which have another shape."""


class ErrorDetail(Struct, frozen=True):
    """What went wrong; `param` names the field, and `code` is for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Struct, frozen=True):
    error: ErrorDetail


IDS = {
    "/static/": "The path of a file.",
    "/v1/responses/": "The id of a stored response.",
    "/v1/files/": "The id of a file.",
    "/v1/batches/": "The id of a batch.",
}
"""What `{id}` stands for below these paths; elsewhere it is the name of a model."""
BODY_STATUSES = (400, 401, 404, 408, 413, 429, 500, 503, 504)
ADMIN_STATUSES = (400, 401, 403, 404, 409, 500, 503)
BATCH_STATUSES = (400, 401, 403, 404, 408, 409, 413, 429, 500, 503)
OTHER_STATUSES = (401, 404, 500, 503)
SOCKET_STATUSES = (400, 401, 403, 426, 500, 503)


def list_routes(url_map: Map) -> list[str]:
    """Every route as "METHOD /path/{id}"."""
    found = set()
    for rule in url_map.iter_rules():
        path = re.sub(r"<.*?>", "{id}", rule.rule)
        methods = (rule.methods or {"GET"}) - {"HEAD", "OPTIONS"}
        found |= {f"{method} {path}" for method in methods}
    return sorted(found)


def make_document(routes: Iterable[str], settings: Settings, model_name: str = "") -> dict[str, Any]:
    """The description of these routes, for a server with these settings; examples name the model."""
    references, schemas = _schemas()
    order = list(OPERATIONS)
    paths: dict[str, dict[str, Any]] = {}
    for route in sorted(routes, key=lambda route: order.index(_find(route, OPERATIONS))):
        method, path = route.split(" ")
        paths.setdefault(path, {})[method.lower()] = _operation(route, references, settings, model_name)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "levserve",
            "version": __version__,
            "description": "Language models over the OpenAI HTTP API. Any optional field may be null, "
            "which is the same as leaving it out.",
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "responses": _error_responses(references[ErrorBody], references[MessageError]),
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "A key of --api-key."},
                "adminKey": {"type": "http", "scheme": "bearer", "description": "A key of --admin-key."},
            },
        },
    }


def _schemas() -> tuple[dict[Any, Any], dict[str, Any]]:
    """A reference to the schema of each type of body or answer, by type, and all schemas by name."""
    kinds: list[Any] = [ErrorBody, MessageError]
    for operation in OPERATIONS.values():
        for kind in (operation.answer, operation.body, operation.events, operation.failure):
            if kind is not None and not isinstance(kind, str) and kind not in kinds:
                kinds.append(kind)
    found, schemas = msgspec.json.schema_components(kinds, ref_template=REFERENCE)
    for operation in OPERATIONS.values():
        if operation.body is not None:
            schema = schemas[operation.body.__name__]
            schema["properties"] = _describe_fields(operation.body, schema["properties"])
    return dict(zip(kinds, found, strict=True)), schemas


def is_refused(body: type[Struct], name: str) -> bool:
    """Whether a body declares a field only to refuse it by name."""
    if issubclass(body, ResponseBody):
        return name in UNSUPPORTED_IN_RESPONSES
    if issubclass(body, message_body.PromptBody):
        return name in message_body.REFUSED
    if issubclass(body, ChatBody) and name in UNSUPPORTED_IN_CHAT:
        return True
    if issubclass(body, CompletionBody) and name in UNSUPPORTED_IN_COMPLETIONS:
        return True
    return name in UNSUPPORTED


def _describe_fields(body: type[Struct], properties: dict[str, Any]) -> dict[str, Any]:
    """The fields with their meanings, without those that are refused."""
    described = {}
    for name, schema in properties.items():
        if not is_refused(body, name):
            described[name] = schema | {"description": _plain(describe_field(body.__name__, name))}
    return described


def _find(route: str, table: Mapping[str, object]) -> str:
    """The key of a route in a table that lists a route with a second path under /v1 only once."""
    return route if route in table else route.replace(" /v1/", " /")


def _operation(route: str, references: dict[Any, Any], settings: Settings, model_name: str) -> dict[str, Any]:
    method, path = route.split(" ")
    operation = OPERATIONS[_find(route, OPERATIONS)]
    meaning = ROUTES[_find(route, ROUTES)].removesuffix(VERSIONED)
    described: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{method.lower()} {path}").strip("_"),
        "summary": _plain(meaning),
        "tags": [_tag(path)],
        "security": _security(path, settings),
        "responses": _responses(path, operation, references),
    }
    if parameters := _parameters(path, operation):
        described["parameters"] = parameters
    if operation.body is not None:
        example = operation.example
        if "model" in example:
            example = {**example, "model": model_name}
        content = {"schema": references[operation.body], "example": example}
        is_required = path != f"{ADMIN_PATHS}reload"
        described["requestBody"] = {"content": {"application/json": content}, "required": is_required}
    if operation.form:
        described["requestBody"] = {"content": {"multipart/form-data": {"schema": _form(operation)}}}
        described["requestBody"]["required"] = True
    return described


def _form(operation: Operation) -> dict[str, Any]:
    properties: dict[str, dict[str, Any]] = {}
    for name, what in operation.form.items():
        properties[name] = {"type": "string", "description": what}
    properties["file"]["format"] = "binary"
    properties["purpose"]["examples"] = ["batch"]
    return {"type": "object", "properties": properties, "required": ["file", "purpose"]}


def _responses(path: str, operation: Operation, references: dict[Any, Any]) -> dict[str, Any]:
    if path == "/v1/ws":
        upgraded = {"description": "The connection is a WebSocket from here on."}
        return {"101": upgraded, **_references(SOCKET_STATUSES)}
    responses: dict[str, Any] = {"200": _success(path, operation, references)}
    if operation.failure is not None:
        failure = {"application/json": {"schema": references[operation.failure]}}
        return responses | {"503": {"description": "The server is unhealthy.", "content": failure}}
    if path.startswith(ADMIN_PATHS):
        return responses | _references(ADMIN_STATUSES)
    if path.startswith(("/v1/files", "/v1/batches")):
        return responses | _references(BATCH_STATUSES)
    statuses = BODY_STATUSES if operation.body is not None else OTHER_STATUSES
    return responses | _references(statuses, MESSAGES_SHAPE if is_messages_path(path) else "")


def _success(path: str, operation: Operation, references: dict[Any, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if isinstance(operation.answer, str):
        content[operation.answer] = {}
    elif operation.answer is not None:
        content["application/json"] = {"schema": references[operation.answer]}
    if operation.events is None:
        return {"description": "The answer.", "content": content}
    content["text/event-stream"] = {"schema": references[operation.events]}
    what = "The answer; as a stream, each event's data is such an object"
    has_done = not path.startswith(("/v1/responses", "/v1/messages"))
    what += ", and the last one's is [DONE]." if has_done else "."
    return {"description": what, "content": content}


def _references(statuses: Iterable[int], shape: str = "") -> dict[str, Any]:
    return {str(status): {"$ref": f"#/components/responses/{shape}{status}"} for status in statuses}


def _error_responses(body: dict[str, Any], messages_body: dict[str, Any]) -> dict[str, Any]:
    """A response for each status of an error, in each of the two shapes."""
    meanings: dict[int, list[str]] = {}
    for name, meaning in ERRORS.items():
        meanings.setdefault(getattr(errors, name).status, []).append(_plain(meaning))
    return {
        f"{shape}{status}": {
            "description": "; or ".join(meanings[status]),
            "content": {"application/json": {"schema": schema}},
        }
        for shape, schema in (("", body), (MESSAGES_SHAPE, messages_body))
        for status in sorted(meanings)
    }


def _parameters(path: str, operation: Operation) -> list[dict[str, Any]]:
    parameters: list[dict[str, Any]] = []
    if "{id}" in path:
        what = next((what for root, what in IDS.items() if path.startswith(root)), "The name of a model.")
        parameters.append(_parameter("id", "path", {"type": "string"}, what, required=True))
    for name, meaning in operation.query.items():
        parameters.append(_parameter(name, "query", {"type": "string"}, meaning))
    if operation.body is not None and not path.startswith((ADMIN_PATHS, "/v1/batches")):
        schema = {"type": "number", "exclusiveMinimum": 0}
        what = "Milliseconds that the request may take."
        parameters.append(_parameter(TIMEOUT_HEADER, "header", schema, what))
    return parameters


def _parameter(
    name: str, place: str, schema: dict[str, Any], description: str, *, required: bool = False
) -> dict[str, Any]:
    return {"name": name, "in": place, "required": required, "description": description, "schema": schema}


def _security(path: str, settings: Settings) -> list[dict[str, list[str]]]:
    if path.startswith(ADMIN_PATHS):
        return [{"adminKey": []}]
    is_open = path in OPEN_PATHS or (settings.open_metrics and path in METRICS_PATHS)
    is_page = settings.ui and (path in OPEN_PAGES or path.startswith("/static/"))
    return [] if is_open or is_page or not settings.api_keys else [{"key": []}]


def _tag(path: str) -> str:
    if path.startswith(ADMIN_PATHS):
        return "admin"
    if path in OPEN_PATHS | METRICS_PATHS:
        return "operations"
    if path in (*OPEN_PAGES, "/") or path.startswith("/static/"):
        return "pages"
    return "models"


def _plain(text: str) -> str:
    """A sentence of the documentation without its links."""
    return LINK.sub(r"\1", text)
