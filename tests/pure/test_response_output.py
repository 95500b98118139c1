"""Items and events of responses from hand-made deltas, and messages from items."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from levserve.errors import ServeError, Unavailable
from levserve.generation import Choice, Delta, Deltas, join_parts
from levserve.schedule.request import FinishReason, TokenLogprob
from levserve.text.parts import CallArguments, CallStart, Content, Part, Thought
from levserve.text.stops import StopStrings
from levserve.web.request_log import RequestLog
from levserve.web.responses.body import ResponseBody
from levserve.web.responses.events import ResponseEvents, ResponseStream
from levserve.web.responses.exchange import Exchange
from levserve.web.responses.input_items import InputItem, InputPart
from levserve.web.responses.messages import make_messages
from levserve.web.responses.output import Output
from levserve.web.responses.store import ResponseStore
from levserve.web.run import Run
from tests.fake_app import wsgi_server
from tests.fake_device import serve_toy

MODEL = serve_toy("toy", 64)
TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)


@st.composite
def answers(draw: st.DrawFn) -> list[Delta]:
    """The deltas of an answer: thoughts, contents and calls in any order, cut anywhere."""
    pieces: list[Part] = []
    num_calls = 0
    for kind in draw(st.lists(st.sampled_from(["content", "thought", "call"]), max_size=5)):
        texts = draw(st.lists(TEXTS, min_size=1, max_size=3))
        if kind == "call":
            pieces.append(CallStart(num_calls, f"call_{num_calls}", draw(st.sampled_from("fg"))))
            pieces += [CallArguments(num_calls, text) for text in texts]
            num_calls += 1
        else:
            pieces += [Content(text) if kind == "content" else Thought(text) for text in texts]
    deltas = []
    while pieces:
        count = draw(st.integers(0, len(pieces)))
        deltas.append(Delta("", (3,), parts=tuple(pieces[:count])))
        pieces = pieces[count:]
    finish = draw(st.sampled_from([FinishReason.STOP, FinishReason.LENGTH, FinishReason.DEADLINE]))
    return [*deltas, Delta("", finish=finish, parts=())]


def begin(store: ResponseStore | None = None, **fields: Any) -> tuple[Exchange, Run]:
    body = msgspec.convert({"model": "toy", "input": "t17"} | fields, ResponseBody)
    exchange = Exchange(body, store or ResponseStore(10, 10**6), "")
    choice = Choice(MODEL.tokenizer.detokenizer(), StopStrings(()))
    deltas: Deltas = None  # type: ignore[assignment]  # the tests bring their own
    return exchange, Run(exchange.chat, MODEL, [[17]], [choice], deltas, RequestLog("id", "POST", "/"))


def stream(deltas: list[Delta], store: ResponseStore | None = None) -> bytes:
    events = ResponseEvents(*begin(store))
    return events.opening() + b"".join(events.delta(0, delta) for delta in deltas) + events.closing()


def read(data: bytes) -> list[Any]:
    events = []
    for number, block in enumerate(data.decode().removesuffix("\n\n").split("\n\n")):
        name, line = block.split("\n")
        event = json.loads(line.removeprefix("data: "))
        assert (name, event["sequence_number"]) == (f"event: {event['type']}", number)
        events.append(event)
    return events


def build(deltas: list[Delta]) -> list[Any]:
    """The items of the same answer when it is not streamed."""
    output = Output(Choice(MODEL.tokenizer.detokenizer(), StopStrings(())), MODEL.tokenizer)
    for delta in deltas:
        list(output.add(delta))
    list(output.close())
    return list(msgspec.to_builtins(output.items))


def without_ids(items: list[Any]) -> list[Any]:
    return [{name: value for name, value in item.items() if name != "id"} for item in items]


@given(answers())
@settings(deadline=None, max_examples=50)
def test_events_join_to_the_items_of_the_last_one_and_of_the_blocking_answer(deltas: list[Delta]) -> None:
    events = read(stream(deltas))
    joined: dict[int, dict[str, Any]] = {}
    done: list[Any] = []
    for event in events[2:-1]:
        place = event["output_index"]
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert place == len(done) == len(joined), "an item begins where the one before ended"
                assert event["item"]["status"] == "in_progress"
                joined[place] = {"id": event["item"]["id"], "text": ""}
            case "output_text.delta" | "reasoning_text.delta" | "function_call_arguments.delta":
                assert event["item_id"] == joined[place]["id"]
                joined[place]["text"] += event["delta"]
            case "output_text.done" | "reasoning_text.done":
                assert event["text"] == joined[place]["text"]
            case "function_call_arguments.done":
                assert event["arguments"] == joined[place]["text"]
            case "output_item.done":
                item = event["item"]
                text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
                assert (item["id"], text) == (joined[place]["id"], joined[place]["text"])
                done.append(item)
    response = events[-1]["response"]
    assert response["output"] == done
    assert without_ids(done) == without_ids(build(deltas))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == f"response.{response['status']}"


@given(answers())
@settings(deadline=None, max_examples=50)
def test_how_an_answer_is_cut_does_not_change_its_items(deltas: list[Delta]) -> None:
    parts = join_parts(part for delta in deltas for part in delta.parts or ())
    once = [Delta("", parts=parts, finish=deltas[-1].finish)]
    assert without_ids(build(once)) == without_ids(build(deltas))


class Player:
    """A server that answers every request with the same stream, and the SDK's client of it."""

    data = b""
    client: openai.OpenAI

    def __call__(self, environ: dict[str, Any], start_response: Any) -> list[bytes]:
        environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
        start_response("200 OK", [("Content-Type", "text/event-stream")])
        return [self.data]


