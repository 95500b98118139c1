"""What the OpenAI bodies accept, and how each mistake is named."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from levserve.errors import BadRequest
from levserve.request.decode import decode
from levserve.request.schema import (
    UNSUPPORTED,
    UNSUPPORTED_IN_CHAT,
    UNSUPPORTED_IN_COMPLETIONS,
    ChatBody,
    CompletionBody,
)

USER = {"role": "user", "content": "hello"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def broken_call(arguments: str) -> dict[str, Any]:
    return {"id": "call_2", "type": "function", "function": {"name": "f", "arguments": arguments}}


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def completion(**fields: Any) -> CompletionBody:
    return decode(json.dumps({"model": "m", "prompt": "p"} | fields).encode(), CompletionBody)


def chat(**fields: Any) -> ChatBody:
    return decode(json.dumps({"model": "m", "messages": [USER]} | fields).encode(), ChatBody)


def refused(**fields: Any) -> BadRequest:
    make = chat if "messages" in fields or CHAT_ONLY & fields.keys() else completion
    with pytest.raises(BadRequest) as caught:
        make(**fields)
    return caught.value


CHAT_ONLY = {"max_completion_tokens", "top_logprobs", "continue_final_message", "chat_template_kwargs"}


@pytest.mark.parametrize(
    "prompt, prompts",
    [
        ("one", ["one"]),
        (["one", "two"], ["one", "two"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ("", [""]),
    ],
)
def test_a_prompt_has_four_forms(prompt: Any, prompts: list[Any]) -> None:
    assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize("prompt", [[], ["one", 2], [[1], 2], ["one", [2]]])
def test_a_prompt_list_holds_one_kind_of_thing(prompt: Any) -> None:
    error = refused(prompt=prompt)
    assert (error.param, error.code) == ("prompt", "invalid_type" if prompt else "empty_array")


@pytest.mark.parametrize(
    "field",
    ["max_tokens", "n", "stop", "stream", "temperature", "top_p", "seed", "logit_bias", "echo", "user"],
)
def test_null_is_the_same_as_leaving_a_field_out(field: str) -> None:
    assert completion(**{field: None}) == completion()
    assert chat(**{field: None}) == chat()


@pytest.mark.parametrize(
    "field",
    [
        {"guided_json": {"type": "string"}},
        {"json_schema": {"type": "string"}},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json_object": True}},
    ],
)
def test_white_space_is_asked_for_whichever_field_gives_the_schema(field: dict[str, Any]) -> None:
    grammar = chat(**field, guided_whitespace_pattern="[ ]?").find_grammar()
    assert grammar is not None and grammar.whitespace == "[ ]?"


def test_no_alternatives_are_asked_for_by_zero() -> None:
    assert chat(top_logprobs=0).top_logprobs == 0


def test_unknown_and_ignorable_fields_are_accepted() -> None:
    fields = (
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_options",
        "verbosity",
    )
    extra = {name: {"any": ["thing"]} for name in (*fields, "moderation", "prediction", "made_up")}
    assert chat(**extra) == chat()
    assert completion(**extra) == completion()


@pytest.mark.parametrize(
    "fields, param, code",
    [
        ({"model": None}, "model", "invalid_type"),
        ({"model": 3}, "model", "invalid_type"),
        ({"model": ""}, "model", "empty_string"),
        ({"prompt": None}, "prompt", "invalid_type"),
        ({"prompt": 3.5}, "prompt", "invalid_type"),
        ({"prompt": [1, 2.5]}, "prompt[1]", "invalid_type"),
        ({"prompt": [[1, "x"]]}, "prompt[0][1]", "invalid_type"),
        ({"max_tokens": "many"}, "max_tokens", "invalid_type"),
        ({"max_tokens": 1.5}, "max_tokens", "invalid_type"),
        ({"max_tokens": True}, "max_tokens", "invalid_type"),
        ({"max_tokens": 0}, "max_tokens", None),
        ({"max_tokens": -1}, "max_tokens", "integer_below_min_value"),
        ({"max_tokens": 10**18}, "max_tokens", "integer_above_max_value"),
        ({"max_tokens": 10**30}, "max_tokens", "integer_above_max_value"),
        ({"n": 0}, "n", "integer_below_min_value"),
        ({"n": 129}, "n", "integer_above_max_value"),
        ({"stream": "yes"}, "stream", "invalid_type"),
        ({"stream_options": {"include_usage": True}}, "stream_options", None),
        (
            {"stream": True, "stream_options": {"include_usage": 1}},
            "stream_options.include_usage",
            "invalid_type",
        ),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
            "unsupported_parameter",
        ),
        ({"temperature": -0.1}, "temperature", "decimal_below_min_value"),
        ({"temperature": 2.1}, "temperature", "decimal_above_max_value"),
        ({"temperature": "hot"}, "temperature", "invalid_type"),
        ({"temperature": 10**400}, "temperature", "invalid_value"),
        ({"top_p": -0.1}, "top_p", "decimal_below_min_value"),
        ({"top_p": 1.1}, "top_p", "decimal_above_max_value"),
        ({"top_k": -2}, "top_k", "integer_below_min_value"),
        ({"min_p": 1.5}, "min_p", "decimal_above_max_value"),
        ({"presence_penalty": 2.5}, "presence_penalty", "decimal_above_max_value"),
        ({"frequency_penalty": -2.5}, "frequency_penalty", "decimal_below_min_value"),
        ({"repetition_penalty": 0}, "repetition_penalty", "decimal_below_min_value"),
        ({"repetition_penalty": 11}, "repetition_penalty", "decimal_above_max_value"),
        ({"seed": 2**63}, "seed", "integer_above_max_value"),
        ({"seed": 1.5}, "seed", "invalid_type"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "decimal_above_max_value"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "integer_below_min_value"),
        ({"logit_bias": {"one": 1}}, "logit_bias", "invalid_type"),
        ({"logit_bias": [1]}, "logit_bias", "invalid_type"),
        ({"logit_bias": {str(token): 1 for token in range(301)}}, "logit_bias", "invalid_value"),
        ({"stop": ""}, "stop", "empty_string"),
        ({"stop": ["a", ""]}, "stop[1]", "empty_string"),
        ({"stop": ["a"] * 17}, "stop", "array_above_max_length"),
        ({"stop": [3]}, "stop[0]", "invalid_type"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "integer_below_min_value"),
        ({"stop_token_ids": list(range(17))}, "stop_token_ids", "array_above_max_length"),
        ({"min_tokens": -1}, "min_tokens", "integer_below_min_value"),
        ({"logprobs": 21}, "logprobs", "integer_above_max_value"),
        ({"logprobs": True}, "logprobs", "invalid_type"),
        ({"guided_choice": []}, "guided_choice", "empty_array"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", None),
        ({"guided_whitespace_pattern": " ", "guided_regex": "a"}, "guided_whitespace_pattern", None),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
            None,
        ),
        ({"best_of": 0}, "best_of", "integer_below_min_value"),
        ({"best_of": 129}, "best_of", "integer_above_max_value"),
        ({"n": 2, "best_of": 1}, "best_of", None),
        ({"best_of": 2, "stream": True}, "best_of", None),
        ({"echo": 1}, "echo", "invalid_type"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "integer_below_min_value"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "integer_above_max_value"),
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs", None),
        ({"timings": "yes"}, "timings", "invalid_type"),
        ({"messages": []}, "messages", "empty_array"),
        ({"messages": "hello"}, "messages", "invalid_type"),
        ({"messages": ["hello"]}, "messages[0]", "invalid_type"),
        ({"messages": [{"content": "hello"}]}, "messages[0].role", "missing_required_parameter"),
        ({"messages": [USER, {"role": "user"}]}, "messages[1].content", "missing_required_parameter"),
        ({"messages": [{"role": "king", "content": "hello"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_type"),
        (
            {"messages": [{"role": "tool", "content": "42"}]},
            "messages[0].tool_call_id",
            "missing_required_parameter",
        ),
        (
            {"messages": [{"role": "function", "content": "42"}]},
            "messages[0].name",
            "missing_required_parameter",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
            "messages[0].tool_calls[0].function",
            "missing_required_parameter",
        ),
        (
            {"messages": [{"role": "user", "content": "", "tool_calls": [CALL]}]},
            "messages[0].tool_calls",
            None,
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [CALL | {"type": "custom"}]}]},
            "messages[0].tool_calls[0].type",
            "unsupported_parameter",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [broken_call("{")]}]},
            "messages[0].tool_calls[0].function.arguments",
            None,
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [CALL, broken_call("[]")]}]},
            "messages[0].tool_calls[1].function.arguments",
            None,
        ),
        ({"messages": [USER], "tools": [{}]}, "tools[0].type", "missing_required_parameter"),
        ({"messages": [USER], "tools": [{"type": "custom"}]}, "tools[0].type", "invalid_value"),
        (
            {"messages": [USER], "tools": [{"type": "function"}]},
            "tools[0].function",
            "missing_required_parameter",
        ),
        ({"messages": [USER], "tools": [tool("a b")]}, "tools[0].function.name", "invalid_value"),
        ({"messages": [USER], "tools": [tool("")]}, "tools[0].function.name", "invalid_value"),
        ({"messages": [USER], "tools": [tool("f"), tool("f")]}, "tools[1].function.name", None),
        (
            {"messages": [USER], "tools": [tool(f"f{n}") for n in range(129)]},
            "tools",
            "array_above_max_length",
        ),
        ({"messages": [USER], "tools": [tool("f")], "functions": [{"name": "f"}]}, "functions", None),
        ({"messages": [USER], "tools": [tool("f")], "tool_choice": "f"}, "tool_choice", "invalid_value"),
        ({"messages": [USER], "tools": [tool("f")], "tool_choice": tool("g")}, "tool_choice", None),
        ({"messages": [USER], "tool_choice": "required"}, "tool_choice", None),
        ({"messages": [USER], "tool_choice": tool("f")}, "tool_choice", None),
        ({"messages": [USER], "function_call": {"name": "f"}}, "function_call", None),
        ({"messages": [USER], "functions": [{"name": "f"}], "function_call": "f"}, "function_call", None),
        ({"messages": [USER], "functions": [{}]}, "functions[0].name", "missing_required_parameter"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
            "invalid_value",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
            "missing_required_parameter",
        ),
        ({"messages": [USER], "logprobs": 5}, "logprobs", "invalid_type"),
        ({"messages": [USER], "max_tokens": 0}, "max_tokens", "integer_below_min_value"),
        ({"top_logprobs": 5}, "top_logprobs", None),
        (
            {"messages": [USER], "logprobs": True, "top_logprobs": 21},
            "top_logprobs",
            "integer_above_max_value",
        ),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "integer_below_min_value"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", None),
        ({"chat_template_kwargs": []}, "chat_template_kwargs", "invalid_type"),
    ],
)
def test_a_mistake_names_its_field(fields: dict[str, Any], param: str, code: str | None) -> None:
    error = refused(**fields)
    assert (error.status, error.type, error.param, error.code) == (400, "invalid_request_error", param, code)
    assert param in error.message


ASKING = {
    "audio": {"voice": "alloy"},
    "modalities": ["text", "audio"],
}


@pytest.mark.parametrize("field, harmless", (UNSUPPORTED | UNSUPPORTED_IN_CHAT).items())
def test_a_known_field_that_cannot_be_honoured_is_refused_by_name_only_when_it_asks_for_something(
    field: str, harmless: tuple[object, ...]
) -> None:
    error = refused(messages=[USER], **{field: ASKING.get(field, [1])})
    assert (error.param, error.code) == (field, "unsupported_parameter")
    for value in (None, *harmless):
        assert chat(**{field: value}).model == "m"


@pytest.mark.parametrize("field, harmless", UNSUPPORTED_IN_COMPLETIONS.items())
def test_a_field_of_chats_is_refused_by_name_in_completions(field: str, harmless: tuple[object, ...]) -> None:
    assert refused(**{field: [1]}).param == field
    for value in (None, *harmless):
        assert completion(**{field: value}).model == "m"


def test_the_message_names_the_wanted_and_the_given_type() -> None:
    assert (
        refused(stop=7).message
        == "Invalid type for 'stop': expected a string or an array, but got an integer instead."
    )
    assert refused(n_predict=7).message == "'n_predict' is not supported by this server; send 'max_tokens'."
    assert refused(n=0).message == "Invalid value for 'n': expected an integer >= 1."
    assert refused(messages=[{"content": ""}]).message == "Missing required parameter: 'messages[0].role'."


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"hello",
        b'{"model": NaN}',
        b'{"model": "m", "temperature": Infinity}',
        b'{"model": "\xff"}',
        b'{"model": "m", "prompt": "t", "another": "\xff"}',
        b'{"a":' + b"[" * 100_000,
    ],
)
def test_what_is_not_json_has_neither_param_nor_code(data: bytes) -> None:
    with pytest.raises(BadRequest) as caught:
        decode(data, CompletionBody)
    assert (caught.value.param, caught.value.code) == (None, None)


def test_half_of_an_emoji_is_called_that() -> None:
    body = json.dumps({"model": "m", "prompt": "\U0001f642"})
    assert decode(body.encode(), CompletionBody).prompt == "\U0001f642"
    for cut in ("\\ud83d", "\\ud83d and more"):
        with pytest.raises(BadRequest, match="one half of a surrogate pair"):
            decode(f'{{"model": "m", "prompt": "{cut}"}}'.encode(), CompletionBody)


@pytest.mark.parametrize("data", [b"[]", b"null", b'"text"', b"3"])
def test_a_body_that_is_no_object_is_refused(data: bytes) -> None:
    with pytest.raises(BadRequest, match="the body: expected an object"):
        decode(data, CompletionBody)


@pytest.mark.parametrize(
    "fields, max_length",
    [
        ({}, None),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 7}, 7),
        ({"max_tokens": 5, "max_completion_tokens": 7}, 7),
    ],
)
def test_max_completion_tokens_wins_and_none_means_the_whole_context(
    fields: dict[str, int], max_length: int | None
) -> None:
    assert chat(**fields).max_length == max_length


def test_completions_are_16_tokens_long_unless_told() -> None:
    assert completion().max_length == 16
    assert completion(max_tokens=1).max_length == 1
    assert completion(max_tokens=0, echo=True).max_length == 0


@pytest.mark.parametrize(
    "fields, count", [({}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 3}, 3)]
)
def test_chat_logprobs_are_a_switch_and_a_number(fields: dict[str, Any], count: int | None) -> None:
    assert chat(**fields).num_logprobs == count


@pytest.mark.parametrize(
    "fields, shown, computed",
    [
        ({}, None, None),
        ({"logprobs": 0}, 0, 0),
        ({"logprobs": 2, "prompt_logprobs": 5}, 2, 5),
        ({"logprobs": 5, "prompt_logprobs": 2}, 5, 5),
        ({"prompt_logprobs": 0}, None, 0),
        ({"best_of": 2}, None, 0),
        ({"best_of": 2, "n": 2}, None, None),
    ],
)
def test_the_device_finds_out_what_is_shown_and_what_ranks(
    fields: dict[str, Any], shown: int | None, computed: int | None
) -> None:
    body = completion(**fields)
    assert (body.num_logprobs, body.num_computed_logprobs) == (shown, computed)


def test_text_parts_are_joined_and_names_kept() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = chat(
        messages=[{"role": "user", "content": parts, "name": "ann"}, {"role": "assistant", "content": None}]
    )
    assert [message.to_template() for message in body.messages] == [
        {"role": "user", "content": "ab", "name": "ann"},
        {"role": "assistant", "content": ""},
    ]


@pytest.mark.parametrize("stop, stops", [(None, ()), ("a", ("a",)), (["a", "b"], ("a", "b")), ([], ())])
def test_stop_is_a_string_or_a_list(stop: Any, stops: tuple[str, ...]) -> None:
    assert completion(stop=stop).stops == stops


FIRST_BODIES = """
import sys, threading
from levserve.request.decode import decode
from levserve.request.schema import ChatBody, CompletionBody
sys.setswitchinterval(1e-6)
start = threading.Barrier(16)
def work(kind, data):
    start.wait()
    decode(data, kind)
given = [(ChatBody, b'{"model": "m", "messages": [{"role": "user", "content": "t"}]}'), (CompletionBody, b'{"model": "m", "prompt": "t"}')]
for number in range(16):
    threading.Thread(target=work, args=given[number % 2]).start()
"""


def test_first_bodies_that_come_together_do_not_crash_the_process() -> None:
    """msgspec analyses a type on its first use, which is not thread-safe: one start in six crashed."""
    processes = [subprocess.Popen([sys.executable, "-c", FIRST_BODIES]) for _ in range(6)]
    assert [process.wait(timeout=60) for process in processes] == [0] * 6
