"""The description of the API: valid, complete, and true to what the server answers."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import OpenAPIV31SpecValidator

from levserve.errors import BadRequest
from levserve.request.schema import UNSUPPORTED, ChatBody
from levserve.web.openapi import ErrorDetail, list_routes
from levserve.web.operations import OPERATIONS
from tests.fake_app import App, serving

KEY = "sk-test-0123456789"


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with serving(obeys=False) as app:
        yield app


@pytest.fixture(scope="module")
def document(app: App) -> dict[str, Any]:
    found = app.client.get("/openapi.json").json
    assert found is not None
    return dict(found)


def test_the_description_is_valid(document: dict[str, Any]) -> None:
    OpenAPIV31SpecValidator(document).validate()


def test_every_route_is_described(app: App, document: dict[str, Any]) -> None:
    described = {
        f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods
    }
    assert described == set(list_routes(app.client.application.url_map))
    assert set(OPERATIONS) <= described


def test_fields_are_those_that_are_honoured_each_with_its_meaning(document: dict[str, Any]) -> None:
    fields = document["components"]["schemas"]["ChatBody"]["properties"]
    assert set(fields) == set(ChatBody.__struct_fields__) - set(UNSUPPORTED) - {
        "add_special_tokens",
        "best_of",
        "echo",
        "suffix",
    }
    for operation in OPERATIONS.values():
        if operation.body is not None:
            schema = document["components"]["schemas"][operation.body.__name__]
            assert all(field["description"] for field in schema["properties"].values())


@pytest.mark.parametrize("route", [route for route, one in OPERATIONS.items() if one.example])
def test_each_example_is_answered_as_described(app: App, document: dict[str, Any], route: str) -> None:
    method, path = route.split(" ")
    operation = document["paths"][path][method.lower()]
    example = operation["requestBody"]["content"]["application/json"]["example"]
    if "input_file_id" in example:
        form = {"purpose": "batch", "file": (io.BytesIO(b"{}"), "in.jsonl")}
        uploaded = app.client.post("/v1/files", data=form).json
        answer = document["paths"]["/v1/files"]["post"]["responses"]["200"]
        check(document, answer["content"]["application/json"]["schema"], uploaded)
        example = example | {"input_file_id": (uploaded or {})["id"]}
    # The toy's context is short, and its vocabulary has other words.
    reply = app.post(path, with_toy_words(example))
    assert reply.status_code == 200, reply.text
    content = operation["responses"]["200"]["content"]
    if reply.is_json:
        check(document, content["application/json"]["schema"], reply.json)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_events_are_as_described(app: App, document: dict[str, Any], path: str) -> None:
    body = with_toy_words(OPERATIONS[f"POST {path}"].example) | {"model": "toy", "n": 2, "max_tokens": 2}
    content = document["paths"][path]["post"]["responses"]["200"]["content"]
    options = {"stream_options": {"include_usage": True}, "logprobs": 1 if "chat" not in path else True}
    for chunk in app.stream(path, body) + app.stream(path, body | options):
        check(document, content["text/event-stream"]["schema"], chunk)


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/models/toy", "/tokenizer_info", "/healthz", "/health", "/readyz", "/"]
)
def test_other_answers_are_as_described(app: App, document: dict[str, Any], path: str) -> None:
    operation = document["paths"][path.replace("toy", "{id}")]["get"]
    content = operation["responses"]["200"]["content"]["application/json"]
    check(document, content["schema"], app.client.get(path).json)


def test_errors_are_as_described(app: App, document: dict[str, Any]) -> None:
    reply = app.post("/v1/completions", {})
    described = document["components"]["responses"][str(reply.status_code)]
    check(document, described["content"]["application/json"]["schema"], reply.json)
    assert reply.json is not None and set(reply.json["error"]) == set(ErrorDetail.__struct_fields__)
    assert BadRequest("x").body()


def test_the_description_tells_which_key_opens_what() -> None:
    with serving(api_key=KEY, admin_key="sk-admin") as app:
        paths = app.client.get("/openapi.json").json["paths"]  # type: ignore[index]
    assert paths["/v1/completions"]["post"]["security"] == [{"key": []}]
    assert paths["/admin/stats"]["get"]["security"] == [{"adminKey": []}]
    assert paths["/healthz"]["get"]["security"] == paths["/docs"]["get"]["security"] == []


def test_the_pages_are_open_and_can_be_turned_off() -> None:
    with serving(api_key=KEY) as app:
        page = app.client.get("/docs")
        assert page.status_code == 200 and page.content_type == "text/html; charset=utf-8"
        assert "script-src 'self'" in page.headers["Content-Security-Policy"]
        assert "<script src=" in page.text and page.text.count("<script") == 1, "no script in the page itself"
        assert app.client.get("/openapi.json").status_code == 200
        assert app.client.post("/docs").status_code == 401
    with serving(api_key=KEY, ui=False) as app:
        assert app.client.get("/openapi.json").status_code == 401
        with_key = {"Authorization": f"Bearer {KEY}"}
        assert app.client.get("/docs", headers=with_key).status_code == 404
        found = app.client.get("/openapi.json", headers=with_key).json
        assert found is not None and "/docs" not in found["paths"]


def check(document: dict[str, Any], schema: dict[str, Any], value: Any) -> None:
    Draft202012Validator({**schema, "components": document["components"]}).validate(value)


def with_toy_words(example: dict[str, Any]) -> dict[str, Any]:
    words = {"The sky is": "t17", " blue": " t18", "The sky is blue.": "t17 t18", "Say hello.": "t17"}

    def translate(value: Any) -> Any:
        if isinstance(value, str):
            return words.get(value, value)
        if isinstance(value, list):
            return [translate(one) for one in value]
        if isinstance(value, dict):
            return {name: translate(one) for name, one in value.items()}
        return value

    translated: dict[str, Any] = translate(example)
    return translated
