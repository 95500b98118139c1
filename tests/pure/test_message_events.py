"""A streamed message equals the message that is answered whole, however its parts were cut."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from levserve.engine.stream import TokenStream
from levserve.errors import ServeError
from levserve.generation import Choice, Delta, Deltas, join_parts
from levserve.request.chat_message import Message
from levserve.request.schema import ChatBody
from levserve.schedule.request import FinishReason, TokenBatch
from levserve.text.parts import CallArguments, CallStart, Content, Part, Thought
from levserve.text.stops import StopStrings
from levserve.web.messages.answer import MessageAnswer
from levserve.web.messages.events import MessageEvents
from levserve.web.messages.objects import SIGNATURE
from levserve.web.request_log import RequestLog
from levserve.web.run import Run
from tests.fake_device import serve_toy

MODEL = serve_toy("toy", 64)
BODY = ChatBody(model="toy", messages=[Message(role="user", content="t1")], max_tokens=9)

texts = st.text(min_size=1, max_size=6)
arguments = st.dictionaries(texts, st.integers() | texts, max_size=2).map(lambda value: json.dumps(value))


@st.composite
def answers(draw: st.DrawFn) -> list[Part]:
    """The parts that a reader may find in an answer, before they are cut into deltas."""
    parts: list[Part] = []
    num_calls = 0
    for kind in draw(st.lists(st.sampled_from(["content", "thought", "call"]), max_size=6)):
        match kind:
            case "content":
                parts.append(Content(draw(texts)))
            case "thought":
                parts.append(Thought(draw(texts)))
            case "call":
                parts.append(CallStart(num_calls, f"call_{num_calls}", "look_up"))
                written = draw(arguments)
                if draw(st.booleans()):
                    parts.append(CallArguments(num_calls, written))
                num_calls += 1
    return list(join_parts(parts))


@st.composite
def cuts(draw: st.DrawFn, parts: Sequence[Part]) -> list[tuple[Part, ...]]:
    """The same parts with their texts cut anywhere, spread over any number of deltas."""
    deltas: list[list[Part]] = [[]]
    for part in parts:
        pieces: list[Part] = [part]
        if not isinstance(part, CallStart):
            places = sorted(set(draw(st.lists(st.integers(1, max(len(part.text) - 1, 1)), max_size=3))))
            bounds = [0, *(place for place in places if place < len(part.text)), len(part.text)]
            cut = [part.text[start:end] for start, end in itertools.pairwise(bounds)]
            pieces = [part._replace(text=text) for text in cut]
        for piece in pieces:
            if draw(st.booleans()):
                deltas.append([])
            deltas[-1].append(piece)
    return [tuple(delta) for delta in deltas]


def make_run(stops: Sequence[str] = (), warnings: Sequence[str] = ()) -> Run:
    choice = Choice(MODEL.tokenizer.detokenizer(), StopStrings(stops))
    stream = TokenStream(["0"], lambda request_id, finish: None)
    request_log = RequestLog("id", "POST", "/v1/messages", choices=[choice])
    return Run(BODY, MODEL, [[1, 2]], [choice], Deltas(stream, [choice]), request_log, "", warnings)


def join_events(data: bytes) -> dict[str, Any]:
    """The message that a client builds from the events, as Anthropic's SDK does."""
    message: dict[str, Any] = {}
    texts = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
    open_index: int | None = None
    inputs: dict[int, str] = {}
    for frame in data.decode().split("\n\n")[:-1]:
        event = json.loads(frame.partition("\ndata: ")[2])
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert open_index is None and event["index"] == len(message["content"])
                open_index = event["index"]
                message["content"].append(event["content_block"])
            case "content_block_delta":
                assert event["index"] == open_index
                delta = event["delta"]
                if delta["type"] == "input_json_delta":
                    inputs[event["index"]] = inputs.get(event["index"], "") + delta["partial_json"]
                else:
                    field = texts[delta["type"]]
                    message["content"][event["index"]][field] += delta[field]
            case "content_block_stop":
                assert event["index"] == open_index
                open_index = None
            case "message_delta":
                assert open_index is None
                message |= event["delta"] | {"usage": event["usage"]}
                message |= {"warnings": event["warnings"]} if "warnings" in event else {}
    for index, text in inputs.items():
        message["content"][index]["input"] = json.loads(text)
    assert frame == 'event: message_stop\ndata: {"type":"message_stop"}'
    return message


