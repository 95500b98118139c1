"""Prompts that are cut from the left: because the client asks for it, or because the operator does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from levserve.request.truncation import keep_last
from tests.fake_app import App, serving
from tests.fake_device import MAX_SEQ_LEN

CHAT, TEXT, EMBED, SCORE = "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/loglikelihood"
LONG = " ".join(f"t{number}" for number in range(17, 17 + MAX_SEQ_LEN + 6))
"""More tokens than the context holds; the last is t86."""


def body(path: str, text: str, **fields: Any) -> dict[str, Any]:
    given: dict[str, dict[str, Any]] = {
        CHAT: {"model": "toy", "messages": [{"role": "user", "content": text}], "temperature": 0},
        TEXT: {"model": "toy", "prompt": text, "temperature": 0, "max_tokens": 4},
        "/generate": {"prompts": [text], "temperature": 0, "max_tokens": 4},
        EMBED: {"model": "toy", "input": text},
        SCORE: {"prompts": [text], "continuations": [" t90 t91"]},
    }
    return given[path] | fields


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with serving(obeys=False) as app:
        yield app


@pytest.fixture(scope="module")
def cutting() -> Iterator[App]:
    with serving(obeys=False, truncate_prompts=True) as app:
        yield app


def ask(app: App, path: str, text: str, **fields: Any) -> tuple[tuple[int, ...], Any]:
    """The prompt that reached the device, and the answer."""
    reply = app.post(path, body(path, text, **fields))
    assert reply.status_code == 200, reply.text
    return app.device.requests[-1].prompt, reply.json


@pytest.mark.parametrize("path", [TEXT, "/generate", EMBED])
def test_the_last_tokens_are_kept(app: App, path: str) -> None:
    prompt, answer = ask(app, path, "t17 t18 t19", truncate_prompt_tokens=2)
    assert prompt == (18, 19) and "warnings" not in answer
    assert answer["usage"]["prompt_tokens"] == 2
    assert ask(app, path, "t17 t18 t19", truncate_prompt_tokens=9)[0] == (17, 18, 19)


def test_a_chat_keeps_the_end_of_its_template(app: App) -> None:
    assert ask(app, CHAT, "t17 t18 t19", truncate_prompt_tokens=2, max_tokens=1)[0] == (19, 9)


def test_a_continuation_keeps_its_tokens_and_one_before_it(app: App) -> None:
    prompt, answer = ask(app, SCORE, "t17 t18 t19", truncate_prompt_tokens=3, details=True)
    assert prompt == (19, 90, 91) and answer["tokens"] == [["t90", "t91"]]
    short = body(SCORE, "t17 t18 t19", truncate_prompt_tokens=2)
    assert app.refuse(SCORE, short) == (400, "truncate_prompt_tokens")


@pytest.mark.parametrize("path", [TEXT, "/generate", EMBED, SCORE, CHAT])
def test_minus_one_keeps_what_fits(app: App, path: str) -> None:
    before = len(app.device.requests)
    assert app.refuse(path, body(path, LONG))[0] == 400
    assert len(app.device.requests) == before
    prompt, answer = ask(app, path, LONG, truncate_prompt_tokens=-1)
    kept = {EMBED: MAX_SEQ_LEN, SCORE: MAX_SEQ_LEN, CHAT: MAX_SEQ_LEN * 3 // 4}
    assert len(prompt) == kept.get(path, MAX_SEQ_LEN - 4)
    assert prompt[-1] == {SCORE: 91, CHAT: 9}.get(path, 86) and "warnings" not in answer


@pytest.mark.parametrize("path", [TEXT, "/generate", EMBED, SCORE, CHAT])
def test_the_operator_may_prefer_cut_prompts_to_refusals(cutting: App, path: str) -> None:
    prompt, answer = ask(cutting, path, LONG)
    (warning,) = answer["warnings"]
    whole = len(LONG.split()) + {SCORE: 2, CHAT: 1}.get(path, 0)
    assert f"the first {whole - len(prompt)} were left out" in warning
    assert "warnings" not in ask(cutting, path, "t17 t18")[1]


def test_a_number_that_is_still_too_large_is_cut_further_only_by_the_operator(app: App, cutting: App) -> None:
    asked = body(TEXT, LONG, truncate_prompt_tokens=MAX_SEQ_LEN + 1)
    assert app.refuse(TEXT, asked) == (400, "prompt")
    prompt, answer = ask(cutting, TEXT, LONG, truncate_prompt_tokens=MAX_SEQ_LEN + 1)
    assert len(prompt) == MAX_SEQ_LEN - 4 and len(answer["warnings"]) == 1


def test_an_answer_that_cannot_fit_is_refused_whatever_is_cut(cutting: App) -> None:
    asked = body(TEXT, LONG, max_tokens=MAX_SEQ_LEN, truncate_prompt_tokens=-1)
    assert cutting.refuse(TEXT, asked) == (400, "prompt")


def test_an_echo_shows_what_is_left(app: App) -> None:
    _, answer = ask(app, TEXT, "t17 t18 t19", truncate_prompt_tokens=2, echo=True, max_tokens=1)
    assert answer["choices"][0]["text"] == "t18 t19 t20"


def test_every_prompt_of_a_list_is_cut_for_itself(app: App) -> None:
    app.post(TEXT, body(TEXT, "", prompt=["t17", "t18 t19 t20"], truncate_prompt_tokens=2))
    assert [request.prompt for request in app.device.requests[-2:]] == [(17,), (19, 20)]


@pytest.mark.parametrize("path", [TEXT, CHAT, "/generate", SCORE])
@pytest.mark.parametrize("limit", [0, -2, "2", 1.5])
def test_no_other_number_is_accepted(app: App, path: str, limit: Any) -> None:
    assert app.refuse(path, body(path, "t17", truncate_prompt_tokens=limit)) == (
        400,
        "truncate_prompt_tokens",
    )


def test_a_bos_that_the_tokenizer_wrote_stays_and_counts(app: App) -> None:
    assert keep_last([1, 5, 6, 7], 2, bos=1) == [1, 7]
    assert keep_last([1, 5, 6, 7], 1, bos=1) == [7]
    assert keep_last([5, 6, 7], 2, bos=1) == [6, 7]
    assert ask(app, TEXT, "<s> t17 t18", truncate_prompt_tokens=2)[0] == (1, 18)
    assert ask(app, TEXT, "", prompt=[1, 17, 18], truncate_prompt_tokens=2)[0] == (17, 18)
