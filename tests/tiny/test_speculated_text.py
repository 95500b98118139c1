"""An engine that drafts from earlier text writes the text that it writes without drafts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from levserve.generation import Choice, Deltas
from levserve.schedule.request import FinishReason, GenerationRequest
from levserve.schedule.speculation import Drafter, Speculation
from levserve.text.stops import StopStrings
from levserve.text.tokenizer import load_tokenizer
from tests.conftest import GOLDEN
from tests.engines import Answer, Running, ask, read, running_engine
from tests.pure.test_speculation import NUM_DRAFT
from tests.tiny.test_engine import cases_of


class Switch(Speculation):
    """Drafts when it is told to, so that no test depends on what is faster on this machine."""

    is_on = True

    def pays(self, num_rows: int) -> bool:
        return self.is_on and 0 < num_rows <= self.max_rows


@pytest.fixture(scope="module")
def mistral() -> Iterator[Running]:
    """An engine that drafts once its programs are ready; some layers of its model have a window."""
    flags = ("--speculate", str(NUM_DRAFT), "--page-size", "4", "--kv-pages", "40", "--prefill-chunk", "32")
    with running_engine(GOLDEN / "mistral", *flags, rows=2, compiles_all=True) as running:
        running.wait_compiled()
        running.loaded.scheduler.speculation = Switch(NUM_DRAFT)
        yield running
        running.wait_idle()
        assert running.metric("kv_pages_used") == 0
        running.loaded.scheduler.check()


@contextmanager
def checked(running: Running) -> Iterator[None]:
    """Checks that drafts are verified inside, and that some of their tokens are right and some are not."""

    def counts() -> tuple[float, float, float]:
        return (
            running.metric("drafts_total"),
            running.metric("draft_tokens_total"),
            running.metric("draft_accepted_tokens_total"),
        )

    before = counts()
    yield
    running.wait_idle()  # work for a client that has stopped reading counts as well
    drafts, tokens, right = (after - old for after, old in zip(counts(), before))
    assert 0 < drafts and 0 < right < tokens <= NUM_DRAFT * drafts


def run_without(running: Running, *requests: GenerationRequest) -> list[Answer]:
    """The answers that the same server gives without drafts."""
    switch = running.loaded.scheduler.speculation
    assert isinstance(switch, Switch)
    switch.is_on = False
    rounds = running.metric("rounds_total", kind="verify")
    answers = running.run(
        *(replace(request, request_id=f"{request.request_id}-plain") for request in requests)
    )
    assert running.metric("rounds_total", kind="verify") == rounds
    switch.is_on = True
    return answers


def test_greedy_text_is_the_references(mistral: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The references repeat little, so drafts are taken from them, with a wrong token at a varying place."""
    cases = cases_of("mistral")
    texts = [[*case["prompt"], *case["greedy"]] for case in cases]

    class Knowing(Drafter):
        def propose(self, tokens: Sequence[int], limit: int) -> tuple[int, ...]:
            (text,) = (text for text in texts if text[: len(tokens)] == tokens)
            draft = text[len(tokens) : len(tokens) + min(limit, NUM_DRAFT)]
            wrong = len(tokens) % (NUM_DRAFT + 2)
            return tuple(token ^ (index == wrong) for index, token in enumerate(draft))

    monkeypatch.setattr("levserve.schedule.scheduler.Drafter", Knowing)
    with checked(mistral):
        answers = mistral.run(*(ask(case["prompt"], num_logprobs=0) for case in cases))
    for case, answer in zip(cases, answers):
        assert answer.tokens == case["greedy"]
        np.testing.assert_allclose(
            [entry.logprob for entry in answer.logprobs], case["greedy_logprobs"], atol=1e-3
        )


LOOP = [5, 6, 7, 8] * 4
FEW = {
    "temperature": 1.0,
    "logit_bias": ((17, 20.0), (18, 20.0), (19, 20.0)),
}  # so that samples repeat earlier ones


RULES: dict[str, dict[str, Any]] = {
    "temperature": FEW | {"seed": 11},
    "truncated": FEW | {"seed": 12, "top_k": 2, "top_p": 0.9, "min_p": 0.01},
    "penalties": FEW
    | {"seed": 13, "presence_penalty": 0.3, "frequency_penalty": 0.1, "repetition_penalty": 1.02},
    "min_tokens": FEW | {"seed": 14, "min_tokens": 20, "stop_ids": [18]},
    "logprobs": FEW | {"seed": 15, "num_logprobs": 3},
}