@given(st.data(), answers(), st.booleans(), st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]))
def test_the_events_join_to_the_whole_message(
    data: st.DataObject, parts: list[Part], hides_thoughts: bool, finish: FinishReason
) -> None:
    run = make_run(warnings=["a warning"])
    answer = MessageAnswer(run, hides_thoughts=hides_thoughts)
    events = MessageEvents(answer, "id")
    sent = events.opening()
    run.choices[0].add(TokenBatch((3, 4), finish=finish))
    pieces = data.draw(cuts(parts))
    for piece in pieces[:-1]:
        sent += events.delta(0, Delta("", parts=piece))
    sent += events.delta(0, Delta("", finish=finish, parts=pieces[-1])) + events.closing()
    whole = json.loads(msgspec.json.encode(answer.whole(Delta("", finish=finish, parts=tuple(parts)))))
    assert join_events(sent) == whole
    kinds = [block["type"] for block in whole["content"]]
    wanted = {Content: "text", Thought: "thinking", CallStart: "tool_use"}
    assert kinds == [wanted[type(part)] for part in parts if type(part) in wanted]
    has_calls = "tool_use" in kinds
    ended = ("tool_use" if has_calls else "end_turn") if finish is FinishReason.STOP else whole["stop_reason"]
    assert whole["stop_reason"] == ended


def test_text_without_a_reader_is_content() -> None:
    run = make_run()
    events = MessageEvents(MessageAnswer(run), "id")
    assert events.delta(0, Delta("")) == b""
    assert b'"text_delta","text":"h\\u00e9"' in events.delta(0, Delta("hé"))


def test_thoughts_come_first_are_signed_and_can_be_hidden() -> None:
    for hides_thoughts, shown in ((False, "hm"), (True, "")):
        answer = MessageAnswer(make_run(), hides_thoughts=hides_thoughts)
        (thoughts, text) = answer.whole(Delta("", parts=(Thought("hm"), Content("yes")))).content
        assert msgspec.to_builtins(thoughts) == {
            "type": "thinking",
            "thinking": shown,
            "signature": SIGNATURE,
        }
        assert msgspec.to_builtins(text) == {"type": "text", "text": "yes"}
        sent = MessageEvents(answer, "id").delta(0, Delta("", parts=(Thought("hm"), Content("yes"))))
        assert (b"thinking_delta" in sent) is not hides_thoughts
        assert sent.index(b"signature_delta") < sent.index(b"content_block_stop") < sent.index(b"text_delta")


@pytest.mark.parametrize("written", ['{"word": "a', "", "[1]", '{"a":1}}', "nonsense"])
def test_arguments_that_are_no_object_become_an_empty_one(written: str) -> None:
    parts: tuple[Part, ...] = (CallStart(0, "call_0", "look_up"),)
    parts += (CallArguments(0, written),) if written else ()
    message = MessageAnswer(make_run()).whole(Delta("", finish=FinishReason.LENGTH, parts=parts))
    assert json.loads(msgspec.json.encode(message))["content"][0]["input"] == {}


def test_arguments_keep_the_characters_of_the_model() -> None:
    written = '{"b": 1.50, "a": "\\u00e9"}'
    parts = (CallStart(0, "call_0", "look_up"), CallArguments(0, written))
    message = MessageAnswer(make_run()).whole(Delta("", finish=FinishReason.STOP, parts=parts))
    assert f'"input":{written}'.encode() in msgspec.json.encode(message)


@pytest.mark.parametrize(
    ("finish", "num_tokens", "reason"),
    [
        (FinishReason.STOP, 4, "end_turn"),
        (FinishReason.LENGTH, 9, "max_tokens"),
        (FinishReason.LENGTH, 5, "model_context_window_exceeded"),
        (FinishReason.DEADLINE, 5, "max_tokens"),
    ],
)
def test_each_end_has_its_reason(finish: FinishReason, num_tokens: int, reason: str) -> None:
    run = make_run()
    run.choices[0].add(TokenBatch((3,) * num_tokens, finish=finish))
    assert MessageAnswer(run).end(has_calls=False).stop_reason == reason


def test_a_stop_string_is_named_even_after_a_call() -> None:
    run = make_run(stops=["t4"])
    run.choices[0].add(TokenBatch((3, 4)))
    end = MessageAnswer(run).end(has_calls=True)
    assert (end.stop_reason, end.stop_sequence) == ("stop_sequence", "t4")


def test_a_failure_is_an_event_with_the_id_of_the_request() -> None:
    events = MessageEvents(MessageAnswer(make_run()), "req-7")
    name, data = events.failure(ServeError("The device failed.")).decode().strip().split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: ")) == {
        "type": "error",
        "error": {"type": "api_error", "message": "The device failed."},
        "request_id": "req-7",
    }
