"""The HTTP side over a real gunicorn, with tokens that can be worked out by hand (see fake_device.py)."""

from __future__ import annotations

import json
import select
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.fake_server import Client, ServerProcess, completion
from tests.waiting import PATIENCE_SECONDS

CHAT = {
    "model": "toy",
    "messages": [{"role": "user", "content": "t17 t18"}],
    "temperature": 0,
    "max_tokens": 3,
}


@pytest.fixture(scope="module")
def shared() -> Iterator[ServerProcess]:
    with ServerProcess("--max-running", "2", "--max-waiting", "4", "--max-body-bytes", "4KiB") as process:
        yield process.wait_ready()


@pytest.fixture
def server(shared: ServerProcess) -> ServerProcess:
    """The shared server, idle; events of earlier tests are skipped."""
    wait_for_room(shared, 6)
    shared.skip_events()
    return shared


def read_stream(server: ServerProcess, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a stream that must end with [DONE]."""
    with server.connect() as client:
        client.send("POST", path, body | {"stream": True})
        *events, done = client.stream()
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


def read_metric(server: ServerProcess, sample: str) -> float:
    lines = server.ask("GET", "/metrics").body.decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{sample} "))


class TestCompletions:
    def test_answers_with_text_finish_reason_and_usage(self, server: ServerProcess) -> None:
        reply = server.complete("t7 t17 t18", max_tokens=3)
        assert reply.status == 200
        body = reply.json
        assert body["choices"] == [
            {"index": 0, "text": " t19 t20 t21", "logprobs": None, "finish_reason": "length"}
        ]
        details = {"cached_tokens": 1}
        assert body["usage"] == {
            "prompt_tokens": 3,
            "completion_tokens": 3,
            "total_tokens": 6,
            "prompt_tokens_details": details,
            "completion_tokens_details": {"reasoning_tokens": 0},
        }
        assert (body["object"], body["model"], body["id"][:5]) == ("text_completion", "toy", "cmpl-")
        assert int(reply.headers["openai-processing-ms"]) >= 0

    def test_stops_at_the_end_token_and_does_not_show_it(self, server: ServerProcess) -> None:
        choice = server.complete("t383").json["choices"][0]  # the vocabulary wraps around: <pad> <s> </s>
        assert (choice["text"], choice["finish_reason"]) == ("", "stop")
        assert server.complete("t383", ignore_eos=True, max_tokens=4).json["choices"][0]["text"] == " t3"
        raw = server.complete("t383", skip_special_tokens=False).json["choices"][0]["text"]
        assert raw == " <pad> <s>"

    def test_stop_token_ids_stop_too(self, server: ServerProcess) -> None:
        choice = server.complete("t17", stop_token_ids=[20]).json["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (" t18 t19", "stop")

    def test_numbers_choices_by_prompt_then_by_seed(self, server: ServerProcess) -> None:
        body = server.complete(["t10", "t20"], n=2, seed=0, temperature=1, max_tokens=2).json
        texts = {choice["index"]: choice["text"] for choice in body["choices"]}
        assert texts == {0: " t11 t12", 1: " t12 t14", 2: " t23 t26", 3: " t24 t28"}
        assert body["usage"]["prompt_tokens"] == 2
        assert body["usage"]["completion_tokens"] == 8

    def test_takes_token_ids_as_they_are(self, server: ServerProcess) -> None:
        assert server.complete([17, 18], max_tokens=1).json["choices"][0]["text"] == " t19"
        texts = [choice["text"] for choice in server.complete([[17], [30]], max_tokens=1).json["choices"]]
        assert texts == [" t18", " t31"]

    def test_stops_before_a_stop_string_that_spans_tokens(self, server: ServerProcess) -> None:
        choice = server.complete("t17", stop=["nothing", "9 t2"]).json["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (" t18 t1", "stop")
        kept = server.complete("t17", stop="9 t2", include_stop_str_in_output=True).json["choices"][0]
        assert kept["text"] == " t18 t19 t2"

    def test_streams_the_same_text_as_it_answers(self, server: ServerProcess) -> None:
        body = completion(["t10", "t20"], n=2, max_tokens=8, stop="t25", seed=3)
        whole = {
            choice["index"]: choice["text"]
            for choice in server.ask("POST", "/v1/completions", body).json["choices"]
        }
        streamed = dict.fromkeys(whole, "")
        finished = []
        for chunk in read_stream(server, "/v1/completions", body):
            (choice,) = chunk["choices"]
            streamed[choice["index"]] += choice["text"]
            finished += [choice["index"]] * (choice["finish_reason"] is not None)
            assert "usage" not in chunk
        assert streamed == whole
        assert sorted(finished) == [0, 1, 2, 3]

    def test_log_probabilities_have_offsets_and_no_infinity(self, server: ServerProcess) -> None:
        body = completion("t17", max_tokens=2, logprobs=3)
        logprobs = server.ask("POST", "/v1/completions", body).json["choices"][0]["logprobs"]
        assert logprobs == {
            "tokens": ["t18", "t19"],
            "token_logprobs": [-0.5, -0.5],
            "top_logprobs": [
                {"t18": -0.5, "t19": -1.5, "t20": -9999.0},
                {"t19": -0.5, "t20": -1.5, "t21": -9999.0},
            ],
            "text_offset": [0, 4],
        }
        pieces = [chunk["choices"][0]["logprobs"] for chunk in read_stream(server, "/v1/completions", body)]
        assert [offset for piece in pieces if piece for offset in piece["text_offset"]] == [0, 4]

    def test_equal_requests_without_a_seed_differ(self, server: ServerProcess) -> None:
        texts = {
            server.complete("t17", temperature=1, max_tokens=1).json["choices"][0]["text"] for _ in range(20)
        }
        assert len(texts) > 1


class TestChat:
    def test_answers_with_a_message(self, server: ServerProcess) -> None:
        body = server.ask("POST", "/v1/chat/completions", CHAT).json
        message = {"role": "assistant", "content": "t10 t11 t12", "refusal": None}
        assert body["choices"] == [
            {"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}
        ]
        assert body["usage"]["prompt_tokens"] == 3
        assert (body["object"], body["id"][:9]) == ("chat.completion", "chatcmpl-")

    def test_streams_role_text_finish_usage_in_this_order(self, server: ServerProcess) -> None:
        chunks = read_stream(
            server, "/v1/chat/completions", CHAT | {"stream_options": {"include_usage": True}}
        )
        assert [chunk["choices"][0]["delta"] for chunk in chunks[:-1]] == [
            {"role": "assistant", "content": ""},
            {"content": "t10"},
            {"content": " t11"},
            {"content": " t12"},
            {},
        ]
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [
            None,
            None,
            None,
            None,
            "length",
        ]
        assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * 5
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["total_tokens"] == 6
        assert len({(chunk["id"], chunk["created"], chunk["object"]) for chunk in chunks}) == 1

    def test_a_stream_has_the_headers_that_keep_proxies_from_buffering(self, server: ServerProcess) -> None:
        reply = server.ask("POST", "/v1/chat/completions", CHAT | {"stream": True})
        assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert reply.headers["cache-control"] == "no-cache"
        assert reply.headers["x-accel-buffering"] == "no"
        assert reply.headers["transfer-encoding"] == "chunked"

    def test_runs_to_the_end_of_the_context_unless_told(self, server: ServerProcess) -> None:
        body = server.ask("POST", "/v1/chat/completions", CHAT | {"max_tokens": None}).json
        assert body["usage"]["total_tokens"] == 64
        assert body["choices"][0]["finish_reason"] == "length"

    def test_continues_the_last_message_when_asked(self, server: ServerProcess) -> None:
        messages = [*CHAT["messages"], {"role": "assistant", "content": "t40"}]  # type: ignore[misc]
        body = server.ask(
            "POST", "/v1/chat/completions", CHAT | {"messages": messages, "continue_final_message": True}
        ).json
        assert body["choices"][0]["message"]["content"] == " t41 t42 t43"

    def test_log_probabilities_carry_bytes(self, server: ServerProcess) -> None:
        body = server.ask(
            "POST", "/v1/chat/completions", CHAT | {"max_tokens": 1, "logprobs": True, "top_logprobs": 2}
        ).json
        top = [
            {"token": text, "logprob": value, "bytes": list(text.encode())}
            for text, value in (("t10", -0.5), ("t11", -1.5))
        ]
        assert body["choices"][0]["logprobs"] == {
            "content": [top[0] | {"top_logprobs": top}],
            "refusal": None,
        }

    def test_the_openai_sdk_reads_answers_streams_and_errors(self, server: ServerProcess) -> None:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
            messages: Any = CHAT["messages"]
            whole = client.chat.completions.create(
                model="toy", messages=messages, temperature=0, max_completion_tokens=3
            )
            assert whole.choices[0].message.content == "t10 t11 t12"
            stream = client.chat.completions.create(
                model="toy", messages=messages, temperature=0, max_tokens=3, stream=True
            )
            assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "t10 t11 t12"
            text = client.completions.create(
                model="toy", prompt="t17", temperature=0, max_tokens=1, extra_body={"top_k": 3}
            )
            assert text.choices[0].text == " t18"
            assert [model.id for model in client.models.list()] == ["toy"]
            with pytest.raises(openai.NotFoundError) as caught:
                client.chat.completions.create(model="gpt-9", messages=messages)
            assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
            assert "'toy'" in str(caught.value)


class TestErrors:
    @pytest.mark.parametrize(
        "method, path, body, status, param, code",
        [
            ("GET", "/v1/nowhere", None, 404, None, None),
            ("GET", "/v1/completions", None, 405, None, None),
            ("GET", "/v1/models/other/name", None, 404, "model", "model_not_found"),
            ("POST", "/v1/completions", b"{", 400, None, None),
            ("POST", "/v1/completions", {"model": "toy"}, 400, "prompt", "missing_required_parameter"),
            ("POST", "/v1/completions", {"model": "other", "prompt": "t17"}, 404, "model", "model_not_found"),
            ("POST", "/v1/completions", completion(""), 400, "prompt", None),
            ("POST", "/v1/completions", completion([384]), 400, "prompt", None),
            ("POST", "/v1/completions", completion([10**30]), 400, "prompt", None),
            ("POST", "/v1/completions", completion([[]]), 400, "prompt", None),
            (
                "POST",
                "/v1/completions",
                completion("t17", max_tokens=64),
                400,
                "prompt",
                "context_length_exceeded",
            ),
            ("POST", "/v1/completions", completion("t17", min_tokens=17), 400, "min_tokens", None),
            ("POST", "/v1/completions", completion("t17", logit_bias={"384": 1}), 400, "logit_bias", None),
            ("POST", "/v1/completions", completion("t17", stop_token_ids=[384]), 400, "stop_token_ids", None),
            ("POST", "/v1/completions", completion("t17", n=7), 400, "n", None),
            ("POST", "/v1/completions", completion(["t17"] * 7), 400, "prompt", None),
            ("POST", "/v1/completions", completion("t17" * 4096), 413, None, "body_too_large"),
            (
                "POST",
                "/v1/chat/completions",
                CHAT | {"tools": [{"type": "custom"}]},
                400,
                "tools[0].type",
                "invalid_value",
            ),
            (
                "POST",
                "/v1/chat/completions",
                CHAT | {"max_tokens": 62},
                400,
                "messages",
                "context_length_exceeded",
            ),
            (
                "POST",
                "/v1/chat/completions",
                CHAT | {"stream": True, "max_tokens": 62},
                400,
                "messages",
                "context_length_exceeded",
            ),
            (
                "POST",
                "/v1/chat/completions",
                CHAT | {"chat_template_kwargs": {"messages": []}},
                400,
                "chat_template_kwargs",
                None,
            ),
        ],
    )
    def test_have_one_shape(
        self,
        server: ServerProcess,
        method: str,
        path: str,
        body: Any,
        status: int,
        param: str | None,
        code: str | None,
    ) -> None:
        reply = server.ask(method, path, body)
        assert reply.status == status
        error = reply.json["error"]
        assert sorted(error) == ["code", "message", "param", "type"]
        assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
        assert reply.headers["content-type"] == "application/json"
        assert reply.headers["x-request-id"]

    # On Python 3.11 the first is too deep for the template, the second for JSON.
    @pytest.mark.parametrize("depth", [900, 1500])
    def test_deep_nesting_is_never_the_servers_fault(self, server: ServerProcess, depth: int) -> None:
        data = json.dumps(CHAT).replace(
            "{", '{"chat_template_kwargs": {"deep": ' + "[" * depth + "]" * depth + "}, ", 1
        )
        assert server.ask("POST", "/v1/chat/completions", data.encode()).status in (200, 400)

    def test_an_overlong_prompt_is_told_both_numbers(self, server: ServerProcess) -> None:
        message = server.complete("t17 t18", max_tokens=63).json["error"]["message"]
        assert "maximum context length is 64 tokens" in message
        assert "65 tokens (2 in the prompt, 63 for the completion)" in message

    def test_a_wrong_method_is_told_the_right_ones(self, server: ServerProcess) -> None:
        assert "POST" in server.ask("GET", "/v1/completions").headers["allow"]

    def test_a_body_of_another_type_is_415(self, server: ServerProcess) -> None:
        reply = server.ask("POST", "/v1/completions", completion("t17"), **{"Content-Type": "text/plain"})
        assert reply.status == 415
        assert "application/json" in reply.json["error"]["message"]

    @pytest.mark.parametrize("length, status", [(1, 200), (1500, 413)])
    def test_a_chunked_body_is_read_whole_or_refused(
        self, server: ServerProcess, length: int, status: int
    ) -> None:
        data = json.dumps(completion("t17 " * length)).encode()
        with server.connect() as client:
            client.send_chunked("/v1/completions", data)
            assert client.receive().status == status

    def test_a_request_id_is_echoed_if_it_is_harmless(self, server: ServerProcess) -> None:
        assert (
            server.ask("GET", "/v1/models", **{"X-Request-Id": "my-1.id_"}).headers["x-request-id"]
            == "my-1.id_"
        )
        for bad in ("a" * 65, "sp ace", "semi;colon"):
            made = server.ask("GET", "/v1/nowhere", **{"X-Request-Id": bad}).headers["x-request-id"]
            assert len(made) == 16 and made != bad

    def test_requests_are_counted_by_route_and_status(self, server: ServerProcess) -> None:
        kinds = (("/v1/completions", 200), ("/v1/completions", 400), ("unknown", 404))
        samples = [f'levserve_requests_total{{route="{route}",status="{status}"}}' for route, status in kinds]
        before = {sample: read_metric(server, sample) for sample in samples}
        server.complete("t17")
        server.complete("")
        server.ask("GET", "/v1/nowhere/at/all")
        assert {sample: read_metric(server, sample) - 1 for sample in samples} == before

    def test_the_log_has_a_line_for_each_request_and_never_its_text(self, server: ServerProcess) -> None:
        server.ask("POST", "/v1/completions?key=secret", completion("t17 t333"), **{"X-Request-Id": "logged"})
        line = server.log.wait_for(lambda line: "logged" in line)
        assert "logged POST /v1/completions 200" in line
        assert not any("t333" in line or "secret" in line for line in server.log.seen)


class TestResponses:
    def test_a_stream_says_what_the_whole_answer_says(self, server: ServerProcess) -> None:
        body = {"model": "toy", "input": "t17", "temperature": 0, "max_output_tokens": 20}
        count = read_metric(server, 'levserve_requests_total{route="/v1/responses",status="200"}')
        whole = server.ask("POST", "/v1/responses", body).json
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            asked: Any = body | {"stream": True}
            events = list(client.responses.create(**asked))
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert text == whole["output"][0]["content"][0]["text"] == " ".join(f"t{n}" for n in range(10, 30))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        counted = read_metric(server, 'levserve_requests_total{route="/v1/responses",status="200"}')
        assert counted == count + 2


class TestLeaving:
    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("prompt", ["t4", "t6"])
    def test_a_client_that_hangs_up_cancels_its_request(
        self, server: ServerProcess, prompt: str, stream: bool
    ) -> None:
        client = server.start_completion(prompt, stream=stream, n=2)
        client.close()
        first, second = server.wait_event("cancel"), server.wait_event("cancel")
        assert (first[-2:], second[-2:]) == ("-0", "-1")

    def test_a_stream_that_is_left_in_the_middle_is_cancelled(self, server: ServerProcess) -> None:
        client = server.start_completion("t6", stream=True)
        assert json.loads(next(client.stream()))["choices"][0]["text"] == " t7"
        client.close()
        server.wait_event("cancel")

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_client_that_leaves_its_response_cancels_it(self, server: ServerProcess, stream: bool) -> None:
        with server.connect() as client:
            body = {"model": "toy", "input": "t6", "temperature": 0, "stream": stream}
            client.send("POST", "/v1/responses", body)
            server.wait_event("submit")
        server.wait_event("cancel")

    def test_two_requests_may_share_an_id(self, server: ServerProcess) -> None:
        with server.connect() as first:
            first.send("POST", "/v1/completions", completion("t4"), **{"X-Request-Id": "same"})
            held = server.wait_event("submit")
            assert held.startswith("same.")
            reply = server.ask(
                "POST", "/v1/completions", completion("t17", max_tokens=1), **{"X-Request-Id": "same"}
            )
            assert reply.json["choices"][0]["text"] == " t18"
        assert held in iter(lambda: server.wait_event("cancel"), None)

    def test_a_full_server_refuses_at_once_and_takes_work_again(self, server: ServerProcess) -> None:
        clients = [server.connect() for _ in range(18)]
        for client in clients:
            client.send("POST", "/v1/completions", completion("t4"))
        refused = wait_readable(clients, 12)
        for client in refused:
            reply = client.receive()
            assert reply.status == 429
            assert (reply.headers["retry-after"], reply.headers["retry-after-ms"]) == ("1", "1000")
            assert reply.json["error"]["code"] == "rate_limit_exceeded"
        assert server.ask("GET", "/healthz").status == 200
        for client in clients:
            client.close()
        wait_for_room(server, 6)

    def test_choices_take_places_like_requests(self, server: ServerProcess) -> None:
        client = server.start_completion("t4", n=5)
        refused = 'levserve_refused_total{reason="queue_full"}'
        before = read_metric(server, refused)
        assert server.complete("t17", n=2).status == 429
        assert read_metric(server, refused) == before + 1
        assert server.complete("t17", n=1).status == 200
        client.close()


def wait_for_room(server: ServerProcess, places: int) -> None:
    """Waits until abandoned requests have given their places back."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while server.complete("t17", n=places, max_tokens=1).status != 200:
        assert time.monotonic() < deadline, "places were not given back"


def wait_readable(clients: list[Client], count: int) -> list[Client]:
    """Waits until `count` of the clients have an answer; returns those."""
    poll = select.poll()
    for client in clients:
        poll.register(client, select.POLLIN)
    found: dict[int, None] = {}
    while len(found) < count:
        ready = poll.poll(PATIENCE_SECONDS * 1000)
        assert ready, f"{len(found)} of {count} answered"
        for fd, _ in ready:
            found[fd] = None
            poll.unregister(fd)
    return [client for client in clients if client.fileno() in found]
