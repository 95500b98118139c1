"""Whatever a client sends, it gets an answer or a well-formed error, never a 5xx, and the server goes on."""

from __future__ import annotations

import json
import math
import reprlib
import time
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import inspect
from msgspec.inspect import Type
from werkzeug.test import TestResponse

from levserve.answers.embeddings import EmbeddingBody
from levserve.answers.scoring import ScoreBody
from levserve.request.schema import ChatBody, CompletionBody
from levserve.web.messages.body import MessageBody
from levserve.web.responses.body import ResponseBody
from tests.fake_app import App, serving

CHAT, TEXT, EMBED, SCORE = "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/loglikelihood"
MESSAGE, RESPOND = "/v1/messages", "/v1/responses"
KINDS = {
    CHAT: ChatBody,
    TEXT: CompletionBody,
    EMBED: EmbeddingBody,
    SCORE: ScoreBody,
    MESSAGE: MessageBody,
    RESPOND: ResponseBody,
}
FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), database=None)


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with serving(obeys=False, max_inflight=12, max_running=3, max_body_bytes=16384) as app:
        yield app


words = st.lists(
    st.sampled_from(["t9", "t17", "t18", "t383", "</s>", "<s>", "é"]), min_size=1, max_size=8
).map(" ".join)
strings = words | st.text(max_size=12) | st.sampled_from(["", " ", "\ud800", "\0"])
numbers = (
    st.integers(-3, 130)
    | st.floats(-3, 3)
    | st.sampled_from([2**31, 2**63, -(2**63), 10**30, math.nan, math.inf, 1e308])
)
junk = st.recursive(
    st.none() | st.booleans() | numbers | strings,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(strings, inner, max_size=3),
    max_leaves=6,
)
token_ids = st.lists(st.integers(0, 383), min_size=1, max_size=20)
texts = (
    words | st.lists(words, min_size=1, max_size=3) | token_ids | st.lists(token_ids, min_size=1, max_size=3)
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant", "developer"]), "content": words},
        optional={"name": words},
    ),
    min_size=1,
    max_size=3,
)
calls = st.fixed_dictionaries(
    {"type": st.just("function_call"), "call_id": st.just("a"), "name": st.just("f")}
)
items = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant", "developer"]), "content": words}
    )
    | calls.map(lambda call: call | {"arguments": "{}"})
    | st.just({"type": "function_call_output", "call_id": "a", "output": "t20"})
    | st.fixed_dictionaries({"type": st.just("reasoning"), "summary": st.just([])})
    | junk,
    min_size=1,
    max_size=4,
)
# Values for fields whose type alone does not say what is plausible.
LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "model": st.just("toy"),
    "prompt": texts,
    "input": texts,
    "messages": messages,
    "prompts": st.lists(words, min_size=1, max_size=2),
    "continuations": st.lists(st.just(" t18 t19"), min_size=1, max_size=2),
    "logit_bias": st.dictionaries(st.integers(0, 390).map(str), st.floats(-100, 100), max_size=3),
    "chat_template_kwargs": st.dictionaries(strings, junk, max_size=2),
    "encoding_format": st.sampled_from(["float", "base64"]),
    "pooling": st.sampled_from(["mean", "last"]),
    "timeout": st.floats(30, 600),
}


def may_run_out(body: dict[str, Any]) -> bool:
    """Whether the time that a body allows may be too short on a busy machine."""
    timeout = body.get("timeout")
    return isinstance(timeout, int | float) and 0 < timeout < 30


def values(kind: Type) -> st.SearchStrategy[Any]:
    """Values that decode as this type."""
    match kind:
        case inspect.BoolType():
            return st.booleans()
        case inspect.IntType(ge=least):
            return st.integers(least or 0, max(least or 0, 0) + 4)
        case inspect.FloatType(ge=least, le=most):
            return st.floats(least or 0.1, most or 1)
        case inspect.StrType():
            return words
        case inspect.ListType(item_type=item):
            return st.lists(values(item), max_size=3)
        case inspect.UnionType(types=kinds):
            return st.one_of(*map(values, kinds))
        case inspect.StructType(fields=fields):
            return st.fixed_dictionaries(
                {}, optional={field.encode_name: values(field.type) for field in fields}
            )
    return st.none()