@pytest.fixture(scope="module")
def player() -> Iterator[Player]:
    player = Player()
    with (
        wsgi_server(player) as url,
        openai.OpenAI(base_url=url, api_key="none", max_retries=0) as player.client,
    ):
        yield player


@given(answers())
@settings(deadline=None, max_examples=25)
def test_openais_sdk_reads_every_stream(player: Player, deltas: list[Delta]) -> None:
    player.data = stream(deltas)
    with player.client.responses.stream(model="toy", input="t17") as events:
        kinds = Counter(event.type for event in events)
    assert kinds == Counter(event["type"] for event in read(player.data))


def test_the_events_of_thoughts_a_text_and_a_call() -> None:
    parts = (Thought("hm"), Content("hi"), CallStart(0, "call_0", "f"), CallArguments(0, "{}"))
    kinds = [
        event["type"].removeprefix("response.")
        for event in read(stream([Delta("", parts=parts, finish=FinishReason.STOP)]))
    ]
    assert kinds == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done", "completed"),
    ]


def test_only_the_item_that_was_cut_off_is_incomplete() -> None:
    parts = (Content("hi"), CallStart(0, "call_0", "f"), CallArguments(0, '{"a'))
    items = build([Delta("", parts=parts, finish=FinishReason.LENGTH)])
    assert [item["status"] for item in items] == ["completed", "incomplete"]


def test_thoughts_that_were_cut_off_stand_alone_and_complete_ones_have_a_message() -> None:
    for finish, kinds in (
        (FinishReason.LENGTH, ["reasoning"]),
        (FinishReason.STOP, ["reasoning", "message"]),
    ):
        items = build([Delta("", parts=(Thought("hm"),), finish=finish)])
        assert [item["type"] for item in items] == kinds


