"""The tokenizer over HTTP, as lm-evaluation-harness and vLLM's clients ask for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from flask.testing import FlaskClient

from levserve.engine.engine import Engine
from levserve.models.registry import Registry
from levserve.observe.metrics import Metrics
from levserve.settings.settings import Settings
from levserve.web.app import create_app
from levserve.web.watcher import Watcher
from tests.fake_device import TEMPLATE, FakeDevice

MESSAGES = [{"role": "user", "content": "t17 t18"}]


@pytest.fixture
def registry() -> Registry:
    return Registry(Engine(max_inflight=1, metrics=Metrics()))


@pytest.fixture
def client(registry: Registry) -> Iterator[FlaskClient]:
    watcher = Watcher()
    FakeDevice(registry)  # publishes the model; tokenizing does not need its thread
    yield create_app(registry, Settings(max_body_bytes=1000), watcher).test_client()
    watcher.stop()


def ask(client: FlaskClient, path: str, body: dict[str, Any]) -> Any:
    reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json


@pytest.mark.parametrize("root", ["", "/v1"])
def test_a_text_becomes_tokens_and_text_again(client: FlaskClient, root: str) -> None:
    reply = ask(client, f"{root}/tokenize", {"prompt": "t17 t18", "add_special_tokens": False})
    assert reply == {"count": 2, "max_model_len": 64, "tokens": [17, 18], "token_strs": None}
    assert ask(client, f"{root}/detokenize", {"tokens": [17, 18]}) == {"prompt": "t17 t18"}


def test_the_string_of_a_special_token_is_its_one_id(client: FlaskClient) -> None:
    info = client.get("/tokenizer_info").json
    assert info is not None
    for name, token in (("pad_token", 0), ("bos_token", 1), ("eos_token", 2)):
        assert ask(client, "/tokenize", {"prompt": info[name], "add_special_tokens": False})["tokens"] == [
            token
        ]
        assert ask(client, "/detokenize", {"tokens": [token]})["prompt"] == info[name]
    assert ask(client, "/detokenize", {"tokens": [1, 17, 2], "skip_special_tokens": True})["prompt"] == "t17"


def test_tokens_are_named_when_asked(client: FlaskClient) -> None:
    assert ask(client, "/tokenize", {"prompt": "t17 t18", "return_token_strs": True})["token_strs"] == [
        "t17",
        "t18",
    ]


def test_a_conversation_is_tokenized_with_the_template(client: FlaskClient) -> None:
    assert ask(client, "/tokenize", {"messages": MESSAGES})["tokens"] == [17, 18, 9]
    assert ask(client, "/tokenize", {"messages": MESSAGES, "add_generation_prompt": False})["tokens"] == [
        17,
        18,
    ]


def test_the_template_can_be_read_as_text(client: FlaskClient) -> None:
    assert ask(client, "/apply_template", {"messages": MESSAGES}) == {"prompt": "t17 t18 t9"}
    written = [{"role": "user", "content": "t17 </s>"}]
    assert ask(client, "/apply_template", {"messages": written, "model": "toy"}) == {"prompt": "t17 </s> t9"}


def test_the_tokenizer_tells_of_itself(client: FlaskClient) -> None:
    info = client.get("/tokenizer_info").json
    assert info is not None
    assert (info["bos_token"], info["eos_token"], info["pad_token"]) == ("<s>", "</s>", "<pad>")
    assert (info["vocab_size"], info["model_max_length"], info["eos_token_ids"]) == (384, 64, [2])
    assert info["chat_template"] == TEMPLATE
    assert client.get("/v1/tokenizer_info").json == info


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "code"),
    [
        ("/tokenize", {}, 400, "prompt", "missing_required_parameter"),
        ("/tokenize", {"prompt": 3}, 400, "prompt", "invalid_type"),
        ("/tokenize", {"prompt": "t17", "messages": MESSAGES}, 400, "messages", None),
        ("/tokenize", {"prompt": "t17", "model": "other"}, 404, "model", "model_not_found"),
        ("/tokenize", {"prompt": "\ud800"}, 400, None, None),
        ("/tokenize", {"prompt": "t17 " * 300}, 413, None, "body_too_large"),
        ("/tokenize", {"messages": []}, 400, "messages", "empty_array"),
        (
            "/tokenize",
            {"messages": [{"content": "t17"}]},
            400,
            "messages[0].role",
            "missing_required_parameter",
        ),
        (
            "/tokenize",
            {"messages": [{"role": "robot", "content": "t17"}]},
            400,
            "messages[0].role",
            "invalid_value",
        ),
        (
            "/tokenize",
            {"messages": MESSAGES, "add_special_tokens": True},
            400,
            "add_special_tokens",
            "unsupported_parameter",
        ),
        ("/apply_template", {}, 400, "messages", "missing_required_parameter"),
        (
            "/apply_template",
            {"messages": MESSAGES, "chat_template": "x"},
            400,
            "chat_template",
            "unsupported_parameter",
        ),
        (
            "/apply_template",
            {"messages": MESSAGES, "chat_template_kwargs": {"messages": 1}},
            400,
            "chat_template_kwargs",
            None,
        ),
        (
            "/apply_template",
            {"messages": MESSAGES, "add_generation_prompt": True, "continue_final_message": True},
            400,
            "continue_final_message",
            None,
        ),
        ("/detokenize", {}, 400, "tokens", "missing_required_parameter"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens[0]", "invalid_type"),
        ("/detokenize", {"tokens": [384]}, 400, "tokens", None),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens", None),
        ("/detokenize", {"tokens": [10**30]}, 400, "tokens", None),
    ],
)
def test_a_mistake_is_named(
    client: FlaskClient, path: str, body: Any, status: int, param: str | None, code: str | None
) -> None:
    reply = client.post(path, json=body)
    assert reply.status_code == status
    assert reply.json is not None
    assert (reply.json["error"]["param"], reply.json["error"]["code"]) == (param, code)


def test_nobody_tokenizes_before_the_model_is_loaded() -> None:
    watcher = Watcher()
    client = create_app(
        Registry(Engine(max_inflight=1, metrics=Metrics())), Settings(), watcher
    ).test_client()
    watcher.stop()
    assert client.post("/tokenize", json={"prompt": "t17"}).status_code == 503
    assert client.get("/tokenizer_info").status_code == 503