def bodies(path: str) -> st.SearchStrategy[dict[str, Any]]:
    """Bodies, most of them with at most one wrong field, so that they get past the first checks."""
    kind = inspect.type_info(KINDS[path])
    assert isinstance(kind, inspect.StructType)
    likely = LIKELY | ({"input": words | items} if path == RESPOND else {})
    fields = {
        field.name: likely[field.name] if field.name in likely else values(field.type)
        for field in kind.fields
    }
    # `input` of /v1/responses may be left out beside a conversation, which no body here names.
    needed = {
        field.name: fields[field.name] for field in kind.fields if field.required or field.name == "input"
    }
    others = st.lists(
        st.sampled_from(sorted(fields.keys() - needed.keys())), unique=True, max_size=6
    ).flatmap(lambda names: st.fixed_dictionaries({name: fields[name] for name in names}))
    right = st.builds(dict.__or__, st.fixed_dictionaries(needed), others)
    wrong = st.builds(
        lambda body, name, value: body | {name: value}, right, st.sampled_from(sorted(fields)), junk
    )
    return (right | wrong).filter(lambda body: not may_run_out(body))


def check(reply: TestResponse) -> None:
    assert reply.status_code < 500 and reply.status_code != 429, reply.text
    if reply.request.path.startswith(MESSAGE):
        check_message(reply)
    elif reply.status_code >= 400:
        (error,) = json.loads(reply.text).values()
        assert sorted(error) == ["code", "message", "param", "type"]
        assert error["type"] == "invalid_request_error"
        assert error["code"] is None or isinstance(error["code"], str)
    elif reply.text.startswith("event: response.created"):
        *events, rest = reply.text.split("\n\n")
        assert rest == ""
        read = [read_strictly(event.partition("\ndata: ")[2]) for event in events]
        assert read[-1]["type"] in ("response.completed", "response.incomplete")
    elif reply.mimetype == "text/event-stream":
        *chunks, done, rest = reply.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        assert all("error" not in read_strictly(chunk.removeprefix("data: ")) for chunk in chunks)
    else:
        read_strictly(reply.text)


def check_message(reply: TestResponse) -> None:
    """Checks that the reply has Anthropic's shape, whole or as events."""
    *events, rest = reply.text.split("\n\n") if reply.mimetype == "text/event-stream" else ("",)
    answer = read_strictly(events[-1].partition("data: ")[2] if events else reply.text)
    if reply.status_code >= 400:
        assert sorted(answer) == ["error", "request_id", "type"] and sorted(answer["error"]) == [
            "message",
            "type",
        ]
        assert answer["error"]["type"] in ("invalid_request_error", "not_found_error", "request_too_large")
    elif events:
        assert (answer, rest) == ({"type": "message_stop"}, "")


def read_strictly(text: str) -> Any:
    def refuse(constant: str) -> NoReturn:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def send(app: App, path: str, data: bytes) -> TestResponse:
    return app.client.post(path, data=data, content_type="application/json", buffered=True)


@pytest.mark.parametrize("path", KINDS)
def test_bodies_near_the_contract_are_answered_or_refused(app: App, path: str) -> None:
    statuses = set()

    @FUZZ
    @given(bodies(path))
    def fuzz(body: dict[str, Any]) -> None:
        reply = send(app, path, json.dumps(body).encode(errors="surrogatepass"))
        check(reply)
        statuses.add(reply.status_code)

    fuzz()
    assert {200, 400} <= statuses, "the fuzzing reaches both"


def test_any_json_and_any_bytes_are_refused_or_answered_by_every_endpoint(app: App) -> None:
    paths = sorted(
        rule.rule for rule in app.client.application.url_map.iter_rules() if "POST" in (rule.methods or ())
    )
    assert KINDS.keys() <= set(paths)

    @FUZZ
    @given(
        st.sampled_from(paths), junk.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=40)
    )
    def fuzz(path: str, data: bytes) -> None:
        check(send(app, path, data))

    fuzz()


