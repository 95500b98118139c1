"""An engine holds its text to a constraint and writes the same alone, in company and in any rounds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from levserve.schedule.constraint import Matcher
from levserve.schedule.request import FinishReason, GenerationRequest
from levserve.text.combined import AllOf
from levserve.text.token_rules import AllowedTokens, BannedWords
from tests.conftest import GOLDEN
from tests.engines import Answer, Running, ask, running_engine

VOCAB = 384
PROMPTS = ((17, 18, 19), (40, 41), (100, 101, 102, 103, 104))
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 5},
    "truncated": {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "seed": 6},
    "penalised": {"temperature": 1.0, "presence_penalty": 1.0, "repetition_penalty": 1.3, "seed": 7},
    "with log-probabilities": {"num_logprobs": 2, "temperature": 1.0, "seed": 8},
}


@dataclass(frozen=True)
class Cycle:
    """Allows tokens from these sets in turn; a set of one is a forced token. Ends after `length` tokens."""

    sets: tuple[frozenset[int], ...]
    length: int = 1000

    def start(self) -> CycleMatcher:
        return CycleMatcher(self)


@dataclass
class CycleMatcher(Matcher):
    rule: Cycle
    count: int = 0
    is_stuck: bool = False
    is_free: bool = False

    @property
    def is_over(self) -> bool:
        return self.count == self.rule.length

    def _set(self, count: int) -> frozenset[int]:
        return self.rule.sets[count % len(self.rule.sets)]

    def allows(self, token: int) -> bool:
        return token in self._set(self.count)

    def take(self, token: int) -> None:
        assert self.allows(token)
        self.count += 1

    def ends_with(self, token: int) -> bool:
        return False

    def forced(self) -> Sequence[int]:
        tokens = []
        while len(found := self._set(self.count + len(tokens))) == 1:
            tokens += found
        return tokens

    def mask(self) -> bytes:
        return sum(1 << token for token in self._set(self.count)).to_bytes(VOCAB // 8, "little")


RULE = Cycle(
    (
        frozenset(range(10, 200)),
        frozenset(range(150, 380)),
        frozenset([33]),
        frozenset([34]),
        frozenset([35]),
        frozenset(range(30, 40)),
    )
)


@pytest.fixture(scope="module", params=["1", "8"])
def llama(request: pytest.FixtureRequest) -> Iterator[Running]:
    flags = ("--round-steps", request.param, "--page-size", "4", "--kv-pages", "30", "--prefill-chunk", "16")
    with running_engine(GOLDEN / "llama", *flags, rows=4) as running:
        yield running
        running.wait_idle()
        assert running.metric("kv_pages_used") == 0
        running.loaded.scheduler.check()


def one_at_a_time(running: Running, request: GenerationRequest) -> list[int]:
    """The text from requests for one token each, so that every token is sampled under its own mask."""
    tokens: list[int] = []
    while len(tokens) < request.max_tokens:
        at = len(tokens) % len(RULE.sets)
        single = replace(
            request,
            request_id=f"{request.request_id}-{len(tokens)}",
            prompt=request.prompt + tuple(tokens),
            max_tokens=1,
            constraint=Cycle(RULE.sets[at:] + RULE.sets[:at]),
        )
        (answer,) = running.run(single)
        tokens += answer.tokens
    return tokens


@pytest.mark.parametrize("name", [name for name in SAMPLINGS if name != "penalised"])
def test_the_text_is_that_of_single_masked_draws(llama: Running, name: str) -> None:
    request = ask(PROMPTS[0], 24, constraint=RULE, **SAMPLINGS[name])
    (answer,) = llama.run(request)
    assert answer.tokens == one_at_a_time(llama, request)
    assert answer.finish is FinishReason.LENGTH
    if request.sampling.num_logprobs is not None:
        assert len(answer.logprobs) == len(answer.tokens)


def test_the_text_is_the_same_in_company_and_after_preemption(llama: Running) -> None:
    """Thirty pages of four tokens hold two of these requests to their ends, not four."""
    requests = [
        ask(prompt, 40, constraint=None if number == 1 else RULE, **rules)
        for number, prompt in enumerate(PROMPTS)
        for rules in (SAMPLINGS["greedy"], SAMPLINGS["penalised"])
    ]
    alone = [llama.run(request)[0] for request in requests]
    preempted = llama.metric("preemptions_total")
    together = llama.run(*(replace(request, request_id=f"{request.request_id}-x") for request in requests))
    assert [answer.tokens for answer in together] == [answer.tokens for answer in alone]
    assert llama.metric("preemptions_total") > preempted


def count_constraints(llama: Running) -> tuple[float, float, float]:
    return (
        llama.metric("constrained_sequences_total"),
        llama.metric("constraint_misfits_total"),
        llama.metric("constraint_forced_tokens_total"),
    )


def test_misfits_and_forced_tokens_are_counted(llama: Running) -> None:
    before = count_constraints(llama)
    answers: list[Answer] = llama.run(ask(PROMPTS[0], 30, constraint=RULE))
    assert len(answers[0].tokens) == 30
    llama.wait_idle()
    sequences, misfits, forced = (new - old for new, old in zip(count_constraints(llama), before))
    assert sequences == 1
    assert forced > 0
    reads_first = llama.loaded.sizes.round_steps == 1
    assert misfits == 0 if reads_first else misfits > 0, "a draw whose mask is known always fits"


def test_a_constraint_that_is_complete_ends_the_text(llama: Running) -> None:
    (answer,) = llama.run(ask(PROMPTS[0], 30, constraint=replace(RULE, length=5)))
    assert len(answer.tokens) == 5
    assert answer.finish is FinishReason.STOP


def test_token_lists_hold_and_a_contradiction_ends_the_request(llama: Running) -> None:
    allowed = AllowedTokens(frozenset((50, 60, 70)), VOCAB)
    banned = BannedWords(frozenset(((50,), (60, 60))), VOCAB)
    first, second, third = llama.run(
        ask(PROMPTS[0], 12, constraint=allowed),
        ask(PROMPTS[0], 12, constraint=AllOf((allowed, banned)), temperature=1.0),
        ask(PROMPTS[0], 12, constraint=AllOf((allowed, RULE))),
    )
    assert set(first.tokens) <= {50, 60, 70}
    assert set(second.tokens) <= {60, 70}
    assert (60, 60) not in set(zip(second.tokens, second.tokens[1:]))
    assert third.finish is FinishReason.STUCK, json.dumps(third.tokens)
