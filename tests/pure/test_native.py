"""/generate and /generate_stream over a real gunicorn, with tokens that can be worked out by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fake_server import ServerProcess


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--max-running", "2", "--max-waiting", "4") as process:
        yield process.wait_ready()


def generate(server: ServerProcess, **body: Any) -> Any:
    reply = server.ask("POST", "/generate", body)
    assert reply.status == 200, reply.json
    return reply.json


def stream(server: ServerProcess, **body: Any) -> list[dict[str, Any]]:
    with server.connect() as client:
        client.send("POST", "/generate_stream", body)
        *events, done = client.stream()
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


def test_each_prompt_gets_its_completion_in_order(server: ServerProcess) -> None:
    reply = generate(server, prompts=["t17", "t30 t31"], max_tokens=2, temperature=0)
    assert reply["completions"] == [" t18 t19", " t32 t33"]
    assert reply["finish_reasons"] == ["length", "length"]
    usage = reply["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 4, 7)


def test_the_stream_has_the_same_texts_in_pieces(server: ServerProcess) -> None:
    body = {"prompts": ["t17", "t30"], "max_tokens": 4, "temperature": 0, "stop": ["t20"]}
    texts, ends = ["", ""], ["", ""]
    for event in stream(server, **body):
        assert set(event) <= {"index", "text", "finish_reason"}
        texts[event["index"]] += event["text"]
        ends[event["index"]] += event.get("finish_reason", "")
    assert texts == generate(server, **body)["completions"] == [" t18 t19 ", " t31 t32 t33 t34"]
    assert ends == ["stop", "length"]


def test_tokens_are_drawn_unless_the_temperature_is_zero(server: ServerProcess) -> None:
    texts = [
        generate(server, prompts=["t17"], max_tokens=1, seed=seed)["completions"][0] for seed in range(5)
    ]
    assert texts == [" t18", " t19", " t20", " t21", " t22"], "the default temperature is 0.7"


def test_128_tokens_are_the_default_and_refused_where_they_do_not_fit(server: ServerProcess) -> None:
    error = server.ask("POST", "/generate", {"prompts": ["t17"]}).json["error"]
    assert (error["param"], error["code"]) == ("prompts", "context_length_exceeded")
    assert "129 tokens (1 in the prompt, 128 for the completion)" in error["message"]


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
@pytest.mark.parametrize(
    ("body", "status", "param", "code"),
    [
        ({}, 400, "prompts", "missing_required_parameter"),
        ({"prompts": []}, 400, "prompts", "empty_array"),
        ({"prompts": "t17"}, 400, "prompts", "invalid_type"),
        ({"prompts": ["t17", 3]}, 400, "prompts[1]", "invalid_type"),
        ({"prompts": [""]}, 400, "prompts", None),
        ({"prompts": ["t17"] * 7}, 400, "prompts", None),
        ({"prompts": ["t17"], "max_tokens": 0}, 400, "max_tokens", "integer_below_min_value"),
        ({"prompts": ["t17"], "temperature": 2.5}, 400, "temperature", "decimal_above_max_value"),
        ({"prompts": ["t17"], "temperature": "warm"}, 400, "temperature", "invalid_type"),
        ({"prompts": ["t17"], "top_p": 2}, 400, "top_p", "decimal_above_max_value"),
        ({"prompts": ["t17"], "stop": [""]}, 400, "stop[0]", "empty_string"),
        ({"prompts": ["t17"], "seed": 2**64}, 400, "seed", "integer_above_max_value"),
        ({"prompts": ["t17"], "model": "other"}, 404, "model", "model_not_found"),
    ],
)
def test_a_mistake_is_named(
    server: ServerProcess, path: str, body: Any, status: int, param: str, code: str | None
) -> None:
    reply = server.ask("POST", path, {"max_tokens": 4} | body)
    assert reply.status == status
    assert (reply.json["error"]["param"], reply.json["error"]["code"]) == (param, code)


def test_each_path_streams_or_does_not(server: ServerProcess) -> None:
    for path, stream, other in (
        ("/generate", True, "/generate_stream"),
        ("/generate_stream", False, "/generate"),
    ):
        error = server.ask("POST", path, {"prompts": ["t17"], "stream": stream}).json["error"]
        assert error["param"] == "stream" and f"ask {other} instead" in error["message"]
        assert (
            server.ask("POST", path, {"prompts": ["t17"], "stream": not stream, "max_tokens": 1}).status
            == 200
        )


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
def test_a_client_that_hangs_up_cancels_its_prompts(server: ServerProcess, path: str) -> None:
    server.skip_events()
    with server.connect() as client:
        client.send("POST", path, {"prompts": ["t4", "t4"], "max_tokens": 4})
        server.wait_event("submit")
    assert [server.wait_event("cancel")[-2:], server.wait_event("cancel")[-2:]] == ["-0", "-1"]
