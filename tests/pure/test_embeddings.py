"""Embeddings: what is pooled, in which form it comes, and what is refused."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.fake_app import App, serving
from tests.fake_server import ServerProcess

PATH = "/v1/embeddings"
HALF = 0.5**0.5  # each of the two equal components of a unit vector


@pytest.fixture
def app() -> Iterator[App]:
    with serving(max_running=3) as app:
        yield app


def embed(app: App, given: Any, **fields: Any) -> Any:
    reply = app.post(PATH, {"model": "toy", "input": given} | fields)
    assert reply.status_code == 200, reply.text
    return reply.json


def vectors(app: App, given: Any, **fields: Any) -> list[Any]:
    return [entry["embedding"] for entry in embed(app, given, **fields)["data"]]


def test_the_mean_of_a_texts_states_has_length_1(app: App) -> None:
    body = embed(app, "t17 t18")  # the hidden states are 1 in places 1 and 2
    assert body["data"][0] == {
        "index": 0,
        "object": "embedding",
        "embedding": pytest.approx([0, HALF, HALF, 0]),
    }
    assert (body["object"], body["model"], body["usage"]) == (
        "list",
        "toy",
        {"prompt_tokens": 2, "total_tokens": 2},
    )


def test_the_last_state_is_taken_when_asked_for(app: App) -> None:
    assert vectors(app, "t17 t18", pooling="last") == [[0, 0, 1, 0]]
    assert vectors(app, "t17 t18", pooling="mean") == vectors(app, "t17 t18")


@pytest.mark.parametrize(
    "given, count",
    [("t17", 1), (["t17", "t18"], 2), ([17, 18], 1), ([[17], [18], [19]], 3), (["t17"] * 20, 20)],
)
def test_input_has_four_forms_and_keeps_its_order(app: App, given: Any, count: int) -> None:
    body = embed(app, given)
    assert [entry["index"] for entry in body["data"]] == list(range(count))
    assert body["data"][0]["embedding"] == pytest.approx(
        [0, HALF, HALF, 0] if given == [17, 18] else [0, 1, 0, 0]
    )


def test_base64_holds_little_endian_floats(app: App) -> None:
    (text,) = vectors(app, "t17 t18", encoding_format="base64")
    assert struct.unpack("<4f", base64.b64decode(text)) == pytest.approx((0, HALF, HALF, 0))


def test_dimensions_may_be_said_but_not_changed(app: App) -> None:
    assert vectors(app, "t17", dimensions=4) == [[0, 1, 0, 0]]
    given = len(app.device.requests)
    assert app.refuse(PATH, {"model": "toy", "input": "t17", "dimensions": 3}) == (400, "dimensions")
    assert len(app.device.requests) == given, "refused before anything is computed"


def test_nothing_is_generated(app: App) -> None:
    embed(app, ["t17", "t18 t19"])
    assert [
        (request.prompt, request.max_tokens, request.wants_hidden) for request in app.device.requests
    ] == [
        ((17,), 0, True),
        ((18, 19), 0, True),
    ]


@pytest.mark.parametrize(
    "fields, status, param",
    [
        ({"input": None}, 400, "input"),
        ({"input": []}, 400, "input"),
        ({"input": ""}, 400, "input"),
        ({"input": ["t17", ""]}, 400, "input[1]"),
        ({"input": ["t17", 18]}, 400, "input"),
        ({"input": [384]}, 400, "input"),
        ({"input": ["t17"] * 2049}, 400, "input"),
        ({"input": "t17 " * 65}, 400, "input"),
        ({"model": "other"}, 404, "model"),
        ({"encoding_format": "int8"}, 400, "encoding_format"),
        ({"encoding_format": 8}, 400, "encoding_format"),
        ({"pooling": "max"}, 400, "pooling"),
        ({"pooling": ""}, 400, "pooling"),
        ({"dimensions": 0}, 400, "dimensions"),
        ({"truncate_prompt_tokens": 0}, 400, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, 400, "truncate_prompt_tokens"),
    ],
)
def test_a_mistake_names_its_field(app: App, fields: dict[str, Any], status: int, param: str) -> None:
    assert app.refuse(PATH, {"model": "toy", "input": "t17"} | fields) == (status, param)


def test_a_text_may_fill_the_context(app: App) -> None:
    assert embed(app, "t17 " * 64)["usage"]["prompt_tokens"] == 64


def test_a_full_server_refuses(app: App) -> None:
    with serving(max_inflight=2, max_running=2) as small:
        assert len(vectors(small, ["t17"] * 9)) == 9
        unread = small.client.post(
            "/v1/completions", json={"model": "toy", "prompt": "t6", "stream": True}, buffered=False
        )
        assert small.refuse(PATH, {"model": "toy", "input": ["t17", "t18"]}) == (429, None)
        unread.close()


def test_the_openai_sdk_reads_them() -> None:
    with (
        ServerProcess("--max-running", "2") as server,
        openai.OpenAI(base_url=f"{server.wait_ready().url}/v1", api_key="none") as client,
    ):
        for encoding in ("float", "base64", openai.NOT_GIVEN):
            reply = client.embeddings.create(model="toy", input=["t17", "t18"], encoding_format=encoding)  # type: ignore[arg-type]
            if encoding != "base64":
                assert [entry.embedding for entry in reply.data] == [[0, 1, 0, 0], [0, 0, 1, 0]]
