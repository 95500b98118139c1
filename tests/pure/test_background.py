"""Background work: it gives way to live work, finishes all the same, and hardly slows live work down."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from levserve.schedule.background import REST_ROUNDS, Rest, Share
from levserve.schedule.request import BACKGROUND
from levserve.schedule.sequence import RoundPlan
from tests.pure.test_scheduler import Server, ask, eager, expected_output, make


def has_background(plan: RoundPlan) -> bool:
    sequences = [row.sequence for row in plan.rows] + [chunk.sequence for chunk in plan.chunks]
    return any(sequence.request.priority >= BACKGROUND for sequence in sequences)


def keep_live(server: Server, number: int) -> None:
    """Submits live work if there is none, so that this round has some."""
    if not server.scheduler.has_live_work:
        server.submit(ask(f"live-{number}", (9, 9), 30))


def test_background_work_has_the_device_to_itself_while_there_is_no_other() -> None:
    server = make(num_pages=64, num_slots=4)
    for number in range(3):
        server.submit(ask(f"batch-{number}", (number, 1), 20, priority=BACKGROUND))
    rounds = 0
    while server.scheduler.has_work:
        server.step()
        rounds += 1
    assert rounds < 60
    for number in range(3):
        assert server.outputs[f"batch-{number}"] == expected_output((number, 1), 20, stop=False)


def test_beside_live_work_it_takes_part_in_one_round_of_many() -> None:
    server = make(num_pages=64, num_slots=4)
    for number in range(2):
        server.submit(ask(f"batch-{number}", (number, 1), 40, priority=BACKGROUND))
    for _ in range(5):
        server.step()
    assert all(server.outputs[f"batch-{number}"] for number in range(2))
    num_rounds = num_shared = 0
    for number in range(4 * REST_ROUNDS):
        keep_live(server, number)
        num_rounds += 1
        num_shared += has_background(server.step())
    # Besides its turns, background work gets the rounds in which no live sequence can run, such as between
    # two live requests.
    live = [name for name in server.finishes if name.startswith("live")]
    assert num_rounds // REST_ROUNDS <= num_shared <= num_rounds // REST_ROUNDS + 2 * len(live)


def run_timed(row_cost: float, program_rows: int, num_live: int, num_rounds: int) -> tuple[list[float], int]:
    """Each round's time relative to that of its live rows alone, and the number of other rows beside them.

    A step takes 1, plus `row_cost` for each row of the smallest program that is large enough.
    """

    def seconds(num_rows: int) -> float:
        return 1 + row_cost * -(-num_rows // program_rows) * program_rows

    share, rest = Share(), Rest()
    slowdowns, num_beside = [], 0
    for _ in range(num_rounds):
        rows = 24 if rest.takes_turn() else min(share.next(num_live, None).rows, 24)
        share.note(num_live, rows, seconds(num_live + rows))
        slowdowns.append(seconds(num_live + rows) / seconds(num_live))
        num_beside += rows
    return slowdowns, num_beside


def percentile_99(values: list[float]) -> float:
    return sorted(values)[-(-len(values) * 99 // 100) - 1]


def test_where_every_row_costs_much_background_work_has_its_turns_alone() -> None:
    slowdowns, num_beside = run_timed(0.5, 1, num_live=2, num_rounds=5000)
    assert percentile_99(slowdowns) == 1 and num_beside >= 24 * (5000 // REST_ROUNDS)


@settings(max_examples=30)
@given(st.floats(0, 0.3), st.sampled_from((1, 4, 8, 32)), st.integers(1, 40))
def test_live_streams_lose_less_than_a_fifth_in_ninety_nine_rounds_of_a_hundred(
    row_cost: float, program_rows: int, num_live: int
) -> None:
    slowdowns, num_beside = run_timed(row_cost, program_rows, num_live, num_rounds=5000)
    assert percentile_99(slowdowns) <= 1.2
    if row_cost * 12 < 0.1 and program_rows == 1:  # a dozen more rows are hardly noticed
        assert num_beside > 6 * 5000


def test_where_rows_cost_nothing_background_work_fills_the_free_slots() -> None:
    server = make(num_pages=128, num_slots=8)
    for number in range(4):
        server.submit(ask(f"batch-{number}", (number, 1), 90, priority=BACKGROUND))
    for _ in range(8):
        server.step()
    server.submit(ask("live", (3, 4), 90))
    num_shared = 0
    while not server.finishes["live"]:
        plan = server.step()
        num_shared += sum(row.sequence.request.priority >= BACKGROUND for row in plan.rows)
        if plan.rows:
            server.scheduler.note_round(plan, 1.0 * max(row.steps for row in plan.rows))
    assert num_shared > 90  # more than the rows of the live request
    server.run_dry()
    for number in range(4):
        assert server.outputs[f"batch-{number}"] == expected_output((number, 1), 90, stop=False)


def test_a_live_stream_never_shares_a_round_before_the_turn_comes() -> None:
    server = make(num_pages=64, num_slots=4)
    server.submit(ask("batch", (1, 2), 40, priority=BACKGROUND))
    for _ in range(4):
        server.step()
    server.submit(ask("live", (3, 4), 30))
    while not server.finishes["live"]:
        plan = server.step()
        is_live = any(row.sequence.request.request_id == "live" for row in plan.rows)
        assert not (is_live and has_background(plan))
    server.run_dry()
    assert server.outputs["batch"] == expected_output((1, 2), 40, stop=False)


def test_no_draft_is_checked_in_a_round_with_more_rows_than_drafts_can_be_checked_for() -> None:
    server = make(num_pages=128, num_slots=4, speculation=eager(3, max_rows=1))
    server.reads_first = True
    for number in range(3):
        server.submit(ask(f"batch-{number}", (number, 1), 60, priority=BACKGROUND))
    for _ in range(8):
        server.step()
    num_checked = num_shared = 0
    for number in range(2 * REST_ROUNDS):
        keep_live(server, number)
        plan = server.step()
        num_checked += plan.is_verify
        num_shared += len(plan.rows) > 1
        assert not plan.is_verify or len(plan.rows) == 1
    assert num_checked and num_shared


def test_live_work_takes_the_slots_and_the_pages_of_background_work() -> None:
    server = make(num_pages=10, num_slots=2)
    for number in range(2):
        server.submit(ask(f"batch-{number}", (number,) * 8, 8, priority=BACKGROUND + number))
    for _ in range(6):
        server.step()
    server.submit(ask("live", (5,) * 20, 12))
    while not server.finishes["live"]:
        server.step()
    assert server.num_preempted >= 1
    assert server.outputs["live"] == expected_output((5,) * 20, 12, stop=False)
    server.run_dry()
    for number in range(2):
        assert server.outputs[f"batch-{number}"] == expected_output((number,) * 8, 8, stop=False)


def test_it_ends_although_live_work_never_does() -> None:
    server = make(num_pages=64, num_slots=4)
    server.submit(ask("batch", (1, 2), 10, priority=BACKGROUND))
    for number in range(20 * REST_ROUNDS):
        keep_live(server, number)
        server.step()
        if server.finishes["batch"]:
            return
    raise AssertionError("background work starves")


def test_where_live_work_always_waits_for_slots_the_longest_wait_is_ended() -> None:
    server = make(num_pages=64, num_slots=2)
    server.submit(ask("batch", (1, 2), 3, priority=BACKGROUND))
    for number in range(2 * REST_ROUNDS):
        while server.scheduler.num_waiting < 4:
            server.submit(ask(f"live-{number}-{server.scheduler.num_waiting}", (9, 9), 2))
        server.step()
        if server.finishes["batch"]:
            return
    raise AssertionError("background work starves")


def test_what_others_are_told_does_not_count_it() -> None:
    server = make(num_pages=64, num_slots=4)
    server.submit(ask("batch", (1, 2), 40, priority=BACKGROUND))
    backlog = server.scheduler.backlog()
    assert (backlog.prefill, backlog.decode) == (0, 0)
    assert server.scheduler.num_streams == 1
    server.submit(ask("live", (3, 4, 5), 10))
    assert server.scheduler.num_streams == 1
    assert server.scheduler.backlog().prefill == 3


def test_the_first_end_is_that_of_the_running_sequence_with_the_fewest_tokens_left() -> None:
    server = make(num_pages=64, num_slots=2)
    for name, count in (("long", 40), ("short", 10), ("waits", 1)):
        server.submit(ask(name, (1, 2), count))
    while server.scheduler.num_running < 2:
        server.step()
    running = server.scheduler.backlog()
    assert 2 * 5 <= running.first_end <= 2 * 10 and running.first_end < running.decode


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(1, 12), st.integers(1, 10), st.integers(0, 4)),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 4),
)
def test_every_sequence_has_the_text_that_it_would_have_alone(
    arrivals: list[tuple[bool, int, int, int]], num_slots: int
) -> None:
    server = make(num_pages=12, num_slots=num_slots)
    for number, (is_live, length, max_tokens, num_rounds) in enumerate(arrivals):
        prompt = (number % 13,) * length
        server.submit(ask(str(number), prompt, max_tokens, priority=0 if is_live else BACKGROUND))
        for _ in range(num_rounds):
            server.step()
    server.run_dry()
    for number, (_, length, max_tokens, _) in enumerate(arrivals):
        prompt = (number % 13,) * length
        assert server.outputs[str(number)] == expected_output(prompt, max_tokens, stop=False)
