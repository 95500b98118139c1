"""A real engine on a real device thread, around a tiny model, for tests."""

from __future__ import annotations

import gc
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import jax

from levserve.device.platform import MIN_COMPILE_SECONDS
from levserve.engine.engine import Engine
from levserve.engine.stream import TokenStream
from levserve.models.build import Loaded
from levserve.models.load import load
from levserve.models.registry import Registry
from levserve.models.startup import serve
from levserve.observe.metrics import Metrics
from levserve.schedule.request import FinishReason, GenerationRequest, PooledHidden, Sampling, TokenLogprob
from levserve.settings.parse import parse_settings
from tests.conftest import CACHE_VARIABLE
from tests.waiting import COMPILE_SECONDS, wait_until

# jax would keep every program of the process in files of its own, beside levserve's, and next to none is looked for again:
# to write them took a twenty-fifth of the processor's time of tests that compile.
jax.config.update(MIN_COMPILE_SECONDS, 3600.0)

_numbers = count()


@dataclass
class Answer:
    """Everything one sequence got."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    hidden: PooledHidden | None = None
    finish: FinishReason | None = None


@dataclass
class Running:
    registry: Registry
    loaded: Loaded
    failures: list[BaseException] = field(default_factory=list)

    @property
    def engine(self) -> Engine:
        return self.registry.engine

    def submit(self, *requests: GenerationRequest) -> TokenStream:
        return self.engine.submit(requests, self.loaded.model)

    def run(self, *requests: GenerationRequest) -> list[Answer]:
        """Submits all at once and waits for every end."""
        return read(self.submit(*requests), len(requests))

    def golden_difference(self, folder: Path) -> float:
        """By how much this model's log-probabilities of the golden texts differ from the reference's, in the mean."""
        cases = json.loads((folder / "golden.json").read_text())["cases"]
        answers = self.run(
            *(
                ask(case["prompt"] + case["greedy"], 0, score_from=len(case["prompt"]), num_logprobs=0)
                for case in cases
            )
        )
        differences = [
            abs(got.logprob - wanted)
            for answer, case in zip(answers, cases, strict=True)
            for got, wanted in zip(answer.prompt_logprobs, case["greedy_logprobs"], strict=True)
        ]
        return sum(differences) / len(differences)

    def metric(self, name: str, **labels: str) -> float:
        return self.engine.metrics.registry.get_sample_value(f"levserve_{name}", labels) or 0.0

    def wait_compiled(self) -> None:
        """Until every program is ready."""
        wait_until(lambda: self.loaded.runner.programs.is_complete, COMPILE_SECONDS)

    def wait_idle(self) -> None:
        """Until the device thread has seen to everything; gauges are set at the end of each of its turns."""
        deadline = time.monotonic() + 20
        while (
            self.metric("requests_running") + self.metric("requests_waiting") or not self.engine.inbox.empty()
        ):
            assert time.monotonic() < deadline, "the engine did not become idle"
            threading.Event().wait(0.01)


def ask(
    prompt: Sequence[int], max_tokens: int = 24, *, stop_ids: Sequence[int] = (), **given: Any
) -> GenerationRequest:
    """A greedy request unless told otherwise; sampling fields and the request's own may be given alike."""
    own = {
        name: given.pop(name)
        for name in (
            "deadline",
            "score_from",
            "scores_in_one_pass",
            "wants_hidden",
            "shares_prompt_of",
            "constraint",
        )
        if name in given
    }
    rules = Sampling(**({"temperature": 0.0} | given))
    return GenerationRequest(
        f"r{next(_numbers)}", tuple(prompt), max_tokens, rules, frozenset(stop_ids), **own
    )


def read(stream: TokenStream, count: int = 1) -> list[Answer]:
    answers = [Answer() for _ in range(count)]
    while not stream.is_finished:
        index, batch = stream.get(timeout_seconds=60)
        answers[index].tokens += batch.tokens
        answers[index].logprobs += batch.logprobs
        answers[index].prompt_logprobs += batch.prompt_logprobs
        answers[index].hidden = batch.hidden or answers[index].hidden
        answers[index].finish = batch.finish
    return answers


@contextmanager
def without_older_objects() -> Iterator[None]:
    """Garbage is looked for only among what is made inside. Other tests of the process may have left millions of objects,
    and each look at all of them takes seconds."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def live_bytes() -> int:
    """What jax holds in this process."""
    gc.collect()  # other tests' engines too
    return sum(array.nbytes for array in jax.live_arrays())


def cache_folder() -> Path:
    """One folder of compiled programs for all engines of a test run."""
    return Path(os.environ[CACHE_VARIABLE])


@contextmanager
def running_engine(folder: Path, *flags: str, rows: int = 4, compiles_all: bool = False) -> Iterator[Running]:
    """Loads a model and serves it on a device thread, in float32 unless told otherwise; stops and joins it afterwards.

    The programs that a server compiles when it is ready are compiled only where a test `compiles_all`: the first ones can
    do everything, and compiling is most of what these tests cost.
    """
    given = ["--model", str(folder), "--dtype", "float32", "--cache-dir", str(cache_folder()), *flags]
    settings = replace(parse_settings(given, {}), max_running=rows)
    engine = Engine(max_inflight=256, metrics=Metrics())
    registry = Registry(engine)
    loaded: list[Loaded] = []
    failures: list[BaseException] = []

    def work() -> None:
        try:
            loaded.append(load(settings, engine.metrics, report=lambda _: None))
            if not compiles_all:
                programs = loaded[0].runner.programs
                programs.start_background = programs._compiles.note_ready  # type: ignore[method-assign]
            serve(registry, loaded[0])
        except BaseException as error:
            failures.append(error)
            engine.fail()

    thread = threading.Thread(target=work, name="levserve-device")
    thread.start()
    is_ready = engine.wait_ready(timeout_seconds=COMPILE_SECONDS)
    try:
        if not is_ready:
            raise failures[0]
        yield Running(registry, loaded[0], failures)
    finally:
        engine.stop()
        registry.close()
        registry.join()
        thread.join(timeout=COMPILE_SECONDS)  # it finishes the program that it compiles
        assert not thread.is_alive(), "the device thread did not stop"