LONG = 4_000_000
USER = {"role": "user", "content": "t17"}


@pytest.fixture(scope="module")
def roomy() -> Iterator[App]:
    """An app with the default limit on body size."""
    with serving(obeys=False, max_inflight=12) as app:
        app.complete("t17", max_tokens=1)
        yield app


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TEXT, {"prompt": "t17 " * (LONG // 4)}, "prompt"),
        (TEXT, {"prompt": ["t17"] * (LONG // 8)}, "prompt"),
        (TEXT, {"prompt": [17] * (LONG // 4)}, "prompt"),
        (TEXT, {"prompt": "t17", "n": 10**18}, "n"),
        (TEXT, {"prompt": "t17", "max_tokens": 10**18}, "max_tokens"),
        (TEXT, {"prompt": "t17", "seed": -(10**30)}, "seed"),
        (TEXT, {"prompt": "t17", "logit_bias": {str(number): 1 for number in range(10**5)}}, "logit_bias"),
        (TEXT, {"prompt": "t17", "stop": "x" * LONG}, "stop"),
        (TEXT, {"prompt": "t17", "stop": ["x"] * 10**5}, "stop"),
        (TEXT, {"prompt": "t17", "stop_token_ids": list(range(10**5))}, "stop_token_ids"),
        (CHAT, {"messages": [USER | {"content": "t17 " * (LONG // 4)}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": ""}] * (LONG // 40)}, "messages"),
        (CHAT, {"messages": [USER | {"role": "x" * LONG}]}, "messages[0].role"),
        (CHAT, {"messages": [USER], "chat_template": "{{ cycler.__init__.__globals__ }}"}, "chat_template"),
        (EMBED, {"input": "t17 " * (LONG // 4)}, "input"),
        (RESPOND, {"input": "t17 " * (LONG // 4)}, "input"),
        (RESPOND, {"input": [{"role": "user", "content": ""}] * (LONG // 40)}, "input"),
        (RESPOND, {"input": [{"role": "user", "content": "", "type": "x" * LONG}]}, "input[0].type"),
        (SCORE, {"prompts": ["t17 " * (LONG // 4)], "continuations": [" t18"]}, "prompts[0]"),
    ],
    ids=reprlib.repr,
)
def test_what_is_huge_is_refused_by_name_in_no_time(
    roomy: App, path: str, body: dict[str, Any], param: str
) -> None:
    data = json.dumps({"model": "toy"} | body).encode()
    began = time.process_time()
    reply = send(roomy, path, data)
    assert time.process_time() - began < 2  # takes a few hundredths of a second, mostly to parse the JSON
    check(reply)
    assert (reply.status_code, json.loads(reply.text)["error"]["param"]) == (400, param)
    assert len(reply.text) < 1_000


@pytest.mark.parametrize("depth", [10, 900, 100_000])
def test_nesting_of_any_depth_has_an_answer(roomy: App, depth: int) -> None:
    for path in KINDS:
        check(send(roomy, path, b'{"model": "toy", "user": ' + b"[" * depth + b"]" * depth + b"}"))


def test_what_looks_like_a_template_in_a_message_is_text(roomy: App) -> None:
    content = "{{ 7 * 7 }}{% for x in range(10**9) %}x{% endfor %}{{ ''.__class__.__mro__ }}"
    for messages in (
        [USER | {"content": content}],
        [USER | {"content": [{"type": "text", "text": content}]}],
    ):
        reply = roomy.post(
            "/apply_template", {"messages": messages, "chat_template_kwargs": {"enable_thinking": content}}
        )
        assert reply.json is not None and reply.json["prompt"] == f"{content} t9"


def test_after_all_that_the_server_still_answers(app: App) -> None:
    assert app.complete("t17", max_tokens=1, n=12)["choices"][0]["text"] == " t18"
