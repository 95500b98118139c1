"""No field is parsed and ignored: each declared field changes what the device or the client gets."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest

from levserve.answers.embeddings import EmbeddingBody
from levserve.answers.scoring import ScoreBody
from levserve.request.schema import (
    UNSUPPORTED,
    UNSUPPORTED_IN_CHAT,
    UNSUPPORTED_IN_COMPLETIONS,
    ChatBody,
    CompletionBody,
    StreamOptions,
)
from levserve.text.grammar import Grammar
from tests.fake_app import App, serving

CHAT, TEXT, EMBED, SCORE = "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/loglikelihood"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {
        "model": "toy",
        "messages": [{"role": "user", "content": "t17 t18"}],
        "max_tokens": 4,
        "temperature": 0,
        "seed": 1,
    },
    TEXT: {"model": "toy", "prompt": "</s> t380", "max_tokens": 8, "temperature": 0, "seed": 1},
    EMBED: {"model": "toy", "input": "t17 t18"},
    SCORE: {"prompts": ["t17"], "continuations": [" t18"]},
}
KINDS = {CHAT: ChatBody, TEXT: CompletionBody, EMBED: EmbeddingBody, SCORE: ScoreBody}
IGNORED = {"user"}  # names the end user, which has no effect

TOOLS = [{"type": "function", "function": {"name": "f"}}]

# For each field a value that has an effect, or all fields that must be set for it to have one.
BOTH: dict[str, Any] = {
    "model": "other",
    "max_tokens": 2,
    "n": 2,
    "prompt_logprobs": 1,
    "stream": True,
    "stream_options": {"stream": True, "stream_options": {"include_usage": True}},
    "timings": True,
    "return_token_ids": True,
    "logprobs_mode": "processed_logprobs",
    "seed": 2,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.5,
    "presence_penalty": 1,
    "frequency_penalty": 1,
    "repetition_penalty": 2,
    "logit_bias": {"17": 1},
    "stop": "1",
    "stop_token_ids": [381],
    "include_stop_str_in_output": {"stop": "1", "include_stop_str_in_output": True},
    "ignore_eos": True,
    "min_tokens": 2,
    "skip_special_tokens": {"ignore_eos": True, "skip_special_tokens": False},
    "timeout": 1000,
    "priority": 1,
    "truncate_prompt_tokens": 1,
    "response_format": {"response_format": {"type": "json_object"}},
    "structured_outputs": {"structured_outputs": {"regex": "t[0-9]+"}},
    "guided_json": {"guided_json": {"type": "string"}},
    "guided_regex": "t[0-9]+",
    "guided_choice": ["t17", "t18"],
    "guided_grammar": 'root ::= "t17"',
    "guided_whitespace_pattern": {"guided_json": {"type": "string"}, "guided_whitespace_pattern": "[ ]?"},
    "grammar": 'root ::= "t17"',
    "json_schema": {"json_schema": {"type": "string"}},
    "allowed_token_ids": [17, 18],
    "bad_words": ["t17"],
}
VALUES: dict[str, dict[str, Any]] = {
    TEXT: BOTH
    | {
        "prompt": "t18",
        "suffix": "t19",
        "logprobs": 1,
        "echo": True,
        "best_of": 2,
        "add_special_tokens": False,
    },
    CHAT: BOTH
    | {
        "messages": [{"role": "user", "content": "t20"}],
        "max_completion_tokens": 2,
        "logprobs": True,
        "top_logprobs": {"logprobs": True, "top_logprobs": 1},
        "add_generation_prompt": False,
        "continue_final_message": True,
        "chat_template_kwargs": {"messages": 1},
        "reasoning_effort": "high",
        "thinking_token_budget": 5,
        "tools": TOOLS,
        "tool_choice": {"tools": TOOLS, "tool_choice": "required"},
        "parallel_tool_calls": {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": True},
        "functions": [{"name": "f"}],
        "function_call": {"functions": [{"name": "f"}], "function_call": {"name": "f"}},
        "skip_special_tokens": {
            "messages": [{"role": "user", "content": "t382"}],
            "continue_final_message": True,
            "ignore_eos": True,
        }
        | {"skip_special_tokens": False},
    },
    EMBED: {
        "model": "other",
        "input": "t17",
        "encoding_format": "base64",
        "dimensions": 3,
        "pooling": "last",
        "add_special_tokens": False,
        "truncate_prompt_tokens": 1,
        "timeout": 1000,
        "priority": 1,
    },
    SCORE: {
        "prompts": ["t18"],
        "continuations": [" t19"],
        "model": "other",
        "details": True,
        "mode": "one_pass",
        "return_token_ids": True,
        "timeout": 1000,
        "priority": 1,
        "truncate_prompt_tokens": {"prompts": ["t17 t17"], "truncate_prompt_tokens": 2},
    },
}
UNSEEN = {"add_special_tokens"}  # the toy tokenizer adds none; tests of the tokenizer show the effect


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with serving(obeys=False, request_timeout=0.0) as app:
        yield app


def outcome(app: App, path: str, fields: dict[str, Any]) -> tuple[Any, ...]:
    """What the device is asked and what the client gets, without what differs between any two requests."""
    before = len(app.device.requests)
    reply = app.post(path, BODIES[path] | fields)
    asked = [
        dataclasses.replace(
            request,
            request_id="",
            shares_prompt_of=None,
            deadline=None if request.deadline is None else 1.0,
            # Only grammars are cached between requests; equal ones of other kinds are different objects.
            constraint=request.constraint if isinstance(request.constraint, Grammar) else None,
        )
        for request in app.device.requests[before:]
    ]
    body = json.loads(reply.text) if reply.is_json else [reply.text.count("data: "), "usage" in reply.text]
    if isinstance(body, dict):
        body = {name: value for name, value in body.items() if name not in ("id", "created", "timings")} | {
            "timed": "timings" in body
        }
    kinds = [type(request.constraint) for request in app.device.requests[before:]]
    return reply.status_code, asked, kinds, body


def cases() -> list[tuple[str, str]]:
    refused = {
        TEXT: UNSUPPORTED.keys() | UNSUPPORTED_IN_COMPLETIONS.keys(),
        CHAT: UNSUPPORTED.keys() | UNSUPPORTED_IN_CHAT.keys(),
        EMBED: set(),
        SCORE: set(),
    }
    return [
        (path, name)
        for path, kind in KINDS.items()
        for name in kind.__struct_fields__
        if name not in IGNORED | refused[path]
    ]


@pytest.mark.parametrize("path, name", cases())
def test_every_declared_field_does_something(app: App, path: str, name: str) -> None:
    value = VALUES[path][name]
    asking = value if isinstance(value, dict) and name in value else {name: value}
    silent = {other: given for other, given in asking.items() if other != name}
    if name not in UNSEEN:
        assert outcome(app, path, asking) != outcome(app, path, silent)
    assert outcome(app, path, silent | {name: None}) == outcome(app, path, silent) or name in BODIES[path], (
        "null is leaving it out"
    )


@pytest.mark.parametrize("path", [TEXT, CHAT])
@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_every_field_that_cannot_be_honoured_is_refused_by_name(app: App, path: str, name: str) -> None:
    assert app.refuse(path, BODIES[path] | {name: ["something"]}) == (400, name)


def test_the_parts_of_stream_options_are_known() -> None:
    known = {"include_usage", "continuous_usage_stats", "include_obfuscation"}
    assert set(StreamOptions.__struct_fields__) == known
