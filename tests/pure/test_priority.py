"""Priorities: important work is served first, and the rest is served all the same."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from levserve.schedule.ranked import RankedSequences
from levserve.schedule.sequence import Sequence
from levserve.schedule.slots import RAISE_EVERY
from tests.pure.test_scheduler import Server, ask, expected_output, make


def first_tokens(server: Server) -> list[str]:
    """Runs until nothing is left to do; returns the order in which prompts were computed."""
    order: list[str] = []
    while server.scheduler.has_work:
        order += [chunk.sequence.request.request_id for chunk in server.step().chunks if chunk.is_last]
    return order


@given(st.lists(st.integers(-2, 2), min_size=2, max_size=10))
def test_waiting_requests_are_served_by_priority_and_equals_in_the_order_of_arrival(
    priorities: list[int],
) -> None:
    server = make(num_pages=64, num_slots=1)
    for number, priority in enumerate(priorities):
        server.submit(ask(str(number), (number, 1), 2, priority=priority))
    ranked = sorted(range(len(priorities)), key=lambda number: (priorities[number], number))
    assert first_tokens(server) == [str(number) for number in ranked]


def test_a_more_important_request_takes_the_slot_of_a_running_one_which_goes_on_later() -> None:
    server = make(num_slots=1)
    server.submit(ask("batch", (1, 2, 3), 20, priority=10))
    for _ in range(6):
        server.step()
    server.submit(ask("live", (4, 5), 3))
    server.run_dry()
    assert server.num_preempted == 1
    assert server.outputs["live"] == expected_output((4, 5), 3, stop=False)
    assert server.outputs["batch"] == expected_output((1, 2, 3), 20, stop=False)


def test_nobody_is_preempted_for_a_request_that_would_not_fit_all_the_same() -> None:
    server = make(num_pages=8, num_slots=4)
    server.submit(ask("top", (1,) * 12, 12, priority=-1))
    for _ in range(8):
        server.step()
    server.submit(ask("batch", (2,), 2, priority=1))
    server.step()
    server.submit(ask("large", (3,) * 24, 2))
    server.step()
    assert server.num_preempted == 0
    server.run_dry()


def test_a_request_of_equal_priority_preempts_nobody() -> None:
    server = make(num_slots=1)
    server.submit(ask("a", max_tokens=10, priority=3))
    server.step()
    server.submit(ask("b", priority=3))
    server.run_dry()
    assert server.num_preempted == 0


@given(
    num_waiting=st.integers(1, 4),
    num_slots=st.integers(1, 3),
    length=st.integers(1, 12),
    max_tokens=st.integers(1, 12),
)
def test_work_of_low_priority_ends_although_more_important_work_never_stops_coming(
    num_waiting: int, num_slots: int, length: int, max_tokens: int
) -> None:
    server = make(num_pages=12, num_slots=num_slots)
    for number in range(num_waiting):
        server.submit(ask(f"low-{number}", (number,) * length, max_tokens, priority=1_000_000))
    names = [f"low-{number}" for number in range(num_waiting)]
    for number in range(400 * num_waiting):
        while server.scheduler.num_waiting < num_waiting + 3:  # so that live work is always waiting
            server.submit(ask(f"live-{number}-{server.scheduler.num_waiting}", (9, 9), 2))
        server.step()
        if all(server.finishes[name] for name in names):
            return
    raise AssertionError("somebody starves")


def test_important_work_keeps_most_of_the_slots_while_other_work_is_raised() -> None:
    server = make(num_pages=64, num_slots=1)
    for number in range(100):
        server.submit(ask(f"low-{number}", (number % 13,), 1, priority=1))
    for number in range(100):
        server.submit(ask(f"live-{number}", (number % 13,), 1))
    order = first_tokens(server)
    until_last_live = order[: order.index("live-99") + 1]
    num_low = sum(name.startswith("low") for name in until_last_live)
    assert 1 <= num_low <= len(until_last_live) // RAISE_EVERY + 1


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=12))
def test_a_line_is_always_in_order(joining: list[tuple[int, bool]]) -> None:
    line = RankedSequences()
    for number, (priority, leaves) in enumerate(joining):
        line.add(Sequence(ask(str(number), priority=priority), [1], number))
        line.check()
        first = line.first()
        if leaves and first is not None:
            line.remove(first)
            line.check()
    assert [sequence.rank for sequence in line] == sorted(sequence.rank for sequence in line)
