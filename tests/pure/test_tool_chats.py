"""Chats with tools over HTTP, with a model that repeats the last message: tests decide what it writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from levserve.api.model import Model
from levserve.models.registry import Registry
from levserve.request.decode import decode
from levserve.request.schema import ChatBody
from levserve.settings.settings import TOOL_FORMATS, Settings
from levserve.text.tools.families import BY_NAME
from tests.fake_app import App, serving
from tests.fake_device import Parrot, load_byte_tokenizer

CHAT = "/v1/chat/completions"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "g"}},
]
F = '<tool_call>{"name": "f", "arguments": {"city": "Pa\\u0072is"}}</tool_call>'
G = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'


# Renders system messages, for which format detection looks, but leaves out the long ones that list tools.
TEMPLATE = (
    "{% if messages[0].role == 'system' and messages[0].content | length < 20 %}{{ messages[0].content }}"
    "{% endif %}{{ messages[-1].content }}"
)


def make_parrot(template: str) -> Callable[[Registry], Parrot]:
    return lambda registry: Parrot(registry, load_byte_tokenizer(template))


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with serving(make_device=make_parrot(TEMPLATE)) as app:
        yield app


def body(says: str, **fields: Any) -> dict[str, Any]:
    return {"model": "toy", "messages": [{"role": "user", "content": says}], "tools": TOOLS} | fields


def answer(app: App, asked: dict[str, Any]) -> dict[str, Any]:
    reply = app.post(CHAT, asked)
    assert reply.status_code == 200, reply.text
    assert reply.json is not None
    choice: dict[str, Any] = reply.json["choices"][0]
    return choice


def joined(app: App, asked: dict[str, Any]) -> dict[str, Any]:
    """A stream put together as clients do it: by the index of the call, concatenating its fields."""
    content, finish = "", None
    calls: dict[int, dict[str, Any]] = {}
    for chunk in app.stream(CHAT, asked):
        (choice,) = chunk["choices"]
        content += choice["delta"].get("content") or ""
        finish = choice["finish_reason"] or finish
        for piece in choice["delta"].get("tool_calls", ()):
            call = calls.setdefault(piece["index"], {"name": "", "arguments": ""})
            for name, text in piece["function"].items():
                call[name] += text
    return {"content": content, "calls": list(calls.values()), "finish": finish}


def flat(choice: dict[str, Any]) -> dict[str, Any]:
    message = choice["message"]
    return {
        "content": message["content"] or "",
        "calls": [call["function"] for call in message.get("tool_calls", ())],
        "finish": choice["finish_reason"],
    }


@pytest.mark.parametrize(
    "says, content, calls",
    [
        ("Hello", "Hello", []),
        (F, "", [{"name": "f", "arguments": '{"city": "Pa\\u0072is"}'}]),
        (
            f"I look.\n{F}\n{G}",
            "I look.",
            [{"name": "f", "arguments": '{"city": "Pa\\u0072is"}'}, {"name": "g", "arguments": "{}"}],
        ),
        ("<tool_call>rubbish</tool_call>", "<tool_call>rubbish</tool_call>", []),
        (F.replace('"f"', '"nope"'), F.replace('"f"', '"nope"'), []),
    ],
)
def test_a_stream_joins_to_the_whole_answer(
    app: App, says: str, content: str, calls: list[dict[str, Any]]
) -> None:
    expected = {"content": content, "calls": calls, "finish": "tool_calls" if calls else "stop"}
    assert flat(answer(app, body(says))) == expected
    assert joined(app, body(says)) == expected


def test_a_stream_of_the_python_api_has_the_calls_on_the_last_piece_of_each_choice() -> None:
    messages = [{"role": "user", "content": f"I look.\n{F}\n{G}"}]
    with serving(make_device=make_parrot(TEMPLATE)) as app, Model(app.registry, Settings()) as model:
        whole = model.chat(messages, tools=TOOLS, n=2, seed=1)
        pieces = list(model.stream_chat(messages, tools=TOOLS, n=2, seed=1))
    last = [piece for piece in pieces if piece.finish_reason is not None]
    assert sorted(piece.index for piece in last) == [0, 1]
    for piece in last:
        calls = whole.choices[piece.index].tool_calls
        assert [(call.name, call.arguments) for call in piece.tool_calls] == [
            (call.name, call.arguments) for call in calls
        ]
        assert [call.name for call in calls] == ["f", "g"]
    assert "".join(piece.text for piece in pieces if not piece.index) == "I look."
    assert all(not piece.tool_calls for piece in pieces if piece.finish_reason is None)


def test_content_is_null_beside_calls_without_text_and_ids_differ(app: App) -> None:
    message = answer(app, body(F + G))["message"]
    assert message["content"] is None
    ids = {call["id"] for call in message["tool_calls"]}
    assert len(ids) == 2 and all(call_id.startswith("call_") for call_id in ids)
    assert all(call["type"] == "function" for call in message["tool_calls"])


def test_with_tool_choice_none_a_call_is_text(app: App) -> None:
    assert flat(answer(app, body(F, tool_choice="none"))) == {"content": F, "calls": [], "finish": "stop"}


def test_a_call_that_is_cut_off_ends_by_length(app: App) -> None:
    choice = answer(app, body(F, max_tokens=50))
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == F[F.index('{"city') : 50]
    assert joined(app, body(F, max_tokens=50)) == flat(choice)


def test_a_call_that_a_stop_string_cuts_off_is_not_to_be_answered(app: App) -> None:
    choice = answer(app, body(F, stop=["city"]))
    assert flat(choice) == {"content": "", "calls": [{"name": "f", "arguments": '{"'}], "finish": "stop"}
    assert joined(app, body(F, stop=["city"])) == flat(choice)


def test_a_stop_string_after_a_complete_call_leaves_it_to_be_answered(app: App) -> None:
    choice = answer(app, body(F + "Done.", stop=["Done"]))
    assert choice["finish_reason"] == "tool_calls"
    assert joined(app, body(F + "Done.", stop=["Done"])) == flat(choice)


def test_a_named_function_is_called_once() -> None:
    asked = decode(
        json.dumps(body("", tool_choice={"type": "function", "function": {"name": "f"}})).encode(), ChatBody
    ).find_tools()
    assert asked is not None and asked.is_parallel is False
    assert [tool.name for tool in asked.callable_tools] == ["f"]


def test_a_client_that_knows_functions_gets_a_function_call(app: App) -> None:
    old = {"functions": [tool["function"] for tool in TOOLS], "tools": None}
    choice = answer(app, body(F, **old))
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"] == {"name": "f", "arguments": '{"city": "Pa\\u0072is"}'}
    pieces = [
        chunk["choices"][0]["delta"]["function_call"]
        for chunk in app.stream(CHAT, body(F, **old))
        if "function_call" in chunk["choices"][0]["delta"]
    ]
    assert pieces[0] == {"name": "f", "arguments": ""}
    assert "".join(piece["arguments"] for piece in pieces) == '{"city": "Pa\\u0072is"}'


def test_each_choice_has_its_own_calls_and_log_probabilities(app: App) -> None:
    reply = app.post(CHAT, body(F, n=2, logprobs=True))
    assert reply.json is not None
    for choice in reply.json["choices"]:
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "f"
        assert len(choice["logprobs"]["content"]) == len(F)
    streamed = app.stream(CHAT, body(F, logprobs=True))
    scores = [
        one for chunk in streamed for one in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert len(scores) == len(F)


@pytest.mark.parametrize(
    "fields, param",
    [
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
            "tools[0].function.parameters",
        ),
        (
            {
                "tools": [
                    TOOLS[0],
                    {
                        "type": "function",
                        "function": {
                            "name": "h",
                            "parameters": {"properties": {"a": {"type": "string", "pattern": "("}}},
                        },
                    },
                ]
            },
            "tools[1].function.parameters",
        ),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "h"}}}, "tool_choice"),
    ],
)
def test_a_mistake_is_a_400_that_names_it(app: App, fields: dict[str, Any], param: str) -> None:
    assert app.refuse(CHAT, body("Hello", **fields)) == (400, param)
    assert app.refuse(CHAT, body("Hello", stream=True, **fields)) == (400, param)


@pytest.mark.parametrize("depth", [480, 700, 900, 1500])
def test_a_past_call_whose_arguments_are_nested_deeply_is_a_mistake_at_most(app: App, depth: int) -> None:
    arguments = '{"x": ' + "[" * depth + "]" * depth + "}"
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": arguments}}
    past = [
        {"role": "user", "content": "t17"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "x", "content": "1"},
    ]
    assert app.post(CHAT, {"model": "toy", "messages": past, "max_tokens": 1}).status_code in (200, 400)


def test_tools_and_calls_are_rendered_for_people_too() -> None:
    template = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    history = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"city":"Oslo"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "x", "content": "rain"},
    ]
    with serving(make_device=make_parrot(template)) as app:
        reply = app.post("/apply_template", {"messages": history, "tools": TOOLS})
        assert reply.json is not None
        prompt = reply.json["prompt"]
        assert '"properties": {"city": {"type": "string"}}' in prompt
        assert '[assistant]<tool_call>{"name": "f", "arguments": {"city": "Oslo"}}</tool_call>' in prompt
        assert "[user]<tool_response>\nrain\n</tool_response>" in prompt
        counted = app.post("/tokenize", {"messages": history, "tools": TOOLS}).json
        assert counted is not None and counted["count"] == len(prompt)
        plain = app.post("/apply_template", {"messages": history[:1]}).json
        assert plain == {"prompt": "[user]Weather?"}


def test_the_setting_names_the_formats_there_are() -> None:
    assert set(TOOL_FORMATS) == set(BY_NAME)
