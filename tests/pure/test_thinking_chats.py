"""Chats of a model that thinks: a parrot, whose answer is its prompt, with a template for thoughts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from levserve.schedule.constraint import Matcher
from tests.fake_app import App, serving
from tests.fake_device import PARROT_EOS, QuietThinkingParrot, load_byte_tokenizer

CHAT = "/v1/chat/completions"
CALL = '<tool_call>{"name": "look", "arguments": {"at": "x"}}</tool_call>'
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
    },
}


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with serving(make_device=QuietThinkingParrot) as running:
        yield running


@pytest.fixture(scope="module")
def plain_app() -> Iterator[App]:
    with serving() as running:
        yield running


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "toy", "messages": [{"role": "user", "content": text}], **fields}


def ask(app: App, text: str, **fields: Any) -> Any:
    reply = app.post(CHAT, chat(text, **fields))
    assert reply.status_code == 200, reply.text
    return reply.json


def join(app: App, text: str, **fields: Any) -> dict[str, str]:
    """What the deltas of a stream join to."""
    joined: dict[str, str] = {}
    for chunk in app.stream(CHAT, chat(text, **fields)):
        for choice in chunk["choices"]:
            for name, value in choice["delta"].items():
                if isinstance(value, str):
                    joined[name] = joined.get(name, "") + value
    return joined


def matcher_of(app: App) -> Matcher:
    """A new matcher of the newest request's constraint."""
    constraint = app.device.requests[-1].constraint
    assert constraint is not None
    return constraint.start()


@pytest.mark.parametrize(
    ("text", "fields", "thought", "content"),
    [
        ("<think>\nhm\n</think>\n\nyes", {}, "hm", "yes"),
        ("hm</think>yes ", {"chat_template_kwargs": {"enable_thinking": True}}, "hm", "yes <think>"),
        ("no thought", {}, None, "no thought"),
        ("<think>hm", {}, "hm", ""),
    ],
)
def test_thoughts_stand_beside_the_content_whole_and_streamed(
    app: App, text: str, fields: dict[str, Any], thought: str | None, content: str
) -> None:
    message = ask(app, text, **fields)["choices"][0]["message"]
    assert message["content"] == content
    assert message.get("reasoning_content") == message.get("reasoning") == thought
    joined = join(app, text, **fields)
    assert joined["content"] == content
    assert joined.get("reasoning_content") == joined.get("reasoning") == thought


@pytest.mark.parametrize("fields", [{}, {"stop": ["zzzz"]}])
def test_every_token_id_is_streamed_once_also_while_it_shows_nothing(
    app: App, fields: dict[str, Any]
) -> None:
    text = "<think>\nhm\n</think>\n\nyes"
    whole = ask(app, text, return_token_ids=True, **fields)["choices"][0]["token_ids"]
    chunks = app.stream(CHAT, chat(text, return_token_ids=True, **fields))
    streamed = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])]
    assert streamed == whole and len(whole) > 10


def test_tokens_of_thoughts_are_counted_and_all_tokens_have_log_probabilities(app: App) -> None:
    answer = ask(app, "<think>hm</think>yes", logprobs=True)
    usage = answer["usage"]
    # Marks are several tokens here; of the opening one, only the last token counts.
    assert usage["completion_tokens_details"] == {"reasoning_tokens": len("<think>hm</think>yes") - 6 - 3}
    assert len(answer["choices"][0]["logprobs"]["content"]) == usage["completion_tokens"]


@pytest.mark.parametrize(
    ("fields", "ending"),
    [
        ({"reasoning_effort": "high"}, "<think>"),
        ({"reasoning_effort": "none"}, "</think>\n\n"),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, "<think>"),
        ({}, "yes"),
    ],
)
def test_the_effort_reaches_the_template_and_its_own_variables_win(
    app: App, fields: dict[str, Any], ending: str
) -> None:
    ask(app, "yes", **fields)
    prompt = app.device.requests[-1].prompt
    assert load_byte_tokenizer().decode(prompt).endswith(ending)


