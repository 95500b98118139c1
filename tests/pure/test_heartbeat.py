"""Streams without text yet: a real status if they fail soon, comments as signs of life if they take long."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Iterator

import openai
import pytest

from levserve.engine.served_model import ServedModel
from levserve.models.entry import Resident
from levserve.models.registry import MakeRoom, Report
from levserve.web.heartbeat import PING
from tests.fake_app import App, serving
from tests.fake_server import ServerProcess, completion
from tests.waiting import wait_until

BEAT_SECONDS = 0.05


@pytest.fixture
def app() -> Iterator[App]:
    with serving(sse_heartbeat=BEAT_SECONDS, request_timeout=8 * BEAT_SECONDS) as app:
        yield app


def stream(app: App, prompt: str, path: str = "/v1/completions", **fields: object) -> tuple[int, list[str]]:
    """The status and the events, comments included."""
    body = (
        completion(prompt)
        if path == "/v1/completions"
        else {"model": "toy", "messages": [{"role": "user", "content": prompt}]}
    )
    reply = app.post(path, body | {"stream": True} | fields)
    return reply.status_code, reply.text.split("\n\n")


def test_a_stream_that_waits_gets_its_200_and_then_comments_until_its_end(app: App) -> None:
    status, events = stream(app, "t4")  # never gets a token
    *pings, error, done, rest = events
    assert (status, done, rest) == (200, "data: [DONE]", "")
    assert set(pings) == {PING.decode().rstrip()} and 1 < len(pings) <= 8
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"


def test_a_gap_between_tokens_gets_comments_too(app: App) -> None:
    status, events = stream(app, "t6")  # one token, then none
    text, *pings, end = events[:-2]
    assert (status, json.loads(text.removeprefix("data: "))["choices"][0]["text"]) == (200, " t7")
    assert set(pings) == {": ping"} and len(pings) > 1
    assert json.loads(end.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("seconds", [1e-9, 1e-3])
def test_a_heart_that_beats_too_fast_does_not_stop_a_stream_nor_a_chat_from_beginning_with_its_role(
    seconds: float,
) -> None:
    with serving(sse_heartbeat=seconds) as app:
        _, events = stream(app, "t17", "/v1/chat/completions")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: {")]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_tokens_without_text_are_silence_too() -> None:
    with serving(sse_heartbeat=1e-9) as app:
        _, events = stream(
            app, "t17", stop=" " + " ".join(f"t{number}" for number in range(18, 60)), max_tokens=30
        )
    assert events.count(": ping") >= 29, "one for every token that is held back"


def test_text_that_is_held_back_is_silence(app: App) -> None:
    _, events = stream(app, "t6", stop=" t7 t8")  # " t7" may become the stop
    assert events[0] == ": ping"


def test_a_stream_that_flows_has_no_comments() -> None:
    with serving() as app:
        _, events = stream(app, "t17", max_tokens=40)
    assert all(event.startswith("data: ") for event in events[:-1])


def test_what_fails_before_the_first_comment_has_a_real_status() -> None:
    with serving(sse_heartbeat=10, request_timeout=BEAT_SECONDS) as app:
        assert stream(app, "t4")[0] == 504


@pytest.mark.parametrize("prompt", ["t4", "t6"])
def test_0_seconds_are_for_none(prompt: str) -> None:
    with serving(sse_heartbeat=0, request_timeout=4 * BEAT_SECONDS) as app:
        assert ": ping" not in stream(app, prompt)[1]


def test_the_openai_sdk_passes_over_them() -> None:
    options = (
        "--max-running",
        "2",
        "--sse-heartbeat",
        str(BEAT_SECONDS),
        "--request-timeout",
        str(6 * BEAT_SECONDS),
    )
    with (
        ServerProcess(*options) as server,
        openai.OpenAI(base_url=f"{server.wait_ready().url}/v1", api_key="none") as client,
    ):
        chunks = client.completions.create(model="toy", prompt="t6", stream=True, temperature=0)
        assert [chunk.choices[0].text for chunk in chunks] == [" t7", ""]
        with pytest.raises(openai.APIError, match="time ran out"):
            list(client.completions.create(model="toy", prompt="t4", stream=True))


def test_a_client_that_leaves_between_comments_is_noticed() -> None:
    with ServerProcess("--max-running", "2", "--sse-heartbeat", str(BEAT_SECONDS)) as server:
        client = server.wait_ready().start_completion("t4", stream=True)
        client.close()
        server.wait_event("cancel")


class SlowLoader:
    """Knows one model besides the one that is loaded, and loads it when `gate` opens."""

    def __init__(self, model: ServedModel) -> None:
        self.model = model
        self.gate = threading.Event()

    def names(self) -> list[str]:
        return [self.model.name]

    def aliases(self, name: str) -> tuple[str, ...]:
        return ()

    def load(self, name: str, report: Report, make_room: MakeRoom) -> Resident:
        assert self.gate.wait(20)
        return Resident(model=self.model)

    def unload(self, resident: Resident) -> None: ...


def test_a_stream_whose_model_loads_late_is_cancelled_when_its_client_leaves(app: App) -> None:
    loader = SlowLoader(dataclasses.replace(app.registry.default, name="late"))
    app.registry.set_loader(loader)
    reply = app.client.post("/v1/completions", json=completion("t4") | {"model": "late", "stream": True})
    chunks = iter(reply.response)
    assert next(chunks) == PING, "the model is not there yet"
    loader.gate.set()
    assert next(chunks) == PING
    wait_until(lambda: bool(app.device.requests))
    reply.close()
    (request,) = app.device.requests
    wait_until(lambda: ("cancel", request.request_id) in list(app.device.events.queue))
    app.registry.close()
    app.registry.join()
