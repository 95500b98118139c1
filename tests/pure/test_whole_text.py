"""The scheduler of models that compute a whole text for every token: turns, scores, equal texts, ends."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from levserve.schedule.commit import Sampled
from levserve.schedule.request import FinishReason, GenerationRequest, PooledHidden, TokenLogprob
from levserve.schedule.sequence import Chunk, RoundPlan, SequenceUpdate
from levserve.schedule.whole_text import WholeTextScheduler, WorkBudget

LENGTHS = (8, 16, 32, 64)


def make(num_slots: int = 4, round_tokens: int = 64) -> WholeTextScheduler:
    return WholeTextScheduler(WorkBudget(num_slots, LENGTHS, round_tokens))


def ask(name: str, prompt: int | tuple[int, ...] = 3, max_tokens: int = 2, **given: Any) -> GenerationRequest:
    tokens = tuple(range(prompt)) if isinstance(prompt, int) else prompt
    return GenerationRequest(name, tokens, max_tokens, **given)


def answer_chunk(chunk: Chunk) -> Sampled:
    request = chunk.sequence.request
    tokens = [7] if chunk.is_last and request.max_tokens else []
    scores = [TokenLogprob(-float(place)) for place in chunk.scored]
    return Sampled(tokens, prompt_logprobs=scores)


def step(
    scheduler: WholeTextScheduler, max_prefill: int | None = None
) -> tuple[RoundPlan, list[SequenceUpdate]]:
    plan = scheduler.plan(max_prefill)
    scheduler.check()
    updates = scheduler.commit(
        plan, [answer_chunk(chunk) for chunk in plan.chunks], [Sampled([7])] * len(plan.rows)
    )
    scheduler.check()
    return plan, updates


def names(plan: RoundPlan) -> list[str]:
    return [each.sequence.request.request_id for each in (*plan.chunks, *plan.rows)]


def test_a_sequence_gains_a_token_a_round_and_ends_at_its_limit() -> None:
    scheduler = make()
    scheduler.add(ask("a"))
    _, first = step(scheduler)
    _, second = step(scheduler)
    assert [update.finish for update in (*first, *second)] == [None, FinishReason.LENGTH]
    assert not scheduler.has_work


def test_a_round_computes_no_more_tokens_than_its_work_and_sequences_take_turns() -> None:
    scheduler = make(round_tokens=16)
    for name in "abcd":
        scheduler.add(ask(name, (ord(name), 1, 2), 3))
    assert [names(step(scheduler)[0]) for _ in range(4)] == [["a", "b"], ["c", "d"], ["a", "b"], ["c", "d"]]


def test_a_text_longer_than_a_rounds_work_is_computed_alone() -> None:
    scheduler = make(round_tokens=16)
    scheduler.add(ask("long", 40, 1))
    scheduler.add(ask("short", 3, 1))
    plan, _ = step(scheduler)
    assert names(plan) == ["long"] and plan.num_tokens == 64


def test_equal_texts_count_once() -> None:
    scheduler = make(num_slots=8, round_tokens=16)
    for name in "abcdef":
        scheduler.add(ask(name, 3, 1))
    plan, _ = step(scheduler)
    assert names(plan) == list("abcdef") and plan.num_tokens == 8


def test_a_prompts_scores_are_as_many_texts_as_it_has_scored_tokens_over_several_rounds() -> None:
    scheduler = make(round_tokens=24)
    scheduler.add(ask("a", 8, 0, score_from=1))
    chunks, scores, finish = [], [], None
    while scheduler.has_work:
        plan, updates = step(scheduler)
        chunks += [list(chunk.scored) for chunk in plan.chunks]
        for update in updates:
            scores += [score.logprob for score in update.batch.prompt_logprobs]
            finish = update.finish
    assert chunks == [[1, 2, 3], [4, 5, 6], [7]]
    assert scores == [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0] and finish is FinishReason.LENGTH


def test_the_token_after_a_scored_prompt_comes_with_its_last_scores_or_after_them() -> None:
    for round_tokens in (8, 16, 64):
        scheduler = make(round_tokens=round_tokens)
        scheduler.add(ask("a", 4, 2, score_from=2))
        scores, tokens = [], []
        while scheduler.has_work:
            for update in step(scheduler)[1]:
                scores += [score.logprob for score in update.batch.prompt_logprobs]
                tokens += update.batch.tokens
        assert scores == [-2.0, -3.0] and tokens == [7, 7]


def test_other_choices_wait_until_the_first_has_scored_their_prompt() -> None:
    scheduler = make(round_tokens=16)
    scheduler.add(ask("first", 4, 2, score_from=1))
    scheduler.add(ask("second", 4, 2, shares_prompt_of="first"))
    is_scored = False
    while scheduler.has_work:
        plan, _ = step(scheduler)
        assert is_scored or names(plan) == ["first"]
        is_scored |= any(chunk.is_last for chunk in plan.chunks)
    assert is_scored


def test_other_choices_go_on_if_the_first_is_cancelled_before_its_prompt_is_scored() -> None:
    scheduler = make(round_tokens=16)
    scheduler.add(ask("first", 4, 2, score_from=1))
    scheduler.add(ask("second", 4, 1, shares_prompt_of="first"))
    scheduler.end("first", FinishReason.CANCELLED)
    assert names(step(scheduler)[0]) == ["second"]


def test_scores_in_one_pass_are_one_text() -> None:
    scheduler = make(round_tokens=8)
    scheduler.add(ask("a", 16, 0, score_from=3, scores_in_one_pass=True))
    plan, updates = step(scheduler)
    assert plan.num_tokens == 16 and list(plan.chunks[0].scored) == list(range(3, 16))
    assert updates[0].finish is FinishReason.LENGTH


def test_scores_beside_streams_take_no_more_than_they_may() -> None:
    scheduler = make(round_tokens=64)
    scheduler.add(ask("stream", 3, 4))
    scheduler.add(ask("scored", (9, 9, 9, 9, 9, 9), 0, score_from=1))
    plan, _ = step(scheduler, max_prefill=16)
    assert plan.work is not None and plan.work.prefill == 16 and plan.work.decode == 8


def test_an_embedding_is_one_text_and_ends() -> None:
    scheduler = make()
    scheduler.add(ask("a", 5, 0, wants_hidden=True))
    plan = scheduler.plan()
    (update,) = scheduler.commit(plan, [Sampled((), hidden=PooledHidden(*[[]] * 2))], [])  # type: ignore[arg-type]
    assert update.batch.hidden is not None and update.finish is FinishReason.LENGTH and plan.num_tokens == 8


def test_a_prompt_of_which_nothing_is_wanted_ends_without_any_work() -> None:
    scheduler = make()
    scheduler.add(ask("a", 5, 0))
    plan, (update,) = step(scheduler)
    assert plan.num_tokens == 0 and update.finish is FinishReason.LENGTH


def test_more_important_work_takes_a_slot_at_once_and_the_other_goes_on_later() -> None:
    scheduler = make(num_slots=1)
    scheduler.add(ask("low", 3, 3, priority=1))
    step(scheduler)
    scheduler.add(ask("high", 3, 1, priority=0))
    plan, _ = step(scheduler)
    assert names(plan) == ["high"] and [one.request.request_id for one, _ in plan.preempted] == ["low"]
    later = [names(step(scheduler)[0]) for _ in range(2)]
    assert later == [["low"], ["low"]] and not scheduler.has_work


def test_a_cancelled_sequence_gives_its_slot_back() -> None:
    scheduler = make(num_slots=1)
    scheduler.add(ask("a", 3, 9))
    scheduler.add(ask("b", 3, 1))
    step(scheduler)
    assert scheduler.end("a", FinishReason.CANCELLED) is not None
    assert names(step(scheduler)[0]) == ["b"]


@given(
    st.lists(
        st.tuples(st.integers(1, 20), st.integers(0, 4), st.booleans(), st.booleans(), st.integers(0, 2)),
        min_size=1,
        max_size=12,
    ),
    st.sampled_from([8, 24, 200]),
    st.sampled_from([None, 1, 30]),
)
def test_every_request_ends_once_with_all_it_asked_for(
    asked: list[tuple[int, int, bool, bool, int]], round_tokens: int, max_prefill: int | None
) -> None:
    scheduler = make(3, round_tokens)
    for number, (length, max_tokens, is_scored, is_whole, priority) in enumerate(asked):
        score_from = 1 if is_scored and length > 1 else None
        scheduler.add(
            ask(
                str(number),
                length,
                max_tokens,
                score_from=score_from,
                scores_in_one_pass=is_whole,
                priority=priority,
            )
        )
    ends: list[str] = []
    tokens: dict[str, int] = {}
    scores: dict[str, list[float]] = {}
    for _ in range(1000):
        if not scheduler.has_work:
            break
        plan, updates = step(scheduler, max_prefill)
        assert plan.num_tokens <= max(round_tokens, 32)  # one text may exceed the limit alone
        for update in updates:
            name = update.sequence.request.request_id
            tokens[name] = tokens.get(name, 0) + len(update.batch.tokens)
            scores.setdefault(name, []).extend(score.logprob for score in update.batch.prompt_logprobs)
            if update.finish is not None:
                ends.append(name)
    assert sorted(ends) == sorted(str(number) for number in range(len(asked)))
    for number, (length, max_tokens, is_scored, _, _) in enumerate(asked):
        assert tokens[str(number)] == max_tokens
        assert scores[str(number)] == ([-float(place) for place in range(1, length)] if is_scored else [])
