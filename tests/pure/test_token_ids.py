"""`return_token_ids`: the ids of prompts and answers, whole and streamed, as vLLM's clients read them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.fake_app import App, serving
from tests.fake_server import completion

USER = [{"role": "user", "content": "t17 t18"}]


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with serving() as app:
        yield app


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "toy", "messages": USER, "temperature": 0, "return_token_ids": True, **fields}


def test_a_completion_has_the_ids_of_each_choice_and_of_its_prompt(app: App) -> None:
    reply = app.complete([[17, 18], [30]], max_tokens=3, n=2, temperature=0, return_token_ids=True)
    assert [one["prompt_token_ids"] for one in reply["choices"]] == [[17, 18], [17, 18], [30], [30]]
    assert [one["token_ids"] for one in reply["choices"]] == [[19, 20, 21]] * 2 + [[31, 32, 33]] * 2
    assert "prompt_token_ids" not in reply


def test_an_echoed_prompt_is_not_among_the_ids_of_the_answer(app: App) -> None:
    fields: dict[str, Any] = {"max_tokens": 2, "temperature": 0, "echo": True, "return_token_ids": True}
    (choice,) = app.complete("t17 t18", **fields)["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([17, 18], [19, 20])
    chunks = app.stream("/v1/completions", completion("t17 t18", **fields))
    ids = [one for chunk in chunks for one in chunk["choices"][0].get("token_ids", [])]
    assert ids == [19, 20]
    (scored,) = app.complete("t17 t18", **(fields | {"max_tokens": 0}))["choices"]
    assert (scored["prompt_token_ids"], scored["token_ids"]) == ([17, 18], [])


def test_a_chat_has_its_prompts_ids_beside_the_choices(app: App) -> None:
    reply = app.post("/v1/chat/completions", chat(max_tokens=2, n=2)).json
    assert reply is not None
    rendered = app.post("/tokenize", {"model": "toy", "messages": USER}).json
    assert rendered is not None and reply["prompt_token_ids"] == rendered["tokens"]
    assert [one["token_ids"] for one in reply["choices"]] == [[10, 11], [10, 11]]


@pytest.mark.parametrize("fields", [{}, {"stop": ["t99 t98"]}, {"logprobs": 1}])
def test_a_streamed_completion_shows_every_id_once_also_while_its_text_is_held_back(
    app: App, fields: dict[str, Any]
) -> None:
    body = completion("t17 t18", max_tokens=5, temperature=0, return_token_ids=True, **fields)
    chunks = app.stream("/v1/completions", body)
    assert chunks[0]["choices"][0]["prompt_token_ids"] == [17, 18]
    assert not any("prompt_token_ids" in chunk["choices"][0] for chunk in chunks[1:])
    ids = [one for chunk in chunks for one in chunk["choices"][0].get("token_ids", [])]
    assert ids == [19, 20, 21, 22, 23]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == " t19 t20 t21 t22 t23"


@pytest.mark.parametrize("fields", [{}, {"stop": ["t99"]}, {"logprobs": True}])
def test_a_streamed_chat_shows_every_id_once(app: App, fields: dict[str, Any]) -> None:
    chunks = app.stream("/v1/chat/completions", chat(max_tokens=4, **fields))
    whole = app.post("/v1/chat/completions", chat(max_tokens=4, **fields)).json
    assert whole is not None and chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])
    ids = [one for chunk in chunks for one in chunk["choices"][0].get("token_ids", [])]
    assert ids == whole["choices"][0]["token_ids"] == [10, 11, 12, 13]


def test_nothing_changes_where_nobody_asks(app: App) -> None:
    (choice,) = app.complete("t17", max_tokens=2, temperature=0)["choices"]
    assert not {"token_ids", "prompt_token_ids"} & set(choice)
    for chunk in app.stream("/v1/completions", completion("t17", max_tokens=2, return_token_ids=False)):
        assert "token_ids" not in chunk["choices"][0]
    assert app.refuse("/v1/completions", completion("t17", return_token_ids="yes")) == (
        400,
        "return_token_ids",
    )


def test_pairs_to_score_may_be_token_ids_and_their_ids_come_back(app: App) -> None:
    texts = {"prompts": ["t17", "t20 t21"], "continuations": [" t18 t19", " t22"], "return_token_ids": True}
    ids = {"prompts": [[17], [20, 21]], "continuations": [[18, 19], [22]], "return_token_ids": True}
    found = app.post("/loglikelihood", ids).json
    assert found is not None and found == app.post("/loglikelihood", texts).json
    assert (found["prompt_token_ids"], found["token_ids"]) == ([[17], [20, 21]], [[18, 19], [22]])
    long = {"prompts": [[50] * 100 + [17]], "continuations": [[18]], "truncate_prompt_tokens": -1}
    reply = app.post("/loglikelihood", long | {"return_token_ids": True}).json
    assert reply is not None and len(reply["prompt_token_ids"][0]) == 63


@pytest.mark.parametrize(
    "prompt, continuation, param",
    [
        ([17], " t18", "continuations[0]"),
        ("t17", [18], "continuations[0]"),
        ([], [18], "prompts[0]"),
        ([17], [], "continuations[0]"),
        ([100_000], [18], "prompts[0]"),
        ([17], [-1], "continuations[0]"),
        ([True], [18], "prompts[0][0]"),
        ([17] * 100, [18], "prompts[0]"),
    ],
)
def test_a_pair_that_cannot_be_scored_is_refused(
    app: App, prompt: Any, continuation: Any, param: str
) -> None:
    body = {"prompts": [prompt], "continuations": [continuation]}
    assert app.refuse("/loglikelihood", body) == (400, param)
