"""Anthropic's /v1/messages over HTTP, with tokens that can be worked out by hand (see fake_device.py)."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from werkzeug.test import TestResponse

from levserve.errors import BadRequest
from levserve.request.decode import decode
from levserve.web.messages.body import REFUSED, MessageBody, PromptBody
from levserve.web.messages.chat import MESSAGE_NAMES, MessageChat, make_chat, make_prompt
from tests.fake_app import App, serving

PATH, COUNT_PATH = "/v1/messages", "/v1/messages/count_tokens"
USER = {"role": "user", "content": "t17 t18"}
BODY: dict[str, Any] = {"model": "toy", "max_tokens": 3, "messages": [USER], "temperature": 0}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "look_up", "input": {"word": "é", "n": 1.0}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "found"}
TOOL = {
    "name": "look_up",
    "description": "Finds a word.",
    "input_schema": {"type": "object", "properties": {"word": {"type": "string"}}},
}


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with serving(obeys=False, max_inflight=12) as app:
        yield app


def read_events(reply: TestResponse) -> list[dict[str, Any]]:
    """The events of a stream; each event line must name the type of its data."""
    assert reply.status_code == 200, reply.text
    *events, rest = reply.text.split("\n\n")
    assert rest == ""
    found = []
    for event in events:
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def refuse(app: App, fields: dict[str, Any], path: str = PATH) -> tuple[int, str]:
    """The status and the message of a refusal, which must have Anthropic's shape."""
    reply = app.post(path, BODY | fields)
    assert reply.json is not None and set(reply.json) == {"type", "error", "request_id"}, reply.text
    assert reply.json["type"] == "error" and set(reply.json["error"]) == {"type", "message"}
    assert reply.json["request_id"] == reply.headers["request-id"] == reply.headers["x-request-id"]
    return reply.status_code, reply.json["error"]["message"]


def chat_of(**fields: Any) -> MessageChat:
    return make_chat(decode(json.dumps(BODY | fields).encode(), MessageBody))


def conversation_of(**fields: Any) -> list[dict[str, Any]]:
    """The messages of the chat as JSON objects, without fields that are None."""
    messages = msgspec.to_builtins(chat_of(**fields).messages)
    return [{name: value for name, value in one.items() if value is not None} for one in messages]