def test_scores_of_thoughts_and_calls_are_left_out() -> None:
    choice = Choice(MODEL.tokenizer.detokenizer(), StopStrings(()))
    output = Output(choice, MODEL.tokenizer)
    score = (TokenLogprob(-0.5, ()),)
    choice.num_thought_tokens = 1
    list(output.add(Delta("", (10,), score, parts=(Thought("t10"),))))
    list(output.add(Delta("", (11,), score, parts=())))  # held back
    list(output.add(Delta("", (12,), score, parts=(Content("t11t12"),))))
    list(output.add(Delta("", (13,), score, parts=())))
    list(output.add(Delta("", (14,), score, parts=(CallStart(0, "call_0", "f"),))))
    list(output.add(Delta("", (15,), score, parts=(CallArguments(0, "{}"),), finish=FinishReason.STOP)))
    list(output.close())
    message = msgspec.to_builtins(output.items)[1]
    assert [one["token"] for one in message["content"][0]["logprobs"]] == ["t11", "t12", "t13"]


def test_a_failure_tells_what_there_was() -> None:
    store = ResponseStore(10, 10**6)
    exchange, run = begin(store)
    events = ResponseEvents(exchange, run)
    data = events.opening() + events.delta(0, Delta("half"))
    data += events.failure(Unavailable("The server shut down.", retry_after_seconds=1))
    last = read(data)[-1]
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "The server shut down."}
    assert last["response"]["output"][0]["content"][0]["text"] == "half"
    assert store.get(last["response"]["id"], "") is None


def test_a_failure_before_the_beginning_is_a_whole_stream() -> None:
    exchange, _ = begin()
    created, failed = read(ResponseStream(exchange).refusal(ServeError("The model failed to load.")))
    assert (created["type"], failed["type"]) == ("response.created", "response.failed")
    assert created["response"]["id"] == failed["response"]["id"]
    assert failed["response"]["error"]["code"] == "server_error"


def test_a_later_request_reads_thoughts_and_calls_but_not_a_call_that_was_cut_off() -> None:
    store = ResponseStore(10, 10**6)
    whole = (Thought("hm"), Content("hi"), CallStart(0, "call_0", "f"), CallArguments(0, "{}"))
    cut = (CallStart(1, "call_1", "f"), CallArguments(1, '{"a'))
    last = read(stream([Delta("", parts=whole + cut, finish=FinishReason.LENGTH)], store))[-1]
    result = {"type": "function_call_output", "call_id": "call_0", "output": "42"}
    exchange, _ = begin(store, input=[result], previous_response_id=last["response"]["id"])
    asked, answered, found = exchange.chat.messages
    assert (asked.role, asked.content) == ("user", "t17")
    assert (answered.content, answered.reasoning_content) == ("hi", "hm")
    assert [call.id for call in answered.calls] == ["call_0"]
    assert (found.role, found.tool_call_id, found.content) == ("tool", "call_0", "42")


class TestMessages:
    def test_neighbouring_items_of_an_assistant_are_one_message(self) -> None:
        thoughts = InputItem(type="reasoning", summary=[InputPart("summary_text", "hm")])
        text = InputItem(type="message", role="assistant", content="hi")
        calls = [
            InputItem(type="function_call", call_id=call_id, name="f", arguments="{}") for call_id in "ab"
        ]
        (message,) = make_messages(None, [thoughts, text, *calls])
        assert (message.content, message.reasoning_content) == ("hi", "hm")
        assert [call.id for call in message.calls] == ["a", "b"]
        two = make_messages(None, [text, thoughts, text])
        assert [one.reasoning_content for one in two] == [None, "hm"]

    def test_instructions_and_the_inputs_system_messages_are_one_message(self) -> None:
        items = [
            InputItem(type="message", role=role, content=role) for role in ("developer", "system", "user")
        ]
        messages = make_messages("first", items)
        assert [(one.role, one.content) for one in messages] == [
            ("system", "first\n\ndeveloper\n\nsystem"),
            ("user", "user"),
        ]
        assert [one.role for one in make_messages(None, items)] == ["developer", "system", "user"]

    def test_thoughts_that_nothing_follows_are_left_out(self) -> None:
        thoughts = InputItem(type="reasoning", content=[InputPart("reasoning_text", "hm")])
        user = InputItem(type="message", role="user", content="x")
        assert [one.role for one in make_messages(None, [thoughts, user, thoughts])] == ["user"]