def test_a_constraint_begins_after_the_thoughts(app: App) -> None:
    held = {"response_format": {"type": "json_object"}}
    ask(app, "yes", reasoning_effort="high", **held)
    matcher = matcher_of(app)
    tokenizer = load_byte_tokenizer()
    assert matcher.is_free
    for token in tokenizer.encode_plain("hm</think>\n"):
        assert matcher.allows(token)
        matcher.take(token)
    assert matcher.allows(*tokenizer.encode_plain("{"))
    assert not matcher.allows(*tokenizer.encode_plain("x"))


def test_a_constraint_begins_at_once_without_thoughts(app: App) -> None:
    ask(app, "yes", reasoning_effort="none", guided_choice=["a", "b"])
    matcher = matcher_of(app)
    assert not matcher.is_free
    assert not matcher.allows(*load_byte_tokenizer().encode_plain("<"))


def test_a_model_that_may_think_may_also_answer_at_once(app: App) -> None:
    ask(app, "yes", guided_choice=["a", "b"])
    matcher = matcher_of(app)
    tokens = [*load_byte_tokenizer().encode_plain("<ac")]
    assert [matcher.allows(token) for token in tokens] == [True, True, False]


def test_a_budget_forces_the_end_of_the_thoughts(app: App) -> None:
    ask(app, "yes", reasoning_effort="high", thinking_token_budget=0)
    tokenizer = load_byte_tokenizer()
    assert tokenizer.decode([*matcher_of(app).forced()]) == "\n</think>\n\n"
    ask(app, "yes", reasoning_effort="none", thinking_token_budget=5)
    assert app.device.requests[-1].constraint is None


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_thoughts_in_the_history_reach_the_template(app: App, name: str) -> None:
    messages = [{"role": "assistant", "content": "b", name: "a"}, {"role": "user", "content": "c"}]
    reply = app.post(CHAT, {"model": "toy", "messages": messages})
    assert reply.json is not None and reply.json["choices"][0]["message"]["content"] == "(a)bc"


def test_an_answer_that_is_continued_within_its_thoughts_goes_on_thinking(app: App) -> None:
    messages = [{"role": "user", "content": ""}, {"role": "assistant", "content": "<think>so"}]
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    reply = app.post(CHAT, {"model": "toy", "messages": messages, **fields})
    assert reply.json is not None
    assert reply.json["choices"][0]["message"]["reasoning"] == "<think>so"


@pytest.mark.parametrize(
    "fields",
    [{"reasoning_effort": "high"}, {"thinking_token_budget": 5}, {"reasoning_effort": "sideways"}],
)
def test_a_model_that_does_not_think_refuses_to_be_asked_for_it(
    plain_app: App, fields: dict[str, Any]
) -> None:
    assert plain_app.refuse(CHAT, chat("t9", max_tokens=1, **fields)) == (400, next(iter(fields)))


def test_a_model_that_does_not_think_may_be_told_not_to(plain_app: App) -> None:
    answer = ask(plain_app, "t9", max_tokens=1, reasoning_effort="none")
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_an_unknown_effort_is_refused(app: App) -> None:
    assert app.refuse(CHAT, chat("a", reasoning_effort="sideways")) == (400, "reasoning_effort")


def test_required_calls_are_held_after_the_thoughts(app: App) -> None:
    ask(app, "yes", tools=[LOOK], tool_choice="required", reasoning_effort="high")
    matcher = matcher_of(app)
    for token in load_byte_tokenizer().encode_plain("hm <tool_call></think>\n" + CALL):
        assert matcher.allows(token)
        matcher.take(token)
    assert matcher.allows(PARROT_EOS)


def test_an_answer_has_thoughts_and_calls_whole_and_streamed(app: App) -> None:
    text = "<think>hm</think>\n" + CALL
    # The description of the tools comes first in the prompt; truncation removes it, so the parrot omits it.
    fields = {"tools": [LOOK], "truncate_prompt_tokens": len(text)}
    (choice,) = ask(app, text, **fields)["choices"]
    assert choice["message"]["reasoning"] == "hm" and choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"at": "x"}'}
    assert choice["finish_reason"] == "tool_calls"
    deltas = [chunk["choices"][0]["delta"] for chunk in app.stream(CHAT, chat(text, **fields))]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "hm"
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert "".join(call.get("name", "") for call in calls) == "look"
    assert "".join(call["arguments"] for call in calls) == '{"at": "x"}'