@pytest.mark.parametrize("rules", RULES)
def test_a_text_is_the_same_with_drafts_alone_and_in_company(mistral: Running, rules: str) -> None:
    requests = [ask(prompt, 48, **RULES[rules]) for prompt in (LOOP, [40, 41, 40], [9] * 7)]
    with checked(mistral):
        together = mistral.run(*requests)
        (alone,) = mistral.run(replace(requests[0], request_id=f"alone-{rules}"))
    for answer, plain in zip([*together, alone], [*(wanted := run_without(mistral, *requests)), wanted[0]]):
        assert answer.tokens == plain.tokens and answer.finish is plain.finish
        np.testing.assert_allclose(
            [one.logprob for one in answer.logprobs], [one.logprob for one in plain.logprobs], atol=1e-4
        )
        assert [[token for token, _ in one.top] for one in answer.logprobs] == [
            [token for token, _ in one.top] for one in plain.logprobs
        ]


def test_limits_and_stop_tokens_cut_an_accepted_draft_where_they_would_cut_steps(mistral: Running) -> None:
    (whole,) = run_without(mistral, ask(LOOP, 40, seed=5, **FEW))
    with checked(mistral):
        for limit in range(1, 40, 4):
            (answer,) = mistral.run(ask(LOOP, limit, seed=5, **FEW))
            assert answer.tokens == whole.tokens[:limit] and answer.finish is FinishReason.LENGTH
        for token in dict.fromkeys(whole.tokens):
            (answer,) = mistral.run(ask(LOOP, 40, stop_ids=[token], seed=5, **FEW))
            assert (
                answer.tokens == whole.tokens[: whole.tokens.index(token)]
                and answer.finish is FinishReason.STOP
            )


def test_a_stop_string_inside_an_accepted_draft_ends_the_text_where_it_begins(mistral: Running) -> None:
    spell = load_tokenizer(GOLDEN / "mistral").detokenizer
    whole: list[int] = []
    stream, ends = mistral.submit(ask(LOOP, 40, seed=5, **FEW)), []
    while not stream.is_finished:
        whole += stream.get(timeout_seconds=60)[1].tokens
        ends.append(len(whole))
    text, num_inside = spell().add(whole), 0
    with checked(mistral):
        for place in range(4, 40, 3):
            stop = spell().add(whole[place - 4 : place])
            choice = Choice(spell(), StopStrings([stop]))
            deltas = Deltas(mistral.submit(ask(LOOP, 40, seed=5, **FEW)), [choice])
            assert "".join(delta.text for _, delta in deltas) == text[: text.find(stop)]
            assert choice.finish is FinishReason.STOP
            assert len(spell().add(whole[: choice.num_tokens])) == text.find(stop) + len(stop), (
                "the last one counted completes it"
            )
            num_inside += choice.num_tokens not in ends
    assert num_inside > 0
    mistral.wait_idle()
    assert mistral.metric("kv_pages_used") == 0


def test_a_preemption_among_drafts_loses_nothing(mistral: Running) -> None:
    requests = [
        ask([number, *LOOP], 90, seed=number, **FEW) for number in range(20, 24)
    ]  # 27 of 40 pages each
    before = mistral.metric("preemptions_total")
    with checked(mistral):
        answers = mistral.run(*requests)
    assert mistral.metric("preemptions_total") > before
    assert [answer.tokens for answer in answers] == [
        run_without(mistral, request)[0].tokens for request in requests
    ]


def test_a_request_cancelled_among_drafts_returns_its_pages(mistral: Running) -> None:
    stream = mistral.submit(ask(LOOP, 140))
    for _ in range(4):
        stream.get(timeout_seconds=20)
    stream.close()
    assert read(stream)[0].finish is FinishReason.CANCELLED
    mistral.wait_idle()
    assert mistral.metric("kv_pages_used") == 0


def test_pages_that_held_wrong_drafts_are_found_again_with_the_right_tokens(mistral: Running) -> None:
    prompt = [70, 71, *LOOP]
    with checked(mistral):
        (first,) = mistral.run(ask(prompt, 60, seed=3, **FEW))
    before = mistral.metric("prefix_hit_tokens_total")
    (found,) = mistral.run(ask([*prompt, *first.tokens], 8, num_logprobs=0))
    assert mistral.metric("prefix_hit_tokens_total") - before >= len(prompt) + 48
    (computed,) = run_without(
        mistral, ask([*prompt, *first.tokens], 8, num_logprobs=0, score_from=1)
    )  # which reuses nothing
    assert found.tokens == computed.tokens
    np.testing.assert_allclose(
        [one.logprob for one in found.logprobs], [one.logprob for one in computed.logprobs], atol=1e-4
    )
