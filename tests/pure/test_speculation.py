"""Drafts from what was said before: the right ones, and only where they pay."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from levserve.schedule.speculation import LEAST_GAIN, NGRAMS, Drafter, Speculation, num_accepted

NUM_DRAFT = 5
TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def draft_of(tokens: list[int]) -> list[int]:
    """What followed the latest earlier occurrence of the longest suffix that has one, by full search."""
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


def share_checked(speculation: Speculation, accepted: float, cost: float, num_rounds: int = 400) -> float:
    """The share of two-row rounds in which drafts are checked.

    Every step accepts `accepted` tokens, and checking costs `cost` plain steps.
    """
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


@given(accepted=st.integers(0, 4), cost=st.floats(0.5, 8.0))
def test_a_draft_model_is_used_where_it_pays_and_tried_again_now_and_then_where_it_does_not(
    accepted: int, cost: float
) -> None:
    speculation = Speculation(4, num_turns=2)
    speculation.max_rows = 2
    checked = 0
    for number in range(600):
        is_verify = speculation.pays(2)
        checked += is_verify and number >= 200
        speculation.note_round(
            2, cost if is_verify else 1.0, is_verify=is_verify, num_steps=2 if is_verify else 8
        )
        if is_verify:
            speculation.note_drafted(2 * (accepted + 1), 2 * accepted)
    if cost < 0.9 * (1 + accepted):
        assert checked > 0.85 * 400
    elif cost > 1.1 * (1 + accepted):
        assert 0 < checked < 0.1 * 400
    assert not speculation.pays(3)
