"""Drafts from what was said before: the right ones, only where they pay, and never a different text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from levserve.generation import Choice, Deltas
from levserve.schedule.request import FinishReason, GenerationRequest
from levserve.schedule.speculation import LEAST_GAIN, NGRAMS, Drafter, Speculation, num_accepted
from levserve.text.stops import StopStrings
from levserve.text.tokenizer import load_tokenizer
from tests.conftest import GOLDEN
from tests.engines import Answer, Running, ask, read, running_engine
from tests.test_engine import cases_of
from tests.waiting import wait_until

NUM_DRAFT = 5
TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def draft_of(tokens: list[int]) -> list[int]:
    """What followed the latest occurrence of the longest end that occurred before, by looking everywhere."""
    for size in NGRAMS:
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:]:
                followed = tokens[end:]
                return (followed * NUM_DRAFT)[:NUM_DRAFT]
    return []


@given(tokens=TEXTS, cuts=st.lists(st.integers(1, 60)))
def test_a_draft_is_what_followed_the_latest_time(tokens: list[int], cuts: list[int]) -> None:
    drafter = Drafter(NUM_DRAFT)
    for end in [*sorted(cut for cut in cuts if cut < len(tokens)), len(tokens)]:
        drafter.follow(tokens[:end])
        assert list(drafter.propose(tokens[:end], NUM_DRAFT)) == draft_of(tokens[:end])
    assert list(drafter.propose(tokens, 2)) == draft_of(tokens)[:2]
    assert drafter.propose(tokens, -1) == ()


@given(prompt=TEXTS, answer=TEXTS)
def test_what_drafts_would_gain_is_known_without_checking_them(prompt: list[int], answer: list[int]) -> None:
    tokens, place = prompt + answer, len(prompt)
    steps: list[int | None] = []
    while (accepted := num_accepted(draft := draft_of(tokens[:place]), tokens[place:])) < len(tokens) - place:
        steps.append(accepted if draft else None)
        place += accepted + 1
    drafter = Drafter(NUM_DRAFT)
    drafter.follow(prompt)
    followed = [
        count for end in range(len(prompt), len(tokens)) for count in drafter.follow(tokens[: end + 1])
    ]
    assert followed == steps


@given(
    draft=st.lists(st.integers(0, 1), max_size=6), more=st.lists(st.integers(0, 1), min_size=1, max_size=3)
)
def test_a_draft_is_accepted_up_to_its_first_wrong_token(draft: list[int], more: list[int]) -> None:
    assert num_accepted(draft, [*draft, *more]) == len(draft)
    for wrong in range(len(draft)):
        assert num_accepted(draft, [*draft[:wrong], 1 - draft[wrong], *more]) == wrong


def share_checked(speculation: Speculation, accepted: int, cost: float, num_rounds: int = 400) -> float:
    """Of rounds of two rows in which every step accepts so many tokens, and checking costs so many times a plain step."""
    checked = 0
    for _ in range(num_rounds):
        is_verify = speculation.pays(2)
        checked += is_verify
        speculation.note_round(2, cost if is_verify else 1.0, is_verify=is_verify)
        speculation.note_steps([accepted, accepted])
    return checked / num_rounds


@given(before=st.integers(0, 5), accepted=st.integers(0, 5), cost=st.floats(0.5, 8.0))
def test_drafts_are_checked_where_that_is_faster_and_next_to_never_where_it_is_not(
    before: int, accepted: int, cost: float
) -> None:
    speculation = Speculation(NUM_DRAFT)
    assert not speculation.pays(2), "no program is ready"
    speculation.max_rows = 2
    share_checked(speculation, before, 1.5, num_rounds=100)
    share = share_checked(speculation, accepted, cost)
    if accepted > LEAST_GAIN and cost < 0.9 * (1 + accepted):
        assert share > 0.85
    elif cost > 1.1 * (1 + accepted) or not accepted:
        assert share < 0.15
    assert not speculation.pays(3) and not speculation.pays(0)


@pytest.mark.parametrize(
    ("steps", "pays"), [([None] * 8 + [3], True), ([None] * 8 + [1], False), ([None] * 50 + [3], False)]
)
def test_steps_without_a_draft_cost_nothing_but_for_the_wait(steps: list[int | None], pays: bool) -> None:
    speculation = Speculation(NUM_DRAFT)
    speculation.max_rows = 1
    speculation.note_round(1, 1.0, is_verify=False)
    speculation.note_round(1, 2.5, is_verify=True)
    for _ in range(50):
        speculation.note_steps(steps)
    speculation.note_steps([None] * 12)
    assert speculation.pays(1) == pays


@pytest.mark.parametrize("accepted", [0, 3])
def test_a_machine_that_was_busy_for_a_while_is_measured_again(accepted: int) -> None:
    speculation = Speculation(NUM_DRAFT)
    speculation.max_rows = 2
    share_checked(speculation, 3, 1.2)
    share_checked(speculation, 3, 50.0)
    assert not speculation.pays(2)
    assert (share_checked(speculation, accepted, 1.2) > 0.8) == (accepted == 3)


class Switch(Speculation):
    """Drafts when it is told to, so that a test does not hang on what is faster here today."""

    is_on = True

    def pays(self, num_rows: int) -> bool:
        return self.is_on and 0 < num_rows <= self.max_rows


@pytest.fixture(scope="module")
def mistral() -> Iterator[Running]:
    """An engine that drafts, once its programs are ready for it; some layers of its model see a window."""
    flags = ("--speculate", str(NUM_DRAFT), "--page-size", "4", "--kv-pages", "40", "--prefill-chunk", "32")
    with running_engine(GOLDEN / "mistral", *flags, rows=2) as running:
        wait_until(lambda: running.loaded.runner.programs.is_complete, 240)
        running.loaded.scheduler.speculation = Switch(NUM_DRAFT)
        yield running
        running.wait_idle()
        assert running.metric("kv_pages_used") == 0
        running.loaded.scheduler.check()


@contextmanager
def checked(running: Running) -> Iterator[None]:
    """Sees that drafts are checked inside, and that some of their tokens are right and some are not."""

    def counts() -> tuple[float, float, float]:
        return (
            running.metric("drafts_total"),
            running.metric("draft_tokens_total"),
            running.metric("draft_accepted_tokens_total"),
        )

    before = counts()
    yield
    running.wait_idle()  # what it still does for somebody who has stopped reading counts as well
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


@pytest.mark.tiny
def test_greedy_text_is_the_references(mistral: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The references say little twice, so drafts are taken from them, with a wrong token at a place that changes."""
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
}  # so that a draw repeats what was drawn before
RULES: dict[str, dict[str, Any]] = {
    "temperature": FEW | {"seed": 11},
    "truncated": FEW | {"seed": 12, "top_k": 2, "top_p": 0.9, "min_p": 0.01},
    "penalties": FEW
    | {"seed": 13, "presence_penalty": 0.3, "frequency_penalty": 0.1, "repetition_penalty": 1.02},
    "min_tokens": FEW | {"seed": 14, "min_tokens": 20, "stop_ids": [18]},
    "logprobs": FEW | {"seed": 15, "num_logprobs": 3},
}


@pytest.mark.tiny
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


@pytest.mark.tiny
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


@pytest.mark.tiny
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


@pytest.mark.tiny
def test_a_preemption_among_drafts_loses_nothing(mistral: Running) -> None:
    requests = [
        ask([number, *LOOP], 90, seed=number, **FEW) for number in range(20, 24)
    ]  # 27 pages each, of 40
    before = mistral.metric("preemptions_total")
    with checked(mistral):
        answers = mistral.run(*requests)
    assert mistral.metric("preemptions_total") > before
    assert [answer.tokens for answer in answers] == [
        run_without(mistral, request)[0].tokens for request in requests
    ]


@pytest.mark.tiny
def test_a_request_cancelled_among_drafts_returns_its_pages(mistral: Running) -> None:
    stream = mistral.submit(ask(LOOP, 140))
    for _ in range(4):
        stream.get(timeout_seconds=20)
    stream.close()
    assert read(stream)[0].finish is FinishReason.CANCELLED
    mistral.wait_idle()
    assert mistral.metric("kv_pages_used") == 0


@pytest.mark.tiny
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
