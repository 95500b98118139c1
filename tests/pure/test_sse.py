"""The bytes of a stream: order of events, framing, and agreement with whole objects."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec import UNSET

from levserve.errors import ServeError
from levserve.generation import Delta
from levserve.schedule.request import FinishReason, TokenLogprob
from levserve.web.answer import Answer, CachedTokens, ChatAnswer, TextAnswer, Usage
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
    totals = Totals(Usage(3, 2, 5, CachedTokens(1)), UNSET)
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
