"""/v1/responses over the application: what is honoured or refused, stream events, continuing a response."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from werkzeug.test import TestResponse

from levserve.web.responses.body import UNSUPPORTED_IN_RESPONSES
from tests.fake_app import App, serving, wsgi_server
from tests.fake_device import QuietThinkingParrot
from tests.waiting import PATIENCE_SECONDS

PATH = "/v1/responses"
ASKED = {"model": "toy", "input": "t17 t18", "temperature": 0, "max_output_tokens": 3}
CALL = {"type": "function_call", "call_id": "call_1", "name": "t20", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "t21"}
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
DRAFT_EVENTS = ["response.created", "response.in_progress"]
MESSAGE_EVENTS = ["response.output_item.added", "response.content_part.added"]
DONE_EVENTS = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with serving(obeys=False) as app:
        yield app


@pytest.fixture(scope="module")
def parrot() -> Iterator[App]:
    """An app whose model repeats its prompt, in which the server finds thoughts."""
    with serving(make_device=QuietThinkingParrot) as app:
        yield app


def ask(app: App, **fields: Any) -> Any:
    reply = app.post(PATH, ASKED | fields)
    assert reply.status_code == 200, reply.text
    return reply.json


def stream(app: App, **fields: Any) -> list[Any]:
    reply = app.post(PATH, ASKED | fields | {"stream": True})
    assert reply.status_code == 200, reply.text
    return read_events(reply)


def read_events(reply: TestResponse) -> list[Any]:
    """The data of the events; each event line must name the type, and numbers must ascend by one."""
    events = []
    for number, block in enumerate(reply.text.removesuffix("\n\n").split("\n\n")):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        events.append(event)
    return events


def prompt_of(app: App) -> tuple[int, ...]:
    return app.device.requests[-1].prompt


def text_of(response: Any) -> str:
    return "".join(part["text"] for item in response["output"] for part in item["content"])


def without_ids(value: Any) -> Any:
    """The value without the fields in which two responses to one request differ."""
    if isinstance(value, dict):
        own = ("id", "item_id", "created_at", "completed_at", "previous_response_id")
        return {name: without_ids(one) for name, one in value.items() if name not in own}
    return [without_ids(one) for one in value] if isinstance(value, list) else value


class TestCreate:
    def test_answers_with_a_message_and_usage(self, app: App) -> None:
        response = ask(app)
        assert text_of(response) == "t10 t11 t12"
        assert response["object"] == "response" and response["id"].startswith("resp_")
        (item,) = response["output"]
        assert (item["type"], item["role"], item["id"][:4]) == ("message", "assistant", "msg_")
        assert item["content"][0]["annotations"] == [] and item["content"][0]["logprobs"] == []
        usage = response["usage"]
        assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (3, 3, 6)
        assert usage["output_tokens_details"] == {"reasoning_tokens": 0}

    def test_an_answer_cut_by_its_limit_is_incomplete(self, app: App) -> None:
        response = ask(app)
        assert response["status"] == response["output"][0]["status"] == "incomplete"
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}

    def test_an_answer_that_ended_by_itself_is_complete(self, app: App) -> None:
        response = ask(app, stop="t12", max_output_tokens=None)
        assert response["status"] == response["output"][0]["status"] == "completed"
        assert response["incomplete_details"] is None and response["error"] is None
        assert response["completed_at"] >= response["created_at"]

    def test_an_empty_answer_still_has_a_message(self, app: App) -> None:
        response = ask(app, stop="t10", max_output_tokens=None)
        assert [item["content"][0]["text"] for item in response["output"]] == [""]

    def test_what_was_asked_for_is_repeated(self, app: App) -> None:
        fields = {
            "instructions": "t30",
            "metadata": {"a": "b"},
            "top_p": 0.5,
            "tools": [TOOL],
            "tool_choice": "none",
            "parallel_tool_calls": False,
            "text": {"format": {"type": "text"}, "verbosity": "low"},
            "user": "me",
            "store": False,
        }
        response = ask(app, **fields)
        assert {name: response[name] for name in fields} == fields
        assert (response["temperature"], response["max_output_tokens"]) == (0, 3)

    def test_fields_left_out_show_their_defaults(self, app: App) -> None:
        response = ask(app)
        defaults = {
            "instructions": None,
            "metadata": {},
            "top_p": 1,
            "tools": [],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "text": {"format": {"type": "text"}},
            "truncation": "disabled",
            "store": True,
            "background": False,
            "previous_response_id": None,
        }
        assert {name: response[name] for name in defaults} == defaults

    def test_sampling_reaches_the_device(self, app: App) -> None:
        ask(app, temperature=0.5, top_p=0.25, seed=7, top_k=4, priority=-2)
        assert app.device.requests[-1].priority == -2
        sampling = app.device.requests[-1].sampling
        assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.top_k) == (0.5, 0.25, 7, 4)

    def test_log_probabilities_come_if_they_are_included(self, app: App) -> None:
        fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
        scored = ask(app, **fields)["output"][0]["content"][0]["logprobs"]
        assert [one["token"] for one in scored] == ["t10", "t11", "t12"]
        assert [len(one["top_logprobs"]) for one in scored] == [2, 2, 2]
        assert without_ids(stream(app, **fields)[-1]["response"]) == without_ids(ask(app, **fields))

    def test_limits_stand_in_the_headers(self, app: App) -> None:
        headers = app.post(PATH, ASKED).headers
        assert "x-ratelimit-limit-requests" in headers and "x-request-id" in headers

    def test_a_capped_limit_is_told_by_its_own_name(self) -> None:
        with serving(obeys=False, max_new_tokens=2) as app:
            response = ask(app)
        assert response["max_output_tokens"] == 2
        assert "'max_output_tokens' is 3" in response["warnings"][0]


class TestInput:
    def test_instructions_come_first(self, app: App) -> None:
        ask(app, instructions="t30")
        assert prompt_of(app) == (30, 17, 18, 9)

    @pytest.mark.parametrize(
        "item",
        [
            {"role": "user", "content": "t40"},
            {"role": "user", "content": [{"type": "input_text", "text": "t4"}, {"type": "input_text", "text": "0"}]},
            {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
             "content": [{"type": "output_text", "text": "t40", "annotations": [], "logprobs": []}]},
            {"type": "message", "role": "system", "content": "t40"},
            {"role": "developer", "content": "t40"},
        ],
    )  # fmt: skip
    def test_messages_of_every_form_are_read(self, app: App, item: Any) -> None:
        ask(app, input=[item, {"role": "user", "content": "t41"}])
        assert prompt_of(app) == (40, 41, 9)

    def test_calls_and_results_are_read(self, app: App) -> None:
        thoughts = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None}
        ask(app, input=[{"role": "user", "content": "t41"}, thoughts, CALL, RESULT])
        assert 21 in prompt_of(app) and prompt_of(app)[-1] == 9

    @pytest.mark.parametrize(
        ("item", "param"),
        [
            ({}, "type"),
            ({"id": "msg_1"}, "type"),
            ({"type": "item_reference", "id": "msg_1"}, "type"),
            ({"type": "web_search_call"}, "type"),
            ({"type": "message", "content": "t3"}, "role"),
            ({"role": "tool", "content": "t3"}, "role"),
            ({"role": "user"}, "content"),
            ({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}, "content[0].type"),
            ({"role": "user", "content": [{"type": "input_text"}]}, "content[0].text"),
            ({"role": "user", "content": 3}, "content"),
            ({"role": "user", "content": [{"text": "t3"}]}, "content[0].type"),
            (CALL | {"call_id": None}, "call_id"),
            (CALL | {"name": None}, "name"),
            (CALL | {"name": "a b"}, "name"),
            (CALL | {"arguments": None}, "arguments"),
            (CALL | {"arguments": "{"}, "arguments"),
            (CALL | {"arguments": "[]"}, "arguments"),
            (RESULT, "call_id"),
            (RESULT | {"call_id": None}, "call_id"),
            (RESULT | {"output": None}, "output"),
            (RESULT | {"output": [{"type": "input_file"}]}, "output[0].type"),
            ({"type": "reasoning", "summary": [{"type": "input_text", "text": ""}]}, "summary[0].type"),
            ({"type": "reasoning", "content": [{"type": "reasoning_text"}]}, "content[0].text"),
        ],
    )
    def test_a_wrong_item_is_named(self, app: App, item: Any, param: str) -> None:
        items = [{"role": "user", "content": "t17"}, item]
        assert app.refuse(PATH, ASKED | {"input": items}) == (400, f"input[1].{param}")

    def test_an_input_without_messages_is_refused(self, app: App) -> None:
        assert app.refuse(PATH, ASKED | {"input": []}) == (400, "input")
        assert app.refuse(PATH, ASKED | {"input": [{"type": "reasoning", "summary": []}]}) == (400, "input")
        assert app.refuse(PATH, {"model": "toy"}) == (400, "input")


class TestRefusals:
    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"background": True}, "background"),
            ({"conversation": "conv_1"}, "conversation"),
            ({"prompt": {"id": "pmpt_1"}}, "prompt"),
            ({"truncation": "middle"}, "truncation"),
            ({"context_management": [{"type": "compaction"}]}, "context_management"),
            ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
            ({"tools": [TOOL, {"type": "custom", "name": "x"}]}, "tools[1].type"),
            ({"tools": [{"type": "function"}]}, "tools[0].name"),
            ({"tools": [TOOL | {"name": "a b"}]}, "tools[0].name"),
            ({"tools": [TOOL, TOOL]}, "tools[1].name"),
            ({"tool_choice": "required"}, "tool_choice"),
            ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
            ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
            ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice.name"),
            ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice.mode"),
            ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.tools"),
            ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
            ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [3]}}, "tool_choice"),
            ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
            ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
            ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
            ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nonsense"}}}}, "text.format.schema"),
            ({"max_output_tokens": 0}, "max_output_tokens"),
            ({"max_output_tokens": 64}, "input"),
            ({"input": "t17 " * 1000}, "input"),
            ({"temperature": 3}, "temperature"),
            ({"top_logprobs": 21}, "top_logprobs"),
            ({"metadata": {"a": 1}}, "metadata"),
            ({"metadata": {"a" * 65: "b"}}, "metadata"),
            ({"metadata": {"a": "b" * 513}}, "metadata"),
            ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
            ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
            ({"previous_response_id": "resp_0"}, "previous_response_id"),
            ({"include": "x"}, "include"),
        ],
    )  # fmt: skip
    def test_a_field_that_cannot_be_honoured_is_named(self, app: App, fields: Any, param: str) -> None:
        assert app.refuse(PATH, ASKED | fields) == (400, param)

    @pytest.mark.parametrize(
        "fields",
        [
            {"include": ["reasoning.encrypted_content", "anything"]},
            {
                "service_tier": "auto",
                "prompt_cache_key": "k",
                "safety_identifier": "s",
                "client_metadata": {},
            },
            {"truncation": "disabled", "background": False, "context_management": []},
            {"stream_options": None, "tools": [], "tool_choice": "auto"},
            {"reasoning": {"effort": None, "summary": "auto"}},
            dict.fromkeys(UNSUPPORTED_IN_RESPONSES),
        ],
    )
    def test_fields_that_ask_for_nothing_are_accepted(self, app: App, fields: Any) -> None:
        assert text_of(ask(app, **fields)) == "t10 t11 t12"

    def test_a_long_input_is_cut_if_asked(self, app: App) -> None:
        response = ask(app, input="t17 " * 1000 + "t18", truncation="auto")
        assert response["truncation"] == "auto"
        assert prompt_of(app)[-2:] == (18, 9) and len(prompt_of(app)) < 1000

    def test_an_unknown_model_is_not_found(self, app: App) -> None:
        assert app.refuse(PATH, ASKED | {"model": "other"})[0] == 404

    def test_a_previous_response_that_is_not_there_has_openais_code(self, app: App) -> None:
        reply = app.post(PATH, ASKED | {"previous_response_id": "resp_0"})
        assert reply.json is not None and reply.json["error"]["code"] == "previous_response_not_found"

    @pytest.mark.parametrize("depth", [300, 950, 980, 985])
    @pytest.mark.parametrize("field", ['"tools":[{"type":"function","name":"a","parameters":{"a":%s}}]',
                                       '"tool_choice":{"a":%s}',
                                       '"text":{"format":{"type":"json_schema","schema":{"a":%s}}}'])  # fmt: skip
    def test_deep_nesting_is_refused(self, app: App, field: str, depth: int) -> None:
        nested = field % ("[" * depth + "]" * depth)
        body = f'{{"model":"toy","input":"t17",{nested}}}'
        assert app.client.post(PATH, data=body, content_type="application/json").status_code == 400


class TestStream:
    def test_events_come_in_order(self, app: App) -> None:
        events = stream(app)
        deltas = ["response.output_text.delta"] * 3
        assert [event["type"] for event in events] == [
            *DRAFT_EVENTS,
            *MESSAGE_EVENTS,
            *deltas,
            *DONE_EVENTS,
            "response.incomplete",
        ]
        assert [event["delta"] for event in events[4:7]] == ["t10", " t11", " t12"]
        assert all(event["response"]["output"] == [] for event in events[:2])

    def test_the_last_event_is_the_blocking_answer(self, app: App) -> None:
        for fields in ({}, {"stop": "t12", "max_output_tokens": None}):
            last = stream(app, **fields)[-1]
            assert without_ids(last["response"]) == without_ids(ask(app, **fields))
        assert last["type"] == "response.completed"

    def test_an_answer_whose_time_ran_out_is_incomplete(self) -> None:
        with serving() as app:
            last = stream(app, input="t6", timeout=0.2)[-1]
        assert last["type"] == "response.incomplete"
        assert last["response"]["incomplete_details"] == {"reason": "deadline"}
        assert text_of(last["response"]) == "t10"

    def test_a_failure_in_the_middle_is_an_event(self) -> None:
        with serving() as app, ThreadPoolExecutor(1) as pool:
            asked = pool.submit(stream, app, input="t6")
            app.device.events.get(timeout=PATIENCE_SECONDS)
            app.engine.begin_drain(time.monotonic() + 0.2)
            *_, last = asked.result()
        assert last["type"] == "response.failed"
        assert last["response"]["error"]["code"] == "server_error"
        assert text_of(last["response"]) == "t10"

    def test_there_is_no_done_mark(self, app: App) -> None:
        assert "[DONE]" not in app.post(PATH, ASKED | {"stream": True}).text


class TestKept:
    def test_a_response_can_be_read_and_deleted(self, app: App) -> None:
        response = ask(app)
        path = f"{PATH}/{response['id']}"
        assert app.client.get(path).json == response
        deleted = {"id": response["id"], "object": "response", "deleted": True}
        assert app.client.delete(path).json == deleted
        assert app.client.get(path).status_code == app.client.delete(path).status_code == 404

    def test_a_streamed_response_can_be_read(self, app: App) -> None:
        last = stream(app)[-1]["response"]
        assert app.client.get(f"{PATH}/{last['id']}").json == last

    def test_the_conversation_goes_on(self, app: App) -> None:
        first = ask(app, instructions="t50")
        second = ask(app, input="t30", previous_response_id=first["id"])
        assert prompt_of(app) == (17, 18, 10, 11, 12, 30, 9), "instructions are not carried over"
        assert second["previous_response_id"] == first["id"]
        app.client.delete(f"{PATH}/{first['id']}")
        ask(app, input="t31", previous_response_id=second["id"], max_output_tokens=1)
        assert prompt_of(app) == (17, 18, 10, 11, 12, 30, 10, 11, 12, 31, 9)

    @pytest.mark.parametrize(("asked", "wanted"), [({}, False), ({"parallel_tool_calls": True}, True)])
    def test_a_response_says_whether_it_may_have_several_calls(
        self, app: App, asked: dict[str, bool], wanted: bool
    ) -> None:
        """The model's template knows no tools, so it may repeat calls only if asked to."""
        assert ask(app, tools=[TOOL], **asked)["parallel_tool_calls"] is wanted

    def test_a_conversation_may_go_on_without_new_input(self, app: App) -> None:
        first = ask(app)
        reply = app.post(PATH, {"model": "toy", "previous_response_id": first["id"]})
        assert reply.status_code == 200 and prompt_of(app) == (17, 18, 10, 11, 12, 9)

    def test_a_response_that_is_not_stored_is_not_there(self, app: App) -> None:
        response = ask(app, store=False)
        assert app.client.get(f"{PATH}/{response['id']}").status_code == 404

    def test_a_result_may_answer_a_call_of_an_earlier_response(self, app: App) -> None:
        first = ask(app, input=[{"role": "user", "content": "t41"}, CALL])
        ask(app, input=[RESULT], previous_response_id=first["id"])
        assert 21 in prompt_of(app) and prompt_of(app)[-1] == 9

    def test_without_room_nothing_is_stored_and_the_response_says_so(self) -> None:
        with serving(obeys=False, max_stored_responses=0) as app:
            response = ask(app)
            assert response["store"] is False
            assert app.client.get(f"{PATH}/{response['id']}").status_code == 404

    def test_input_items_are_listed_page_by_page(self, app: App) -> None:
        first = ask(app, input=[{"role": "user", "content": f"t{number}"} for number in (40, 41, 42)])
        path = f"{PATH}/{first['id']}/input_items"
        page = app.client.get(f"{path}?limit=2").json
        assert page is not None
        assert [item["content"][0]["text"] for item in page["data"]] == ["t42", "t41"]
        assert page["has_more"] is True and page["last_id"] == page["data"][-1]["id"]
        rest = app.client.get(f"{path}?after={page['last_id']}").json
        assert rest is not None and rest["has_more"] is False
        assert [item["content"][0]["text"] for item in rest["data"]] == ["t40"]
        oldest = app.client.get(f"{path}?order=asc&limit=1").json
        assert oldest is not None and oldest["data"] == rest["data"]
        for query in ("limit=0", "limit=101", "limit=x", "order=up", "after=msg_0"):
            assert app.client.get(f"{path}?{query}").status_code == 400
        assert app.client.get(f"{PATH}/{first['id']}?stream=true").status_code == 400

    def test_items_are_listed_with_the_fields_of_openai(self, app: App) -> None:
        said = {"role": "assistant", "content": [{"type": "output_text", "text": "t41"}]}
        made = ask(app, input=[{"role": "user", "content": "t40"}, said, CALL, RESULT])
        listed = app.client.get(f"{PATH}/{made['id']}/input_items?order=asc").json
        assert listed is not None
        assert [item["status"] for item in listed["data"]] == ["completed"] * 4
        assert listed["data"][0]["content"] == [{"type": "input_text", "text": "t40"}]
        assert listed["data"][1]["content"] == [{"type": "output_text", "text": "t41", "annotations": []}]

    def test_only_what_runs_in_the_background_could_be_cancelled(self, app: App) -> None:
        made = ask(app)
        assert app.refuse(f"{PATH}/{made['id']}/cancel", {}) == (400, "response_id")
        assert app.refuse(f"{PATH}/resp_0/cancel", {}) == (404, "response_id")

    def test_a_key_sees_its_own_responses_only(self, tmp_path: Any) -> None:
        keys = [{"Authorization": f"Bearer key-{name}"} for name in "ab"]
        with serving(obeys=False, file_keys=("key-a", "key-b")) as app:
            made = app.client.post(PATH, json=ASKED, headers=keys[0]).json
            assert made is not None
            path = f"{PATH}/{made['id']}"
            assert app.client.get(path, headers=keys[1]).status_code == 404
            assert app.client.get(f"{path}/input_items", headers=keys[1]).status_code == 404
            assert app.client.delete(path, headers=keys[1]).status_code == 404
            body = ASKED | {"previous_response_id": made["id"]}
            assert app.client.post(PATH, json=body, headers=keys[1]).status_code == 400
            assert app.client.post(PATH, json=body, headers=keys[0]).status_code == 200
            assert app.client.get(path, headers=keys[0]).json == made

    def test_a_restart_with_a_state_folder_keeps_responses(self, tmp_path: Any) -> None:
        with serving(obeys=False, state_dir=str(tmp_path / "state")) as app:
            first, gone = ask(app), ask(app)
            app.client.delete(f"{PATH}/{gone['id']}")
        with serving(obeys=False, state_dir=str(tmp_path / "state")) as app:
            assert app.client.get(f"{PATH}/{first['id']}").json == first
            assert app.client.get(f"{PATH}/{gone['id']}").status_code == 404
            ask(app, input="t30", previous_response_id=first["id"])
            assert prompt_of(app) == (17, 18, 10, 11, 12, 30, 9)


