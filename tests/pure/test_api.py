"""The Python API around the fake device: answers as over HTTP, from any thread, with nothing left behind."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import levserve
from levserve.api.admission_queue import AdmissionQueue, WaitingWork
from levserve.api.fields import ChatFields, TextFields
from levserve.api.model import Model
from levserve.engine.admission import Reservation
from levserve.errors import (
    BadRequest,
    ConfigError,
    ContextTooLong,
    DeadlineExceeded,
    ServeError,
    StartupError,
    Unavailable,
)
from levserve.request.schema import ChatBody, CompletionBody
from levserve.settings.program import make_settings
from levserve.settings.settings import Settings
from tests.fake_app import App, serving
from tests.waiting import wait_until

USER = [{"role": "user", "content": "t17 t18"}]


@pytest.fixture
def app() -> Iterator[App]:
    with serving(obeys=True) as app:
        yield app


@pytest.fixture
def model(app: App) -> Iterator[Model]:
    with Model(app.registry, Settings()) as model:
        yield model


def test_a_prompt_is_continued_with_its_tokens_and_its_usage(model: Model) -> None:
    (result,) = model.generate("t17 t18", max_tokens=3, temperature=0)
    assert (result.text, result.tokens, result.finish_reason) == (" t19 t20 t21", (19, 20, 21), "length")
    assert result.prompt == (17, 18)
    assert (result.usage.prompt_tokens, result.usage.completion_tokens, result.usage.total_tokens) == (
        2,
        3,
        5,
    )


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_tokens": 5, "seed": 3, "n": 2},
        {"temperature": 0, "stop": ["t21"]},
        {"temperature": 0, "logprobs": 2, "max_tokens": 3},
        {"seed": 4, "echo": True, "max_tokens": 2},
        {"seed": 1, "best_of": 2, "n": 1, "max_tokens": 3},
        {"seed": 1, "prompt_logprobs": 1, "max_tokens": 2},
    ],
)
def test_texts_and_scores_are_those_of_the_server(app: App, model: Model, fields: dict[str, Any]) -> None:
    fields = {"seed": 7, "temperature": 1} | fields
    prompts = ["t17 t18", "t30", "t40 t41"]
    over_http = app.complete(prompts, **fields)
    results = model.generate(prompts, **fields)
    choices = [choice for result in results for choice in result.choices]
    assert [choice.text for choice in choices] == [one["text"] for one in over_http["choices"]]
    assert [choice.finish_reason for choice in choices] == [
        one["finish_reason"] for one in over_http["choices"]
    ]
    usage = over_http["usage"]
    assert sum(result.usage.prompt_tokens for result in results) == usage["prompt_tokens"]
    assert sum(result.usage.completion_tokens for result in results) == usage["completion_tokens"]
    if "logprobs" in fields:
        for choice, one in zip(choices, over_http["choices"], strict=True):
            shown = [entry.logprob for entry in choice.logprobs if entry is not None]
            assert shown == one["logprobs"]["token_logprobs"]
    if "prompt_logprobs" in fields:
        assert results[0].prompt_logprobs is not None and results[0].prompt_logprobs[0] is None
        assert len(results[0].prompt_logprobs) == len(results[0].prompt)


def test_a_chat_is_that_of_the_server(app: App, model: Model) -> None:
    body = {"model": "toy", "messages": USER, "max_tokens": 4, "seed": 11}
    reply = app.post("/v1/chat/completions", body).json
    assert reply is not None
    result = model.chat(USER, max_tokens=4, seed=11)
    assert result.text == reply["choices"][0]["message"]["content"]
    assert model.chat_many([USER, USER], max_tokens=4, seed=11)[0].text == result.text


def test_a_prompt_may_be_tokens_and_numpys_too(model: Model) -> None:
    wanted = model.generate("t17 t18", max_tokens=2, temperature=0)[0].tokens
    for prompt in ([17, 18], (17, 18), np.array([17, 18]), [[17, 18]], [np.array([17, 18])]):
        (result,) = model.generate(prompt, max_tokens=np.int64(2), temperature=0)  # type: ignore[arg-type, typeddict-item]
        assert result.tokens == wanted


def test_a_list_longer_than_the_queue_comes_back_in_order_and_never_asks_for_more_than_it_holds(
    app: App, model: Model
) -> None:
    prompts = [f"t{20 + number % 300}" for number in range(200)]
    results = model.generate(iter(prompts), max_tokens=2, temperature=0)
    assert [result.tokens for result in results] == [
        (21 + number % 300, 22 + number % 300) for number in range(200)
    ]
    assert app.engine.admission.room().free_requests == app.engine.max_inflight
    assert model.generate([]) == []


def test_a_stream_gives_pieces_that_join_to_the_text(model: Model) -> None:
    pieces = list(model.stream("t17", max_tokens=4, temperature=0))
    assert "".join(piece.text for piece in pieces) == " t18 t19 t20 t21"
    assert [piece.finish_reason for piece in pieces] == [None, None, None, "length"]
    chat = list(model.stream_chat(USER, max_tokens=2, temperature=0))
    assert "".join(piece.text for piece in chat) == model.chat(USER, max_tokens=2, temperature=0).text


@pytest.mark.parametrize("way", ["close", "with", "drop"])
def test_a_stream_that_is_left_ends_on_the_device(app: App, model: Model, way: str) -> None:
    stream = model.stream("t6", max_tokens=20, temperature=0)  # one token, then it waits for ever
    next(stream)
    if way == "close":
        stream.close()
        assert list(stream) == []
    elif way == "with":
        with stream:
            pass
    del stream
    wait_until(lambda: any(event == "cancel" for event, _ in list(app.device.events.queue)))
    wait_until(lambda: app.engine.admission.room().free_requests == app.engine.max_inflight)


def test_mistakes_are_the_servers_errors(model: Model) -> None:
    with pytest.raises(BadRequest, match="temperature"):
        model.generate("t17", temperature=3)
    with pytest.raises(BadRequest, match="finite"):
        model.generate("t17", temperature=math.nan)
    with pytest.raises(ContextTooLong):
        model.generate(["t17", "t17 " * 100])
    with pytest.raises(BadRequest, match="token id"):
        model.generate([17, 100_000])
    with pytest.raises(BadRequest, match="messages"):
        model.chat([])
    with pytest.raises(BadRequest):
        model.generate("\ud800")
    with pytest.raises(BadRequest, match="admits 8 at a time"):
        model.generate("t17", n=9)
    with pytest.raises(TypeError, match="did you mean 'max_tokens'"):
        model.generate("t17", max_token=3)  # type: ignore[call-arg]
    with pytest.raises(DeadlineExceeded):
        model.generate("t4", timeout=0.05)


def test_a_prompt_that_fails_ends_the_call_and_what_runs_beside_it(app: App, model: Model) -> None:
    with pytest.raises(ContextTooLong):
        model.generate(["t4", "t17 " * 100], max_tokens=2)
    wait_until(lambda: app.engine.admission.room().free_requests == app.engine.max_inflight)


def test_scores_are_those_of_the_server(app: App, model: Model) -> None:
    pairs = [("t17", " t18 t19"), ("t17", " t19"), ("t20 t21", " t30")]
    body = {"prompts": [one for one, _ in pairs], "continuations": [two for _, two in pairs], "details": True}
    reply = app.post("/loglikelihood", body).json
    assert reply is not None
    scores = model.score(pairs)
    assert [score.is_greedy for score in scores] == reply["is_greedy"] == [True, False, False]
    assert [score.logprob for score in scores[:2]] == reply["ll"][:2] == [-1.0, -1.5]
    assert scores[2].logprob == -math.inf
    assert model.score([([17], [18, 19])])[0] == scores[0]
    for pair in (([17], " t18"), ([], [18]), ([17], [])):
        with pytest.raises(BadRequest):
            model.score([pair])  # type: ignore[list-item]


def test_embeddings_are_those_of_the_server(app: App, model: Model) -> None:
    reply = app.post("/v1/embeddings", {"model": "toy", "input": ["t17 t18", "t20"]}).json
    assert reply is not None
    vectors = model.embed(["t17 t18", "t20"])
    np.testing.assert_allclose(vectors, [one["embedding"] for one in reply["data"]])
    assert model.embed([]).shape == (0, 4)
    with pytest.raises(BadRequest, match="pooling"):
        model.embed("t17", pooling="max")


def test_threads_share_a_model(model: Model) -> None:
    found: dict[int, list[tuple[int, ...]]] = {}

    def ask(number: int) -> None:
        prompts = [[20 + number]] * 10
        found[number] = [one.tokens for one in model.generate(prompts, max_tokens=3, temperature=0)]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: [(21 + number, 22 + number, 23 + number)] * 10 for number in range(6)}


def test_an_event_loop_is_not_blocked_and_many_calls_run_together(model: Model) -> None:
    async def main() -> None:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.001)

        ticking = asyncio.create_task(tick())
        calls = [model.agenerate(f"t{20 + number}", max_tokens=2, temperature=0) for number in range(40)]
        results = await asyncio.gather(*calls)
        assert [one[0].tokens[0] for one in results] == [21 + number for number in range(40)]
        assert (await model.achat(USER, max_tokens=2, temperature=0)).tokens == (10, 11)
        pieces = [piece.text async for piece in model.astream("t17", max_tokens=3, temperature=0)]
        assert "".join(pieces) == " t18 t19 t20"
        tokens = [piece.tokens async for piece in model.astream_chat(USER, max_tokens=2, temperature=0)]
        assert sum(tokens, ()) == (10, 11)
        with pytest.raises(BadRequest):
            await model.agenerate("t17", temperature=3)
        assert ticks > 1
        ticking.cancel()

    asyncio.run(main())


def test_a_cancelled_task_ends_its_work(app: App, model: Model) -> None:
    async def main() -> None:
        task = asyncio.create_task(model.agenerate(["t4"] * 3, max_tokens=2))
        while app.engine.admission.room().free_requests > app.engine.max_inflight - 3:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    wait_until(lambda: app.engine.admission.room().free_requests == app.engine.max_inflight)


def test_whoever_waits_for_a_place_waits_by_priority(app: App) -> None:
    waiting, granted, held = AdmissionQueue(app.engine), list[str](), list[Reservation]()

    def ask(name: str, priority: int) -> WaitingWork:
        def note(place: Reservation | Exception) -> None:
            assert isinstance(place, Reservation)
            held.append(place)
            granted.append(name)

        return waiting.ask(1, 4, priority, note)

    for number in range(app.engine.max_inflight):
        ask(f"first-{number}", 5)
    ask("late", 0)
    ask("gone", -2).is_cancelled = True
    ask("important", -1)
    assert len(granted) == app.engine.max_inflight
    waiting.release(held[0])
    waiting.release(held[1])
    assert granted[-2:] == ["important", "late"]
    for place in held:
        waiting.release(place)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Makes SIGINT raise KeyboardInterrupt, because a test run started in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_leaves_nothing_behind(app: App, model: Model, ctrl_c: None) -> None:
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        model.generate(["t4"] * 20)
    timer.join()
    wait_until(lambda: app.engine.admission.room().free_requests == app.engine.max_inflight)
    assert model.generate("t17", max_tokens=1, temperature=0)[0].tokens == (18,)


def test_a_closed_model_refuses_and_ends_what_ran(app: App) -> None:
    model = Model(app.registry, Settings())
    stream = model.stream("t6", max_tokens=20, temperature=0)
    next(stream)
    model.close()
    model.close()
    with pytest.raises(ServeError):
        list(stream)
    with pytest.raises(Unavailable, match="closed"):
        model.generate("t17")
    with pytest.raises(Unavailable):
        model.stream("t17")


def test_a_wrong_shape_is_told_in_words(model: Model) -> None:
    texts: Any = ["t1", "t2"]
    with pytest.raises(BadRequest, match="A stream has one prompt"):
        model.stream(texts)
    with pytest.raises(BadRequest, match="A pair is a prompt and its continuation, not 't1'"):
        model.score(texts)
    assert repr(model).startswith("<levserve model ")


def test_every_keyword_is_a_field_of_the_body() -> None:
    assert TextFields.__annotations__.keys() <= set(CompletionBody.__struct_fields__)
    assert ChatFields.__annotations__.keys() <= set(ChatBody.__struct_fields__)


def test_settings_are_given_by_name_and_read_as_flags_are() -> None:
    settings = make_settings(
        {"model": "a/b@main", "max_running": 3, "compile_cache": False, "seed": None}, {}
    )
    assert (settings.model, settings.revision, settings.max_running) == ("a/b", "main", 3)
    assert not settings.compile_cache and settings.seed is None
    for values, words in (
        ({"max_runing": 3}, "did you mean"),
        ({"max_running": -3}, "max_running must be an integer, at least 0, not -3"),
        ({"port": 3}, "setting of the server"),
        ({"kv_memory": "1GB", "kv_pages": 3}, "exclude each other"),
    ):
        with pytest.raises(ConfigError, match=words):
            make_settings(values, {})
    assert make_settings({}, {"LEVSERVE_MAX_RUNNING": "5"}).max_running == 5


def test_importing_levserve_imports_next_to_nothing() -> None:
    program = "import sys, levserve; print(levserve.open.__name__, *(m for m in ('jax', 'flask', 'numpy', 'msgspec') if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["open"]


def test_an_open_that_fails_raises_one_sentence() -> None:
    with pytest.raises(StartupError, match="does not exist"):
        levserve.open("/nowhere/at-all")
    with pytest.raises(StartupError, match="unknown setting 'colour'"):
        levserve.open(colour="red")


def test_a_call_has_a_timeout_of_its_own_or_that_of_the_settings(app: App) -> None:
    with Model(app.registry, Settings()) as model:
        with pytest.raises(DeadlineExceeded):
            model.score([("t17", " t4")], timeout=0.05)
        with pytest.raises(DeadlineExceeded):
            model.embed("t4", timeout=0.05)
        for wrong in (0, -1, math.nan):
            with pytest.raises(BadRequest, match="timeout"):
                model.score([("t17", " t18")], timeout=wrong)


def test_a_timeout_for_all_calls_is_a_setting(app: App) -> None:
    assert Settings().request_timeout > 0  # the server's default, which does not apply to the Python API
    settings = make_settings({"request_timeout": 0.05}, {})
    with Model(app.registry, settings) as model:
        with pytest.raises(DeadlineExceeded):
            model.generate("t4")
        assert model.generate("t17", max_tokens=1, temperature=0)[0].tokens == (18,)


def test_a_notebook_whose_event_loop_runs_may_call_both_kinds(model: Model) -> None:
    async def cell() -> None:
        """Runs inside an event loop, as a notebook's cell does."""
        assert model.generate("t17", max_tokens=2, temperature=0)[0].tokens == (18, 19)
        assert [piece.text for piece in model.stream("t17", max_tokens=1, temperature=0)] == [" t18"]
        assert model.score([("t17", " t18")])[0].is_greedy
        (result,) = await model.agenerate("t17", max_tokens=2, temperature=0)
        assert result.tokens == (18, 19)

    asyncio.run(cell())


def test_work_that_is_held_back_waits_for_what_runs_and_then_goes_on(app: App) -> None:
    waiting, granted = AdmissionQueue(app.engine), list[Reservation]()

    def ask() -> WaitingWork:
        def note(place: Reservation | Exception) -> None:
            assert isinstance(place, Reservation)
            granted.append(place)

        return waiting.ask(1, 4, 0, note)

    ask()
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with waiting.hold_back():
            entered.set()
            leave.wait(10)

    holding = threading.Thread(target=hold)
    holding.start()
    wait_until(lambda: waiting._is_held_back)
    ask()
    assert len(granted) == 1 and not entered.is_set()
    waiting.release(granted[0])
    assert entered.wait(10) and len(granted) == 1
    leave.set()
    holding.join()
    assert len(granted) == 2
    waiting.release(granted[1])
