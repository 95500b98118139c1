"""The whole engine on golden brains: right tokens in any company, scores of both kinds, equal texts once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from levserve.device.text_programs import Task, TextPrograms, TextShape
from levserve.device.text_runner import TextRunner
from levserve.model.rules import Mode
from levserve.schedule.request import FinishReason
from tests.brains import WIDE, brain_cases, brain_folder
from tests.engines import Running, ask, running_engine
from tests.tiny.test_constrained_text import Cycle, CycleMatcher

ROWS = 4
MOE = "hrm-tiny-moe"
WIDE_TOKENS = 3


@pytest.fixture(scope="module")
def moe() -> Iterator[Running]:
    with running_engine(brain_folder(MOE), "--max-seq-len", "64", rows=ROWS, compiles_all=True) as running:
        running.wait_compiled()
        yield running


def logprobs(entries: list[Any]) -> list[float]:
    return [entry.logprob for entry in entries]


@pytest.mark.parametrize(
    ("name", "context"),
    [
        ("hrm-tiny-dense-pt", 64),
        ("hrm-tiny-odd", 40),
        ("hrm-tiny-bare-fp16", 64),
        ("hrm-tiny-trained", 64),
        (WIDE, 64),
    ],
)
def test_a_brain_served_in_one_batch_matches_its_reference(
    name: str, context: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These are all brains except that of the tests below. A brain that states no context would get 2,048.

    No scores in one pass are requested, so their program is not compiled. The wide brain takes longer to
    run than to compile, so its run is compiled with optimization. It also writes less, as each token is a
    run of its own; test_hrm.py checks more of its text.
    """
    cases = brain_cases(name)
    monkeypatch.setattr(TextPrograms, "first_shapes", property(shapes_but_for_one_pass))
    if name == WIDE:
        well = {"xla_backend_optimization_level": 1}
        monkeypatch.setattr(
            TextPrograms, "_compiler_options", lambda _, shape: well if shape.task is Task.RUN else {}
        )
        cases = [shorten(case) for case in cases]
    is_said = name not in (WIDE, "hrm-tiny-bare-fp16")
    flags = () if is_said else ("--max-seq-len", str(context))
    with running_engine(brain_folder(name), *flags) as running:
        assert running.loaded.model.max_seq_len == context
        answers = running.run(
            *(
                ask(case["prompt"], len(case["greedy"]), num_logprobs=5, score_from=score_from(case))
                for case in cases
            )
        )
    for case, answer in zip(cases, answers):
        check(case, answer)


FIRST_SHAPES = TextPrograms.first_shapes


def shapes_but_for_one_pass(programs: TextPrograms) -> list[TextShape]:
    assert FIRST_SHAPES.fget is not None
    return [shape for shape in FIRST_SHAPES.fget(programs) if shape.task is not Task.ONE_PASS]


def shorten(case: dict[str, Any]) -> dict[str, Any]:
    """A golden case with less of its answer, and log-probabilities of only the end of its prompt."""
    short = {name: case[name][:WIDE_TOKENS] for name in ("greedy", "greedy_logprobs")}
    return case | short | {"scored_from": max(len(case["prompt"]) - WIDE_TOKENS, 1)}


def score_from(case: dict[str, Any]) -> int | None:
    return case.get("scored_from", 1) if len(case["prompt"]) > 1 else None


def check(case: dict[str, Any], answer: Any) -> None:
    assert answer.tokens == case["greedy"] and answer.finish is FinishReason.LENGTH
    np.testing.assert_allclose(logprobs(answer.logprobs), case["greedy_logprobs"], atol=1e-3)
    scored = case["prompt_logprobs"][case.get("scored_from", 1) :]
    np.testing.assert_allclose(logprobs(answer.prompt_logprobs), scored, atol=1e-3)
    best, value = answer.logprobs[0].top[0]
    assert best == case["last_top5"][0][0] and value == pytest.approx(case["last_top5"][0][1], abs=1e-3)


def test_texts_among_others_of_other_lengths_match_their_references(moe: Running) -> None:
    cases = brain_cases(MOE)
    crowd = [ask([5 + number] * (1 + 4 * number), 9, temperature=0.8, seed=number) for number in range(8)]
    requests = [
        ask(case["prompt"], len(case["greedy"]), num_logprobs=5, score_from=score_from(case))
        for case in cases
    ]
    answers = moe.run(*crowd, *requests)[len(crowd) :]
    for case, answer in zip(cases, answers):
        check(case, answer)