class TestThoughts:
    def test_thoughts_are_an_item_of_their_own(self, parrot: App) -> None:
        fields = {"input": "<think>hm</think>yes", "max_output_tokens": None, "top_logprobs": 1}
        response = ask(parrot, **fields)
        thoughts, message = response["output"]
        assert (thoughts["type"], thoughts["summary"]) == ("reasoning", [])
        assert thoughts["content"] == [{"type": "reasoning_text", "text": "hm"}]
        assert message["content"][0]["text"] == "yes"
        assert [one["token"] for one in message["content"][0]["logprobs"]] == ["y", "e", "s"]
        num_thought = len(">hm</think>")  # of the opening mark, only the last token counts
        assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": num_thought}
        assert without_ids(stream(parrot, **fields)[-1]["response"]) == without_ids(response)

    def test_thoughts_are_part_of_the_history(self, parrot: App) -> None:
        first = ask(parrot, input="<think>hm</think>yes", max_output_tokens=None)
        second = ask(parrot, input="?", previous_response_id=first["id"], max_output_tokens=None)
        assert second["usage"]["input_tokens"] == len("<think>hm</think>yes" + "(hm)yes" + "?")

    def test_efforts_are_honoured_where_the_model_thinks_and_known_by_name(
        self, app: App, parrot: App
    ) -> None:
        fields = {"input": "a", "reasoning": {"effort": "high"}, "max_output_tokens": None}
        assert ask(parrot, **fields)["usage"]["input_tokens"] == len("a<think>")
        assert app.post(PATH, ASKED | {"reasoning": {"effort": "high"}}).status_code == 200
        assert app.refuse(PATH, ASKED | {"reasoning": {"effort": "x"}}) == (400, "reasoning.effort")


class TestSdk:
    @pytest.fixture
    def client(self, app: App) -> Iterator[openai.OpenAI]:
        with (
            wsgi_server(app.client.application) as url,
            openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        ):
            yield client

    def test_creates_reads_and_deletes(self, client: openai.OpenAI) -> None:
        response = client.responses.create(model="toy", input="t17", temperature=0, max_output_tokens=2)
        assert response.output_text == "t10 t11"
        assert client.responses.retrieve(response.id).output_text == "t10 t11"
        counted = client.responses.input_tokens.count(model="toy", input="t17")
        assert response.usage is not None and counted.input_tokens == response.usage.input_tokens
        (item,) = client.responses.input_items.list(response.id)
        assert item.type == "message"
        client.responses.delete(response.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(response.id)

    def test_streams_to_the_final_response(self, client: openai.OpenAI) -> None:
        asked: Any = {"model": "toy", "input": "t17", "temperature": 0, "extra_body": {"stop": "t13"}}
        with client.responses.stream(**asked) as stream:
            texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
            final = stream.get_final_response()
        assert "".join(texts).strip() == final.output_text.strip() == "t10 t11 t12"
        assert final.status == "completed"
