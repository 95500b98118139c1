"""Rounds that decode and prefill in one program, where padding costs nothing, give the same answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from levserve.device.in_flight import InFlightRound
from levserve.device.runner import Runner
from levserve.model.cpu.backend import CpuBackend
from levserve.schedule.request import GenerationRequest
from levserve.schedule.sequence import RoundPlan
from tests.conftest import GOLDEN
from tests.engines import Answer, Running, ask, read, running_engine


class Mixed:
    """The plans of rounds that were dispatched as one mixed program."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plans: list[RoundPlan] = []
        dispatch = Runner._dispatch_mixed

        def note(self_: Runner, plan: RoundPlan, *given: Any) -> InFlightRound:
            self.plans.append(plan)
            return dispatch(self_, plan, *given)

        monkeypatch.setattr(Runner, "_dispatch_mixed", note)


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with pytest.MonkeyPatch.context() as patch:
        # Lets any CPU run whole layers: LLVM replaces the instruction if the CPU has none.
        dot = lambda target: CpuBackend(target=target, has_products=True)  # noqa: E731
        patch.setattr("levserve.model.cpu.backend.fit_target", dot)
        with running_engine(GOLDEN / "llama", "--quantize", "int8", compiles_all=True) as running:
            running.wait_compiled()
            running.run(ask((1, 2, 3), 4))
            yield running


@pytest.fixture
def mixed(monkeypatch: pytest.MonkeyPatch) -> Mixed:
    return Mixed(monkeypatch)


def beside_a_stream(running: Running, *requests: GenerationRequest) -> list[Answer]:
    """Answers requests that all arrive while another one streams."""
    stream = running.submit(ask((5, 6, 7), 150))
    stream.get(timeout_seconds=60)
    answers = running.run(*requests)
    read(stream)
    return answers


def prompt(number: int, length: int) -> list[int]:
    """A prompt that no other test uses."""
    return [2 + (number * 31 + index * 7) % 90 for index in range(length)]


KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 7},
    {"temperature": 1.0, "seed": 3, "top_p": 0.9, "num_logprobs": 2},
    {"presence_penalty": 1.5, "repetition_penalty": 1.3, "logit_bias": ((4, 5.0),)},
]


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_a_prompt_beside_a_stream_is_answered_as_it_is_alone(
    running: Running, mixed: Mixed, kind: int
) -> None:
    given = [prompt(kind, length) for length in (3, 21, 40)]
    together = beside_a_stream(running, *(ask(tokens, 8, **KINDS[kind]) for tokens in given))
    assert sum(plan.num_prefill for plan in mixed.plans) >= 40
    assert any(chunk.is_last for plan in mixed.plans for chunk in plan.chunks)
    mixed.plans.clear()
    running.wait_idle()
    running.loaded.scheduler.forget_prefixes()
    alone = [running.run(ask(tokens, 8, **KINDS[kind]))[0] for tokens in given]
    assert not mixed.plans
    assert [answer.tokens for answer in together] == [answer.tokens for answer in alone]
    for mine, theirs in zip(together, alone):
        assert len(mine.logprobs) == len(theirs.logprobs)
        for one, other in zip(mine.logprobs, theirs.logprobs):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-3)


def test_of_a_long_prompt_the_first_part_is_mixed(
    running: Running, mixed: Mixed, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = running.loaded.runner
    monkeypatch.setattr(engine, "_sizes", dataclasses.replace(engine._sizes, mixed_context=16))
    tokens = prompt(50, 80)
    (together,) = beside_a_stream(running, ask(tokens, 4))
    starts = [chunk.start for plan in mixed.plans for chunk in plan.chunks]
    assert starts and max(starts) < 16
    running.wait_idle()
    running.loaded.scheduler.forget_prefixes()
    assert together.tokens == running.run(ask(tokens, 4))[0].tokens


def test_the_stream_beside_it_goes_on_as_if_nobody_had_come(running: Running, mixed: Mixed) -> None:
    wanted = running.run(ask((5, 6, 7), 100))[0].tokens
    stream = running.submit(ask((5, 6, 7), 100))
    _, first = stream.get(timeout_seconds=60)
    running.run(*(ask(prompt(20 + number, 30), 6) for number in range(3)))
    assert mixed.plans
    assert [*first.tokens, *read(stream)[0].tokens] == wanted


@pytest.mark.parametrize(
    "given", [{"score_from": 1, "num_logprobs": 0}, {"wants_hidden": True}], ids=["scored", "pooled"]
)
def test_a_prompt_of_which_more_is_wanted_than_its_next_token_is_computed_by_itself(
    running: Running, mixed: Mixed, given: dict[str, Any]
) -> None:
    tokens = prompt(30 + len(given), 20)
    (answer,) = beside_a_stream(running, ask(tokens, 2, **given))
    assert not mixed.plans
    assert len(answer.prompt_logprobs) == (19 if "score_from" in given else 0) and (
        answer.hidden is not None
    ) == ("wants_hidden" in given)


def test_choices_of_one_prompt_are_forked_from_it(running: Running, mixed: Mixed) -> None:
    first = ask(prompt(40, 24), 4)
    second = ask(prompt(40, 24), 4, shares_prompt_of=first.request_id)
    answers = beside_a_stream(running, first, second)
    assert answers[0].tokens == answers[1].tokens == running.run(ask(prompt(40, 24), 4))[0].tokens
    assert not any(plan.forks for plan in mixed.plans)
