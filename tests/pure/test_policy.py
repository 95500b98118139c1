"""What the operator decides about requests: how many tokens one may ask for, and what its client is told."""

from __future__ import annotations

from typing import Any

import pytest

from levserve.settings.settings import Settings
from tests.fake_app import App, serving

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "toy", "messages": [{"role": "user", "content": "t17"}], "temperature": 0},
    TEXT: {"model": "toy", "prompt": "t17", "temperature": 0},
    "/generate": {"prompts": ["t17"], "temperature": 0},
}


def num_generated(app: App, path: str, **fields: Any) -> tuple[int, list[str]]:
    reply = app.post(path, BODIES[path] | fields)
    assert reply.status_code == 200, reply.text
    assert reply.json is not None
    return reply.json["usage"]["completion_tokens"], reply.json.get("warnings", [])


@pytest.mark.parametrize(
    ("path", "field"),
    [
        (TEXT, "max_tokens"),
        (CHAT, "max_tokens"),
        (CHAT, "max_completion_tokens"),
        ("/generate", "max_tokens"),
    ],
)
def test_a_larger_ask_is_capped_and_told_so(path: str, field: str) -> None:
    with serving(max_new_tokens=5) as app:
        count, (warning,) = num_generated(app, path, **{field: 6})
        assert count == 5 and f"'{field}' is 6" in warning and "at most 5 tokens" in warning
        assert num_generated(app, path, **{field: 5}) == (5, [])


@pytest.mark.parametrize(
    ("path", "field"),
    [
        (TEXT, "max_tokens"),
        (CHAT, "max_tokens"),
        (CHAT, "max_completion_tokens"),
        ("/generate", "max_tokens"),
    ],
)
def test_a_larger_ask_is_refused_by_name_where_that_is_set(path: str, field: str) -> None:
    with serving(max_new_tokens=5, max_new_tokens_mode="refuse") as app:
        assert app.refuse(path, BODIES[path] | {field: 6}) == (400, field)
        assert "at most 5 tokens" in app.post(path, BODIES[path] | {field: 6}).text
        assert num_generated(app, path, **{field: 5}) == (5, [])


@pytest.mark.parametrize("mode", ["cap", "refuse"])
@pytest.mark.parametrize("path", BODIES)
def test_a_request_that_asks_for_no_number_gets_the_most_there_is(path: str, mode: str) -> None:
    with serving(max_new_tokens=5, max_new_tokens_mode=mode) as app:
        assert num_generated(app, path) == (5, [])


def test_a_chat_near_the_end_of_the_context_gets_what_is_left() -> None:
    with serving(max_new_tokens=5) as app:
        long = {"messages": [{"role": "user", "content": " ".join(["t17"] * 60)}]}
        assert num_generated(app, CHAT, **long) == (3, [])


def test_a_stream_tells_with_the_end_of_each_choice() -> None:
    with serving(max_new_tokens=2) as app:
        for path in (TEXT, CHAT):
            chunks = app.stream(path, BODIES[path] | {"max_tokens": 9, "n": 2})
            ends = ["warnings" in chunk for chunk in chunks]
            assert ends == [bool(chunk["choices"][0]["finish_reason"]) for chunk in chunks]
            assert sum(ends) == 2
        reply = app.post("/generate_stream", BODIES["/generate"] | {"max_tokens": 9})
        assert reply.text.count("warnings") == 1


def test_one_of_several_models_may_have_a_cap_of_its_own() -> None:
    with serving(max_new_tokens=5, models={"toy": Settings(max_new_tokens=3)}) as app:
        assert num_generated(app, TEXT, max_tokens=9)[0] == 3


def test_a_default_length_leaves_out_what_the_context_does_not_hold() -> None:
    with serving(default_max_tokens=60) as app:
        words = " ".join(f"t{number}" for number in range(17, 37))
        chat = {"model": "toy", "messages": [{"role": "user", "content": words}], "temperature": 0}
        reply = app.post("/v1/chat/completions", chat)
        assert reply.status_code == 200, reply.text
        usage = (reply.json or {})["usage"]
        assert usage["total_tokens"] <= 64
        asked = app.post("/v1/chat/completions", chat | {"max_tokens": 60})
        assert asked.status_code == 400 and "maximum context length" in asked.text


def test_the_operators_defaults_hold_for_generate_too() -> None:
    with serving(default_max_tokens=3, default_temperature=0.0) as app:
        body = {"prompts": ["t17"], "seed": 2}
        reply = app.post("/generate", body)
        assert reply.json is not None and reply.json["completions"] == [" t18 t19 t20"]
