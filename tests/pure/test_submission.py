"""From a body to the engine's sequences: every field is translated, and what does not fit is refused."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from levserve.answers.answer import count_usage
from levserve.errors import BadRequest
from levserve.generation import Choice
from levserve.request.choices import make_choices
from levserve.request.decode import decode
from levserve.request.policy import Policy
from levserve.request.schema import ChatBody, CompletionBody
from levserve.request.submission import Seeds, prepare
from levserve.schedule.request import FinishReason, GenerationRequest, Sampling, TokenBatch, TokenLogprob
from levserve.text.stops import StopStrings
from tests.fake_device import MAX_SEQ_LEN, MODEL, serve_toy

SERVED = serve_toy(MODEL, MAX_SEQ_LEN)


def requests(
    kind: type[ChatBody] | type[CompletionBody] = CompletionBody, **fields: Any
) -> list[GenerationRequest]:
    start = (
        {"prompt": "t17 t18"}
        if kind is CompletionBody
        else {"messages": [{"role": "user", "content": "t17 t18"}]}
    )
    body = decode(json.dumps({"model": MODEL} | start | fields).encode(), kind)
    return prepare(body, SERVED, Seeds(None), "id", 12.5).requests


@pytest.mark.parametrize(
    "field, value, name, wanted",
    [
        ("temperature", 0, "temperature", 0.0),
        ("temperature", 1.5, "temperature", 1.5),
        ("top_p", 0.5, "top_p", 0.5),
        ("top_p", 0, "top_p", 1e-6),
        ("top_k", 40, "top_k", 40),
        ("top_k", -1, "top_k", 0),
        ("min_p", 0.1, "min_p", 0.1),
        ("presence_penalty", -1.5, "presence_penalty", -1.5),
        ("frequency_penalty", 0.5, "frequency_penalty", 0.5),
        ("repetition_penalty", 1.2, "repetition_penalty", 1.2),
        ("logit_bias", {"17": -100, "18": 2.5}, "logit_bias", ((17, -100.0), (18, 2.5))),
        ("min_tokens", 3, "min_tokens", 3),
        ("seed", -5, "seed", -5),
        ("logprobs", 0, "num_logprobs", 0),
        ("logprobs", 5, "num_logprobs", 5),
        ("prompt_logprobs", 3, "num_logprobs", 3),
    ],
)
def test_each_sampling_field_arrives_and_changes_nothing_else(
    field: str, value: Any, name: str, wanted: Any
) -> None:
    (request,) = requests(**({"seed": 0} | {field: value}))
    (plain,) = requests(seed=0)
    changed = {
        key
        for key in Sampling.__dataclass_fields__
        if getattr(request.sampling, key) != getattr(plain.sampling, key)
    }
    assert getattr(request.sampling, name) == wanted
    assert changed <= {name}


def test_a_body_that_says_nothing_samples_as_openai_does() -> None:
    (request,) = requests(seed=0)
    assert request.sampling == Sampling()
    assert (request.max_tokens, request.stop_ids, request.deadline) == (16, frozenset((2,)), 12.5)


def test_a_chat_may_fill_the_context() -> None:
    (request,) = requests(ChatBody)
    assert request.prompt == (17, 18, 9)
    assert request.max_tokens == MAX_SEQ_LEN - 3


def test_sequences_are_prompt_major_with_a_seed_for_each() -> None:
    made = requests(prompt=["t17", "t30"], n=2, seed=7)
    assert [(one.request_id, one.prompt, one.sampling.seed) for one in made] == [
        ("id-0", (17,), 7),
        ("id-1", (17,), 8),
        ("id-2", (30,), 9),
        ("id-3", (30,), 10),
    ]


def test_tokens_that_the_model_has_no_weights_for_are_refused_by_name() -> None:
    served = dataclasses.replace(SERVED, num_rows=30)
    for name, token in (("allowed_token_ids", 30), ("prompt", 31)):
        fields = {"prompt": [17]} | {name: [token]}
        body = decode(json.dumps({"model": MODEL} | fields).encode(), CompletionBody)
        with pytest.raises(BadRequest, match=f"'{name}' has the token id {token}"):
            prepare(body, served, Seeds(None), "id", 12.5)


def test_stop_ids_are_the_end_tokens_and_the_clients_own() -> None:
    assert requests(stop_token_ids=[20, 21])[0].stop_ids == {2, 20, 21}
    assert requests(stop_token_ids=[20], ignore_eos=True)[0].stop_ids == {20}


def test_best_of_runs_more_sequences_than_are_answered() -> None:
    made = requests(n=1, best_of=3, seed=7)
    assert [(one.sampling.seed, one.sampling.num_logprobs) for one in made] == [(7, 0), (8, 0), (9, 0)]


@pytest.mark.parametrize(
    "fields, wanted",
    [
        ({}, [None, None]),
        ({"echo": True}, [None, None]),
        ({"logprobs": 1}, [None, None]),
        ({"echo": True, "logprobs": 0}, [1, None]),
        ({"prompt_logprobs": 0}, [1, None]),
        ({"prompt_logprobs": 0, "prompt": "t17"}, [None, None]),
    ],
)
def test_a_prompt_is_scored_once_where_its_scores_are_shown(
    fields: dict[str, Any], wanted: list[int | None]
) -> None:
    assert [one.score_from for one in requests(n=2, **fields)] == wanted


@pytest.mark.parametrize(
    "fields, on_device",
    [
        ({}, {2}),
        ({"echo": True}, {2}),
        ({"echo": True, "logprobs": 1}, set()),
        ({"echo": True, "logprobs": 1, "min_tokens": 1}, {2}),
    ],
)
def test_stop_tokens_that_must_be_listed_are_left_to_the_choice(
    fields: dict[str, Any], on_device: set[int]
) -> None:
    body = decode(json.dumps({"model": MODEL, "prompt": "t17"} | fields).encode(), CompletionBody)
    _, (request,), (choice,), _ = prepare(body, SERVED, Seeds(None), "id", None)
    assert request.stop_ids == on_device
    choice.add(TokenBatch((18, 2), (TokenLogprob(-0.5),) * 2))
    assert (choice.finish is None) == bool(on_device)


@pytest.mark.parametrize(
    "prompt, tokens, offsets",
    [
        ("t17 t18", [17, 18], (0, 3)),
        ([17, 18], [17, 18], (0, 3)),
        ("<s> t17", [1, 17], (0, 0)),
        ("t17", [17, 18, 19], (0, 3, 3)),  # a tokenizer whose tokens spell more than the text
    ],
)
def test_offsets_of_an_echo_never_pass_its_end(
    prompt: Any, tokens: list[int], offsets: tuple[int, ...]
) -> None:
    body = decode(json.dumps({"model": MODEL, "prompt": prompt, "echo": True}).encode(), CompletionBody)
    (choice,) = make_choices(body, SERVED.tokenizer, [tokens])
    delta = choice.add(TokenBatch((), finish=FinishReason.LENGTH))
    assert delta is not None and (delta.tokens, delta.offsets) == (tuple(tokens), offsets)


def test_seeds_are_fresh_unless_a_base_is_set() -> None:
    assert Seeds(None).draw() != Seeds(None).draw()
    first, second, other = Seeds(3), Seeds(3), Seeds(4)
    assert [first.draw(), first.draw()] == [second.draw(), second.draw()]
    assert other.draw() != Seeds(3).draw()


def test_cached_tokens_count_once_for_each_prompt() -> None:
    choices = [Choice(SERVED.tokenizer.detokenizer(), StopStrings(())) for _ in range(4)]
    for choice, num_cached in zip(choices, (0, 3, 2, 2), strict=True):
        choice.add(TokenBatch((17, 18), num_cached=num_cached))
    usage = count_usage([[1, 2, 3], [4, 5]], choices)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 8, 13)
    assert usage.prompt_tokens_details.cached_tokens == 2


@pytest.mark.parametrize(
    ("kind", "fields", "wanted"),
    [
        (CompletionBody, {}, (7, 0.25)),
        (ChatBody, {}, (7, 0.25)),
        (CompletionBody, {"max_tokens": 3, "temperature": 1}, (3, 1.0)),
        (ChatBody, {"max_completion_tokens": 3, "temperature": 0}, (3, 0.0)),
    ],
)
def test_the_operators_defaults_are_for_those_who_say_nothing(
    kind: type[ChatBody] | type[CompletionBody], fields: dict[str, Any], wanted: tuple[int, float]
) -> None:
    start = (
        {"prompt": "t17"} if kind is CompletionBody else {"messages": [{"role": "user", "content": "t17"}]}
    )
    body = decode(json.dumps({"model": MODEL} | start | fields).encode(), kind)
    policy = Policy(7, 0.25)
    (request,) = prepare(policy.apply_to(body).body, SERVED, Seeds(None), "id", None, policy).requests
    assert (request.max_tokens, request.sampling.temperature) == wanted
    assert Policy(0, None).apply_to(body).body is body