class TestAnswers:
    def test_a_message_has_blocks_a_reason_and_counts(self, app: App) -> None:
        reply = app.post(PATH, BODY).json
        assert reply is not None and reply.pop("id").startswith("msg_")
        assert reply == {
            "type": "message",
            "role": "assistant",
            "model": "toy",
            "content": [{"type": "text", "text": "t10 t11 t12"}],
            "stop_reason": "max_tokens",
            "stop_sequence": None,
            "usage": {
                "input_tokens": 3,
                "cache_read_input_tokens": 0,
                "cache_creation_input_tokens": 0,
                "output_tokens": 3,
                "output_tokens_details": {"thinking_tokens": 0},
            },
        }

    def test_what_the_cache_had_is_counted_apart(self) -> None:
        with serving() as app:  # each t7 counts as found in the cache
            usage = app.post(PATH, BODY | {"messages": [{"role": "user", "content": "t7 t7 t17"}]}).json[
                "usage"
            ]  # type: ignore[index]
        assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (2, 2)

    @pytest.mark.parametrize(
        ("fields", "reason", "text"),
        [
            ({"messages": [{"role": "user", "content": "t17"}]}, "max_tokens", "t10 t11 t12"),
            ({"stop_sequences": ["zzz", "t12"], "max_tokens": 9}, "stop_sequence", "t10 t11 "),
            ({"max_tokens": 32_000}, "model_context_window_exceeded", None),
            ({"messages": [USER, {"role": "assistant", "content": "t383"}]}, "end_turn", ""),
        ],
    )
    def test_the_reason_of_the_end_is_told(
        self, app: App, fields: dict[str, Any], reason: str, text: str | None
    ) -> None:
        reply = app.post(PATH, BODY | fields).json
        assert reply is not None and reply["stop_reason"] == reason
        assert reply["stop_sequence"] == ("t12" if reason == "stop_sequence" else None)
        if text is not None:
            assert "".join(block["text"] for block in reply["content"]) == text
        *_, change, stop = read_events(app.post(PATH, BODY | fields | {"stream": True}))
        assert change["delta"] == {"stop_reason": reason, "stop_sequence": reply["stop_sequence"]}
        assert change["usage"] == reply["usage"] and stop == {"type": "message_stop"}

    def test_a_stream_has_its_events_in_order(self, app: App) -> None:
        events = read_events(app.post(f"{PATH}?beta=true", BODY | {"stream": True}))
        assert [event["type"] for event in events] == [
            "message_start",
            "ping",
            "content_block_start",
            *["content_block_delta"] * 3,
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
        started = events[0]["message"]
        assert (started["content"], started["stop_reason"], started["usage"]["input_tokens"]) == ([], None, 3)
        assert events[2] == {
            "type": "content_block_start",
            "index": 0,
            "content_block": {"type": "text", "text": ""},
        }
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        assert deltas == [{"type": "text_delta", "text": text} for text in ("t10", " t11", " t12")]

    def test_a_last_message_of_the_assistant_is_continued(self, app: App) -> None:
        reply = app.post(PATH, BODY | {"messages": [USER, {"role": "assistant", "content": "t30"}]}).json
        assert reply is not None and reply["content"] == [{"type": "text", "text": " t31 t32 t33"}]

    def test_sampling_fields_reach_the_device(self, app: App) -> None:
        app.post(PATH, BODY | {"temperature": 0.25, "top_k": 7, "top_p": 0.5})
        sampling = app.device.requests[-1].sampling
        assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.25, 7, 0.5)

    def test_tokens_are_counted_as_the_message_counts_them(self, app: App) -> None:
        fields = {"model": "toy", "messages": [USER], "system": [{"type": "text", "text": "t20 t21"}]}
        counted = app.post(COUNT_PATH, fields).json
        answered = app.post(PATH, BODY | fields).json
        assert counted == {"input_tokens": 5}
        assert answered is not None and answered["usage"]["input_tokens"] == 5

    def test_an_answer_is_held_to_a_schema(self, app: App) -> None:
        schema = {"enum": ["t30"]}
        for fields in (
            {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
            {"output_format": {"type": "json_schema", "schema": schema}},
        ):
            app.post(PATH, BODY | fields)
            assert app.device.requests[-1].constraint is not None


class TestErrors:
    @pytest.mark.parametrize(
        ("fields", "wanted"),
        [
            ({"max_tokens": None}, "'max_tokens'"),
            ({"max_tokens": 0}, "'max_tokens'"),
            ({"messages": []}, "'messages'"),
            ({"messages": [{"role": "tool", "content": "t17"}]}, "'messages[0].role'"),
            ({"messages": [{"role": "user", "content": []}]}, "'messages[0].content' has no blocks"),
            ({"messages": [USER, {"role": "user", "content": []}]}, "'messages[1].content' has no blocks"),
            ({"messages": [{"role": "user", "content": [CALL]}]}, "the role 'user'"),
            ({"messages": [{"role": "user", "content": [RESULT]}]}, "no earlier 'tool_use' block"),
            ({"messages": [USER, {"role": "assistant", "content": [CALL]}]}, "'tool_result' must follow"),
            ({"messages": [USER, {"role": "assistant", "content": [RESULT]}]}, "'tool_result'"),
            ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'image'"),
            ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "'document'"),
            ({"messages": [{"role": "user", "content": [{"type": "server_tool_use"}]}]}, "'server_tool_use'"),
            ({"messages": [{"role": "user", "content": [{"text": "t17"}]}]}, "'messages[0].content[0].type'"),
            (
                {
                    "messages": [
                        USER,
                        {"role": "assistant", "content": [CALL]},
                        {"role": "user", "content": [RESULT | {"content": [{"type": "image"}]}]},
                    ]
                },
                "'messages[2].content[0].content[0].type' is 'image'",
            ),
            ({"system": [{"type": "image"}]}, "'system[0].type' is 'image'"),
            ({"temperature": 1.5}, "'temperature'"),
            ({"top_k": -1}, "'top_k'"),
            ({"top_p": 2}, "'top_p'"),
            ({"stop_sequences": [""]}, "'stop_sequences[0]'"),
            ({"tools": [{"name": "bash", "type": "bash_20250124"}]}, "'bash_20250124'"),
            ({"tools": [TOOL | {"name": "no spaces"}]}, "'tools[0].name'"),
            ({"tools": [{"name": "x"}]}, "'tools[0].input_schema'"),
            ({"tools": [TOOL | {"input_schema": {"type": "string"}}]}, "'tools[0].input_schema'"),
            ({"tools": [TOOL, TOOL]}, "'tools[1].name'"),
            ({"tool_choice": {"type": "any"}}, "'tool_choice' is only allowed with 'tools'"),
            ({"tools": [TOOL], "tool_choice": {"type": "required"}}, "'tool_choice.type'"),
            ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "'tool_choice.name'"),
            ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "'other'"),
            ({"thinking": {"type": "enabled"}}, "'thinking.budget_tokens'"),
            ({"thinking": {"type": "enabled", "budget_tokens": 3}}, "must be below 'max_tokens'"),
            ({"thinking": {"type": "sometimes"}}, "'thinking.type'"),
            ({"thinking": {"type": "adaptive", "display": "loud"}}, "'thinking.display'"),
            ({"output_config": {"effort": "huge"}}, "'output_config.effort'"),
            ({"output_config": {"format": {"type": "yaml", "schema": {}}}}, "'output_config.format.type'"),
            (
                {"output_config": {"format": {"type": "json_schema", "schema": {"type": "nonsense"}}}},
                "'output_config.format.schema'",
            ),
        ],
    )
    def test_a_mistake_is_named(self, app: App, fields: dict[str, Any], wanted: str) -> None:
        status, message = refuse(app, fields)
        assert status == 400 and wanted in message

    @pytest.mark.parametrize(
        "fields",
        [
            {"messages": [{"role": "user", "content": [RESULT]}]},
            {"messages": [{"role": "user", "content": []}], "tools": [TOOL]},
            {"system": [{"type": "image"}]},
            {"tools": [{"name": "bash", "type": "bash_20250124"}]},
            {"thinking": {"type": "sometimes"}},
        ],
    )
    def test_a_count_refuses_what_the_message_would(self, app: App, fields: dict[str, Any]) -> None:
        assert refuse(app, fields, COUNT_PATH) == refuse(app, fields)

    @pytest.mark.parametrize("name", REFUSED)
    def test_what_cannot_be_honoured_is_refused_by_name(self, app: App, name: str) -> None:
        assert refuse(app, {name: {"type": "something"}}) == (
            400,
            f"'{name}' is not supported by this server.",
        )

    def test_an_unknown_model_is_not_found(self, app: App) -> None:
        reply = app.post(PATH, BODY | {"model": "claude-fable"})
        assert reply.status_code == 404 and reply.json is not None
        assert reply.json["error"]["type"] == "not_found_error"
        assert "'toy'" in reply.json["error"]["message"]

    def test_a_prompt_that_is_too_long_is_refused_in_the_words_that_tools_look_for(self, app: App) -> None:
        status, message = refuse(app, {"messages": [{"role": "user", "content": "t17 " * 80}]})
        assert status == 400 and message.startswith("prompt is too long: 82 tokens > 64 maximum")

    def test_errors_before_the_view_have_the_same_shape(self) -> None:
        with serving(api_key="sk-test-0123456789", max_body_bytes=64) as app:
            key = {"x-api-key": "sk-test-0123456789"}
            asked = {
                401: app.client.post(PATH, json=BODY),
                404: app.client.get(f"{PATH}/batches", headers=key),
                405: app.client.get(PATH, headers=key),
                400: app.client.post(PATH, data=b"{", headers=key, content_type="application/json"),
                413: app.client.post(PATH, json=BODY, headers=key),
                415: app.client.post(PATH, data=b"a=1", headers=key, content_type="text/plain"),
            }
            app.engine.begin_drain(time.monotonic())
            asked[503] = app.client.post(PATH, json={}, headers=key)
        kinds = {}
        for status, reply in asked.items():
            assert reply.status_code == status and reply.json is not None, reply.text
            assert set(reply.json) == {"type", "error", "request_id"} and reply.json["type"] == "error"
            kinds[status] = reply.json["error"]["type"]
        assert kinds == {
            400: "invalid_request_error",
            401: "authentication_error",
            404: "not_found_error",
            405: "invalid_request_error",
            413: "request_too_large",
            415: "invalid_request_error",
            503: "overloaded_error",
        }

    def test_other_paths_keep_their_shape(self, app: App) -> None:
        assert app.refuse("/v1/messagesx", {}) == (404, None)

    @pytest.mark.parametrize("header", ["x-api-key", "Authorization"])
    def test_a_key_is_taken_from_either_header(self, header: str) -> None:
        with serving(api_key="sk-test-0123456789") as app:
            value = "sk-test-0123456789" if header == "x-api-key" else "Bearer sk-test-0123456789"
            assert app.client.post(PATH, json=BODY, headers={header: value}).status_code == 200
            assert app.client.post(PATH, json=BODY, headers={header: f"{value}x"}).status_code == 401

    def test_a_failure_in_the_middle_of_a_stream_is_an_event(self) -> None:
        # The fake device sends one token, then waits forever.
        waiting = {
            "messages": [{"role": "user", "content": "t6"}],
            "stream": True,
        }
        with serving() as app:
            end = threading.Timer(0.2, lambda: app.engine.begin_drain(time.monotonic()))
            end.start()
            events = read_events(app.post(PATH, BODY | waiting))
            end.join()
        assert [event["type"] for event in events] == [
            "message_start",
            "ping",
            "content_block_start",
            "content_block_delta",
            "error",
        ]
        assert events[-1]["error"]["type"] == "overloaded_error"