def test_continuations_are_scored_by_the_chain_rule_or_in_one_pass(moe: Running) -> None:
    cases = brain_cases(MOE)
    texts = [(case["prompt"] + case["continuation"], len(case["prompt"])) for case in cases]
    chain = [ask(text, 0, score_from=first, num_logprobs=0) for text, first in texts]
    whole = [ask(text, 0, score_from=first, scores_in_one_pass=True) for text, first in texts]
    answers = moe.run(*chain, *whole)
    for case, by_chain, in_pass in zip(cases, answers, answers[len(cases) :]):
        np.testing.assert_allclose(
            logprobs(by_chain.prompt_logprobs), case["continuation_logprobs"], atol=1e-3
        )
        found = logprobs(in_pass.prompt_logprobs)
        np.testing.assert_allclose(found, case["continuation_logprobs_one_pass"], atol=1e-3)
        assert by_chain.finish is in_pass.finish is FinishReason.LENGTH


def test_equal_texts_of_a_round_are_computed_once(moe: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    batch = TextRunner._dispatch_batch

    def count(runner: TextRunner, texts: Any, uses: Any) -> None:
        counts.append(len(texts))
        batch(runner, texts, uses)

    monkeypatch.setattr(TextRunner, "_dispatch_batch", count)
    answers = moe.run(*(ask([7, 8, 9], 4) for _ in range(ROWS)))
    assert len({tuple(answer.tokens) for answer in answers}) == 1
    assert counts == [1, 1, 1, 1], "greedy answers to one prompt stay equal"


def test_the_same_seed_gives_the_same_text_alone_and_in_company(moe: Running) -> None:
    request = {"temperature": 0.9, "top_p": 0.95, "top_k": 20, "seed": 11}
    (alone,) = moe.run(ask([4, 5, 6], 12, **request))
    others = [ask([9] * number, 6, temperature=1.0, seed=number) for number in range(1, 7)]
    together = moe.run(*others, ask([4, 5, 6], 12, **request))[-1]
    (another,) = moe.run(ask([4, 5, 6], 12, **(request | {"seed": 12})))
    assert alone.tokens == together.tokens != another.tokens


def test_penalties_biases_and_minimum_lengths_hold(moe: Running) -> None:
    (plain,) = moe.run(ask([3, 4], 8))
    banned = plain.tokens[0]
    (biased,) = moe.run(ask([3, 4], 8, logit_bias=((banned, -100.0),)))
    assert banned not in biased.tokens
    (stopped,) = moe.run(ask([3, 4], 8, stop_ids=[banned]))
    assert stopped.tokens == [] and stopped.finish is FinishReason.STOP
    (late,) = moe.run(ask([3, 4], 8, stop_ids=[banned], min_tokens=3))
    assert len(late.tokens) >= 3 and banned not in late.tokens[:3]
    (varied,) = moe.run(ask([3, 4], 8, frequency_penalty=2.0, presence_penalty=2.0))
    assert len(set(varied.tokens)) > len(set(plain.tokens)) or varied.tokens != plain.tokens


def test_embeddings_are_the_mean_and_the_last_of_the_last_states(moe: Running) -> None:
    one, many = moe.run(ask([5], 0, wants_hidden=True), ask([5, 6, 7], 0, wants_hidden=True))
    assert one.hidden is not None and many.hidden is not None
    assert list(one.hidden.mean) == pytest.approx(list(one.hidden.last), abs=1e-6)
    assert len(many.hidden.mean) == moe.loaded.model.hidden_size
    # A norm ends every block, so each state has a mean square of one.
    assert sum(x * x for x in many.hidden.last) / len(many.hidden.last) == pytest.approx(1, abs=1e-3)
    assert list(many.hidden.mean) != pytest.approx(list(many.hidden.last), abs=1e-3)


@dataclass(frozen=True)
class Pattern:
    """A constraint that allows tokens from these sets in turn; a set of one is a forced token."""

    sets: tuple[frozenset[int], ...]
    length: int

    def start(self) -> PatternMatcher:
        return PatternMatcher(Cycle(self.sets, self.length))


class PatternMatcher(CycleMatcher):
    def mask(self) -> bytes:
        return sum(1 << token for token in self._set(self.count)).to_bytes(16, "little")


def test_a_text_is_held_to_its_constraint_and_forced_tokens_are_not_drawn(moe: Running) -> None:
    forced = [frozenset([token]) for token in (33, 34, 35)]
    rule = Pattern((frozenset(range(10, 20)), *forced, frozenset(range(40, 90))), 15)
    before = moe.metric("rounds_total", kind="decode")
    company = [ask([8, number], 6, temperature=1.0, seed=number) for number in range(3)]
    held = [ask([5, 6], 40, constraint=rule), ask([5, 6], 40, constraint=rule, temperature=1.0, seed=3)]
    answers = moe.run(*held)
    for answer in answers:
        assert answer.finish is FinishReason.STOP and len(answer.tokens) == 15
        assert all(token in rule.sets[place % 5] for place, token in enumerate(answer.tokens))
    assert moe.metric("rounds_total", kind="decode") - before <= 8, "two of five tokens are drawn"
    together = moe.run(*company, *held)[3:]
    assert [answer.tokens for answer in together] == [answer.tokens for answer in answers]


def test_a_cancelled_text_ends_and_others_go_on(moe: Running) -> None:
    stream = moe.submit(ask([1, 2, 3], 50))
    stream.get(timeout_seconds=30)
    stream.close()
    (answer,) = moe.run(ask([1, 2, 3], 2))
    moe.wait_idle()
    assert len(answer.tokens) == 2
    moe.loaded.scheduler.check()


def test_what_a_cache_would_have_is_absent_from_the_metrics(moe: Running) -> None:
    moe.run(ask([1, 2, 3], 2, score_from=1))
    shown = moe.engine.metrics.render().decode()
    for name in ("prefix_hit", "prefill_tokens", "kv_pages", "draft", 'kind="prefill"', 'kind="verify"'):
        assert name not in shown
    assert 'levserve_rounds_total{kind="decode"}' in shown and 'levserve_rounds_total{kind="score"}' in shown
    assert 'levserve_model_info{model="hrm-tiny-moe",page_size="",pages=""} 1.0' in shown


def test_nothing_is_compiled_while_serving(moe: Running) -> None:
    before = moe.metric("compiles_total", when="serving")
    moe.run(*(ask([3] * length, 3, temperature=0.5, top_p=0.9, num_logprobs=3) for length in range(1, 40, 3)))
    assert moe.metric("compiles_total", when="serving") == before == 0


def test_numbers_that_are_not_finite_fail_their_request_alone(moe: Running) -> None:
    runner = moe.loaded.runner
    assert isinstance(runner, TextRunner)
    embed = np.asarray(runner._leaves[0]).copy()
    assert embed.shape[0] == 97
    spoilt = embed.copy()
    spoilt[50] = math.nan
    leaves = list(runner._leaves)
    try:
        runner.swap([spoilt, *map(np.asarray, leaves[1:])])
        bad, good = moe.run(ask([50, 3], 4), ask([4, 3], 4))
    finally:
        runner.swap([embed, *map(np.asarray, leaves[1:])])
    assert bad.finish is FinishReason.POISONED and good.finish is FinishReason.LENGTH


def test_programs_are_chosen_so_that_little_of_them_is_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = TextPrograms.__new__(TextPrograms)
    shapes = [TextShape(Task.RUN, count, 32) for count in (1, 4, 16)]
    draws = [TextShape(Task.DRAW, 2), TextShape(Task.DRAW, 8), TextShape(Task.DRAW, 8, mode=Mode.GREEDY)]
    passes = [TextShape(Task.ONE_PASS, 1, 32), TextShape(Task.ONE_PASS, 1, 128)]
    programs._ready = dict.fromkeys([*shapes, *draws, *passes], print)
    assert [programs.run(number, 32).rows for number in (1, 2, 3, 4, 9, 12, 40)] == [1, 1, 4, 4, 4, 16, 16]
    assert programs.draw(3, Mode.GREEDY) == draws[2] and programs.draw(3, Mode.PLAIN) == draws[1]
    assert programs.draw(20, Mode.PLAIN) == draws[1] and programs.one_pass(40).length == 128


def test_streams_get_a_token_a_round(moe: Running) -> None:
    stream = moe.submit(ask([2, 3], 5))
    sizes = []
    while not stream.is_finished:
        _, batch = stream.get(timeout_seconds=30)
        sizes.append(len(batch.tokens))
    assert sizes == [1] * 5
