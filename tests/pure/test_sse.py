"""The bytes of a stream: order of events, framing, and agreement with whole objects."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from msgspec import UNSET

from levserve.answers.answer import Answer, CachedTokens, ChatAnswer, ReasoningTokens, TextAnswer, Usage
from levserve.errors import ServeError
from levserve.generation import Delta
from levserve.schedule.request import FinishReason, TokenLogprob
from levserve.text.parts import CallArguments, CallStart, Content, Part, Thought
from levserve.web.events import DONE, ChunkEvents, error_event
from levserve.web.run import Totals
from tests.fake_device import serve_toy

TEXTS = [
    "plain",
    'quotes " and \\',
    "new\nline\ttab \x00 \x1f",
    "grüße 日本 👍",
    "</script>",
    "\u2028",
    "data: x\n\n",
]


@pytest.fixture(params=[ChatAnswer, TextAnswer])
def answer(request: pytest.FixtureRequest) -> Answer:
    model = serve_toy('mo"del\n', 64)
    made: Answer = request.param(model)
    return made


def chunks(data: bytes) -> list[dict[str, Any]]:
    events = data.split(b"\n\n")
    assert events.pop() == b""
    assert all(event.startswith(b"data: ") and b"\n" not in event for event in events)
    return [json.loads(event.removeprefix(b"data: ")) for event in events]


def text_of(chunk: dict[str, Any]) -> Any:
    choice = chunk["choices"][0]
    return choice["text"] if "text" in choice else choice["delta"]["content"]


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_comes_out_as_it_went_in(answer: Answer, text: str) -> None:
    (chunk,) = chunks(ChunkEvents(answer, 2, with_usage=False).delta(1, Delta(text, (17,))))
    assert text_of(chunk) == text
    assert chunk["model"] == 'mo"del\n'
    assert chunk["choices"][0]["index"] == 1
    assert chunk["choices"][0]["finish_reason"] is None


@pytest.mark.parametrize("with_usage", [False, True])
def test_a_templated_event_is_the_object_it_stands_for(answer: Answer, with_usage: bool) -> None:
    events = ChunkEvents(answer, 1, with_usage=with_usage)
    (chunk,) = chunks(events.delta(0, Delta("hi", (17,))))
    (whole,) = chunks(events.delta(0, Delta("hi", (17,), (TokenLogprob(-0.5),), offsets=(0,))))
    assert whole["choices"][0].pop("logprobs") is not None
    assert chunk["choices"][0].pop("logprobs") is None
    assert chunk == whole
    assert ("usage" in chunk) == with_usage


def test_a_delta_without_text_makes_no_event(answer: Answer) -> None:
    assert ChunkEvents(answer, 1, with_usage=True).delta(0, Delta("", (17,))) == b""


def test_the_last_delta_makes_a_text_event_and_a_finish_event(answer: Answer) -> None:
    text, end = chunks(
        ChunkEvents(answer, 1, with_usage=False).delta(0, Delta("bye", (17,), finish=FinishReason.LENGTH))
    )
    assert (text_of(text), text["choices"][0]["finish_reason"]) == ("bye", None)
    assert end["choices"][0]["finish_reason"] == "length"
    assert end["choices"][0].get("text", "") == "" and end["choices"][0].get("delta", {}) == {}


def test_log_probabilities_of_held_back_text_are_sent_at_once(answer: Answer) -> None:
    (chunk,) = chunks(
        ChunkEvents(answer, 1, with_usage=False).delta(
            0, Delta("", (17,), (TokenLogprob(-0.5),), offsets=(0,))
        )
    )
    assert chunk["choices"][0]["logprobs"] is not None


def test_usage_comes_without_choices(answer: Answer) -> None:
    totals = Totals(Usage(3, 2, 5, CachedTokens(1), ReasoningTokens(0)), UNSET)
    closing = ChunkEvents(answer, 1, with_usage=True, totals=lambda: totals).closing()
    assert closing.endswith(DONE)
    (chunk,) = chunks(closing.removesuffix(DONE))
    assert chunk["choices"] == []
    assert chunk["usage"]["total_tokens"] == 5


def test_only_chat_opens_each_choice_with_a_role() -> None:
    model = serve_toy("m", 64)
    opened = chunks(ChunkEvents(ChatAnswer(model), 2, with_usage=False).opening())
    assert [chunk["choices"] for chunk in opened] == [
        [
            {
                "index": index,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
        ]
        for index in (0, 1)
    ]
    assert ChunkEvents(TextAnswer(model), 2, with_usage=False).opening() == b""


def test_an_error_event_has_the_whole_error_shape() -> None:
    assert chunks(error_event(ServeError("no"))) == [
        {"error": {"message": "no", "type": "server_error", "param": None, "code": None}}
    ]


PARTS: tuple[Part, ...] = (
    Thought("hm"),
    Content("I ask. "),
    CallStart(0, "call_a", "f"),
    CallArguments(0, '{"a": '),
    CallArguments(0, "1}"),
    CallStart(1, "call_b", "g"),
    CallArguments(1, "{}"),
)
USAGE = Usage(3, 2, 5, CachedTokens(0), ReasoningTokens(0))


def whole_choice(delta: Delta, **options: bool) -> dict[str, Any]:
    answer = ChatAnswer(serve_toy("m", 64), **options).whole([delta], USAGE)
    choice: dict[str, Any] = json.loads(msgspec.json.encode(answer))["choices"][0]
    return choice


def streamed_choices(deltas: list[Delta], **options: bool) -> list[dict[str, Any]]:
    events = ChunkEvents(ChatAnswer(serve_toy("m", 64), **options), 1, with_usage=False)
    data = b"".join(events.delta(0, delta) for delta in deltas)
    return [chunk["choices"][0] for chunk in chunks(data)]


def test_calls_stream_as_a_name_and_then_pieces_of_arguments() -> None:
    deltas = [Delta("..", (17,), parts=(part,)) for part in PARTS]
    shown = streamed_choices([*deltas, Delta("", finish=FinishReason.STOP, parts=())])
    assert [choice["delta"] for choice in shown] == [
        {"reasoning_content": "hm", "reasoning": "hm"},
        {"content": "I ask. "},
        {"tool_calls": [named_call(0, "call_a", "f")]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a": '}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]},
        {"tool_calls": [named_call(1, "call_b", "g")]},
        {"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]},
        {},
    ]
    assert [choice["finish_reason"] for choice in shown] == [None] * 7 + ["tool_calls"]


def named_call(index: int, call_id: str, name: str) -> dict[str, Any]:
    function = {"name": name, "arguments": ""}
    return {"index": index, "id": call_id, "type": "function", "function": function}


def test_several_parts_of_one_delta_are_the_same_as_one_delta_each() -> None:
    each = streamed_choices([Delta("..", (17,), parts=(part,)) for part in PARTS])
    assert streamed_choices([Delta("..", (17,), parts=PARTS)]) == each


def test_a_whole_message_is_what_its_stream_joins_to() -> None:
    whole = whole_choice(Delta("..", finish=FinishReason.STOP, parts=PARTS))
    assert whole["finish_reason"] == "tool_calls"
    assert whole["message"] == {
        "role": "assistant",
        "content": "I ask. ",
        "refusal": None,
        "reasoning_content": "hm",
        "reasoning": "hm",
        "tool_calls": [
            {"id": "call_a", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
            {"id": "call_b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ],
    }


def test_content_beside_calls_is_null_if_there_is_no_text() -> None:
    assert whole_choice(Delta("..", parts=PARTS[2:]))["message"]["content"] is None
    assert whole_choice(Delta("", parts=()))["message"]["content"] == ""


@pytest.mark.parametrize("finish", [FinishReason.LENGTH, FinishReason.DEADLINE])
def test_an_answer_that_was_cut_off_within_a_call_says_so(finish: FinishReason) -> None:
    delta = Delta("..", (17,), finish=finish, parts=PARTS[2:4])
    whole = whole_choice(delta)
    assert whole["finish_reason"] == "length"
    assert whole["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": '
    assert streamed_choices([delta])[-1]["finish_reason"] == "length"


def test_a_client_that_sent_functions_gets_one_function_call() -> None:
    delta = Delta("..", finish=FinishReason.STOP, parts=PARTS[2:5])
    whole = whole_choice(delta, is_function=True)
    assert whole["finish_reason"] == "function_call"
    assert whole["message"]["function_call"] == {"name": "f", "arguments": '{"a": 1}'}
    assert "tool_calls" not in whole["message"]
    assert [choice["delta"] for choice in streamed_choices([delta], is_function=True)] == [
        {"function_call": {"name": "f", "arguments": ""}},
        {"function_call": {"arguments": '{"a": '}},
        {"function_call": {"arguments": "1}"}},
        {},
    ]


@pytest.mark.parametrize("parts", [(), PARTS[2:5], PARTS[:1]])
def test_log_probabilities_stand_on_the_first_chunk_of_a_delta(parts: tuple[Part, ...]) -> None:
    scored = Delta("..", (17,), (TokenLogprob(-0.5),), offsets=(0,), parts=parts)
    first, *others = streamed_choices([scored])
    assert len(first["logprobs"]["content"]) == 1
    assert all(choice["logprobs"] is None for choice in others)
