"""A model of the Python API that is closed, or that was opened before the process was forked."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from levserve.api import opening
from levserve.api.model import Model
from levserve.api.results import Piece
from levserve.errors import StartupError, Unavailable
from levserve.settings.settings import Settings
from tests.fake_app import App, serving
from tests.waiting import wait_until

USER = [{"role": "user", "content": "t17 t18"}]
CHILD_SECONDS = 20.0


@pytest.fixture
def app() -> Iterator[App]:
    with serving(obeys=True) as app:
        yield app


async def gather(pieces: AsyncIterator[Piece]) -> list[Piece]:
    return [piece async for piece in pieces]


CALLS: dict[str, Callable[[Model], Any]] = {
    "generate": lambda model: model.generate("t17"),
    "nothing": lambda model: model.generate([]),
    "chat": lambda model: model.chat(USER),
    "chat_many": lambda model: model.chat_many([USER]),
    "stream": lambda model: model.stream("t17"),
    "stream_chat": lambda model: model.stream_chat(USER),
    "score": lambda model: model.score([("t17", " t18")]),
    "embed": lambda model: model.embed("t17"),
    "load_weights": lambda model: model.load_weights({}),
    "agenerate": lambda model: asyncio.run(model.agenerate("t17")),
    "achat": lambda model: asyncio.run(model.achat(USER)),
    "astream": lambda model: asyncio.run(gather(model.astream("t17"))),
    "astream_chat": lambda model: asyncio.run(gather(model.astream_chat(USER))),
    "with": lambda model: model.__enter__(),
}


def test_every_call_of_a_closed_model_says_that_it_is_closed(app: App) -> None:
    model = Model(app.registry, Settings())
    begun_later = model.astream("t17")
    model.close()
    for call in (*CALLS.values(), lambda _: asyncio.run(gather(begun_later))):
        with pytest.raises(Unavailable, match="The model toy is closed; open it again"):
            call(model)
    assert model.name == "toy" and "closed" in repr(model)


@pytest.mark.parametrize("name", [name for name in CALLS if name != "with"])
def test_a_device_that_has_failed_is_told_and_not_a_server_that_restarts(name: str, app: App) -> None:
    with Model(app.registry, Settings()) as model:
        app.engine.fail()
        with pytest.raises(Unavailable, match="The device has failed; close the model toy and open it again"):
            CALLS[name](model)


@pytest.mark.parametrize(
    "consume",
    [
        lambda model: list(model.stream("t6", max_tokens=20, temperature=0)),
        lambda model: asyncio.run(gather(model.astream("t6", max_tokens=20, temperature=0))),
        lambda model: model.generate(["t6"] * 30, max_tokens=20, temperature=0),
        lambda model: asyncio.run(model.agenerate(["t6"] * 30, max_tokens=20, temperature=0)),
    ],
    ids=["stream", "astream", "generate", "agenerate"],
)
def test_work_that_runs_while_the_model_is_closed_ends_with_the_same_words(
    app: App, consume: Callable[[Model], Any]
) -> None:
    model = Model(app.registry, Settings())
    closer = threading.Timer(0.2, model.close)
    closer.start()
    with pytest.raises(Unavailable, match="The model toy is closed"):
        consume(model)
    closer.join()


def run_child(call: Callable[[], Any]) -> str:
    """What a forked process tells of the call; the process must end."""
    readable, writable = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads beside the fork, which is what the test is about
        child = os.fork()
    if not child:
        try:
            told = f"returned {call()}"
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
        os.write(writable, told.encode())
        os._exit(0)
    os.close(writable)
    try:
        end = time.monotonic() + CHILD_SECONDS
        wait_until(lambda: os.waitpid(child, os.WNOHANG)[0] or time.monotonic() > end, 2 * CHILD_SECONDS)
        assert time.monotonic() < end, "the child hangs"
        return os.read(readable, 10_000).decode()
    finally:
        os.close(readable)
        if time.monotonic() >= end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


@pytest.mark.parametrize("name", CALLS)
def test_a_forked_process_is_told_that_the_model_is_not_its_own(app: App, name: str) -> None:
    with Model(app.registry, Settings()) as model:
        told = run_child(lambda: CALLS[name](model))
        assert told.startswith(
            "Unavailable: The model toy was opened in the process that this one was forked from"
        )
        assert "'spawn'" in told
        assert model.generate("t17", max_tokens=1, temperature=0)[0].tokens == (18,)


def test_a_stream_does_not_go_on_in_a_forked_process(app: App) -> None:
    with Model(app.registry, Settings()) as model, model.stream("t6", max_tokens=20, temperature=0) as stream:
        next(stream)
        assert run_child(lambda: next(stream)).startswith("Unavailable: The model toy was opened in")
        assert run_child(stream.close) == "returned None"
        assert run_child(model.close) == "returned None"
        assert app.engine.admission.room().free_requests == app.engine.max_inflight - 1


def test_no_model_is_opened_in_a_process_that_was_forked_from_one_with_a_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(opening, "_first_process", os.getpid())
    told = run_child(lambda: opening.open_device(Settings()))
    assert told.startswith("StartupError: this process was forked from one that had opened a model")
    monkeypatch.setattr(opening, "_first_process", 0)
    with pytest.raises(StartupError, match="does not exist"):
        opening.open_device(Settings(model="/nowhere/at-all"))
    assert opening._first_process == 0, "no threads were started"