class TestTranslation:
    def test_system_comes_first_and_blocks_of_text_are_lines(self) -> None:
        system = [
            {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "b"},
        ]
        user = {"role": "user", "content": [{"type": "text", "text": "c"}, {"type": "text", "text": "d"}]}
        assert conversation_of(system=system, messages=[user]) == [
            {"role": "system", "content": "a\nb"},
            {"role": "user", "content": "c\nd"},
        ]
        assert conversation_of(system="a") == [{"role": "system", "content": "a"}, USER]
        assert conversation_of(system="", messages=[USER, {"role": "system", "content": "b"}]) == [
            USER,
            {"role": "system", "content": "b"},
        ]

    def test_thoughts_text_and_calls_of_the_assistant_are_one_message(self) -> None:
        said = [
            {"type": "thinking", "thinking": "hm", "signature": "xyz"},
            {"type": "redacted_thinking", "data": "secret"},
            {"type": "text", "text": "Let me "},
            {"type": "text", "text": "look."},
            CALL,
        ]
        answered = [
            RESULT,
            RESULT | {"content": [{"type": "text", "text": "gone"}], "is_error": True},
            {"type": "tool_result", "tool_use_id": "toolu_1"},
            {"type": "text", "text": "Go on."},
        ]
        messages = [USER, {"role": "assistant", "content": said}, {"role": "user", "content": answered}]
        assert conversation_of(messages=messages) == [
            USER,
            {
                "role": "assistant",
                "content": "Let me look.",
                "reasoning_content": "hm",
                "tool_calls": [
                    {
                        "type": "function",
                        "id": "toolu_1",
                        "function": {"name": "look_up", "arguments": '{"word":"é","n":1.0}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "toolu_1", "name": "look_up", "content": "found"},
            {"role": "tool", "tool_call_id": "toolu_1", "name": "look_up", "content": "Error: gone"},
            {"role": "tool", "tool_call_id": "toolu_1", "name": "look_up", "content": ""},
            {"role": "user", "content": "Go on."},
        ]

    @pytest.mark.parametrize(
        ("choice", "wanted", "is_parallel"),
        [
            ({"type": "auto"}, "auto", None),
            ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
            ({"type": "none"}, "none", None),
            (
                {"type": "tool", "name": "look_up"},
                {"type": "function", "function": {"name": "look_up"}},
                None,
            ),
        ],
    )
    def test_tools_become_functions(
        self, choice: dict[str, Any], wanted: Any, is_parallel: bool | None
    ) -> None:
        chat = chat_of(tools=[TOOL, TOOL | {"name": "b", "type": "custom"}], tool_choice=choice)
        assert (chat.tool_choice, chat.parallel_tool_calls) == (wanted, is_parallel)
        asked = chat.find_tools()
        assert asked is not None and [tool.name for tool in asked.tools] == ["look_up", "b"]
        assert asked.tools[0].parameters == TOOL["input_schema"]
        assert asked.tools[0].description == "Finds a word."

    @pytest.mark.parametrize(
        ("fields", "budget", "effort", "variables"),
        [
            ({}, None, None, None),
            ({"thinking": {"type": "disabled"}}, None, "none", None),
            ({"thinking": {"type": "adaptive"}}, None, "medium", None),
            ({"thinking": {"type": "enabled", "budget_tokens": 2}}, 2, "medium", None),
            ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, None, "low", None),
            ({"output_config": {"effort": "max"}}, None, None, {"reasoning_effort": "high"}),
        ],
    )
    def test_thinking_is_asked_for_as_a_chat_asks(
        self, fields: dict[str, Any], budget: int | None, effort: str | None, variables: dict[str, Any] | None
    ) -> None:
        chat = chat_of(**fields)
        assert (chat.thinking_token_budget, chat.reasoning_effort) == (budget, effort)
        assert chat.chat_template_kwargs == variables

    @pytest.mark.parametrize("kind", ["enabled", "adaptive", "disabled"])
    def test_a_model_that_does_not_think_answers_without_thoughts(self, app: App, kind: str) -> None:
        thinking = {"type": kind} | ({"budget_tokens": 2} if kind == "enabled" else {})
        reply = app.post(PATH, BODY | {"thinking": thinking, "output_config": {"effort": "high"}})
        assert reply.status_code == 200, reply.text
        assert reply.json is not None and [block["type"] for block in reply.json["content"]] == ["text"]

    def test_what_anthropic_needs_for_itself_is_accepted(self) -> None:
        fields: dict[str, Any] = {
            "metadata": {"user_id": "u"},
            "cache_control": {"type": "ephemeral"},
            "context_management": {"edits": []},
            "service_tier": "auto",
            "mcp_servers": [],
        }
        assert chat_of(**fields) == chat_of()

    def test_the_prompt_of_a_count_is_the_prompt_of_the_message(self) -> None:
        fields = {"tools": [TOOL], "system": "a", "thinking": {"type": "disabled"}}
        counted = make_prompt(decode(json.dumps(BODY | fields).encode(), PromptBody))
        answered = chat_of(**fields)
        for name in ("messages", "tools", "reasoning_effort", "continue_final_message"):
            assert getattr(counted, name) == getattr(answered, name)


@pytest.mark.parametrize(
    ("field", "wanted"),
    [
        ("messages[3].tool_calls[0]", "messages"),
        ("response_format.json_schema.schema", "output_config.format.schema"),
        ("tools[2].function.parameters.properties", "tools[2].input_schema.properties"),
        ("tools[2].function.name", "tools[2].name"),
        ("stop", "stop_sequences"),
        ("max_tokens", "max_tokens"),
    ],
)
def test_errors_about_the_chat_name_the_fields_of_the_message(field: str, wanted: str) -> None:
    with pytest.raises(BadRequest) as caught, MESSAGE_NAMES.in_errors():
        raise BadRequest(f"The field '{field}' isn't right.", param=field)
    assert (caught.value.param, caught.value.message) == (wanted, f"The field '{wanted}' isn't right.")
