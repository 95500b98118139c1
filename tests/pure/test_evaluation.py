"""What lm-evaluation-harness asks of a model, answered by the toy device.

After token k, k + 1 has the log-probability -0.5, k + 2 has -1.5, and the others are impossible.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from levserve import cli
from levserve.api.model import Model
from levserve.errors import BadRequest
from levserve.evaluation.command import complete_arguments
from levserve.evaluation.evaluator import Evaluator, read_arguments
from levserve.evaluation.pairs import Scored, cut, roll
from levserve.settings.settings import Settings
from tests.fake_app import App, serving


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with serving() as app:
        yield app


@pytest.fixture(scope="module")
def evaluator(app: App) -> Evaluator:
    return Evaluator(Model(app.registry, Settings()))


def test_continuations_are_scored_in_the_order_they_were_asked(evaluator: Evaluator) -> None:
    pairs = [
        ("t20 t21", " t23"),
        ("t17", " t18 t19"),
        ("t20 t21", " t22"),
        ("t17", " t40"),
        ("t17", " t18 t19"),
    ]
    found = evaluator.loglikelihood(pairs)
    assert found == [(-1.5, False), (-1.0, True), (-0.5, True), (-math.inf, False), (-1.0, True)]
    assert evaluator.loglikelihood([]) == []


def test_equal_pairs_are_computed_once_and_those_that_begin_alike_come_together(
    app: App, evaluator: Evaluator
) -> None:
    before = len(app.device.requests)
    evaluator.loglikelihood([("t30 t31", " t32"), ("t40", " t41"), ("t30 t31", " t33"), ("t40", " t41")])
    asked = [request.prompt for request in app.device.requests[before:]]
    assert asked == [(30, 31, 32), (30, 31, 33), (40, 41)]


def test_an_empty_context_is_the_bos_token(app: App, evaluator: Evaluator) -> None:
    before = len(app.device.requests)
    evaluator.loglikelihood([("", "t17 t18"), ("", "<s> t17")])
    asked = [(request.prompt, request.score_from) for request in app.device.requests[before:]]
    assert asked == [((1, 17), 1), ((1, 17, 18), 1)]  # the bos token is not there twice


def test_a_continuation_without_tokens_is_certain(evaluator: Evaluator) -> None:
    assert evaluator.loglikelihood([("t17", ""), ("t17", " t18")]) == [(0.0, True), (-0.5, True)]


def test_spaces_before_a_continuation_belong_to_it(evaluator: Evaluator) -> None:
    assert evaluator.loglikelihood([("t17 ", "t18")]) == evaluator.loglikelihood([("t17", " t18")])


def test_a_context_that_is_too_long_loses_its_beginning(app: App, evaluator: Evaluator) -> None:
    long = " ".join(["t50"] * 100) + " t17"
    assert evaluator.loglikelihood([(long, " t18 t19")]) == [(-1.0, True)]
    assert len(app.device.requests[-1].prompt) == 64
    numbers = tuple(range(10))
    assert cut(Scored(numbers, 4), 8) == Scored(numbers[2:], 2)
    assert cut(Scored(numbers, 1), 4) == Scored(numbers[6:], 1)  # the continuation alone does not fit
    assert cut(Scored(numbers, 4), 10) == Scored(numbers, 4)


@pytest.mark.parametrize("length", range(14))
@pytest.mark.parametrize("size", (2, 3, 5, 20))
def test_rolling_windows_score_every_token_once_with_all_the_context_that_fits(
    length: int, size: int
) -> None:
    tokens = list(range(100, 100 + length))
    text = [0, *tokens]
    place = 1
    for window in roll(tokens, 0, size):
        assert len(window.tokens) <= size and 1 <= window.num_context < len(window.tokens)
        num_scored = len(window.tokens) - window.num_context
        start = place - window.num_context
        assert list(window.tokens) == text[start : place + num_scored]
        assert len(window.tokens) == size or start == 0
        place += num_scored
    assert place == len(text)


def test_a_text_of_any_length_is_scored_whole(app: App) -> None:
    evaluator = Evaluator(Model(app.registry, Settings()), prefix_token_id=19)
    texts = [" ".join(f"t{number}" for number in range(20, end)) for end in (300, 23, 20, 21)]
    assert evaluator.loglikelihood_rolling(texts) == [-140.0, -1.5, 0.0, -0.5]


def test_texts_are_generated_until_a_stop(evaluator: Evaluator) -> None:
    greedy: dict[str, Any] = {"until": ["t21"], "max_gen_toks": 6, "do_sample": False}
    found = evaluator.generate_until(
        [("t30", {"until": "t33", "max_gen_toks": 9}), ("t17", greedy), ("t40", greedy), ("t18", greedy)]
    )
    assert found == [" t31 t32 ", " t18 t19 t20 ", " t41 t42 t43 t44 t45 t46", " t19 t20 "]


def test_more_stops_than_a_request_takes_still_cut_the_text(evaluator: Evaluator) -> None:
    stops = [f"t{number}" for number in range(300, 330)] + ["t20"]
    assert evaluator.generate_until([("t17", {"until": stops, "max_gen_toks": 8})]) == [" t18 t19 "]


def test_a_prompt_leaves_room_for_what_is_generated(app: App, evaluator: Evaluator) -> None:
    evaluator.generate_until([(" ".join(["t50"] * 100), {"max_gen_toks": 10})])
    assert len(app.device.requests[-1].prompt) == 54
    with pytest.raises(BadRequest, match="64 tokens are to be generated"):
        evaluator.generate_until([("t17", {"max_gen_toks": 64})])


@pytest.mark.parametrize(
    "given, told",
    [
        ({}, {"max_tokens": 9, "temperature": 0.0, "stop": []}),
        ({"temperature": 0.7}, {"max_tokens": 9, "temperature": 0.7, "stop": []}),
        ({"temperature": 0.7, "do_sample": False}, {"max_tokens": 9, "temperature": 0.0, "stop": []}),
        (
            {"do_sample": True, "top_p": 0.9, "max_new_tokens": 3, "until": "x"},
            {"max_tokens": 3, "temperature": 0.0, "stop": ["x"], "top_p": 0.9},
        ),
        ({"until": ["", "a"], "num_beams": 1}, {"max_tokens": 9, "temperature": 0.0, "stop": ["a"]}),
    ],
)
def test_a_tasks_arguments_are_read_as_the_harness_means_them(given: Any, told: Any) -> None:
    assert read_arguments(given, 9)[1] == told


def test_an_argument_that_is_not_known_is_named() -> None:
    with pytest.raises(BadRequest, match="num_beams=4"):
        read_arguments({"num_beams": 4}, 9)


def test_the_command_adds_the_model_unless_one_is_named() -> None:
    assert complete_arguments(["--tasks", "arc_easy"]) == [
        "run",
        "--model",
        "levserve",
        "--tasks",
        "arc_easy",
    ]
    assert complete_arguments(["run", "--tasks", "x"]) == ["run", "--model", "levserve", "--tasks", "x"]
    assert complete_arguments(["--model", "hf", "--tasks", "x"]) == ["run", "--model", "hf", "--tasks", "x"]
    assert complete_arguments(["ls", "tasks"]) == ["ls", "tasks"]


def test_the_command_without_the_package_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "levserve.evaluation.harness", raising=False)
    assert cli.main(["eval", "--tasks", "arc_easy"]) == 2
    assert "pip install 'levserve[eval]'" in capsys.readouterr().err
